"""What the Makefile calls, `python -m tools.NAME`, and what tests and benchmarks share.

What runs the tests is among them: tests/check.py (`make check-NN`), chaos.py and mutants.py.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)
