"""Saving and loading with our checksums, against plain `dcp.save` and `dcp.load`.

    python benchmarks/checkpoint.py --ranks 2 --pairs 30 --folder /dev/shm

Both write and read the same tensors, in the same processes, in turns (ours, theirs, theirs, ours),
each behind a barrier; the slowest rank's time counts. Ours is all of `save_checkpoint` and
`load_checkpoint`: the copy to host memory, the checksums, the commit by rename. The table shows
the median of the paired ratios ours / theirs with its 95 % interval. Its row `blocked` is the time
for which our asynchronous save blocks training, relative to a full `dcp.save`. In memory
(/dev/shm) nothing waits for a disk, which makes the comparison harder for the checksums.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from bench import interval, machine  # noqa: E402
from harness import Pool  # noqa: E402

from common.checkpoint import Checkpointer  # noqa: E402
from common.run import keep_freed_memory  # noqa: E402

STUB = types.SimpleNamespace(state={})  # no optimizer whose step could be set


def tensors(megabytes: int) -> dict[str, torch.Tensor]:
    """This rank's tensors: some of 4 MB and a few small ones, as in a model."""
    shapes = [(512, 2048)] * (megabytes // 4) + [(512,)] * 16
    return {f"model.{dist.get_rank()}.{i}": torch.randn(shape) for i, shape in enumerate(shapes)}


def timed(act: Callable[[], object]) -> float:
    """The seconds of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    act()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def measure(folder: str, megabytes: int, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of ours and theirs, pair by pair, for `save`, `load` and `blocked`."""
    keep_freed_memory()  # as every run does
    state, path = tensors(megabytes), Path(folder)
    place = CheckpointFolder(path / "blocked")
    found: dict[str, list[tuple[float, float]]] = {"save": [], "load": [], "blocked": []}
    for pair in range(-2, pairs):  # two to warm up
        ours, theirs = path / f"ours-{pair}", path / f"theirs-{pair}"
        acts = {
            "save": (
                lambda ours=ours: save_checkpoint(ours, 1, state),
                lambda theirs=theirs: dcp.save(state, checkpoint_id=theirs),
            ),
            "load": (
                lambda ours=ours: load_checkpoint(ours, "auto", state, STUB),
                lambda theirs=theirs: dcp.load(state, checkpoint_id=theirs),
            ),
        }
        for name, both in acts.items():
            seconds = [0.0, 0.0]
            for which in (0, 1) if pair % 2 else (1, 0):
                seconds[which] = timed(both[which])
            if pair >= 0:
                found[name].append((seconds[0], seconds[1]))
        blocked = timed(lambda: save_checkpoint(place, 1, state, 1))
        place.wait()
        if pair >= 0:
            found["blocked"].append((blocked, found["save"][-1][1]))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(ours)
            shutil.rmtree(theirs)
    place.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--megabytes", type=int, default=96, help="per rank")
    parser.add_argument("--folder", help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        pool = Pool(args.ranks, timeout=3600)
        found = pool.run(measure, folder, args.megabytes, args.pairs)[0]
        pool.close()
    print(f"{machine()}\n")
    print(f"{args.ranks} ranks, {args.megabytes} MB per rank, in {args.folder or 'TMP'}")
    print("\n| | ratio | 95 % interval | pairs | ours ms | theirs ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, seconds in found.items():
        ratios = [a / b for a, b in seconds]
        low, high = interval(ratios)
        ours, theirs = (1e3 * statistics.median(s[i] for s in seconds) for i in (0, 1))
        ratio = f"**{statistics.median(ratios):.3f}** | {low:.3f} ... {high:.3f}"
        print(f"| {name} | {ratio} | {len(ratios)} | {ours:.1f} | {theirs:.1f} |")


if __name__ == "__main__":
    main()
