"""What the Makefile calls, `python -m tools.NAME`, and what tests and benchmarks share."""
