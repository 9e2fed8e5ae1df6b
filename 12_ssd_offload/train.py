"""Stage 12: the state in files on an SSD, and AdamW during backward.

Each unit of stage 04 (here a layer) has a file on every rank: this rank's shard of its parameters,
AdamW's two moments, and the gradient. Parameters are read two units ahead of their use, gathered
one unit ahead, and freed after it. As soon as a unit's gradient is reduced, a thread reads the
unit's state, updates it and writes it back, while backward goes on. So memory holds a few units,
whatever their number.

Clipping needs the norm of all gradients, which is known only after backward. So the threads
speculate that nothing is clipped, and write the new state into a second slot of the file. If that
was right, the slots change roles. If not, the step is redone from the old slot, with scaled
gradients. The old slot stays until then: after a `kill -9` at any moment, a run goes on from its
last step.

    P parameters, N ranks, m micro-batches per step; E of the embedding, O of the output; float32

    memory per rank   a few units, whatever their number
    file per rank     28 P / N bytes: two slots of 12, and the gradient
    read per step     (4 m (2 P - E - O) + 12 P + 4 (m - 1) P) / N bytes; if redone 16 P / N more
    written per step  (4 m P + 12 P) / N bytes; if redone 12 P / N more
    communication     as in stage 04

Rajbhandari et al., "ZeRO-Infinity", SC 2021; Liao et al., "Adding NVMe SSDs to Enable and
Accelerate 100B Model Fine-tuning on a Single GPU" (Fuyou), 2024; Lian et al., "SuperOffload",
ASPLOS 2026: speculation, then validation.

Run it:

    torchrun --nproc-per-node 2 12_ssd_offload/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup, Work
from torch.linalg import vector_norm
from torch.optim.adamw import adamw

from common.collectives import (
    all_gather_single,
    all_reduce_control,
    norms_of_rows,
    reduce_scatter_single,
)
from common.distributed import fail
from common.state_files import GRADIENT, SLOT, StateFile, StateFolder
from common.units import (
    cast_inputs,
    check_no_parameters,
    forbid_parameters,
    is_lookup,
    take_parameters,
    units_with_values,
)

# isort: split
from common.arguments import base_parser, check_arguments, model_config, seconds
from common.checkpoint import Shard, State, state_of_flat_shard
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, group_along, setup, world_size
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.run import Run
from common.storage import checkpoints

# ------------------------------------------------------------------------------------------------
# The technique: shards in files, of which a few at a time are in memory
# ------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state; unshard them unit by unit.

    The contract. Each parameter is in exactly one unit, trains, is float32, and is used in every
    forward of its unit and nowhere else. All ranks run the same units in the same order, each once
    per micro-batch. All backwards of a step but the last are under `no_sync()`. A step is
    `finish_gradient_synchronization()`, `clip_grad_norm_()` and `optimizer.step()`.

    module: equal on all ranks, or on the meta device with a `materialize(unit, name)` that gives
    one unit's parameters memory and values. units: in the order to prefetch in. optimizer: has the
    files, and updates them. shard_group: the N ranks that shard each unit (default: all).
    param_dtype: of the unsharded parameters (default: float32). Gradients are reduced in float32.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],
        optimizer: SpeculativeAdamW,
        shard_group: ProcessGroup | None = None,
        param_dtype: torch.dtype | None = None,
        materialize: Callable[[nn.Module, str], None] | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.module = module
        self.group, self.optimizer = shard_group, optimizer
        self.param_dtype = param_dtype
        self.device = device or next(module.parameters()).device
        self.in_flight: FlatParameter | None = None  # whose reduction was started last
        self.synchronizes = True
        self.buckets: list[FlatParameter] = []  # one per unit
        # each unit gets its values and is sharded before the next one: no rank holds the full model
        for name, unit in units_with_values(module, units, materialize):
            bucket = FlatParameter(name, unit, self)
            unit.forward = partial(self.run, bucket, unit.forward)
            self.buckets.append(bucket)
        each = list(enumerate(self.buckets))  # of each unit the next two
        self.next_in_forward = {bucket: self.buckets[i + 1 : i + 3] for i, bucket in each}
        self.next_in_backward = {bucket: self.buckets[:i][:-3:-1] for i, bucket in each}
        forbid_parameters(self)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Update nothing, but add up the gradients. Each micro-batch is reduce-scattered."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def run(self, bucket: FlatParameter, forward: Callable, *args, **kwargs):
        """In place of a unit's `forward`: the unit has parameters in here and nowhere else."""
        # private, as nothing public tells it: whether this is activation checkpointing in backward
        recomputes = torch._C._current_graph_task_id() != -1
        self.unshard(bucket, in_backward=recomputes)
        args, kwargs = cast_inputs(args, kwargs, self.param_dtype)
        with bucket.parameters():
            output = forward(*args, **kwargs)
        if not recomputes:
            bucket.reshard()
        return output

    def unshard(self, bucket: FlatParameter, in_backward: bool) -> None:
        """Gather the unit's parameters. In the direction of travel prefetch those of the next unit,
        and read two units ahead."""
        bucket.used_in_backward |= in_backward
        ahead = (self.next_in_backward if in_backward else self.next_in_forward)[bucket]
        ahead = [each for each in ahead if each.used_in_backward or not in_backward]
        for each in (bucket, *ahead):
            each.fetch()
        for each in (bucket, *ahead[:1]):
            each.unshard()  # before the unit's own kernels, with which it overlaps
        bucket.wait()

    def leave(self, bucket: FlatParameter, grads: tuple[Tensor, ...]) -> None:
        """Backward has computed `grads`, all of the unit's gradients: it is done with the unit."""
        bucket.reshard()
        bucket.finish_reduction()  # of the previous micro-batch, if it is still in flight
        bucket.start_reduction(grads, self.synchronizes)
        previous, self.in_flight = self.in_flight, bucket
        if previous not in (None, bucket):  # at most two units have full gradients
            previous.finish_reduction()  # after the launch: the network is busy meanwhile

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: wait until the optimizer has used every gradient."""
        for bucket in self.buckets:
            bucket.reshard()  # if it was prefetched and not used
            bucket.reading = None
            bucket.finish_reduction()
        check_no_parameters(self.module)
        self.optimizer.wait()
        missing = [b.name for b in self.buckets if self.optimizer.norms.get(b.file) is None]
        if missing:
            raise RuntimeError(f"no backward outside of no_sync() has reached the units {missing}")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Have the gradients scaled to at most this global norm; returns the norm before."""
        self.finish_gradient_synchronization()
        norms = torch.cat([self.optimizer.norms[bucket.file] for bucket in self.buckets])
        # each rank has the squares of its own shards only
        norm = all_reduce_control(vector_norm(norms).square(), group=self.group).sqrt()
        self.optimizer.scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) + 0 * norm  # inf: NaN
        return norm


class FlatParameter:
    """A unit's parameters side by side in one flat buffer, of which each rank owns an equal shard.

    file: holds this rank's shard, [length], its moments and its gradient.
    full: the gathered parameters, [N * length], padded, in `dtype`; exists only while unsharded.
    """

    def __init__(self, name: str, unit: nn.Module, fsdp: FullyShardedDataParallel):
        self.name, self.fsdp, self.group = name, fsdp, fsdp.group
        self.n_ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.shapes = {full_name: p.shape for full_name, p in unit.named_parameters(name)}
        # the embedding's gradient is a sum over many tokens: not in bfloat16
        param_dtype = None if is_lookup(unit) else fsdp.param_dtype
        self.owners, flat = take_parameters(unit)  # the unit has no parameters any more
        if flat.dtype != torch.float32:
            raise ValueError(f"{name}: {flat.dtype}; the files are float32")
        self.dtype = param_dtype or flat.dtype
        length = -(-len(flat) // self.n_ranks)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        padding = self.n_ranks * length - len(flat)
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        flat = F.pad(flat, (0, padding))
        self.file = fsdp.optimizer.files.open(name, flat[self.owned])
        self.shard = torch.empty(0, requires_grad=True)  # what autograd sees in its place
        self.reading: Future | None = None  # the read in flight, or its result
        self.full: Tensor | None = None
        self.version: int | None = None  # the steps done when `full` was gathered
        self.gathering: tuple[Work, Tensor] | None = None  # the all-gather in flight, what it sends
        self.used_in_backward = False  # known from the first backward on
        # the reduce-scatter in flight, its buffer, whether it is one of the last micro-batch
        self.reduction: tuple[Work, Tensor, bool] | None = None

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """Give the unit its parameters, which are functions of the shard, and take them back."""
        params = Gather.apply(self.shard, self)
        version = self.full._version
        for (owner, name), param in zip(self.owners, params, strict=True):
            setattr(owner, name, param)
        # private, as nothing public tells it: whether checkpoint() decides what is saved
        others = torch._C._autograd._top_saved_tensors_default_hooks(True)
        try:
            with nullcontext() if others else saved_tensors_hooks(self.pack, self.unpack):
                yield
            if self.full._version != version:
                raise RuntimeError(f"unit {self.name} has changed a parameter in place")
        finally:
            for owner, name in self.owners:
                delattr(owner, name)

    def pack(self, tensor: Tensor) -> tuple:
        """What autograd keeps for backward: of a view of `full` only its place, else the tensor."""
        if tensor.untyped_storage() is not self.full.untyped_storage():
            return tensor, tensor._version
        return None, self.file.folder.step, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, saved: tuple) -> Tensor:
        """What backward reads: for a place, gather the parameters again."""
        tensor, version, *place = saved
        if (self.file.folder.step if place else tensor._version) != version:
            raise RuntimeError(
                "modified in place, or by the optimizer's last step, before backward"
            )
        if not place:
            return tensor
        self.fsdp.unshard(self, in_backward=True)
        return self.full.as_strided(*place)

    def fetch(self) -> None:
        """Start to read the shard, unless `full` is up to date or the read in flight."""
        if self.version != self.file.folder.step and self.reading is None:
            self.reading = self.file.folder.start(self.file.read, SLOT * self.file.folder.slot)

    @torch.inference_mode(False)  # else `full` would not count its versions
    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is up to date or in flight."""
        if self.version != self.file.folder.step:
            self.reshard()  # of an earlier step
            shard, self.reading = self.file.folder.finish(self.reading)[0], None
            self.version = self.file.folder.step
            sent = shard.to(self.fsdp.device, self.dtype, non_blocking=True)  # cast before sent
            self.full = sent.new_empty(self.n_ranks * len(sent))
            self.gathering = all_gather_single(self.full, sent, self.group, async_op=True), sent

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def reshard(self) -> None:
        """Drop `full` until the next `unshard`, after an all-gather in flight."""
        self.wait()
        self.full = self.version = None  # nobody else keeps it, thanks to `pack`

    def start_reduction(self, grads: tuple[Tensor, ...], is_last: bool) -> None:
        """Start the reduce-scatter: the sum over the ranks replaces this rank's part of `full`."""
        padding = grads[0].new_zeros(self.sizes[-1])
        full = torch.cat([*(grad.flatten() for grad in grads), padding])
        full = full.float()
        work = reduce_scatter_single(full[self.owned], full, group=self.group, async_op=True)
        self.reduction = work, full, is_last

    def finish_reduction(self) -> None:
        """If a reduction is in flight, give its average to the optimizer and free its buffer."""
        if self.reduction is None:
            return
        work, full, is_last = self.reduction
        work.wait()
        average = self.file.empty(1)
        average.copy_(full[self.owned]).div_(self.n_ranks)
        self.reduction = None
        self.fsdp.optimizer.take(self.file, average, is_last)


class Gather(torch.autograd.Function):
    """A unit's parameters as a function of its shard. Its adjoint is a reduce-scatter."""

    @staticmethod
    def forward(ctx, shard: Tensor, bucket: FlatParameter) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.version = bucket, bucket.file.folder.step
        ctx.set_materialize_grads(False)
        *chunks, _ = bucket.full.split(bucket.sizes)  # the all-gather has ended
        return tuple(c.view(s) for c, s in zip(chunks, bucket.shapes.values(), strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[None, None]:
        """Autograd calls it when it has all gradients of the unit."""
        bucket = ctx.bucket
        if bucket.file.folder.step != ctx.version:
            raise RuntimeError("backward through a graph from before the optimizer's last step")
        if any(grad is None for grad in grads):
            raise RuntimeError(f"unit {bucket.name} has not used all of its parameters")
        bucket.fsdp.leave(bucket, grads)
        return None, None  # the optimizer gets the average when the reduction has finished


class SpeculativeAdamW:
    """AdamW on files. It updates a unit as soon as it has the unit's gradient of the whole step.

    The new state goes into the slot that does not count, as if nothing were clipped. `step` makes
    this slot count. If the gradients are clipped, it first does all updates again.

    files: of this rank. speculates: else all updates wait for `step`. settings: of AdamW.
    """

    def __init__(self, files: StateFolder, speculates: bool = True, **settings):
        self.files, self.param_groups, self.state = files, [settings], {}  # as of an Optimizer
        self.may_speculate = self.speculates = speculates
        self.scale = torch.ones(())  # of the gradients: 1, or less if they are clipped
        self.n_redone = 0  # steps
        self.jobs: dict[StateFile, Future] = {}  # of the units whose gradients are in memory
        # of the rows of the gradient; None: it lacks micro-batches
        self.norms: dict[StateFile, Tensor | None] = {}

    def take(self, file: StateFile, gradient: Tensor, is_last: bool) -> None:
        """Take a unit's average gradient of one micro-batch; the rest is done in a thread."""
        if file in self.jobs:
            self.files.finish(self.jobs.pop(file))  # of the previous micro-batch
        if self.norms.get(file) is not None:
            raise RuntimeError(f"{file.path.stem}: a backward after the step's last one")
        is_first = file not in self.norms
        self.norms[file] = None
        self.start(file, self.work, gradient, is_first, is_last)

    def start(self, file: StateFile, function: Callable, *args) -> None:
        """Start a job; at most three at a time, else a slow disk would fill the memory."""
        self.jobs[file] = self.files.start(function, file, *args)
        if len(self.jobs) > 3:
            self.files.finish(self.jobs.pop(next(iter(self.jobs))))

    def work(self, file: StateFile, gradient: Tensor, is_first: bool, is_last: bool) -> None:
        if not is_first:
            gradient += file.read(GRADIENT)  # of the earlier micro-batches
        file.write(GRADIENT, gradient)
        if is_last:
            self.norms[file] = torch.cat(norms_of_rows(gradient))
            if self.speculates:
                self.update(file, gradient)

    def update(self, file: StateFile, gradient: Tensor) -> None:
        """From the slot that counts to the other one."""
        group, steps = self.param_groups[0], torch.tensor(float(self.files.step))
        (beta1, beta2), rest = group["betas"], {"eps": 1e-8, "amsgrad": False, "maximize": False}
        parameters, exp_avg, exp_avg_sq = rows = file.read(SLOT * self.files.slot, SLOT)
        # the function: an object of the class would hold on to the state
        adamw(
            *([parameters], [gradient[0]], [exp_avg], [exp_avg_sq], [], [steps]),
            **{"lr": group["lr"], "beta1": beta1, "beta2": beta2, "fused": True},
            **{"weight_decay": group["weight_decay"], **rest},
        )
        file.write(SLOT * (1 - self.files.slot), rows)

    def update_scaled(self, file: StateFile) -> None:
        self.update(file, file.read(GRADIENT).mul_(self.scale))

    def wait(self) -> None:
        while self.jobs:
            self.files.finish(self.jobs.pop(next(iter(self.jobs))))

    def is_clipped(self) -> bool:
        """Whether speculation was wrong. A gradient that is not finite ends the run."""
        if not self.scale.isfinite():
            what = f"the gradient norm of step {self.files.step} is not finite: stopped before it"
            fail(f"{what}; try a lower --lr or more --warmup-steps", status=1)
        return self.scale.item() < 1.0

    def step(self) -> None:
        """Let the new state count; first compute it, or compute it again, unless it is right."""
        is_clipped = self.is_clipped()
        if is_clipped or not self.speculates:
            self.n_redone += self.speculates
            for file in self.files.files:
                self.start(file, self.update_scaled)
            self.wait()
        self.speculates = self.may_speculate and not is_clipped  # the next step is likely alike
        self.files.step, self.files.slot = self.files.step + 1, 1 - self.files.slot
        self.norms.clear()


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def sharded_from_meta(
    model: Transformer, optimizer: SpeculativeAdamW, args, world: World
) -> FullyShardedDataParallel:
    """Shard a model that is on the meta device; its units get their initial values one by one."""
    return FullyShardedDataParallel(
        model,
        model.units(),
        optimizer,
        shard_group=group_along((world.size,), 0, "shard", args.timeout),
        param_dtype=getattr(torch, args.param_dtype),
        materialize=lambda unit, name: init_weights(unit.to_empty(device="cpu"), args.seed, name),
        device=world.device,
    )


def state_folder(args, run: Run, world: World) -> StateFolder:
    """This rank's files: what they hold belongs to one run, model and number of ranks."""
    content = {name: getattr(args, name) for name in ("d_model", "n_layers", "n_heads")}
    content |= {"vocabulary": run.checkpoints.run["vocabulary"], "ranks": world.size}
    content |= {"run": str(run.folder.resolve())}
    saved = max((int(path.name[5:]) for path in checkpoints(run.checkpoints.path)), default=0)
    is_resumed, pinned = run.resume == "auto", world.device.type == "cuda"
    path = args.offload_dir or run.folder / "state"
    return StateFolder(path, content, is_resumed, saved, pinned)


class MappedShard(Shard):
    """A `Shard` in a file: a save copies it nowhere else."""

    def map(self, _: Callable) -> Shard:
        return self


def training_state(model: FullyShardedDataParallel) -> State:
    """The tensors of a checkpoint, by the plain model's names, as `Shard`s."""
    state: State = {}
    for bucket in model.buckets:
        shard, exp_avg, exp_avg_sq = bucket.file.mapped()
        adamw = SimpleNamespace(state={shard: {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}})
        state |= state_of_flat_shard(adamw, shard, bucket.shapes, bucket.owned.start)
    return {name: MappedShard(s.full_shape, s.chunks.items()) for name, s in state.items()}


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--offload-dir", help="on a local SSD; default: in the run's folder")
    parser.add_argument("--no-speculation", action="store_true", help="AdamW after backward")
    parser.add_argument("--timeout", type=seconds, default=600, help="collective timeout, seconds")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    args.autocast, args.param_dtype = False, args.dtype  # of unsharded units and their inputs
    return args


@torch.no_grad()
def evaluate(model, tokens, args, device, world: World) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args.batching, device, world.rank, world.size):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
            loss = model(inputs, targets)
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
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    with torch.device("meta"):
        model = Transformer(config)

    run = Run(args, __file__, config, device, corpus)
    files = state_folder(args, run, world)
    settings = adamw_settings(args.lr, args.weight_decay)
    optimizer = SpeculativeAdamW(files, not args.no_speculation, **settings)
    model = sharded_from_meta(model, optimizer, args, world)
    if files.is_restored:
        run.checkpoints.is_own = True  # the steps in the run's folder are this run's
    else:
        files.step = run.checkpoints.load(run.resume, training_state(model), optimizer)
        files.commit()
    first_step = files.step
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for i, (inputs, targets, keys) in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            with nullcontext() if is_last else model.no_sync():
                micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr, **files.traffic(), redone=optimizer.n_redone)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        files.commit()
        if run.agree_to_save(step):
            run.checkpoints.save(step + 1, training_state(model), args.keep_checkpoints)
            run.checkpoints.wait()  # the step after the next one overwrites the slot
    files.close()
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
