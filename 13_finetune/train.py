"""Stage 13: fine-tuning a pretrained model on instructions, sharded by 04.

A document is a prompt with its answer, or a conversation. The documents of a step are packed side
by side into micro-batches, of which every rank gets the same number. A document attends to itself
alone. The loss is the mean over all targets of the step, the tokens of the answers. Every rank
reads the byte ranges of its own shards from the files of a Hugging Face folder, and at the end
writes the same ranges of new files.

New since stage 04: packing; a loss that is weighted by targets; sharded reading and writing of
safetensors; a tied embedding, one unit that runs twice per forward. 04's class is in `fsdp.py`.

    P parameters, b bytes each in the files; N ranks that shard, m micro-batches per step, as many
    as its documents need; E of the embedding, O of the head; float32

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
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # of the files beside this one

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.collectives import all_reduce_control
from common.distributed import sync
from common.loss import IGNORED
from common.weight_files import WeightFiles, publish

# isort: split
from common.distributed import World, group_along, print0
from common.guards import guard
from common.llama import Llama
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import State, state_of_flat_tensors, tensors_of
from fsdp import FullyShardedDataParallel

from common.job.arguments import check_memory
from common.job.finetuning import (
    complete,
    documents_of_step,
    finetuning_parser,
    load,
    output_folder,
    say_progress,
)
from common.job.launch import cleanup, setup
from common.job.prepared_instructions import Instructions
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: documents side by side, one mean over all their targets, files read by their bytes
# ------------------------------------------------------------------------------------------------

Documents = list[tuple[Tensor, list[tuple[int, int]]]]  # tokens, and where answers begin and end
MicroBatch = tuple[Tensor, Tensor, tuple[int, ...]]  # inputs, targets, the documents' lengths


def micro_batches_of(
    documents: Documents, max_tokens: int, device: torch.device, rank: int = 0, n_ranks: int = 1
) -> list[MicroBatch]:
    """Pack documents into micro-batches, of which this rank gets its part.

    Every rank computes the same packing, and takes equally many micro-batches of it.
    """
    lengths = [len(ids) - 1 for ids, _ in documents]  # the last token is a target only
    packed = pack(lengths, n_ranks, max_tokens)
    local = ([documents[i] for i in indices] for indices in packed[rank::n_ranks])
    return [side_by_side(each, device) for each in local]


def pack(lengths: Sequence[int], n_ranks: int, max_tokens: int) -> list[list[int]]:
    """Distribute documents over micro-batches; returns the indices of each micro-batch's documents.

    From the longest to the shortest, each goes into the micro-batch with the fewest tokens. The
    number of micro-batches is the lowest multiple of `n_ranks` with which this succeeds.
    """
    count = math.ceil(sum(lengths) / (max_tokens * n_ranks)) * n_ranks
    while True:
        packed: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            lightest = tokens.index(min(tokens))
            packed[lightest].append(i)
            tokens[lightest] += lengths[i]
        if max(tokens) <= max_tokens:
            return packed
        count += n_ranks


def side_by_side(documents: Documents, device: torch.device) -> MicroBatch:
    """Concatenate documents without padding. inputs, targets: int64 [tokens]."""
    inputs, targets = [], []
    # a micro-batch without documents computes one token, which has no target
    for ids, spans in documents or [(torch.zeros(2, dtype=torch.int64), [])]:
        inputs.append(ids[:-1])
        targets.append(torch.full_like(ids[1:], IGNORED))
        for begin, end in spans:  # of an answer; a token's target is the next token
            targets[-1][begin - 1 : end - 1] = ids[begin:end]
    joined = [torch.cat(inputs), torch.cat(targets)]
    if device.type == "cuda":  # a copy from pageable memory would wait for the previous step
        joined = [each.pin_memory() for each in joined]
    return *(each.to(device, non_blocking=True) for each in joined), tuple(map(len, inputs))


def count_targets(micro_batches: list[MicroBatch]) -> Tensor:
    """Count the targets of all micro-batches of a step, on all ranks."""
    return all_reduce_control(sum((targets != IGNORED).sum() for _, targets, _ in micro_batches))


def share_of_loss(model: nn.Module, micro_batch: MicroBatch, total: Tensor, n_ranks: int) -> Tensor:
    """The sum of a micro-batch's losses, divided by `total`, the targets of the whole step.

    A mean over its own targets would give a token more weight where a micro-batch has few of them.
    Averaging the gradients over the ranks divides by `n_ranks` once more, so it is a factor here.
    """
    inputs, targets, lengths = micro_batch
    # `total` is an integer: a unit would round a floating-point input to `param_dtype`
    return model(inputs, lengths, targets, total) * n_ranks


# ---- reading and writing: each rank the bytes of its own shards ----

CHUNK = 2**20  # elements that are converted at a time


def read_model(model: nn.Module, files: WeightFiles) -> None:
    """Fill the shards of a model's `units` from the files."""
    for unit in model.units:
        read_shard(files, unit.shapes, unit.owned, unit.shard.detach())


def read_shard(
    files: WeightFiles, shapes: dict[str, torch.Size], owned: slice, shard: Tensor
) -> None:
    """Fill a shard from its places in the files. No other values are read."""
    for tensor, first, part in ranges_in(shapes, owned):
        name, start, dtype, _ = files.values[tensor][0]
        start += len(files.headers[name]) + first * dtype.itemsize
        # buffered: `readinto` repeats short reads; 2, the smallest, reads hardly past the shard
        with open(files.folder / name, "rb", buffering=2) as file:
            file.seek(start)  # it may be within a row of a matrix
            for chunk in shard[part].split(CHUNK):
                values = torch.empty(len(chunk), dtype=dtype)
                if file.readinto(values.view(torch.uint8).numpy()) < values.nbytes:
                    raise OSError(f"{files.folder / name} has become shorter")
                chunk.copy_(values)  # to the shard's dtype and device
                files.bytes_read += values.nbytes


def no_values(_: str, shapes: dict[str, torch.Size], owned: slice, dtype=torch.float32) -> Tensor:
    """The wrapper's `read_shard`: zeros that share one element, until values are read."""
    numel = sum(shape.numel() for shape in shapes.values())
    return torch.zeros(1, dtype=dtype).expand(len(range(*owned.indices(numel))))


def write_shard(
    files: WeightFiles, folder: Path, shapes: dict[str, torch.Size], owned: slice, shard: Tensor
) -> None:
    """Write a shard to its places in the files of `folder`, in the dtypes that were read."""
    for tensor, first, part in ranges_in(shapes, owned):
        for name, start, dtype, _ in files.values[tensor]:  # two if a tied head is stored, too
            with open(folder / name, "r+b") as file:
                file.seek(len(files.new_headers[name]) + start + first * dtype.itemsize)
                for chunk in shard.detach()[part].split(CHUNK):
                    file.write(chunk.to("cpu", dtype).view(torch.uint8).numpy())
            sync(folder / name)


def ranges_in(shapes: dict[str, torch.Size], owned: slice) -> Iterator[tuple[str, int, slice]]:
    """Split a range of a unit's flat parameter by tensors. Yields each tensor's name, where in the
    tensor the range begins, and the slice of the range that the tensor fills."""
    begin = 0  # of the tensor
    for name, shape in shapes.items():
        start, stop = max(owned.start, begin), min(owned.stop, begin + shape.numel())
        if start < stop:
            yield name, start - begin, slice(start - owned.start, stop - owned.start)
        begin += shape.numel()


def write_model(
    model: nn.Module, files: WeightFiles, out: Path, aside: Path, values=lambda unit: unit.shard
) -> None:
    """Write a folder like the one that was read: complete, or absent. Every rank calls it.

    aside: a folder beside `out` that no other run uses, renamed to `out` at the end. values(unit):
    what is written of a unit, by default its shard.
    """
    is_first, replicas = dist.get_rank() == 0, model.replicate_group
    with together(aside):
        if is_first:
            files.prepare(aside)
    with together(aside):
        if replicas is None or dist.get_rank(replicas) == 0:  # the first replica writes for all
            for unit in model.units:
                write_shard(files, aside, unit.shapes, unit.owned, values(unit))
    with together(aside):
        if is_first:
            publish(aside, out)


@contextmanager
def together(aside: Path) -> Iterator[None]:
    """Leave a block when all ranks have reached its end. If one raises OSError in it, all ranks
    remove `aside` and raise the first such rank's error: none is left waiting."""
    error = None
    try:
        yield
    except OSError as found:
        error = found
    errors: list[OSError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)  # waits for all
    if first := next(filter(None, errors), None):
        shutil.rmtree(aside, ignore_errors=True)
        raise first


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


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
    parser = finetuning_parser(__doc__, "model/")
    add = parser.add_argument
    add("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    add("--cpu-offload", action="store_true", help="shards and AdamW on the CPU")
    parser.set_defaults(lr=2e-5)  # AdamW moves a weight by about this in a step
    args = complete(parser.parse_args(argv))
    args.state_on = "host" if args.cpu_offload else "device"
    return args


@torch.no_grad()
def evaluate(model, data: Instructions, args, device, world: World) -> float:
    """Mean loss in nats over the targets of the documents that training leaves out."""
    model.eval()
    documents = data.tokens_of(data.valid)
    micro_batches = micro_batches_of(documents, args.seq_len, device, world.rank, world.size)
    total = count_targets(micro_batches)
    loss = sum(share_of_loss(model, each, total, n_ranks=1) for each in micro_batches)
    model.train()
    return all_reduce_control(loss).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    config, files, data = load(args)
    check_memory(args, config)

    run = Run(args, __file__, config, device, data)
    out, aside = output_folder(args, run, files)
    with torch.device("meta"):
        model = Llama(config)
    model = sharded_from_meta(model, args, world)
    settings = adamw_settings(args.lr, args.weight_decay) | {"betas": (0.9, 0.999)}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    guard(model, optimizer)

    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    if not first_step:
        read_model(model, files)
        print0(f"read {files.bytes_read:,} bytes of {files.folder} on rank 0")
    say_progress(args, data, first_step)
    if data.valid and first_step < args.steps:
        loss = evaluate(model, data, args, device, world)
        print0(f"val loss {loss:.4f} before step {first_step}")

    step = first_step - 1
    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        documents = documents_of_step(data, args, step)
        n_tokens = sum(len(ids) - 1 for ids, _ in documents)
        micro_batches = micro_batches_of(documents, args.seq_len, device, world.rank, world.size)
        total = count_targets(micro_batches)
        loss = torch.zeros((), device=device)
        for micro_batch in micro_batches:
            micro_loss = share_of_loss(model, micro_batch, total, world.size)
            micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr, tokens=n_tokens, targets=total)
        optimizer.zero_grad(set_to_none=True)

        if data.valid and run.evaluates(step):
            run.log_evaluation("val", evaluate(model, data, args, device, world))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    if out and step + 1 >= args.steps:  # no signal has stopped it earlier
        write = partial(write_model, model, files, out, aside)
        run.write_output("--out", out, write, state)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
