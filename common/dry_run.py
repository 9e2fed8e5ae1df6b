"""What a stage would hold and send on any number of ranks, without the ranks.

    python -m common.dry_run 07 --ranks 1024 --pp 8 --tp 8 --preset gpt2-xl --n-heads 32 ...
    python -m common.dry_run plan

It runs the stage's own `main` for one step as one chosen rank: PyTorch's fake process group
answers at once for all the others, and its fake tensors have shapes and no memory. So it cannot
drift from the stage; what would be refused for real is refused here, by the same line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.collectives import Ledger, ledger
from common.distributed import World, refuse
from common.model import rotary_table

REPO = Path(__file__).resolve().parents[1]
VOCABULARY = 33_278  # of WikiText-2


@dataclass
class Report:
    """What one rank holds (bytes) and sends in a step. `peak` is all that lives at a time."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0
    sent: Ledger | None = None

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def activations(self) -> int:
        """At the peak: activations, and what is gathered or on its way just then."""
        return self.peak - self.states


def states_of(optimizer: torch.optim.Optimizer) -> Report:
    """The storages behind parameters, gradients and optimizer states, each counted once."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = {
        "parameters": params,
        "gradients": [p.grad for p in params],
        "optimizer": [t for p in params for t in optimizer.state[p].values() if t.dim() > 0],
    }
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for kind, tensors in kinds.items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        sizes[kind] = sum(s.nbytes() for key, s in storages.items() if key not in seen)
        seen |= storages.keys()
    return Report(**sizes)


class PeakStorage(TorchDispatchMode):
    """The most bytes of floating-point storages that lived at a time, seen operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.at_most = self.peak = 0  # at_most: with what may have been freed since the last sweep

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.see(args)
        result = func(*args, **(kwargs or {}))
        self.see(result)
        return result

    def see(self, values) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                storage = tensor.untyped_storage()
                reference, before = self.known.get(storage._cdata) or (StorageWeakRef(storage), 0)
                if storage.nbytes() != before:
                    self.known[storage._cdata] = reference, storage.nbytes()
                    self.at_most += storage.nbytes() - before
        if self.at_most > self.peak:
            self.sweep()
            self.peak = max(self.peak, self.at_most)

    def sweep(self) -> None:
        for key, (reference, _) in list(self.known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.known[key]
            else:
                self.known[key] = reference, storage.nbytes()
        self.at_most = sum(size for _, size in self.known.values())


class OneStep:
    """Stands in for `common.run.Run`: one step, which is looked at and not written down."""

    optimizer: torch.optim.Optimizer  # as `load` is shown it

    def __init__(self, *_) -> None:
        self.checkpoints = self

    def load(self, resume: str, state: dict, optimizer: torch.optim.Optimizer) -> int:
        self.optimizer = optimizer
        return 0

    def steps(self, first: int) -> Iterator[int]:
        ledger.reset()  # what the start has sent belongs to no step
        yield first

    def log(self, *_) -> None:
        self.report = states_of(self.optimizer)
        self.report.sent = Ledger(
            *map(Counter, (ledger.calls, ledger.payload, ledger.ring, ledger.control))
        )
        del self.optimizer

    def evaluates(self, step: int) -> bool:
        return False

    is_last = saves = evaluates

    def write(self) -> None:
        pass

    def finish(self) -> Report:
        return self.report


STAND_INS = {"Run": OneStep}


def empty_batches(_, args, device, first_step: int, rank: int = 0, size: int = 1):
    """Shapes of what `train_batches` yields."""
    share = args.global_batch_size // size
    tokens = torch.zeros(args.micro_batch_size, args.seq_len, dtype=torch.int64, device=device)
    keys = torch.zeros(args.micro_batch_size, dtype=torch.int32, device=device)
    while True:
        yield [(tokens, tokens, keys)] * (share // args.micro_batch_size)


@torch.no_grad()
def replace_parameters(module: nn.Module, convert, recurse: bool = True) -> nn.Module:
    """In place of `Module._apply`, which swaps tensors, and fake ones cannot be swapped."""
    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            converted = convert(p)
            if converted is not p:
                setattr(owner, name, nn.Parameter(converted, p.requires_grad))
    return module


def load_stage(number: str) -> ModuleType:
    (path,) = REPO.glob(f"{number}_*/train.py")
    spec = importlib.util.spec_from_file_location(f"dry_run_of_{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dry_run(
    number: str, ranks: int, rank: int, argv: list[str], vocabulary: int = VOCABULARY
) -> Report:
    """One step of stage `number` as `rank` of `ranks`, with the script's own flags `argv`.

    Raises SystemExit where the stage refuses. There must be no process group yet.
    """
    module = load_stage(number)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    stand_ins = {
        "setup": lambda timeout: World(rank, rank, ranks, torch.device("cpu")),
        "load_corpus": lambda _: SimpleNamespace(vocab=range(vocabulary), train=None),
        "train_batches": empty_batches,
        **STAND_INS,
    }
    rotary_table.cache_clear()  # real tensors and fake ones do not mix
    try:
        with (
            patch.multiple(module, **stand_ins),
            patch("common.arguments.check_memory"),  # what it is for
            patch.object(nn.Module, "_apply", replace_parameters),
            FakeTensorMode() as fake,
            PeakStorage() as storages,
        ):
            fake.cache_enabled = False  # a cached view gives a freed storage its size back
            report = module.main(argv)
    finally:
        rotary_table.cache_clear()
        dist.destroy_process_group()
    report.peak = storages.peak
    return report


# ---- what is printed ----


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3f}"


def show(number: str, ranks: int, rank: int, argv: list[str], vocabulary: int) -> None:
    start = time.perf_counter()
    report = dry_run(number, ranks, rank, argv, vocabulary)
    print(f"stage {number}, rank {rank} of {ranks}: {' '.join(argv)}\n\nheld, GB")
    for name in ("parameters", "gradients", "optimizer", "activations", "peak"):
        print(f"  {name:24}{gigabytes(getattr(report, name)):>12}")
    print(f"\n{'sent in a step':26}{'calls':>12}{'payload GB':>14}{'on a ring GB':>14}")
    sent = report.sent
    for key in sorted(sent.calls):
        row = f"{sent.calls[key]:12}{gigabytes(sent.payload[key]):>14}"
        print(f"  {' over '.join(key):24}{row}{gigabytes(sent.ring[key]):>14}")
    print(f"  {'in all':36}{'':14}{gigabytes(sent.total_ring_bytes):>14}")
    print(f"\nactivations: with what is gathered at the peak. {time.perf_counter() - start:.0f} s")


# 3.5 billion parameters in a shape that divides
MODEL = "--d-model 4096 --n-layers 16 --n-heads 64 --seq-len 1024 --activation-checkpointing"
SIZES = (8, 64, 512, 4096)
PLANS = {  # flags of a stage on n ranks: the batch grows with them
    "02": lambda n: f"--global-batch-size {n}",
    "03": lambda n: f"--global-batch-size {n} --zero-stage 2",
    "04": lambda n: f"--global-batch-size {n}",
    "05": lambda n: "--global-batch-size 8 --sequence-parallel",
    "06": lambda n: f"--global-batch-size {4 * n} --micro-batch-size 1",
    "07": lambda n: (
        f"--global-batch-size {n} --micro-batch-size 1 --sequence-parallel "
        + ("--pp 2 --tp 2" if n < 64 else "--pp 8 --tp 8")
    ),
}


def plan() -> None:
    """One table: every stage on 8 to 4096 ranks. The batch grows with the ranks."""
    print(f"{MODEL}, vocabulary {VOCABULARY}; GB of the rank that has most\n")
    print("| stage | ranks | states | peak | sent a step | flags |\n|" + " --- |" * 6)
    for number, flags in PLANS.items():
        for ranks in SIZES:
            # flushed: a row may take a minute, and shows where the plan is
            print(f"| {number} | {ranks} | ", end="", flush=True)
            row = figures(number, ranks, [*MODEL.split(), *flags(ranks).split()])
            print(f"{row} | {flags(ranks)} |", flush=True)


def figures(number: str, ranks: int, argv: list[str]) -> str:
    """States, peak and ring bytes of the rank that has most, or why there are none."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # along a pipeline ranks differ most at its ends; elsewhere all are alike
            ends = (0, ranks - 1) if number in ("06", "07") else (0,)
            reports = [dry_run(number, ranks, rank, argv) for rank in ends]
    except SystemExit:
        why = said.getvalue().removeprefix("dry-run: ").split(":")[0].split(" (")[0].strip()
        return f"no: {why} | | "
    each = [(r.states, r.peak, r.sent.total_ring_bytes) for r in reports]
    return " | ".join(gigabytes(max(values)) for values in zip(*each, strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("stage", help="02 ... 07, or plan: a table of all of them")
    parser.add_argument("--ranks", type=int, default=8, help="how many to pretend")
    parser.add_argument("--rank", type=int, default=0, help="which of them to be")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="words")
    args, own = parser.parse_known_args(argv)
    if not 0 <= args.rank < args.ranks:
        refuse(f"--rank {args.rank} is none of the {args.ranks} ranks: 0 to {args.ranks - 1}")
    if args.stage not in PLANS and args.stage != "plan":
        refuse(
            f"there is no stage {args.stage!r} to run dry; there are {', '.join(PLANS)}, or plan"
        )
    if args.stage == "plan":
        plan()
    else:
        show(args.stage, args.ranks, args.rank, own, args.vocabulary)


if __name__ == "__main__":
    sys.argv[0] = "dry-run"
    main()
