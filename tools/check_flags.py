"""Check flags by the stages' own `parse_args`, without a process group, as rank 0 of a job.

    NPROC=2 python -m tools.check_flags "01_single_gpu=1 04_fsdp=2x8" --preset gpt2

A stage's ranks are nodes x processes per node; 0 per node means NPROC, as in slurm/launch.sh where
there are no GPUs. `make submit-NN` runs it before it submits. A wrong flag ends it with status 2.
"""

from __future__ import annotations

import os
import sys

from tools.stages import load_stage

if __name__ == "__main__":
    stages, flags = sys.argv[1].split(), sys.argv[2:]
    sys.argv[0] = "train.py"  # named in the error
    for name, ranks in (stage.split("=") for stage in stages):
        nodes, _, per_node = ranks.partition("x")
        local = int(per_node or 1) or int(os.environ["NPROC"])
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local)}
        os.environ["WORLD_SIZE"] = str(int(nodes) * local)
        load_stage(name[:2]).parse_args(flags)
