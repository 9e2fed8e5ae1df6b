"""Stage 13: fine-tuning a pretrained model on instructions, sharded by 04.

Every rank reads the byte ranges of its own shards from the files of a Hugging Face folder, and at
the end writes the same ranges of new files. Neither takes the memory of a full unit. The documents
of a step are packed side by side into micro-batches, equally many on every rank. Each attends to
itself alone. The loss is the mean over all targets of the step: micro-batches have unequal numbers
of them.

New since stage 04: sharded reading and writing of safetensors; a loss that is weighted by targets;
a tied embedding, one unit that runs twice per forward. 04's definitions are repeated at the end.

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from common.collectives import (
    all_gather_single,
    all_reduce,
    all_reduce_control,
    broadcast,
    global_norm,
    reduce_scatter_single,
)
from common.job.atomic_files import sync
from common.unit_parameters import (
    Place,
    cast_inputs,
    check_options,
    checked_saved_tensors_hooks,
    is_in_backward,
    is_lookup,
    lend_parameters,
    owned_by,
    place_in,
    take_parameters,
    units_with_values,
)
from common.weight_files import WeightFiles

# isort: split
from common.distributed import World, group_along, print0
from common.guards import guard
from common.job.arguments import base_parser, check_memory, check_ranks, natural, positive_int
from common.job.atomic_files import exists
from common.job.instructions import Instructions, load_instructions
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run
from common.llama import Llama, LlamaConfig
from common.loss import IGNORED
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.packing import document_batches, packed_batches
from common.shards import State, state_of_flat_tensors, tensors_of

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


# ------------------------------------------------------------------------------------------------
# Repeated to the letter from 04: flat buffers, of which each rank owns a shard
# ------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state; unshard them unit by unit.

    The contract. Each parameter is in exactly one unit, trains, has the common dtype, and is used
    in every forward of its unit and nowhere else. All ranks run the same units in the same order.
    After the last backward of a step come `finish_gradient_synchronization()`, `clip_grad_norm_()`,
    the optimizer's `step()` and `zero_grad()`. The optimizer updates `parameters()`, the shards.

    All ranks start with the values of the first one. Or the module is on the meta device, so that
    no rank ever holds the full model. Then `read_shard(name, shapes, owned)` returns a unit's
    values: the slice `owned` of its parameters, laid side by side (it may reach beyond them).
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],  # in the order to prefetch in
        shard_group: ProcessGroup | None = None,  # the N ranks that shard each unit; default: all
        replicate_group: ProcessGroup | None = None,  # ranks with the same shard; default: none
        param_dtype: torch.dtype | None = None,  # of gathered units and their inputs
        reduce_dtype: torch.dtype | None = None,  # of gradients in the reduce-scatter
        reshard_after_forward: bool = True,  # False: each unit stays until its backward
        read_shard: Callable[[str, dict[str, torch.Size], slice], Tensor] | None = None,
        device: torch.device | None = None,  # of the unsharded parameters; default: the module's
        cpu_offload: bool = False,  # keep the shards on the CPU; groups then need a CPU backend
    ):
        super().__init__()
        self.module, self.read_shard = module, read_shard
        self.group, self.replicate_group = shard_group, replicate_group
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.reshard_after_forward = reshard_after_forward
        self.device = device or next(module.parameters()).device
        self.shard_device = torch.device("cpu") if cpu_offload else self.device
        self.kept: Unit | None = None  # the unit that stays gathered for backward
        self.in_flight: Unit | None = None  # the unit whose reduction was started last
        options = [param_dtype, reduce_dtype, reshard_after_forward]
        check_options(module, self.device, options, shard_group, replicate_group)
        named_units = units_with_values(module, units, may_be_meta=read_shard is not None)
        self.units = [Unit(*named_unit, self) for named_unit in named_units]
        for i, unit in enumerate(self.units):
            self.register_parameter(f"shard_{i}", unit.shard)

    def forward(self, *args, **kwargs):
        if not is_in_backward():
            for unit in self.units:
                unit.reshard()  # what was gathered earlier may be stale
            self.kept = None
        return self.module(*args, **kwargs)

    def run(self, unit: Unit, *args, **kwargs):
        """Called as the module's `forward`. Only in here does the module have parameters."""
        in_backward = is_in_backward()
        self.enter(unit, in_backward)
        args, kwargs = cast_inputs(args, kwargs, self.param_dtype)
        params = Gather.apply(unit.shard, unit)
        hooks = checked_saved_tensors_hooks(unit, params)  # calls `unit.pack` and `unpack`
        with lend_parameters(unit.owners, params), hooks as in_checkpoint:
            output = unit.module_forward(*args, **kwargs)
        unit.used_in_backward |= in_checkpoint  # in backward it calls `run`, not `pack`
        if not in_backward and (self.reshard_after_forward or not torch.is_grad_enabled()):
            self.after_forward(unit)
        return output

    def enter(self, unit: Unit, in_backward: bool) -> None:
        """Gather the unit's parameters, and prefetch those of the next unit that will be used."""
        unit.unshard()
        order = self.units[::-1] if in_backward else self.units  # the same on all ranks
        later = order[order.index(unit) + 1 :]
        following = [each for each in later if each.used_in_backward or not in_backward]
        for each in following[:1]:  # none after the last unit
            each.unshard()  # before the unit's own kernels, with which it overlaps
        unit.wait()

    def after_forward(self, unit: Unit) -> None:
        """Free the unit or, if backward needs it, the one kept before. So the last such unit stays
        until backward, because nothing would hide its second all-gather."""
        to_free = unit
        if torch.is_grad_enabled() and unit.used_in_backward:
            to_free, self.kept = self.kept, unit
        if to_free is not None:
            to_free.reshard()

    def leave(self, unit: Unit, grads: tuple[Tensor, ...]) -> None:
        """Free the unit, and start to reduce `grads`, which backward has just completed."""
        unit.reshard()
        unit.finish_reduction()  # in flight if this unit was also the last to be reduced
        unit.start_reduction(grads)
        previous, self.in_flight = self.in_flight, unit
        if previous not in (None, unit):  # so at most two units have full gradients
            previous.finish_reduction()  # after the launch, so that the network stays busy

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: give each shard its average gradient."""
        for unit in self.units:
            unit.reshard()  # if it was prefetched and not used
            unit.finish_reduction()
            if unit.average is None:  # no backward has reached it
                continue
            if self.replicate_group is not None:  # hybrid sharding: average over the replicas
                unit.average /= dist.get_world_size(self.replicate_group)
                all_reduce(unit.average, group=self.replicate_group)
            unit.shard.grad, unit.average = unit.average, None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this global norm; returns the norm before clipping."""
        grads = [unit.shard.grad for unit in self.units if unit.shard.grad is not None]
        # each rank has the squares of its own shards only
        norm = all_reduce_control(global_norm(grads).square(), group=self.group).sqrt()
        for grad in grads:
            grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm


class Unit:
    """A module's parameters side by side in one flat buffer, of which each rank owns a shard.

    shard: [length], a parameter, in the module's dtype, which this rank's optimizer updates.
    full: the gathered parameters, [N * length], padded, in `dtype`; exists only while unsharded.
    average: [length], the average gradient over the ranks, summed over this step's micro-batches.
    """

    def __init__(self, name: str, module: nn.Module, fsdp: FullyShardedDataParallel):
        self.name, self.fsdp, self.group = name, fsdp, fsdp.group
        self.n_ranks = dist.get_world_size(self.group)
        self.shapes = {full_name: p.shape for full_name, p in module.named_parameters(name)}
        # a row of an embedding's gradient sums many tokens: bfloat16 is too imprecise
        param_dtype = None if is_lookup(module) else fsdp.param_dtype
        self.owners, flat = take_parameters(module)  # leaves the module without parameters
        self.dtype = param_dtype or flat.dtype
        self.owned, padding = owned_by(len(flat), self.group)
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        if fsdp.read_shard is None:
            flat = flat.to(fsdp.device)
            broadcast(flat, group=self.group, group_src=0)
            shard = flat[self.owned]
        else:  # `flat` is on the meta device; view_as checks the length
            shard = fsdp.read_shard(name, self.shapes, self.owned).view_as(flat[self.owned])
        missing = self.owned.stop - self.owned.start - len(shard)  # the last ranks' padding
        shard = F.pad(shard.to(fsdp.shard_device, flat.dtype), (0, missing))  # a copy: frees `flat`
        if fsdp.replicate_group is not None:
            broadcast(shard, group=fsdp.replicate_group, group_src=0)
        self.shard = nn.Parameter(shard)
        self.module_forward, module.forward = module.forward, partial(fsdp.run, self)
        self.full: Tensor | None = None
        self.gathering: tuple[Work, Tensor] | None = None  # the all-gather in flight, its input
        self.used_in_backward = False  # set by the first forward
        self.reduction: tuple[Work, Tensor] | None = None  # reduce-scatter in flight, buffer
        self.average: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor | Place:
        """Called when forward saves a tensor for backward. Of a parameter, keep only the place."""
        place = place_in(self.full, tensor)
        self.used_in_backward |= place is not None
        # detached: a node that saved its own output would form a reference cycle
        return tensor.detach() if place is None else place

    def unpack(self, saved: Tensor | Place) -> Tensor:
        """Called when backward needs a saved tensor. For a parameter, gather the unit again."""
        if not isinstance(saved, Place):
            return saved
        self.fsdp.enter(self, in_backward=True)
        return self.full.as_strided(*saved)

    @torch.inference_mode(False)  # under it, `full` would have no version counter
    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is filled or in flight."""
        if self.full is None:
            sent = self.shard.detach().to(self.fsdp.device, self.dtype)  # cast before it is sent
            self.full = sent.new_empty(self.n_ranks * len(sent))
            work = all_gather_single(self.full, sent, self.group, async_op=True)
            self.gathering = work, sent

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def reshard(self) -> None:
        """Wait for an all-gather in flight, then drop `full`."""
        self.wait()
        self.full = None  # frees it: `pack` has kept no reference for backward

    def start_reduction(self, grads: tuple[Tensor, ...]) -> None:
        """Start the reduce-scatter: the sum is written into this rank's part of `flat`."""
        padding = grads[0].new_zeros(self.sizes[-1])
        flat = torch.cat([*(grad.flatten() for grad in grads), padding])
        flat = flat.to(self.fsdp.reduce_dtype or flat.dtype)
        work = reduce_scatter_single(flat[self.owned], flat, group=self.group, async_op=True)
        self.reduction = work, flat

    def finish_reduction(self) -> None:
        """If a reduction is in flight, add its average to the earlier ones and free its buffer."""
        if self.reduction is None:
            return
        work, flat = self.reduction
        work.wait()
        average = flat[self.owned].to(self.shard) / self.n_ranks
        self.average = average if self.average is None else self.average.add_(average)
        self.reduction = None


class Gather(torch.autograd.Function):
    """A unit's parameters as a function of the ranks' shards; its backward is a reduce-scatter.

    Forward returns views of `full`, which `enter` has gathered. Backward calls `leave`.
    """

    @staticmethod
    def forward(ctx, shard: Tensor, unit: Unit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # a missing gradient is None: `check_backward` raises
        *chunks, _ = unit.full.split(unit.sizes)
        return tuple(c.view(s) for c, s in zip(chunks, unit.shapes.values(), strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[None, None]:
        """Autograd calls it when it has all gradients of the unit."""
        ctx.unit.fsdp.leave(ctx.unit, grads)
        return None, None  # no gradient yet: `finish_reduction` will have it


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
