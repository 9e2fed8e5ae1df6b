"""Step times of stage 12 on one process: `python -m 12_ssd_offload.timing FOLDER [--only NAME]`.

Contenders take turns, step by step. FOLDER is on the disk to measure.

    overlapped      12 as it is
    sequential      12, but each read and each update ends before the next operation begins
    cpu-offload     04 with --cpu-offload
    mapped          the same, with shards and moments in `torch.from_file(shared=True)`
    one sequence    12 with one sequence per step, so that the disk is the limit
    disk            about the reads and writes of such a step, without computing

`mapped` is as fast as memory until memory is full: run it in a cgroup that is too small for it.
"""

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.model import Transformer, TransformerConfig, initial_shard
from common.optimization import adamw_settings

from benchmarks.bench import interval
from common.job.launch import cleanup, setup
from common.job.run import keep_freed_memory
from tools.stages import load_stage

SETTINGS = adamw_settings(1e-4, 0.1)
PAIRS = (
    ("sequential", "overlapped"),
    ("cpu-offload", "overlapped"),
    ("mapped", "overlapped"),
    ("disk", "one sequence"),
)


def shard(stage: str, config: TransformerConfig, *optimizer, **flags):
    with torch.device("meta"):
        model = Transformer(config)
    fsdp = load_stage(stage).FullyShardedDataParallel
    flags |= {"read_shard": partial(initial_shard, 0), "device": torch.device("cpu")}
    return fsdp(model, model.units(), *optimizer, **flags)


def at_once(function: Callable, *args) -> Future:
    (job := Future()).set_result(function(*args))
    return job


def ssd(folder: Path, config: TransformerConfig, is_overlapped: bool = True):
    optimizer = load_stage("12").SpeculativeAdamW(folder, **SETTINGS)
    if not is_overlapped:
        optimizer.threads.submit = at_once
    return shard("12", config, optimizer), optimizer, lambda: None


def offload(folder: Path, config: TransformerConfig, is_mapped: bool = False):
    model = shard("04", config, cpu_offload=True)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    for i, param in enumerate(model.parameters() if is_mapped else ()):
        names, n = ("param", "exp_avg", "exp_avg_sq"), param.numel()
        folder.mkdir(exist_ok=True)
        files = [torch.from_file(str(folder / f"{i}.{name}"), True, n) for name in names]
        param.data = files[0].copy_(param.data)
        moments = dict(zip(names[1:], files[1:], strict=True))
        optimizer.state[param] = {"step": torch.zeros(()), **moments}
    return model, optimizer, optimizer.zero_grad


def train_step(tokens: Tensor, model, optimizer, finish: Callable) -> None:
    model(tokens, tokens).backward()
    model.finish_gradient_synchronization()
    if isinstance(optimizer, torch.optim.AdamW):  # in 12 the step clips
        model.clip_grad_norm_(float("inf"))
    optimizer.step()
    finish()


def disk_step(optimizer) -> None:
    """Read all parameters forwards and backwards, two units ahead; then the rest, in threads."""
    stage = load_stage("12")

    def update(file) -> None:
        file.write(stage.GRADIENT, file.empty(1))
        file.write(stage.SLOT, file.read(0, stage.SLOT))

    for order, is_backward in ((optimizer.files, False), (optimizer.files[::-1], True)):
        reads: deque[Future] = deque()
        for i, file in enumerate(order):
            ahead = order[i + len(reads) : i + 3]
            reads.extend(optimizer.threads.submit(each.read, 0) for each in ahead)
            reads.popleft().result()
            if is_backward:
                optimizer.start(file, update)
    optimizer.wait()


def allocate_as_in_a_run_of(contender: str) -> None:
    keep_freed_memory(2**30 if contender in ("cpu-offload", "mapped") else 2**17)


CONTENDERS = {
    "overlapped": ssd,
    "sequential": partial(ssd, is_overlapped=False),
    "cpu-offload": offload,
    "mapped": partial(offload, is_mapped=True),
    "one sequence": ssd,
    "disk": ssd,
}


def measure(pair: tuple[str, str], folder: Path, n_layers: int) -> str:
    """A row of the table."""
    config = TransformerConfig(256, d_model=256, n_layers=n_layers, seq_len=64)
    tokens = torch.randint(256, (1 if "disk" in pair else 8, 64))
    steps = []
    for name in pair:
        arm = CONTENDERS[name](folder / name, config)
        step = partial(train_step, tokens, *arm)
        if name == "disk":
            step = partial(disk_step, arm[1])
        step()  # to warm up
        steps.append(step)
    times: list[tuple[float, float]] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline or len(times) < 6:
        taken = {}
        for step in steps[:: 1 - 2 * (len(times) % 2)]:  # each is the first one in turn
            allocate_as_in_a_run_of(pair[steps.index(step)])
            started = time.perf_counter()
            step()
            taken[step] = time.perf_counter() - started
        times.append((taken[steps[0]], taken[steps[1]]))
    ratios = [a / b for a, b in times]
    low, high = interval(ratios)
    ratio = f"{statistics.median(ratios):.2f} ({low:.2f}–{high:.2f})"
    seconds = " / ".join(f"{statistics.median(each):.2f}" for each in zip(*times, strict=True))
    return f"| {pair[0]} / {pair[1]} | {ratio} | {seconds} | {len(times)} |"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="the pair with this contender")
    parser.add_argument("--n-layers", type=int, default=12)
    args = parser.parse_args()
    setup()
    print("| pair | ratio (95 % interval) | seconds per step | pairs |\n| --- | --- | --- | --- |")
    for pair in PAIRS:
        if args.only in pair or (args.only is None and "mapped" not in pair):
            args.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                print(measure(pair, Path(folder), args.n_layers), flush=True)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
