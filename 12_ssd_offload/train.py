"""Stage 12: FSDP whose state is in files on an SSD, with AdamW in threads during backward.

Each unit of stage 04 has a file on every rank, with this rank's shard of its parameters, AdamW's
moments, and the gradient. When a unit's gradient has been reduced, a thread updates the unit, while
backward continues. Clipping needs the norm of all gradients, which is known only after backward. So
the threads speculate that nothing is clipped, and write the new state into a second slot of the
file. If that was wrong, the step is redone from the old slot. A killed run continues from the last
step; after a restart of the machine, from its checkpoint.

    P parameters: E of the embedding, L of a layer, O of the output; N ranks, m micro-batches per
    step; float32

    memory per rank   four full units (six on Gloo), 22 shards of a unit, P / (256 N) bytes of norms
    files per rank    28 P / N bytes: two slots of 12, and the gradient
    read per step     (4 m (2 P - E - L - O) + 12 P + 4 (m - 1) P) / N bytes
    written per step  (4 m P + 12 P) / N bytes
    if it is redone   16 P / N bytes more are read, 12 P / N more are written
    communication     as in stage 04

Rajbhandari et al., "ZeRO-Infinity", SC 2021; Liao et al. (Fuyou), 2024; Lian et al.,
"SuperOffload", ASPLOS 2026: speculation, then validation.

Run it:

    torchrun --nproc-per-node 2 12_ssd_offload/train.py --data sample --steps 100
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.cuda import Event
from torch.distributed import Work
from torch.linalg import vector_norm
from torch.optim.adamw import adamw

from common.collectives import (
    all_gather_single,
    all_reduce_control,
    broadcast,
    norms_of_rows,
    reduce_scatter_single,
)
from common.unit_parameters import (
    Place,
    cast_inputs,
    check_options,
    is_in_backward,
    is_in_checkpoint,
    is_lookup,
    lend_parameters,
    owned_by,
    place_in,
    take_parameters,
    units_with_values,
)

from common.job.launch import fail
from common.job.ssd_state import GRADIENT, SLOT, StateFile, StateFolder

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import World, print0
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer, initial_shard
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import State, state_of_flat_tensors

from common.job.arguments import base_parser, check_arguments, model_config
from common.job.checkpoint_hooks import checkpoints
from common.job.corpus import load_corpus
from common.job.launch import cleanup, setup, world_size
from common.job.run import Run
from common.job.run_changes import SHAPE, compare_runs

# ------------------------------------------------------------------------------------------------
# The technique: AdamW on files, during backward
# ------------------------------------------------------------------------------------------------


class SpeculativeAdamW:
    """AdamW on files, in threads. A unit is updated as soon as its gradient of the step is reduced.

    An update reads the current slot and writes the other one. Whether gradients are clipped is
    known only after backward, so updates in backward assume that they are not. If that was wrong,
    `step` repeats the updates with scaled gradients: the current slot still has the old state. Then
    it switches the slots.
    """

    def __init__(self, folder: StateFolder, *, speculates: bool = True, **adamw_settings):
        # speculates=False: all updates wait for `step`
        beta1, beta2 = adamw_settings.pop("betas")
        defaults = {"eps": 1e-8, "amsgrad": False, "maximize": False}
        self.param_groups = [defaults | adamw_settings | {"beta1": beta1, "beta2": beta2}]
        self.folder, self.state = folder, {}  # the state is in the files, not in `state`
        self.may_speculate = speculates  # in any step
        self.speculates_now = speculates  # in this step
        self.step_settings: dict = {}  # arguments of `adamw` in this step
        # per file with a gradient of this step: whether it includes the last micro-batch
        self.is_complete: dict[StateFile, bool] = {}
        self.norms: dict[StateFile, Tensor] = {}  # of a complete gradient, per 1,024 elements
        self.scale: Tensor | None = None  # of the gradients; clip_grad_norm_ sets it for one step
        self.n_redone_steps = 0
        # `Unit.shard`, without elements: `Gather` needs an input that requires grad. Its version
        # counts steps, so that a backward through an older graph is an error
        self.shard = nn.Parameter(torch.empty(0))
        # one stream for all copies to and from a GPU: each stream has a memory pool of its own
        self.copies = torch.cuda.Stream() if torch.cuda.is_available() else None

    def take(self, file: StateFile, average: Tensor, is_last: bool) -> None:
        """Start a thread that adds a unit's average gradient of one micro-batch to its file."""
        if self.folder.step != self.folder.committed:
            raise RuntimeError("commit() after every step: the next one overwrites the old slot")
        if self.is_complete.get(file):
            raise RuntimeError(f"{file.path.stem}: a backward after the step's last one")
        if not self.is_complete:
            self.step_settings = dict(self.param_groups[0])
        ready = torch.cuda.current_stream().record_event() if average.is_cuda else None
        is_first = file not in self.is_complete
        self.is_complete[file] = is_last
        self.folder.start(file, self.accumulate, average, ready, is_first, is_last)

    def accumulate(
        self, file: StateFile, average: Tensor, ready: Event | None, is_first: bool, is_last: bool
    ) -> None:
        """In a thread: sum the micro-batches' gradients. After the last one, update the unit."""
        gradient = file.empty(1)
        if ready is not None:
            ready.synchronize()
        with torch.cuda.stream(self.copies):
            gradient[0] = average  # the thread waits for this copy to the CPU
        if not is_first:
            gradient += file.read(GRADIENT)
        file.write(GRADIENT, gradient)
        if is_last:
            self.norms[file] = torch.cat(norms_of_rows(gradient))
            if self.speculates_now:
                self.update(file, gradient)

    def update(self, file: StateFile, gradient: Tensor) -> None:
        """In a thread: AdamW from the current slot to the other one."""
        rows = file.read(self.folder.current_row, SLOT)
        param, exp_avg, exp_avg_sq = rows
        steps = torch.tensor(float(self.folder.step))
        # the function, not the class: an optimizer would keep the state in memory
        adamw([param], [gradient[0]], [exp_avg], [exp_avg_sq], [], [steps], **self.step_settings)
        file.write_slot(self.folder.other_slot, rows)

    def update_scaled(self, file: StateFile) -> None:
        self.update(file, file.read(GRADIENT).mul_(self.scale))

    def step(self) -> None:
        """Repeat updates that were wrong, or make those that have waited. Then switch the slots."""
        self.check_step()
        is_clipped = self.scale.item() < 1.0
        if is_clipped or not self.speculates_now:
            self.n_redone_steps += self.speculates_now
            for file in self.folder.files:
                self.folder.start(file, self.update_scaled)
            self.folder.wait()
        self.folder.switch_slots(self.folder.step + 1)
        increment_version(self.shard)
        # a clipped step is often followed by another
        self.speculates_now = self.may_speculate and not is_clipped
        self.is_complete.clear()
        self.norms.clear()
        self.scale = None

    def check_step(self) -> None:
        if self.scale is None:
            raise RuntimeError("call clip_grad_norm_() once before each step()")
        if self.step_settings != self.param_groups[0]:
            raise RuntimeError("set the learning rate before the step's first backward")
        if not self.scale.item() > 0.0:  # NaN, or 0 of an infinite norm
            what = f"the gradient norm of step {self.folder.step} is not finite: stopped before it"
            fail(f"{what}; try a lower --lr or more --warmup-steps", status=1)

    def load_state(self, step: int, states: Iterable[Tensor]) -> None:
        """Replace all parameters and moments, [3, length] per file, and the number of steps."""
        if self.is_complete or self.folder.step != self.folder.committed:
            raise RuntimeError("load_state() belongs between commit() and the next backward")
        self.folder.replace(step, states)
        increment_version(self.shard)


# ---- FSDP as in stage 04, but each shard is in a file, which is read ahead of its use ----


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state; unshard them unit by unit.

    The contract. Each parameter is in exactly one unit, trains, is float32, and is used
    in every forward of its unit and nowhere else. All ranks run the same units in the same order,
    each once per micro-batch. units: the modules that are gathered one by one, in the order in
    which to prefetch them. Every backward of a step but the last is under `no_sync()`. A step is
    `finish_gradient_synchronization()`, `clip_grad_norm_()`, `optimizer.step()`, and `commit()` of
    the optimizer's folder.

    All ranks start with the values of the first one. Or the module is on the meta device, so that
    no rank ever holds the full model. Then `read_shard(name, shapes, owned)` returns a unit's
    values: the slice `owned` of its parameters, laid side by side (it may reach beyond them).
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],
        optimizer: SpeculativeAdamW,  # it has the files, and gets the gradients
        param_dtype: torch.dtype | None = None,  # of gathered units and their inputs
        read_shard: Callable[[str, dict[str, torch.Size], slice], Tensor] | None = None,
        device: torch.device | None = None,  # of the unsharded parameters; default: the module's
    ):
        if optimizer.folder.files:
            raise ValueError("the optimizer belongs to another wrapper")
        super().__init__()
        self.module, self.read_shard = module, read_shard
        self.optimizer, self.param_dtype = optimizer, param_dtype
        self.device = device or next(module.parameters()).device
        self.kept: Unit | None = None  # the unit that stays gathered for backward
        self.in_flight: Unit | None = None  # the unit whose reduction was started last
        self.synchronizes = True
        check_options(module, self.device, [param_dtype])
        named_units = units_with_values(module, units, may_be_meta=read_shard is not None)
        self.units = [Unit(*named_unit, self) for named_unit in named_units]

    def forward(self, *args, **kwargs):
        for unit in self.units:
            unit.reshard()  # what was gathered earlier may be stale
        self.kept = None
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only sum the gradients: reduce-scatter them, but update nothing."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def enter(self, unit: Unit) -> None:
        """Gather the unit's parameters, prefetch those of the next unit that will be used, and
        start to read those of the unit after it.

        Called by `Gather.forward`, and in backward by `unpack` for each parameter that is read: the
        first call gathers the unit, and the others find it gathered.
        """
        unit.unshard()
        in_backward = is_in_backward()
        order = self.units[::-1] if in_backward else self.units  # the same on all ranks
        later = order[order.index(unit) + 1 :]
        following = [each for each in later if each.used_in_backward or not in_backward]
        for each in following[:2]:
            each.fetch()
        for each in following[:1]:  # none after the last unit
            # NCCL's stream waits for the kernels that were enqueued earlier: if they were this
            # unit's own, the all-gather would not overlap with them
            each.unshard()
        unit.wait()

    def after_forward(self, unit: Unit) -> None:
        """Free the unit or, if backward needs it, the one kept before. So the last such unit stays
        until backward, because nothing would hide its second all-gather."""
        unit.used_in_backward |= is_in_checkpoint()  # backward runs its forward again
        if is_in_backward():  # its own backward follows, which frees it
            return
        to_free = unit
        if torch.is_grad_enabled() and unit.used_in_backward:
            to_free, self.kept = self.kept, unit  # so it is freed one unit after its forward
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
        """After a step's last backward: wait until threads have finished with all gradients."""
        for unit in self.units:
            unit.reshard()  # if it was prefetched, and backward did not reach it
            unit.finish_reduction()
        self.optimizer.folder.wait()
        missing = [u.name for u in self.units if not self.optimizer.is_complete.get(u.file)]
        if missing:
            raise RuntimeError(f"no backward outside of no_sync() has reached the units {missing}")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Set the factor that scales gradients to at most this global norm; returns their norm."""
        self.finish_gradient_synchronization()
        if self.optimizer.scale is not None:
            raise RuntimeError("clip_grad_norm_() twice in a step")
        norms = torch.cat([self.optimizer.norms[unit.file] for unit in self.units])
        # each rank has the squares of its own shards only
        norm = all_reduce_control(vector_norm(norms).square()).sqrt()
        self.optimizer.scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm


class Unit:
    """One unit's parameters side by side in a flat buffer, of which this rank keeps its shard.

    file: has the shard's parameters, moments and gradient, [length] each.
    shard: an empty parameter, the same in all units, so that autograd calls `Gather.backward`.
    full: the gathered parameters, [N * length], padded, in `dtype`; exists only while unsharded.
    """

    def __init__(self, name: str, module: nn.Module, fsdp: FullyShardedDataParallel):
        self.fsdp, self.folder = fsdp, fsdp.optimizer.folder
        self.name, self.n_ranks = name, dist.get_world_size()
        self.shapes = {full_name: p.shape for full_name, p in module.named_parameters(name)}
        # a row of an embedding's gradient sums many tokens: bfloat16 is too imprecise
        param_dtype = None if is_lookup(module) else fsdp.param_dtype
        self.owners, flat = take_parameters(module)  # leaves the module without parameters
        self.owned, padding = owned_by(len(flat), None)
        self.sizes = [*(shape.numel() for shape in self.shapes.values()), padding]
        self.file = StateFile(self.folder, name, self.shard_of(flat))
        self.shard = fsdp.optimizer.shard
        self.full: Tensor | None = None
        self.module_forward, module.forward = module.forward, self.run
        self.dtype = param_dtype or flat.dtype
        self.reading: Future[Tensor] | None = None  # what `read` will return
        self.gathering: tuple[Work, Tensor] | None = None  # the all-gather in flight, its input
        self.used_in_backward = False  # set by the first forward
        # the reduce-scatter in flight, its buffer, whether it belongs to the last micro-batch
        self.reduction: tuple[Work, Tensor, bool] | None = None

    def shard_of(self, flat: Tensor) -> Tensor:
        """This rank's part of the first rank's `flat`, or of the values that `read_shard` has."""
        fsdp, length = self.fsdp, len(flat[self.owned])  # the padding is not in `flat`
        if fsdp.read_shard is None:
            flat = flat.to(fsdp.device)
            broadcast(flat, group_src=0)
            shard = flat[self.owned]
        else:  # `flat` is on the meta device: it has a length, but no values
            shard = fsdp.read_shard(self.name, self.shapes, self.owned).view(length)
        padding = self.owned.stop - self.owned.start - length  # on the last ranks
        return F.pad(shard, (0, padding))

    def run(self, *args, **kwargs):
        """Called as the module's `forward`. Only in here does the module have parameters."""
        params = Gather.apply(self.shard, self)
        args, kwargs = cast_inputs(args, kwargs, self.fsdp.param_dtype)
        # a checkpoint() around the unit saves only its inputs, and calls `run` again in backward
        hooks = nullcontext() if is_in_checkpoint() else saved_tensors_hooks(self.pack, self.unpack)
        with lend_parameters(self.owners, params), hooks:
            output = self.module_forward(*args, **kwargs)
        self.fsdp.after_forward(self)
        return output

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
        self.fsdp.enter(self)
        return self.full.as_strided(*saved)

    def fetch(self) -> None:
        """Start to read the shard, unless a thread is reading it or `full` has it."""
        if self.full is None and self.reading is None:
            # not by `folder.start`, which would first wait for updates in flight
            self.reading = self.folder.threads.submit(self.read)

    def read(self) -> Tensor:
        """In a thread: the shard, on the device, in the dtype in which it is sent."""
        (shard,) = self.file.read(self.folder.current_row)
        with torch.cuda.stream(self.fsdp.optimizer.copies):
            return shard.to(self.fsdp.device, self.dtype)  # the thread waits for the copy

    @torch.inference_mode(False)  # under it, `full` would have no version counter
    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is filled or in flight."""
        self.fetch()
        if self.full is None:
            sent, self.reading = self.folder.finish(self.reading), None
            if sent.is_cuda:  # it was allocated on the stream of the copies
                sent.record_stream(torch.cuda.current_stream())
            self.full = sent.new_empty(self.n_ranks * len(sent))
            work = all_gather_single(self.full, sent, async_op=True)
            self.gathering = work, sent

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def reshard(self) -> None:
        """Wait for an all-gather in flight, then drop `full`."""
        self.wait()
        self.full = None  # frees it: `pack` has kept no reference for backward
        self.reading = None  # a read that was not used

    def start_reduction(self, grads: tuple[Tensor, ...]) -> None:
        """Start the reduce-scatter: the sum is written into this rank's part of `flat`."""
        padding = grads[0].new_zeros(self.sizes[-1])
        flat = torch.cat([*(grad.flatten() for grad in grads), padding]).float()
        work = reduce_scatter_single(flat[self.owned], flat, async_op=True)
        self.reduction = work, flat, self.fsdp.synchronizes

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
    """A unit's parameters as a function of the ranks' shards; backward starts a reduce-scatter."""

    @staticmethod
    def forward(ctx, shard: Tensor, unit: Unit) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # a missing gradient is None, and so an error
        unit.fsdp.enter(unit)  # the all-gather, unless it was prefetched
        *chunks, _ = unit.full.split(unit.sizes)
        return tuple(c.view(s) for c, s in zip(chunks, unit.shapes.values(), strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[None, None]:
        """Autograd calls it when it has all gradients of the unit."""
        ctx.unit.fsdp.leave(ctx.unit, grads)  # starts the reduce-scatter
        return None, None  # the gradient comes later: `finish_reduction` adds it to `average`


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
        read_shard=partial(initial_shard, args.seed),
        device=world.device,
    )


def state_folder(args, run: Run) -> StateFolder:
    """This rank's files: what they hold belongs to one run, model and number of ranks."""
    description = run.checkpoints.run  # the arguments, and what identifies the corpus
    content = {name: description["arguments"][name] for name in SHAPE}
    content["vocabulary"] = description["vocabulary"]
    path = Path(args.offload_dir or run.folder / "state").resolve()
    name = os.path.relpath(run.folder.resolve(), path)  # it may be moved with the files
    steps = [int(each.name.removeprefix("step-")) for each in checkpoints(run.checkpoints.path)]
    is_resumed, saved = run.is_restart or run.resume == "auto", max(steps, default=0)
    folder = StateFolder(path, name, content, is_resumed, saved, description)
    if folder.is_restored:
        run.checkpoints.is_own = True  # the steps in the run's folder are this run's
        for note in compare_runs(folder.earlier, description):
            print0(note)
    return folder


def training_state(model: FullyShardedDataParallel) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    state: State = {}
    for unit in model.units:
        kinds = ("model", "optim.exp_avg", "optim.exp_avg_sq")
        tensors = dict(zip(kinds, unit.file.mapped(), strict=True))
        state |= state_of_flat_tensors(tensors, unit.shapes, unit.owned.start)
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
    folder = state_folder(args, run)
    settings = adamw_settings(args.lr, args.weight_decay)
    optimizer = SpeculativeAdamW(folder, speculates=not args.no_speculation, **settings)
    model = sharded_from_meta(model, optimizer, args, world)
    guard(model)
    if not folder.is_restored:
        steps_done = run.checkpoints.load(run.resume, training_state(model), optimizer)
        # what was loaded into mapped memory has no checksums yet
        optimizer.load_state(steps_done, (file.mapped() for file in folder.files))
    first_step = folder.step
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for i, (inputs, targets, keys) in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            micro_loss = model(inputs, targets, keys) / len(micro_batches)
            with nullcontext() if is_last else model.no_sync():
                micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr, **folder.traffic, redone=optimizer.n_redone_steps)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, training_state(model), args.keep_checkpoints)
            run.checkpoints.wait()  # it reads this slot, which the step after the next overwrites
        folder.commit()  # last: after a kill in the save, the step and the save are done again
    state = training_state(model)
    folder.close()
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
