"""The job of a stage that fine-tunes: its flags, what they name, and the folder that it writes."""

import hashlib
import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from common.batches import global_batch
from common.distributed import print0
from common.instructions import Spans
from common.llama import Llama, LlamaConfig
from common.weight_files import WeightFiles

from common.job.arguments import Arguments, Parser, base_parser, check_ranks, natural, positive_int
from common.job.launch import fail, rank, world_size
from common.job.paths import check_writable, exists
from common.job.prepared_instructions import Instructions, load_instructions
from common.job.run import Run

# `base_parser`'s flags that are redefined below, or dropped (packing sets micro-batches)
OTHERS = "data preset d-model n-layers n-heads seq-len steps micro-batch-size warmup-steps dropout"


def finetuning_parser(description: str | None, output: str) -> Parser:
    """The flags of a stage that fine-tunes a model. output: the default of --out."""
    parser = base_parser(description, without=OTHERS.split())
    add = parser.add_argument
    add("--model", help="a Hugging Face folder: config, safetensors, tokenizer")
    add("--data", help="a file of instructions in JSON, or sample")
    add("--out", help=f"folder to write, seen by all ranks (default: {output} of the run)")
    add("--valid", type=natural, default=0, help="last documents of --data, to evaluate on")
    add("--seq-len", type=positive_int, default=2048, help="most tokens of a micro-batch")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive_int, help="of all documents (default: 1)")
    length.add_argument("--steps", type=positive_int, help="optimizer steps, in place of --epochs")
    add("--warmup-steps", type=natural, help="of linear warm-up (default: 3 %% of the steps)")
    add("--shard-degree", type=positive_int, help="ranks that shard a unit (default: all)")
    add("--param-dtype", choices=("float32", "bfloat16"), help="default: --dtype")
    add("--no-reshard-after-forward", action="store_true", help="until backward")
    # decay would also reach the norms
    parser.set_defaults(weight_decay=0.0, global_batch_size=128)
    return parser


def complete(args: Arguments) -> Arguments:
    """Fill in what is not given, and what has one value for all that fine-tunes."""
    if not args.model or not args.data:
        fail("--model and --data are needed: a Hugging Face folder, and a file of instructions")
    args.epochs = args.epochs or (None if args.steps else 1)
    args.shard_degree = args.shard_degree or world_size()
    if world_size() % args.shard_degree:
        fail(f"--shard-degree {args.shard_degree} does not divide the {world_size()} ranks")
    args.dp, args.micro_batch_size, args.dropout = world_size(), 1, 0.0
    args.dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    args.param_dtype = args.param_dtype or args.dtype
    args.autocast = False  # units are unsharded in --param-dtype, and their inputs cast to it
    return args


def load(args: Arguments) -> tuple[LlamaConfig, WeightFiles, Instructions]:
    """What --model and --data name. Fails on what would be computed wrongly."""
    folder = Path(args.model)
    try:
        config = LlamaConfig.of_folder(folder, args.activation_checkpointing)
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in Llama(config).named_parameters()}
        files = WeightFiles(folder, shapes, rank(), world_size())
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        fail(f"--model {folder}: config.json, the index or a header is wrong: {error!r}")
    except (OSError, ValueError) as error:
        fail(f"--model {folder}: {error}")
    longest = min(args.seq_len, config.max_positions)
    if config.window is not None and config.window < longest:
        fail(f"--model {folder}: a sliding window: pass --seq-len {config.window} or less")
    data = load_instructions(args.data, folder, longest, args.valid)
    if data.vocab_size > config.vocab_size:
        rows = f"the embedding has {config.vocab_size} rows"
        fail(f"--model {folder}: {rows}, and --data the token {data.vocab_size - 1}")
    args.d_model, args.n_layers, args.n_heads = config.d_model, config.n_layers, config.n_heads
    args.steps = args.steps or math.ceil(args.epochs * len(data.train) / args.global_batch_size)
    if args.warmup_steps is None:
        args.warmup_steps = math.ceil(0.03 * args.steps)
    check_ranks(args, data)
    return config, files, data


def documents_of_step(data: Instructions, args: Arguments, step: int) -> list[tuple[Tensor, Spans]]:
    """A function of (seed, step). The last step of --epochs takes the documents that are left."""
    n, size = len(data.train), args.global_batch_size
    left = args.epochs * n - step * size if args.epochs else size
    indices = global_batch(args.seed, step, size, n)[:left]
    return data.tokens_of([data.train[i] for i in indices])


def say_progress(args: Arguments, data: Instructions, first_step: int) -> None:
    """What a run that continues has done."""
    if first_step:
        n = len(data.train)
        done = min(first_step * args.global_batch_size, (args.epochs or math.inf) * n)
        print0(f"{done:,} documents of --seed's order are done, of {n:,} per epoch")


# ---- the output ----


def output_folder(
    args: Arguments, run: Run, files: WeightFiles, name: str = "model"
) -> tuple[Path | None, Path]:
    """Where the output will be, and where it is until it is complete. None: this run has written
    it already, before a restart.

    name: of what is written; a "model" is like the one in --model.
    """
    out = Path(args.out or run.folder / name)
    digest = hashlib.sha256(os.path.abspath(run.folder).encode()).hexdigest()[:8]
    aside = out.absolute().with_name(f".{out.name}.writing-{digest}")  # others may have this --out
    if run.of_rank_0("--out", exists, out):
        if not run.of_rank_0("--run-dir", run.has_written, out):
            fail(f"--out {out} is already there: move it away, or pass another folder")
        print0(f"{out} is already there: it is not written again")
        return None, aside
    if name == "model":
        run.of_rank_0("--out", files.try_to_prepare, aside)
    else:
        run.of_rank_0("--out", check_writable, out)
    return out, aside
