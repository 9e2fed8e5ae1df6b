"""A stage's script on fake tensors, as one rank of many: see dry_run.py and fake_cuda.py.

Fake tensors have shapes but neither memory nor numbers, and PyTorch's fake process group answers at
once for all other ranks. What a stage reads from files or decides by numbers is replaced here.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.collectives import Ledger, all_reduce_control, ledger
from common.model import rotary_table

from common.job.corpus import Corpus
from tools.stages import load_stage


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
    if hasattr(module, "StateFile"):
        patches["StateFile"] = without_file(module.StateFile)
        patches["ThreadPoolExecutor"] = AtOnce
        patches["SpeculativeAdamW"] = unclipped(module.SpeculativeAdamW)
    no_files = without_files() if hasattr(module, "documents_of_step") else {}
    in_job = {name: no_files.pop(name) for name in OF_LOAD & no_files.keys()}
    of_load = contextlib.nullcontext()
    if in_job:
        of_load = patch.multiple("common.job.finetuning", **in_job)
    patches |= no_files
    words, tokens = [str(i) for i in range(vocabulary)], torch.zeros(2, dtype=torch.int32)
    corpus = Corpus("fake", tokens[:1].expand(2**20), tokens, tokens, words, "0")
    rotary_table.cache_clear()  # real tensors and fake ones do not mix
    ledger.reset()  # of an earlier run of this process
    patches["load_corpus"] = lambda _: corpus
    try:
        with (
            patch.multiple(module, **{k: v for k, v in patches.items() if hasattr(module, k)}),
            of_load,
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


def full_documents(_, args, step: int) -> list:
    """In place of 13's documents: for each rank one that fills a micro-batch."""
    tokens = torch.zeros(args.seq_len + 1, dtype=torch.int64)
    return [(tokens, [(1, len(tokens))])] * args.dp


OF_LOAD = {"load_instructions", "WeightFiles", "check_ranks"}  # what it calls


def without_files() -> dict:
    """Patches of 13 and 15, which then need config.json of --model alone."""
    data = dict(name="fake", train=[0], valid=[], vocab=[], vocab_size=0, digest="0", tokens=None)
    return {
        "load_instructions": lambda *_: SimpleNamespace(**data),
        "documents_of_step": full_documents,
        "WeightFiles": lambda folder, *_: SimpleNamespace(folder=folder, bytes_read=0),
        "read_model": lambda *_: None,
        "output_folder": lambda *_: (None, None),
        "check_ranks": lambda *_: None,
        "check_memory": lambda *_: None,
    }


def balanced_counts(rows: int, exchange, counts: Tensor, group: dist.ProcessGroup) -> list:
    """In place of 09's `exchange_counts`: every rank has `rows`, evenly over the experts."""
    exchange(counts, group)  # a fake tensor has no numbers
    (each, rest), n = divmod(rows, len(counts)), len(counts) // group.size()
    every = [each + (i < rest) for i in range(len(counts))]
    sent = [every[i : i + n] for i in range(0, len(every), n)]  # by rank
    return [sent, [sent[group.rank()]] * len(sent)]


def without_file(state_file: type) -> type:
    """12's file of a unit, but nothing is read or written."""

    def init(self, optimizer, name: str, shard: Tensor) -> None:
        self.optimizer, self.name, self.length = optimizer, name, len(shard)
        optimizer.files.append(self)

    methods = {
        "__init__": init,
        "empty": lambda self, n_rows: torch.empty(n_rows, self.length),
        "move": lambda *_: None,
        "mapped": lambda self: torch.empty(1).expand(3, self.length),  # not in memory
    }
    return type("WithoutFile", (state_file,), methods)


class AtOnce:
    """In place of 12's threads: a job runs at once, in this thread."""

    def __init__(self, *_, **__):
        pass

    def submit(self, function, *args) -> Future:
        (job := Future()).set_result(function(*args))
        return job


def unclipped(optimizer: type) -> type:
    """12's optimizer, but it clips no step: fake tensors have no numbers."""

    def step(self, max_norm: float) -> Tensor:
        with patch.object(Tensor, "item", lambda _: 1.0):
            return optimizer.step(self, max_norm)

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
    gc.collect()  # of an earlier run
    units = [x for x in gc.get_objects() if type(x).__name__ == "Unit" and hasattr(x, "shard")]
    frozen = [unit.shard for unit in units if not unit.shard.requires_grad]  # of 15
    kinds = {
        "parameters": [*params, *frozen],
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
