"""What a stage would hold and send on any number of ranks, without the ranks.

    python -m tools.dry_run 07 --ranks 1024 --pp 8 --tp 8 --preset gpt2-xl --n-heads 32 ...
    python -m tools.dry_run 04 --device cuda --cpu-offload ...      see fake_cuda.py
    python -m tools.dry_run all

It runs the stage's own `main` for one step as one chosen rank. PyTorch's fake process group answers
at once for all other ranks, and its fake tensors have shapes but no memory. So the dry run cannot
drift from the stage, and wrong arguments end it with the stage's own error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.collectives import Ledger, all_reduce_control, all_to_all_single, ledger
from common.distributed import World
from common.model import rotary_table

from common.job.corpus import Corpus
from common.job.launch import fail
from common.job.ssd_state import StateFile, StateFolder
from tools.memory import PeakMemory
from tools.stages import BASE, load_stage, runs_for, stage_file, stages

VOCABULARY = 33_278  # of WikiText-2


@dataclass
class Report:
    """Bytes that one rank holds and sends per step. `peak`: all that are alive at the same time."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0
    sent: Ledger | None = None
    sent_before: Counter | None = None  # on a ring before the first step: the initial weights

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def activations(self) -> int:
        """At the peak: activations, unsharded parameters and tensors in flight."""
        return self.peak - self.states


def report_of(
    optimizers: list[torch.optim.Optimizer], sent_before: Counter, device: str = "cpu"
) -> Report:
    """The model state on `device` and what the ledger has counted, after these have stepped. A
    storage of parameters, gradients or optimizer state counts once."""
    state = {p: tensors for optimizer in optimizers for p, tensors in optimizer.state.items()}
    params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    kinds = {
        "parameters": params,
        "gradients": [p.grad for p in params if p.grad is not None],
        "optimizer": [t for each in state.values() for t in each.values() if t.dim() > 0],
    }
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for kind, tensors in kinds.items():
        held = (t.untyped_storage() for t in tensors if t.device.type == device)
        storages = {storage._cdata: storage for storage in held}
        sizes[kind] = sum(s.nbytes() for key, s in storages.items() if key not in seen)
        seen |= storages.keys()
    sent = Ledger(*map(Counter, (ledger.calls, ledger.payload, ledger.ring, ledger.control)))
    return Report(**sizes, sent=sent, sent_before=sent_before)


class OneStep:
    """In place of `common.job.run.Run`: takes one step, whose memory and messages it reports."""

    resume = "never"

    def __init__(self, *_) -> None:
        self.checkpoints = self
        self.optimizers: list[torch.optim.Optimizer] = []  # all that have taken the step

    def load(self, *_) -> int:
        return 0

    def steps(self, first: int) -> Iterator[int]:
        self.sent_before = Counter(ledger.ring)
        ledger.reset()  # communication at the start belongs to no step
        hook = register_optimizer_step_pre_hook(lambda taken, *_: self.optimizers.append(taken))
        try:
            yield first
        finally:
            hook.remove()

    def log(self, *_, **others) -> None:
        self.report = report_of(self.optimizers, self.sent_before)
        del self.optimizers

    def evaluates(self, step: int) -> bool:
        return False

    is_last = agree_to_save_or_stop = evaluates

    def write(self) -> None:
        pass

    def finish(self, state: dict) -> Report:
        return self.report


PATCHES = {"Run": OneStep}


def empty_batches(_, batching, device, first_step: int, rank: int = 0, size: int = 1):
    """Yield batches of the shapes that `train_batches` yields."""
    share, micro = batching.global_batch_size // size, batching.micro_batch_size
    tokens = torch.zeros(micro, batching.seq_len, dtype=torch.int64, device=device)
    keys = torch.zeros(micro, dtype=torch.int32, device=device)
    while True:
        yield [(tokens, tokens, keys)] * (share // micro)


def full_documents(_, __, batching, device, *___):
    """In place of 13's batches: a micro-batch per rank, full with one document."""
    tokens = torch.zeros(batching.seq_len, dtype=torch.int64, device=device)
    while True:
        yield [(tokens, tokens, (batching.seq_len,))]


def without_files() -> dict:
    """Patches of 13, which then needs config.json of --model alone."""
    data = dict(name="fake", train=[0], valid=[], vocab=[], vocab_size=0, digest="0", tokens=None)
    return {
        "load_instructions": lambda *_: SimpleNamespace(**data),
        "document_batches": full_documents,
        "WeightFiles": lambda folder, _: SimpleNamespace(folder=folder, bytes_read=0),
        "read_model": lambda *_: None,
        "output_folder": lambda *_: None,
        "check_ranks": lambda *_: None,
        "check_memory": lambda *_: None,
    }


def exchange_nothing(counts: Tensor, group: dist.ProcessGroup) -> None:
    all_to_all_single(torch.empty_like(counts), counts, group=group)  # for the ledger


def balanced_counts(rows: int, exchange, counts: Tensor, group: dist.ProcessGroup) -> list:
    """In place of 09's `exchange_counts`: every rank has `rows`, evenly over the experts."""
    exchange(counts, group)  # a fake tensor has no numbers
    (each, rest), n = divmod(rows, len(counts)), len(counts) // group.size()
    every = [each + (i < rest) for i in range(len(counts))]
    sent = [every[i : i + n] for i in range(0, len(every), n)]  # by rank
    return [sent, [sent[group.rank()]] * len(sent)]


class NoFile(StateFile):
    """In place of 12's file of a unit: nothing is read or written."""

    def __init__(self, folder: StateFolder, name: str, shard: Tensor):
        self.folder, self.path, self.length = folder, Path(name), len(shard)
        folder.files.append(self)

    def empty(self, n_rows: int) -> Tensor:
        return torch.empty(n_rows, self.length)

    def _move(self, *_) -> None:
        pass

    def write_slot(self, *_) -> None:
        pass

    def mapped(self) -> Tensor:
        return torch.empty(1).expand(3, self.length)  # in a file, not in memory


class NoFiles(StateFolder):
    """In place of 12's folder: its jobs run at once, in this thread."""

    def __init__(self, *_):
        self.files, self.jobs, self.is_restored = [], {}, False
        self.step = self.slot = self.commits = self.committed = 0
        self.path, self.traffic, self.threads = Path(), {}, self

    def submit(self, function, *args) -> Future:
        (job := Future()).set_result(function(*args))
        return job

    def commit(self) -> None:
        self.committed = self.step

    close = commit


def unclipped(optimizer: type) -> type:
    """12's optimizer, but it clips no step: fake tensors have no numbers."""

    def step(self) -> None:
        self.scale.item = lambda: 1.0
        optimizer.step(self)

    return type("Unclipped", (optimizer,), {"step": step})


@torch.no_grad()
def replace_parameters(module: nn.Module, convert, recurse: bool = True) -> nn.Module:
    """In place of `Module._apply`, which swaps tensors: fake tensors cannot be swapped."""
    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            converted = convert(p)
            if converted is not p:
                setattr(owner, name, nn.Parameter(converted, p.requires_grad))
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = convert(buffer)
    return module


def nothing_to_compare(what: str, values: list, device: torch.device, *group) -> None:
    """In place of `check_same`: fake tensors have no numbers."""
    all_reduce_control(torch.zeros(2, device=device), *group)


@contextlib.contextmanager
def fake_stage(
    number: str, ranks: int, rank: int, argv: list[str], vocabulary: int, exchange, **patches
) -> Iterator[ModuleType]:
    """The script of a stage as `rank` of `ranks`, on fake tensors, with `patches` of its names.

    exchange: what 09 does to exchange counts, before its balanced counts replace them.
    """
    module = load_stage(number)
    if number != "01":
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    if hasattr(module, "exchange_counts"):
        args = module.parse_args(argv)
        rows = args.micro_batch_size * args.seq_len * args.top_k
        patches["exchange_counts"] = partial(balanced_counts, rows, exchange)
    if hasattr(module, "check_same"):
        patches["check_same"] = nothing_to_compare
    if hasattr(module, "state_folder"):
        patches |= {"state_folder": NoFiles, "StateFile": NoFile}
        patches["SpeculativeAdamW"] = unclipped(module.SpeculativeAdamW)
    if hasattr(module, "load_instructions"):
        patches |= without_files()
    words, tokens = [str(i) for i in range(vocabulary)], torch.zeros(2, dtype=torch.int32)
    corpus = Corpus("fake", tokens[:1].expand(2**20), tokens, tokens, words, "0")
    rotary_table.cache_clear()  # real tensors and fake ones do not mix
    ledger.reset()  # of an earlier run of this process
    patches["load_corpus"] = lambda _: corpus
    try:
        with (
            patch.multiple(module, **{k: v for k, v in patches.items() if hasattr(module, k)}),
            patch("common.collectives.check_same", nothing_to_compare),
            patch("common.unit_parameters.check_same", nothing_to_compare),
            patch("common.job.arguments.check_ranks"),  # there is one process
            patch("common.job.arguments.check_memory"),  # this machine's memory does not matter
            patch.object(nn.Module, "_apply", replace_parameters),
            FakeTensorMode(allow_non_fake_inputs=True),  # the corpus
        ):
            yield module
    finally:
        rotary_table.cache_clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def dry_run(
    number: str, ranks: int, rank: int, argv: list[str], vocabulary: int = VOCABULARY
) -> Report:
    """Run one step of stage `number` as `rank` of `ranks`, with the script's own flags `argv`.

    Raises SystemExit where the stage fails. There must be no process group yet.
    """
    world = World(rank, ranks, torch.device("cpu"))
    patches = {"setup": lambda timeout: world, "train_batches": empty_batches, **PATCHES}
    stage = fake_stage(number, ranks, rank, argv, vocabulary, exchange_nothing, **patches)
    with stage as module, PeakMemory(only_touched=True) as memory:
        report = module.main(argv)
    report.peak = memory.bytes
    return report


# ---- output ----


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3f}"


def show(
    number: str, ranks: int, rank: int, argv: list[str], vocabulary: int, device: str = "cpu"
) -> None:
    start = time.perf_counter()
    if device == "cuda":
        from tools import fake_cuda

        try:
            report, events = fake_cuda.run(number, ranks, rank, argv, vocabulary)
        except RuntimeError as error:
            fail(f"stage {number} fails in {fake_cuda.place_of(error)}: {error}", status=1)
    else:
        report = dry_run(number, ranks, rank, argv, vocabulary)
    held = f"held on the {'GPU' if device == 'cuda' else 'CPU'}, GB"
    print(f"stage {number}, rank {rank} of {ranks}: {' '.join(argv)}\n\n{held}")
    for name in ("parameters", "gradients", "optimizer", "activations", "peak"):
        print(f"  {name:24}{gigabytes(getattr(report, name)):>12}")
    print(f"\n{'sent per step':26}{'calls':>12}{'payload GB':>14}{'on a ring GB':>14}")
    sent = report.sent
    for key in sorted(sent.calls):
        row = f"{sent.calls[key]:12}{gigabytes(sent.payload[key]):>14}"
        print(f"  {' over '.join(key):24}{row}{gigabytes(sent.ring[key]):>14}")
    print(f"  {'total':36}{'':14}{gigabytes(sent.total_ring_bytes):>14}")
    if device == "cuda":
        fake_cuda.show_events(events)
    print(
        "\nactivations: with unsharded parameters and tensors in flight at the peak. "
        f"{time.perf_counter() - start:.0f} s"
    )


def every_stage() -> None:
    """One table: every stage on 8 to 4096 ranks. The batch grows with the ranks."""
    model = BASE["dry-run-all"]  # 3.5 billion parameters, of sizes that powers of two divide
    print(f"{model}, vocabulary {VOCABULARY}; GB of the rank that has the most\n")
    print("| stage | ranks | states | peak | sent per step | flags |\n|" + " --- |" * 6)
    for run in runs_for("dry-run-all"):
        # flushed, to show progress: a row may take a minute
        print(f"| {run.stage} | {run.ranks} | ", end="", flush=True)
        row = figures(run.stage, run.ranks, run.argv)
        print(f"{row} | {' '.join(run.flags)} |", flush=True)


def figures(number: str, ranks: int, argv: list[str]) -> str:
    """States, peak and ring bytes of the rank that has the most, or why there are none."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            # along a pipeline its ends hold most, and the ranks between them send most
            differ = (0, ranks // 2, ranks - 1) if stage_file(number).ranks_differ else (0,)
            reports = [dry_run(number, ranks, rank, argv) for rank in differ]
    except SystemExit:
        why = stderr.getvalue().removeprefix("dry-run: ").split(":")[0].split(" (")[0].strip()
        return f"no: {why} | | "
    each = [(r.states, r.peak, r.sent.total_ring_bytes) for r in reports]
    return " | ".join(gigabytes(max(values)) for values in zip(*each, strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("stage", help="its number, or all: one table")
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks to simulate")
    parser.add_argument("--rank", type=int, default=0, help="the rank to run as")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="fake, too")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="words")
    args, own = parser.parse_known_args(argv)
    if not 0 <= args.rank < args.ranks:
        fail(f"--rank {args.rank} is not one of the {args.ranks} ranks: 0 to {args.ranks - 1}")
    known = stages() if args.device == "cuda" else stages()[1:]  # stage 01 has nothing to send
    if args.stage == "all":
        every_stage()
    elif args.stage in known:
        show(args.stage, args.ranks, args.rank, own, args.vocabulary, args.device)
    else:
        fail(f"no dry run of {args.stage!r}, but of {', '.join(known)}, or all")


if __name__ == "__main__":
    sys.argv[0] = "dry-run"
    main()
    sys.stdout.flush()
    os._exit(0)  # before Python ends: autograd's threads for fake GPUs would still run
