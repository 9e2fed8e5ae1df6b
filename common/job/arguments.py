"""The flags that every stage has, their defaults, and the checks that need no model."""

import argparse
import dataclasses
import hashlib
import math
import os
import platform
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from common.batches import Batching
from common.collectives import all_reduce_control, check_same
from common.model import TransformerConfig

from common.job.corpus import Corpus
from common.job.launch import fail, launch_environment, prepare_streams

SHAPE = ("d_model", "n_layers", "n_heads", "seq_len")  # what a preset sets
PRESETS = {
    "tiny": (128, 2, 4, 64),
    "small": (384, 6, 6, 256),
    "gpt2": (768, 12, 12, 1024),
    "gpt2-xl": (1600, 48, 25, 1024),
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default unless it is None or False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        unset = action.default is None or action.default is False
        return action.help if unset else super()._get_help_string(action)


class Arguments(Namespace):
    """The flags, which a run records, and what follows from them."""

    __slots__ = ("given",)  # the command line

    @property
    def batching(self) -> Batching:
        return Batching(self.seq_len, self.global_batch_size, self.micro_batch_size, self.seed)

    @property
    def max_norm(self) -> float:
        return self.grad_clip or math.inf


class Parser(argparse.ArgumentParser):
    """Fails with one line on rank 0, and with status 2 on every rank."""

    def parse_args(self, argv: list[str] | None = None) -> Arguments:
        given = sys.argv[1:] if argv is None else argv
        # a shell leaves the tilde of --run-dir=~/x as it is
        words = ["=".join(map(os.path.expanduser, word.split("=", 1))) for word in given]
        args = super().parse_args(words, Arguments())
        for name, value in vars(args).items():
            if value == "":  # an unset variable of a shell
                self.error(f"--{name.replace('_', '-')} is empty: pass a value, or not the flag")
        args.given = given
        return args

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (--help lists the flags)")


def _number(kind: type, least: float, most: float, above: bool = False):
    """An argparse type: a number between `least` (excluded if `above`) and `most`."""

    def parse(text: str):
        value = kind(text)
        if not least <= value <= most or (above and value == least):  # so is a NaN
            bound = "above" if above else "at least"
            raise ArgumentTypeError(f"{text} must be {bound} {least} and at most {most}")
        return value

    parse.__name__ = kind.__name__  # argparse's own error names it
    return parse


positive = _number(float, 0, 1e30, above=True)
positive_int = _number(int, 1, 10**9)
natural = _number(int, 0, 2**63 - 1)
non_negative = _number(float, 0, 1e30)


def base_parser(description: str | None, without: Sequence[str] = ()) -> Parser:
    """A parser with the flags that every stage has, less some. Defaults are printed by --help."""
    prepare_streams()
    p = Parser(
        description=(description or "").strip().split("\n")[0],  # None under python -OO
        epilog="SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU: save and exit. Ctrl-C: exit at once.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    p._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)")  # else -1e-3 is a flag

    def add(flag: str, **options) -> None:
        if flag.removeprefix("--") not in without:
            p.add_argument(flag, **options)

    add("--data", default="wikitext2", help="wikitext2, sample, a folder of {train,valid,test}.txt")
    add("--preset", choices=PRESETS, default="tiny", help="shape of the model")
    add("--d-model", type=positive_int, help="width (default: the preset's)")
    add("--n-layers", type=positive_int, help="number of layers (default: the preset's)")
    add("--n-heads", type=positive_int, help="attention heads (default: the preset's)")
    add("--seq-len", type=positive_int, help="tokens per sample (default: the preset's)")
    add("--steps", type=positive_int, default=1000, help="optimizer steps of the whole run")
    add("--global-batch-size", type=positive_int, default=24, help="samples per step, all ranks'")
    micro = "samples per forward (default: no accumulation; pipelines: <= 4 micro-batches per rank)"
    add("--micro-batch-size", type=positive_int, help=micro)
    add("--lr", type=positive, default=1e-3, help="peak learning rate")
    add("--warmup-steps", type=natural, default=20, help="steps of linear warm-up")
    add("--min-lr-ratio", type=_number(float, 0, 1), default=0.1, help="final rate / peak rate")
    add("--weight-decay", type=non_negative, default=0.1, help="of the optimizer")
    add("--grad-clip", type=non_negative, default=1.0, help="largest global norm; 0: never clip")
    add("--dropout", type=_number(float, 0, 0.99), default=0.0, help="of embeddings and residuals")
    dtypes = ("float32", "bfloat16")
    add("--dtype", choices=dtypes, help="of the matmuls (default: bfloat16 on a GPU, else float32)")
    add("--activation-checkpointing", action="store_true", help="recompute layers in backward")
    add("--seed", type=natural, default=1337, help="of weights, data order and dropout")
    add("--eval-every", type=natural, default=0, help="steps; 0: only at the end")
    add("--checkpoint-every", type=natural, default=0, help="steps; 0: never")
    add("--keep-checkpoints", type=positive_int, default=2, help="how many of the newest to keep")
    add("--save-model", metavar="FILE", help="write the full weights there after the last step")
    add("--resume", metavar="PATH", help="start a new run from this checkpoint, or another run's")
    add("--run-dir", help="default: runs/STAGE/ID, the launcher's id or the time")
    add("--log-every", type=positive_int, default=10, help="steps between lines")
    add("--timeout", type=_number(float, 1, 10**6), default=600, help="collective timeout, seconds")
    add("--profile", action="store_true", help="trace some steps with torch.profiler")
    return p


def check_arguments(
    args: Arguments, data_parallel_size: int = 1, tensor_parallel_size: int = 1
) -> Arguments:
    """Fill in the defaults that depend on other flags; fail on combinations that cannot work.

    The sizes are numbers of ranks: the global batch is split over the first, the matrices are
    sharded over the second, which `model_config` checks.
    """
    for name, value in zip(SHAPE, PRESETS[args.preset], strict=True):
        setattr(args, name, getattr(args, name) or value)
    if args.d_model % (2 * args.n_heads):  # rotary positions rotate pairs
        fail(f"--d-model {args.d_model} / --n-heads {args.n_heads} must be an even number")
    n = args.global_batch_size
    share, rest = divmod(n, data_parallel_size)
    if rest:
        by = f"{data_parallel_size} data-parallel ranks: pass a multiple"
        fail(f"--global-batch-size {n} is not divisible by {by}")
    args.micro_batch_size = args.micro_batch_size or share
    if share % args.micro_batch_size:
        samples = f"{share} samples that --global-batch-size {n} gives each data-parallel rank"
        fail(f"--micro-batch-size {args.micro_batch_size} does not divide the {samples}")
    args.dp, args.tp = data_parallel_size, tensor_parallel_size
    args.state_on = "device"  # the model state; an offloading stage says "host" or "disk"
    args.dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    args.autocast = args.dtype == "bfloat16"  # a stage that casts weights itself turns it off
    return args


def check_pipeline(args: Arguments, p: int, flag: str, dp: int = 1, tp: int = 1) -> Arguments:
    """Check the flags of a pipeline of p ranks, and choose the defaults that depend on them.

    flag: the one that sets p. dp, tp: the sizes for `check_arguments`, which this includes.
    """
    interleaves = args.schedule == "interleaved"
    if interleaves and p == 1:
        fail(f"--schedule interleaved needs {flag} 2 or more: pass another schedule")
    v = args.virtual_stages = args.virtual_stages or (2 if interleaves else 1)
    if v > 1 and not interleaves:
        fail(f"--virtual-stages {v} goes with --schedule interleaved, not with {args.schedule}")
    share = args.global_batch_size // dp
    multiple = p if interleaves else 1  # the number of micro-batches must be a multiple of it
    counts = [m for m in range(multiple, 4 * p + 1, multiple) if share % m == 0]
    if args.micro_batch_size is None and counts:
        args.micro_batch_size = share // counts[-1]
    check_arguments(args, dp, tp)
    m = share // args.micro_batch_size
    if m % multiple:
        fix = f"--micro-batch-size {share // p}" if counts else f"--global-batch-size {dp * p}"
        needs = f"a multiple of {p} ({flag}) micro-batches"
        fail(f"--schedule interleaved needs {needs}, not {m}: pass {fix}, for example")
    if args.n_layers < p * v:
        stages = f"{p * v} stages ({flag} {p}, --virtual-stages {v})"
        fix = f"--n-layers {p * v} or more, or a smaller {flag}"
        fail(f"--n-layers {args.n_layers} do not fill {stages}: pass {fix}")
    return args


def check_degree(config: TransformerConfig, tp: int, sequence_parallel: bool) -> None:
    """Fail if the tensor-parallel degree does not divide the sizes that are sharded.

    The heads cover the widths, which are multiples of their number.
    """
    sizes = {
        f"--n-heads {config.n_heads}": config.n_heads,
        f"the vocabulary of --data, padded to {config.padded_vocab},": config.padded_vocab,
    }
    if sequence_parallel:
        sizes[f"--seq-len {config.seq_len} under --sequence-parallel"] = config.seq_len
    for name, size in sizes.items():
        if size % tp:
            fit = [str(n) for n in range(1, tp) if not any(s % n for s in sizes.values())]
            by = f"{tp} tensor-parallel ranks; possible: {', '.join(fit)}"
            fail(f"{name} is not divisible by {by}")


def model_config(
    args: Arguments, corpus: Corpus, kind: type[TransformerConfig] = TransformerConfig
) -> TransformerConfig:
    """The model's configuration, from the flags and the vocabulary. The ranks must agree."""
    check_ranks(args, corpus)
    if len(corpus.train) <= args.seq_len:
        n = f"{len(corpus.train)} tokens to train on"
        fail(f"{n}, fewer than --seq-len + 1: pass another --data or a smaller --seq-len")
    of_flags = [field.name for field in dataclasses.fields(kind) if field.name != "vocab_size"]
    config = kind(len(corpus.vocab), **{name: getattr(args, name) for name in of_flags})
    if args.tp > 1:
        check_degree(config, args.tp, args.sequence_parallel)
    check_memory(args, config)
    return config


def check_ranks(args: Arguments, corpus: Corpus) -> None:
    """Fail if ranks differ in what all must share: arguments, data, code, versions."""
    if not dist.is_initialized():
        if (size := launch_environment().size) > 1:
            fail(f"this script is for one process, not {size}: start it without a launcher")
        return
    code, script = hashlib.sha256(), Path(sys.argv[0])
    common = Path(__file__).parents[1].rglob("*.py")
    for file in (script, *sorted(script.parent.glob("*.py")), *sorted(common)):
        code.update(file.read_bytes() if file.is_file() else b"")
    shared = {"--" + name.replace("_", "-"): repr(value) for name, value in vars(args).items()}
    del shared["--data"]  # each node may have its own copy
    shared |= {"the hash of --data": corpus.digest, "the hash of the code": code.hexdigest()[:12]}
    shared |= {"PyTorch's version": torch.__version__, "Python's": platform.python_version()}
    shared["the kind of device"] = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return check_same("flags", [shared], torch.device("cpu"))
    except ValueError:  # what differs is worth a second message
        every: list = [None] * dist.get_world_size()
        dist.all_gather_object(every, shared)
    rank, other = next((r, each) for r, each in enumerate(every) if each != every[0])
    names = [name for name in {**every[0], **other} if every[0].get(name) != other.get(name)]
    what = [f"{n} is {every[0].get(n)} on rank 0 and {other.get(n)} on rank {rank}" for n in names]
    count = f"{sum(each != every[0] for each in every)} of {len(every)} ranks"
    fail(f"{count} differ from rank 0: {'; '.join(what)}: start all with the same command")


def check_memory(
    args: Arguments, config: TransformerConfig, state_bytes: int | None = None
) -> None:
    """Fail if the model state and one layer's inputs exceed the memory of all ranks together.

    state_bytes: of all ranks; by default 16 per parameter, once.
    """
    if args.state_on == "disk":
        return
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = torch.tensor(host / launch_environment().local_size, dtype=torch.float64)
    if torch.cuda.is_available() and args.state_on == "device":
        memory.fill_(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    if dist.is_initialized():
        all_reduce_control(memory)  # nodes may differ, but all ranks must agree
    hidden = args.dp * args.micro_batch_size * args.seq_len * config.d_model * 2  # in bfloat16
    needed = (state_bytes or 16 * config.num_parameters()) + hidden
    if needed > memory.item():
        names = ("d_model", "n_layers", "seq_len", "micro_batch_size")
        names = ("model", "seq_len") if "model" in args else names
        sizes = " ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names)
        has = f"and the ranks together have {memory.item() / 1e9:,.1f} GB: pass smaller ones"
        fail(f"{sizes} needs at least {needed / 1e9:,.1f} GB {has}")
