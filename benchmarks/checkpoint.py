"""Saving and loading with our checksums, against plain `dcp.save` and `dcp.load`.

    python benchmarks/checkpoint.py --ranks 2 --pairs 30 --folder /dev/shm

Both write and read the same tensors, in the same processes, in turns (ours, theirs, theirs, ours),
each behind a barrier; the slowest rank's time counts. Ours is all of `Checkpointer.save` and
`Checkpointer.load`: the copy to host memory, the checksums, the commit by rename. `reshard` loads
by columns what was saved by rows; theirs are DTensors. The table shows the median of the paired
ratios ours / theirs with its 95 % interval. Its row `blocked` is the time for which our
asynchronous save blocks training, relative to a full `dcp.save`. In memory (/dev/shm) nothing
waits for a disk, which makes the comparison harder for the checksums.
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
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from common.checkpoint import Checkpointer  # noqa: E402
from common.checkpoint import Shard as OurShard  # noqa: E402
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


def sharded(megabytes: int, dim: int) -> tuple[dict, dict]:
    """Zeros, 4 MB of each tensor per rank, sharded along `dim`: as our shards and as DTensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    shape = (512 * size, 2048)
    local = torch.zeros([n // size if d == dim else n for d, n in enumerate(shape)])
    names = [f"model.{i}" for i in range(megabytes // 4)]
    ours = {n: OurShard.of_slice(shape, dim, rank * local.shape[dim], local.clone()) for n in names}
    theirs = {n: DTensor.from_local(local.clone(), mesh, [Shard(dim)]) for n in names}
    return ours, theirs


def measure(folder: str, megabytes: int, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of ours and theirs, pair by pair, for `save`, `load`, `reshard` and `blocked`."""
    keep_freed_memory()  # as every run does
    state, path = tensors(megabytes), Path(folder)
    rows, columns = sharded(megabytes, 0), sharded(megabytes, 1)
    checkpointer = Checkpointer(path / "blocked")
    found: dict[str, list[tuple[float, float]]] = {}

    def save(where: Path, state: dict) -> None:
        place = Checkpointer(where)
        place.save(1, state)
        place.close()

    def load(where: Path, state: dict) -> None:
        checkpointer.load(str(where / "step-00000001"), state, STUB)

    save(path / "our-rows", rows[0])
    dcp.save(rows[1], checkpoint_id=path / "their-rows")
    for pair in range(-2, pairs):  # two to warm up
        ours, theirs = path / f"ours-{pair}", path / f"theirs-{pair}"
        acts = {
            "save": (
                lambda ours=ours: save(ours, state),
                lambda theirs=theirs: dcp.save(state, checkpoint_id=theirs),
            ),
            "load": (
                lambda ours=ours: load(ours, state),
                lambda theirs=theirs: dcp.load(state, checkpoint_id=theirs),
            ),
            "reshard": (
                lambda: load(path / "our-rows", columns[0]),
                lambda: dcp.load(columns[1], checkpoint_id=path / "their-rows"),
            ),
        }
        seconds = {name: [0.0, 0.0] for name in acts}
        for name, both in acts.items():
            for which in (0, 1) if pair % 2 else (1, 0):
                seconds[name][which] = timed(both[which])
        seconds["blocked"] = [timed(lambda: checkpointer.save(1, state, 1)), seconds["save"][1]]
        checkpointer.wait()
        for name, (our_seconds, their_seconds) in seconds.items() if pair >= 0 else ():
            found.setdefault(name, []).append((our_seconds, their_seconds))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(ours)
            shutil.rmtree(theirs)
    checkpointer.close()
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
    print(f"{machine()}\n\n{args.ranks} ranks, {args.megabytes} MB each, in {args.folder or 'TMP'}")
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
