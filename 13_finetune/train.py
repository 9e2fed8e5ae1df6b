"""Stage 13: fine-tuning a pretrained model on instructions, sharded by 04.

Every rank reads the byte ranges of its own shards from the files of a Hugging Face folder, and at
the end writes the same ranges of new files. Neither takes the memory of a full unit. The documents
of a step are packed side by side into micro-batches, equally many on every rank. Each attends to
itself alone. The loss is the mean over all targets of the step: micro-batches have unequal numbers
of them.

New since stage 04: sharded reading and writing of safetensors; a loss that is weighted by targets;
a tied embedding, one unit that runs twice per forward. 04 is beside this file, as fsdp.py.

    P parameters, b bytes each in the files; N ranks that shard, m micro-batches per step;
    E of the embedding, O of the head; float32

    read and written per rank    b P / N bytes, once, and the files' headers
    memory                       that of 04; while reading 4 P / N bytes
    sent per step, elements      reduce-scatter m P + all-gather m (2 P - E - O)
                                 tied: reduce-scatter m (P + E) + all-gather m 2 P

Taori et al., "Stanford Alpaca: An Instruction-following LLaMA Model", 2023; Krell et al.,
"Efficient Sequence Packing without Cross-contamination", 2021.

Run it:

    torchrun --nproc-per-node 2 13_finetune/train.py --model DIR --data FILE --steps 100
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # of the files beside this one

import torch
import torch.distributed as dist
from torch import Tensor

from common.collectives import all_reduce_control
from common.weight_files import WeightFiles
from fsdp import FullyShardedDataParallel

from common.job.atomic_files import sync

# isort: split
from common.distributed import World, group_along, print0
from common.guards import guard
from common.llama import Llama, LlamaConfig
from common.loss import IGNORED
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.packing import document_batches, packed_batches
from common.shards import State, state_of_flat_tensors, tensors_of

from common.job.arguments import base_parser, check_memory, check_ranks, natural, positive_int
from common.job.atomic_files import exists
from common.job.instructions import Instructions, load_instructions
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: each rank reads and writes the bytes of its own shards
# ------------------------------------------------------------------------------------------------

CHUNK = 2**20  # elements that are converted at a time


def read_model(model: FullyShardedDataParallel, files: WeightFiles) -> None:
    """Fill this rank's shards from the files. No other values are read."""
    for unit in model.units:
        shard = unit.shard.detach()
        for tensor, first, part in ranges_in(unit.shapes, unit.owned):
            file_name, start, dtype, _ = files.values[tensor]
            with open(files.folder / file_name, "rb", buffering=0) as file:
                file.seek(start + first * dtype.itemsize)  # it may be within a row of a matrix
                for chunk in shard[part].split(CHUNK):
                    values = torch.empty(len(chunk), dtype=dtype)
                    if file.readinto(values.view(torch.uint8).numpy()) < values.nbytes:
                        raise OSError(f"{files.folder / file_name} has become shorter")
                    chunk.copy_(values)  # to the shard's dtype and device
                    files.bytes_read += values.nbytes


def no_values(name: str, shapes: dict[str, torch.Size], owned: slice) -> Tensor:
    """A `read_shard` that reads nothing: zeros without memory. `read_model` fills the shards later,
    unless a checkpoint does."""
    numel = sum(shape.numel() for shape in shapes.values())
    return torch.zeros(1).expand(len(range(*owned.indices(numel))))


def write_shard(
    files: WeightFiles, folder: Path, shapes: dict[str, torch.Size], owned: slice, shard: Tensor
) -> None:
    """Write a shard to its places in the files of `folder`, in the dtypes that were read."""
    for tensor, first, part in ranges_in(shapes, owned):
        file_name, start, dtype, _ = files.values[tensor]
        with open(folder / file_name, "r+b", buffering=0) as file:
            file.seek(start + first * dtype.itemsize)
            for chunk in shard[part].split(CHUNK):
                values = memoryview(chunk.to("cpu", dtype).view(torch.uint8).numpy())
                while values:  # after a short write the next one raises OSError
                    values = values[file.write(values) :]
            os.fsync(file.fileno())


def ranges_in(shapes: dict[str, torch.Size], owned: slice) -> Iterator[tuple[str, int, slice]]:
    """Split a range of a unit's flat parameter by tensors. Yields each tensor's name, where in the
    tensor the range begins, and the slice of the range that the tensor fills."""
    begin = 0  # of the tensor
    for name, shape in shapes.items():
        start, stop = max(owned.start, begin), min(owned.stop, begin + shape.numel())
        if start < stop:
            yield name, start - begin, slice(start - owned.start, stop - owned.start)
        begin += shape.numel()


def write_model(model: FullyShardedDataParallel, files: WeightFiles, out: Path) -> None:
    """Write a folder like the one that was read: complete, or absent. Every rank calls it."""
    aside = out.with_name(f".{out.name}.writing")
    if dist.get_rank() == 0:
        files.prepare(aside)
    all_reduce_control(torch.zeros(()))  # the files are there; on the CPU, so that the host waits
    if model.replicate_group is None or dist.get_rank(model.replicate_group) == 0:  # one replica
        for unit in model.units:
            write_shard(files, aside, unit.shapes, unit.owned, unit.shard.detach())
    all_reduce_control(torch.zeros(()))  # all ranks have written
    if dist.get_rank() == 0:
        sync(aside)
        aside.rename(out)
        sync(out.parent)


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def load(args) -> tuple[LlamaConfig, WeightFiles, Instructions]:
    """What --model and --data name. Fails on what would be computed wrongly."""
    folder = Path(args.model)
    try:
        config = LlamaConfig.of_folder(folder, args.activation_checkpointing)
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in Llama(config).named_parameters()}
        files = WeightFiles(folder, shapes)
    except KeyError as error:
        fail(f"--model {folder}: there is no {error} in config.json or a header")
    except (OSError, ValueError) as error:
        fail(f"--model {folder}: {error}")
    data = load_instructions(args.data, folder, min(args.seq_len, config.max_positions), args.valid)
    if data.vocab_size > config.vocab_size:
        rows = f"{data.vocab_size} tokens, the embedding {config.vocab_size} rows"
        fail(f"--model {folder}: the tokenizer has {rows}")
    args.d_model, args.n_layers, args.n_heads = config.d_model, config.n_layers, config.n_heads
    args.steps = args.steps or math.ceil(len(data.train) / args.global_batch_size)  # one epoch
    check_ranks(args, data)
    check_memory(args, config)
    return config, files, data


def output_folder(args, run: Run) -> Path | None:
    """Where to write the model; None: this job has written it, before it was started again."""
    out = Path(args.out or run.folder / "model")
    run.check_output("out", out.parent / "check")
    is_there = all_reduce_control(torch.tensor(float(exists(out)))).item() > 0
    if is_there and not run.is_restart:
        fail(f"--out {out} is already there: move it away, or pass another folder")
    return None if is_there else out


def sharded_from_meta(model: Llama, args, world: World) -> FullyShardedDataParallel:
    """Shard a model that is on the meta device; its shards have no values yet."""
    mesh = (world.size // args.shard_degree, args.shard_degree)
    return FullyShardedDataParallel(
        model,
        model.units(),
        shard_group=group_along(mesh, 1, "shard", args.timeout),
        replicate_group=group_along(mesh, 0, "replicate", args.timeout) if mesh[0] > 1 else None,
        param_dtype=getattr(torch, args.param_dtype),
        reduce_dtype=getattr(torch, args.reduce_dtype),
        reshard_after_forward=not args.no_reshard_after_forward,
        read_shard=no_values,
        device=world.device,
        cpu_offload=args.cpu_offload,
    )


def training_state(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    state: State = {}
    for unit in model.units:
        tensors = tensors_of(optimizer, unit.shard)
        state |= state_of_flat_tensors(tensors, unit.shapes, unit.owned.start)
    return state


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--model", help="a Hugging Face folder: config, safetensors, tokenizer")
    parser.add_argument(
        "--out", help="folder to write, seen by all ranks (default: model/ of the run)"
    )
    parser.add_argument("--valid", type=natural, default=0, help="last documents, to evaluate on")
    parser.add_argument(
        "--shard-degree", type=positive_int, help="ranks that shard a unit (default: all)"
    )
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), help="default: --dtype")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-reshard-after-forward", action="store_true", help="until backward")
    parser.add_argument("--cpu-offload", action="store_true", help="shards and AdamW on the CPU")
    # AdamW moves a weight by about the rate per step; decay would also reach the norms
    parser.set_defaults(lr=2e-5, weight_decay=0.0, steps=None, seq_len=2048)
    parser.set_defaults(data=None, preset=None, dropout=None)
    args = parser.parse_args(argv)
    for name in ("preset", "d_model", "n_layers", "n_heads", "dropout", "micro_batch_size"):
        if getattr(args, name) is not None:
            why = "the shape is that of --model, and micro-batches are packed up to --seq-len"
            fail(f"--{name.replace('_', '-')} is no flag of this stage: {why}")
    if not args.model or not args.data:
        fail("--model and --data are needed: a Hugging Face folder, and a file of instructions")
    args.shard_degree = args.shard_degree or world_size()
    if world_size() % args.shard_degree:
        fail(f"--shard-degree {args.shard_degree} does not divide the {world_size()} ranks")
    args.dp, args.micro_batch_size, args.dropout = world_size(), 1, 0.0
    args.dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    args.param_dtype = args.param_dtype or args.dtype
    args.state_on = "host" if args.cpu_offload else "device"
    args.autocast = False  # units are unsharded in --param-dtype, and their inputs cast to it
    return args


@torch.no_grad()
def evaluate(model, data: Instructions, args, device, world: World) -> float:
    """Mean loss in nats over the targets of the documents that training leaves out."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    where = args.seq_len, device, world.rank, world.size
    for inputs, targets, lengths in packed_batches(data.tokens, data.valid, *where):
        loss = model(inputs, lengths, targets)
        count = (targets != IGNORED).sum()
        total += torch.stack([loss * count, count])
    all_reduce_control(total)
    model.train()
    return (total[0] / total[1]).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    config, files, data = load(args)

    run = Run(args, __file__, config, device, data)
    out = output_folder(args, run)
    with torch.device("meta"):
        model = Llama(config)
    model = sharded_from_meta(model, args, world)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))
    guard(model, optimizer)

    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(run.resume, state, optimizer)
    if not first_step:
        read_model(model, files)
        print0(f"read {files.bytes_read:,} bytes of {files.folder} on rank 0")
    where = device, first_step, world.rank, world.size
    batches = document_batches(data.tokens, data.train, args.batching, *where)

    step = first_step - 1
    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        n_targets = sum((targets != IGNORED).sum() for _, targets, _ in micro_batches)
        total = all_reduce_control(n_targets)  # of this step, on all ranks
        loss = torch.zeros((), device=device)
        for inputs, targets, lengths in micro_batches:
            # the sum of the losses / total: a mean over the step's targets, no mean of means.
            # Times the number of ranks, because gradients are averaged over them
            micro_loss = model(inputs, lengths, targets, total) * world.size
            micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if data.valid and run.evaluates(step):
            run.log_evaluation("val", evaluate(model, data, args, device, world))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    if out and step + 1 >= args.steps:  # else it was asked to stop
        run.checkpoints.wait()  # so that a kill from here on costs no step
        write_model(model, files, out)
        print0(f"wrote {out}")
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
