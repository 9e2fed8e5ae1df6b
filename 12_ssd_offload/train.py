"""Stage 12: FSDP whose state is in files on an SSD, with AdamW in threads during backward.

Each unit of stage 04 (here a layer) has a file on every rank, with this rank's shard of its
parameters, AdamW's moments, and the gradient. As soon as a unit's gradient is reduced, a thread
updates the unit, while backward continues. Clipping needs the norm of all gradients, which is known
only after backward. So the threads speculate that nothing is clipped, and write the new state into
a second slot of the file. If that was wrong, the step is redone from the old slot. A run that is
killed at any moment loses only one step.

    P parameters, N ranks, m micro-batches per step; E of the embedding, O of the output; float32

    memory per rank   four full units and 22 shards of a unit, whatever their number
    files per rank    28 P / N bytes: two slots of 12, and the gradient
    read per step     (4 m (2 P - E - O) + 12 P + 4 (m - 1) P) / N bytes; if redone 16 P / N more
    written per step  (4 m P + 12 P) / N bytes; if redone 12 P / N more
    communication     as in stage 04

Rajbhandari et al., "ZeRO-Infinity", SC 2021; Liao et al. (Fuyou), 2024; Lian et al.,
"SuperOffload", ASPLOS 2026: speculation, then validation.

Run it:

    torchrun --nproc-per-node 2 12_ssd_offload/train.py --data sample --steps 100
"""

from __future__ import annotations

import os
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
from torch.autograd.graph import increment_version
from torch.cuda import Event
from torch.distributed import Work
from torch.linalg import vector_norm
from torch.optim.adamw import adamw

from common.collectives import (
    all_gather_single,
    all_reduce_control,
    check_same,
    norms_of_rows,
    reduce_scatter_single,
)
from common.distributed import fail
from common.state_files import GRADIENT, SLOT, StateFile, StateFolder
from common.units import (
    cast_inputs,
    is_lookup,
    lend_parameters,
    take_parameters,
    units_with_values,
)

# isort: split
from common.arguments import base_parser, check_arguments, model_config
from common.checkpoint import State, state_of_flat_shard
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, print0, setup, world_size
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.run import Run
from common.storage import SHAPE, checkpoints, compare_runs

# ------------------------------------------------------------------------------------------------
# The technique: shards in files, a few of which are in memory at a time
# ------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state; unshard them unit by unit.

    The contract. Each parameter is in exactly one unit, trains, has the common dtype, and is used
    in every forward of its unit and nowhere else. All ranks run the same units in the same order,
    each once per micro-batch. Every backward of a step but the last is under `no_sync()`. A step is
    `finish_gradient_synchronization()`, `clip_grad_norm_()`, `optimizer.step()`, and `commit()` of
    the optimizer's files.

    module: equal on all ranks, or on the meta device with a `materialize(unit, name)` that gives
    one unit's parameters memory and values. units: in the order to prefetch in. optimizer: it has
    the files, and gets the gradients. param_dtype: of the unsharded parameters (default: float32,
    that of the files). device: of the unsharded parameters (default: the module's).
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],
        optimizer: SpeculativeAdamW,
        param_dtype: torch.dtype | None = None,
        materialize: Callable[[nn.Module, str], None] | None = None,
        device: torch.device | None = None,
    ):
        if materialize is not None and device is None:
            raise ValueError("materialize needs a device: a module on the meta device has none")
        if optimizer.files.files:
            raise ValueError("the optimizer belongs to another wrapper")
        super().__init__()
        self.module = module
        self.optimizer, self.param_dtype = optimizer, param_dtype
        self.device = device or next(module.parameters()).device
        self.in_flight: FlatParameter | None = None  # whose reduction was started last
        self.synchronizes = True
        self.buckets: list[FlatParameter] = []  # one per unit
        # each unit gets its values and is sharded before the next one: no rank holds the full model
        for name, unit in units_with_values(module, units, materialize):
            bucket = FlatParameter(name, unit, self)
            unit.forward = partial(self.run, bucket, unit.forward)
            self.buckets.append(bucket)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Update nothing, but sum gradients. Each micro-batch is reduce-scattered."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def run(self, bucket: FlatParameter, forward: Callable, *args, **kwargs):
        """In place of a unit's `forward`: the unit has parameters in here and nowhere else."""
        # private, as nothing public tells it: whether this is activation checkpointing in backward
        recomputes = torch._C._current_graph_task_id() != -1
        self.enter(bucket, in_backward=recomputes)
        args, kwargs = cast_inputs(args, kwargs, self.param_dtype)
        params = Gather.apply(bucket.shard, bucket)
        with lend_parameters(bucket.shard, bucket.owners, params, bucket.pack, bucket.unpack):
            output = forward(*args, **kwargs)
        if not recomputes:
            bucket.reshard()
        return output

    def enter(self, bucket: FlatParameter, in_backward: bool) -> None:
        """Gather the unit's parameters, and prefetch those of the next unit."""
        bucket.unshard()
        bucket.used_in_backward |= in_backward
        self.prefetch(bucket, in_backward)  # before the unit's own kernels, with which it overlaps
        bucket.wait()

    def prefetch(self, bucket: FlatParameter, in_backward: bool) -> None:
        """Read the next two units, and start the all-gather of the first, if they will be used."""
        order = self.buckets[::-1] if in_backward else self.buckets
        i = order.index(bucket) + 1
        near = [each for each in order[i : i + 2] if each.used_in_backward or not in_backward]
        for each in near:
            each.fetch()
        for each in near[:1]:
            each.unshard()

    def leave(self, bucket: FlatParameter, grads: tuple[Tensor, ...]) -> None:
        """Free the unit, and start to reduce `grads`, which backward has just completed."""
        bucket.reshard()
        bucket.finish_reduction()  # of the previous micro-batch, if no other unit has been left
        self.prefetch(bucket, in_backward=True)  # first: NCCL keeps the order of the calls
        bucket.start_reduction(grads, self.synchronizes)
        previous, self.in_flight = self.in_flight, bucket
        if previous not in (None, bucket):  # so at most two units have full gradients
            previous.finish_reduction()  # after the launch: the network is busy meanwhile

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: wait until the optimizer has used every gradient."""
        for bucket in self.buckets:
            bucket.reshard()  # if it was prefetched and not used
            bucket.finish_reduction()
        self.optimizer.files.wait()
        missing = [b.name for b in self.buckets if self.optimizer.norms.get(b.file) is None]
        if missing:
            raise RuntimeError(f"no backward outside of no_sync() has reached the units {missing}")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Have gradients scaled to at most this global norm; returns the norm before clipping."""
        self.finish_gradient_synchronization()
        if self.optimizer.scale is not None:
            raise RuntimeError("clip_grad_norm_() twice in a step")
        norms = torch.cat([self.optimizer.norms[bucket.file] for bucket in self.buckets])
        # each rank has the squares of its own shards only
        norm = all_reduce_control(vector_norm(norms).square()).sqrt()
        self.optimizer.scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm


class FlatParameter:
    """A unit's parameters side by side in one flat buffer, of which each rank owns an equal shard.

    shard: an empty tensor in place of one of [length], the same in all units, for autograd to see.
    Its version counts the optimizer's steps. file: has the values, the moments and the gradient.
    full: the gathered parameters, [N * length], padded, in `dtype`; exists only while unsharded.
    """

    def __init__(self, name: str, unit: nn.Module, fsdp: FullyShardedDataParallel):
        self.fsdp, self.files, self.name = fsdp, fsdp.optimizer.files, name
        self.n_ranks, rank = dist.get_world_size(), dist.get_rank()
        self.shapes = {full_name: p.shape for full_name, p in unit.named_parameters(name)}
        # its gradients have the same dtype, and the embedding's are sums over many tokens
        param_dtype = None if is_lookup(unit) else fsdp.param_dtype
        self.owners, flat = take_parameters(unit)  # the unit has no parameters any more
        if flat.dtype != torch.float32:
            raise ValueError(f"the parameters of {name} are not float32")
        self.dtype = param_dtype or torch.float32
        length = -(-len(flat) // self.n_ranks)  # of a shard, rounded up
        self.owned = slice(rank * length, (rank + 1) * length)
        padding = self.n_ranks * length - len(flat)
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        flat = F.pad(flat, (0, padding))
        # integer sums of the bits do not depend on the order of adding
        sums = [t.sum() for t in (flat.view(torch.int16), *unit.buffers())]
        check_same(f"initial values or dtypes of {name}", [*sums, self.dtype], fsdp.device)
        self.file = StateFile(self.files, name, flat[self.owned])
        self.shard = fsdp.optimizer.shard
        self.reading: Future[Tensor] | None = None  # a thread that reads the shard
        self.full: Tensor | None = None
        self.version: int | None = None  # of the shard in `full`, or that is being read for it
        self.gathering: tuple[Work, Tensor] | None = None  # the all-gather in flight, what it sends
        self.used_in_backward = False  # known from the first backward on
        # the reduce-scatter in flight, its buffer, whether it belongs to the last micro-batch
        self.reduction: tuple[Work, Tensor, bool] | None = None

    def pack(self, tensor: Tensor) -> tuple:
        """What autograd keeps for backward: (tensor,) or, of a view of `full`, its place: (None,
        shape, stride, offset)."""
        # sparse, complex and negated views are not given by a place alone
        other = tensor.layout != torch.strided or tensor.dtype != self.full.dtype or tensor.is_neg()
        if other or tensor.untyped_storage() is not self.full.untyped_storage():
            return (tensor.detach(),)  # an output itself would keep its graph
        return None, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, saved: tuple) -> Tensor:
        """What backward reads: the tensor that `pack` has saved, or the view, gathered again."""
        tensor, *place = saved
        if place:
            self.fsdp.enter(self, in_backward=True)
        return self.full.as_strided(*place) if place else tensor

    def fetch(self) -> None:
        """Start to read the shard, unless `full` is up to date, or will be."""
        if self.version != self.shard._version:
            self.reshard()  # of an earlier step
            self.version = self.shard._version
            self.reading = self.files.threads.submit(self.read)

    def read(self) -> Tensor:
        """In a thread: the shard, on the device, in the dtype in which it is sent."""
        (shard,) = self.file.read(self.files.slot)
        with torch.cuda.stream(self.fsdp.optimizer.copies):
            return shard.to(self.fsdp.device, self.dtype)  # the thread waits for the copy

    @torch.inference_mode(False)  # else `full` would not count its versions
    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is up to date or in flight."""
        self.fetch()
        if self.full is None:
            sent, self.reading = self.files.finish(self.reading), None
            if sent.is_cuda:  # its memory is of the other stream
                sent.record_stream(torch.cuda.current_stream())
            self.full = sent.new_empty(self.n_ranks * len(sent))
            self.gathering = all_gather_single(self.full, sent, async_op=True), sent

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def reshard(self) -> None:
        """Wait for an all-gather in flight, then drop `full`."""
        self.wait()
        self.full = self.version = self.reading = None  # `pack` has kept no reference for backward

    def start_reduction(self, grads: tuple[Tensor, ...], is_last: bool) -> None:
        """Start the reduce-scatter of `grads`, joined in one buffer: the sum replaces this rank's
        part of it."""
        padding = grads[0].new_zeros(self.sizes[-1])
        flat = torch.cat([*(grad.flatten() for grad in grads), padding]).float()
        work = reduce_scatter_single(flat[self.owned], flat, async_op=True)
        self.reduction = work, flat, is_last

    def finish_reduction(self) -> None:
        """If a reduction is in flight, give its average to the optimizer and free its buffer."""
        if self.reduction is None:
            return
        work, flat, is_last = self.reduction
        work.wait()
        average = flat[self.owned] / self.n_ranks
        self.reduction = None
        self.fsdp.optimizer.take(self.file, average, is_last)


class Gather(torch.autograd.Function):
    """A unit's parameters as a function of its shard, [length]. Its adjoint is a reduce-scatter."""

    @staticmethod
    def forward(ctx, shard: Tensor, bucket: FlatParameter) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        *chunks, _ = bucket.full.split(bucket.sizes)  # the all-gather has ended
        return tuple(c.view(s) for c, s in zip(chunks, bucket.shapes.values(), strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[None, None]:
        """Autograd calls it when it has all gradients of the unit."""
        bucket = ctx.bucket
        if any(grad is None for grad in grads):
            raise RuntimeError(f"unit {bucket.name} has not used all of its parameters")
        bucket.fsdp.leave(bucket, grads)
        return None, None  # the average follows when the reduction has finished


class SpeculativeAdamW:
    """AdamW on files. It updates a unit as soon as it has the unit's gradient of the whole step.

    The new state goes into the slot that does not count, as if nothing were clipped. `step` makes
    this slot count. If the gradients are clipped, it first does all updates again.

    speculates: else all updates wait for `step`. settings: of AdamW.
    """

    def __init__(
        self, files: StateFolder, betas: tuple[float, float], speculates: bool = True, **settings
    ):
        defaults = {"eps": 1e-8, "amsgrad": False, "maximize": False}
        self.param_groups = [defaults | settings | {"beta1": betas[0], "beta2": betas[1]}]
        self.files, self.state = files, {}  # the state is in the files
        self.shard = nn.Parameter(torch.empty(0))  # `FlatParameter.shard`
        # one stream for all copies to and from a GPU: each stream has a memory pool of its own
        self.copies = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.may_speculate = self.speculates = speculates
        self.scale: Tensor | None = None  # of the gradients; clip_grad_norm_ sets it for one step
        self.n_redone = 0  # steps
        # of a gradient's rows; empty while a thread computes them, None before the last micro-batch
        self.norms: dict[StateFile, Tensor | None] = {}

    def take(self, file: StateFile, average: Tensor, is_last: bool) -> None:
        """Take a unit's average gradient of one micro-batch; a thread uses it."""
        if self.files.step != self.files.committed:
            raise RuntimeError("commit() after every step: the next one overwrites the old slot")
        if self.norms.get(file) is not None:
            raise RuntimeError(f"{file.path.stem}: a backward after the step's last one")
        if not self.norms:
            self.used = dict(self.param_groups[0])  # by the updates of this step
        is_first = file not in self.norms
        self.norms[file] = torch.empty(0) if is_last else None  # a thread replaces it
        ready = torch.cuda.current_stream().record_event() if average.is_cuda else None
        self.files.start(file, self.accumulate, average, ready, is_first, is_last)

    def accumulate(
        self, file: StateFile, average: Tensor, ready: Event | None, is_first: bool, is_last: bool
    ) -> None:
        """Sum the micro-batches' gradients in the file. After the last one, update the unit."""
        gradient = file.empty(1)
        if ready is not None:
            ready.synchronize()
        with torch.cuda.stream(self.copies):
            gradient[0] = average  # the thread waits for the copy
        if not is_first:
            gradient += file.read(GRADIENT)
        file.write(GRADIENT, gradient)
        if is_last:
            self.norms[file] = torch.cat(norms_of_rows(gradient))
            if self.speculates:
                self.update(file, gradient)

    def update(self, file: StateFile, gradient: Tensor | None = None) -> None:
        """Read the slot that counts, write the other one. gradient: default: the file's, scaled."""
        if gradient is None:
            gradient = file.read(GRADIENT).mul_(self.scale)
        param, exp_avg, exp_avg_sq = rows = file.read(self.files.slot, SLOT)
        steps = torch.tensor(float(self.files.step))
        tensors = [param], [gradient[0]], [exp_avg], [exp_avg_sq], [], [steps]
        # the function, as an object of the class would hold on to the state
        adamw(*tensors, **self.param_groups[0])
        file.write(SLOT - self.files.slot, rows)

    def is_clipped(self) -> bool:
        if not self.scale.item() > 0.0:  # NaN, or 0 of an infinite norm
            what = f"the gradient norm of step {self.files.step} is not finite: stopped before it"
            fail(f"{what}; try a lower --lr or more --warmup-steps", status=1)
        return self.scale.item() < 1.0

    def step(self) -> None:
        """Let the new state count. First do the updates that are missing, or that were wrong."""
        if self.scale is None:
            raise RuntimeError("step() needs a clip_grad_norm_() before it, of its own")
        if self.used != self.param_groups[0]:
            raise RuntimeError("set the learning rate before the step's first backward")
        is_clipped = self.is_clipped()
        if is_clipped or not self.speculates:
            self.n_redone += self.speculates
            for file in self.files.files:
                self.files.start(file, self.update)
            self.files.wait()
        self.speculates = self.may_speculate and not is_clipped  # the next step is likely alike
        self.files.step, self.files.slot = self.files.step + 1, SLOT - self.files.slot
        increment_version(self.shard)  # what is gathered is stale
        self.norms.clear()
        self.scale = None


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
        param_dtype=getattr(torch, args.param_dtype),
        materialize=lambda unit, name: init_weights(unit.to_empty(device="cpu"), args.seed, name),
        device=world.device,
    )


def state_folder(args, run: Run) -> StateFolder:
    """This rank's files: what they hold belongs to one run, model and number of ranks."""
    settings = run.checkpoints.run  # the arguments, and what identifies the corpus
    content = {name: settings["arguments"][name] for name in SHAPE}
    content["vocabulary"] = settings["vocabulary"]
    path = Path(args.offload_dir or run.folder / "state").resolve()
    content["run"] = os.path.relpath(run.folder.resolve(), path)  # it may be moved with the files
    saved = max((int(path.name[5:]) for path in checkpoints(run.checkpoints.path)), default=0)
    is_resumed = run.is_restart or run.resume == "auto"
    files = StateFolder(path, content, is_resumed, saved, settings)
    if files.is_restored:
        run.checkpoints.is_own = True  # the steps in the run's folder are this run's
        for note in compare_runs(files.earlier, settings):
            print0(note)
    return files


def training_state(model: FullyShardedDataParallel) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    state: State = {}
    for bucket in model.buckets:
        shard, exp_avg, exp_avg_sq = bucket.file.mapped()
        state_of_shard = {shard: {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}}
        adamw = SimpleNamespace(state=state_of_shard)  # in place of an optimizer that has it
        state |= state_of_flat_shard(adamw, shard, bucket.shapes, bucket.owned.start)
    return state


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--offload-dir", help="on a local SSD; default: in the run's folder")
    parser.add_argument("--no-speculation", action="store_true", help="AdamW after backward")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    args.state_on = "disk"
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
    files = state_folder(args, run)
    settings = adamw_settings(args.lr, args.weight_decay)
    optimizer = SpeculativeAdamW(files, speculates=not args.no_speculation, **settings)
    model = sharded_from_meta(model, optimizer, args, world)
    guard(model)
    if not files.is_restored:
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
        run.log(step, loss, grad_norm, lr, **files.traffic, redone=optimizer.n_redone)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.agree_to_save(step):
            run.checkpoints.save(step + 1, training_state(model), args.keep_checkpoints)
            run.checkpoints.wait()  # it reads the files, and the next step but one overwrites them
        files.commit()  # last: after a kill in the save, the step and the save are done again
    files.close()
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
