"""Stage 04: fully sharded data parallelism (FSDP), ZeRO stage 3 made fast.

Every rank owns a slice of each unit's parameters, gradients and moments. A unit is gathered just
before it computes, while the unit before it still does, and freed right after; its gradients go
to their owners while backward is at the next.

New since stage 03: gathers run ahead (prefetch), the model is built on the meta device and filled
unit by unit, so that no rank ever holds it whole, gathered weights and gradients have dtypes of
their own over float32 shards, and the shards may lie in groups of --shard-size ranks, replicated
across the groups (hybrid sharding), or on the CPU.

    memory      16 P / N bytes a rank for P parameters on N ranks, and one unit gathered, two
                with prefetch; N is --shard-size under hybrid sharding
    traffic     all-gather 2 a P a step for a micro-batches, less a times the embedding, whose
                backward needs no weights, + reduce-scatter a P; without resharding after forward
                all-gather a P; hybrid sharding adds one all-reduce of P / N

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

Run it:

    torchrun --nproc-per-node 2 04_fsdp/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_leaves, tree_map_only

from common.arguments import base_parser, check_arguments, model_config, positive, positive_int
from common.checkpoint import (
    State,
    adamw_moments,
    load_checkpoint,
    save_checkpoint,
    shards_of_flat_slice,
)
from common.collectives import (
    all_gather_single,
    all_reduce,
    all_reduce_control,
    reduce_scatter_single,
)
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, group_along, refuse, setup, world_size
from common.model import IGNORED, Transformer, init_weights
from common.optimization import adamw_settings, global_norm, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: flat parameters, gathered unit by unit
# ------------------------------------------------------------------------------------------------


class FlatParameter:
    """A unit's parameters side by side in one buffer, padded to N slices of equal length.

    shard: [slice], this rank's, in the parameters' own dtype; what the optimizer steps on.
    full: [N * slice] in `param_dtype`, with memory only while gathered; the parameters are views
    into it, so that nothing is copied. grads: [N * slice] in `reduce_dtype`, during backward.
    groups: the N ranks that share out, and those that hold the same slice (None: no others).
    """

    def __init__(
        self, params: dict[str, nn.Parameter], groups, param_dtype, reduce_dtype, device, home
    ):
        self.params, (self.group, self.replicas) = params, groups
        self.n_ranks = dist.get_world_size(self.group)
        n_replicas = 1 if self.replicas is None else dist.get_world_size(self.replicas)
        self.averages_over = self.n_ranks * n_replicas
        values = torch.cat([p.detach().flatten() for p in params.values()])
        length, rank = -(-len(values) // self.n_ranks), dist.get_rank(self.group)
        self.mine = slice(rank * length, (rank + 1) * length)
        self.padding = self.n_ranks * length - len(values)
        mine = F.pad(values, (0, self.padding))[self.mine].to(home, copy=True)
        trains = next(iter(params.values())).requires_grad
        self.shard = nn.Parameter(mine, requires_grad=trains)
        dtype = param_dtype or values.dtype
        self.full = torch.empty(self.n_ranks * length, dtype=dtype, device=device)
        self.reduce_dtype = reduce_dtype or dtype
        for param, view in self.views_into(self.full).items():
            param.data = view
        self.grads: Tensor | None = None
        self.gathering: Work | None = None
        self.reducing: Work | None = None
        self.replicating: Work | None = None
        self.waiting_for = set(params.values()) if trains else set()
        self.in_backward = False
        self.reshard()

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params.values()]
        pieces = flat[: sum(sizes)].split(sizes)
        return {p: t.view(p.shape) for p, t in zip(self.params.values(), pieces, strict=True)}

    def unshard(self) -> None:
        """Start to gather, unless it is done or under way; `wait` before use.

        Under autograd the buffer keeps its storage, freed and filled, and is written through
        `.data`: what backward has saved points into it, and its version must not change.
        """
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
            self.sent = self.shard.detach().to(self.full, non_blocking=True)
            out = self.full.data
            self.gathering = all_gather_single(out, self.sent, group=self.group, async_op=True)

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = self.sent = None

    def reshard(self) -> None:
        self.wait()
        self.full.untyped_storage().resize_(0)

    def collect(self, param: nn.Parameter) -> None:
        """Move a gradient into `grads`; none is zero."""
        if self.replicating is not None:
            raise RuntimeError("all micro-batches but the last of a step belong in no_sync()")
        self.finish_reducing()  # of the backward before
        if self.grads is None:
            self.grads = torch.empty_like(self.full, dtype=self.reduce_dtype)
            self.grads[len(self.grads) - self.padding :].zero_()
            self.grad_views = self.views_into(self.grads)
        view = self.grad_views[param]
        view.zero_() if param.grad is None else view.copy_(param.grad)
        param.grad = None

    def start_reducing(self) -> None:
        """Send each slice of the gradients to its owner, who sums them, in place."""
        for param in self.waiting_for:  # unused in this backward
            self.collect(param)
        self.waiting_for = set()
        mine = self.grads[self.mine]
        self.reducing = reduce_scatter_single(mine, self.grads, group=self.group, async_op=True)

    def finish_reducing(self) -> None:
        """Wait for it, add the average to `shard.grad` and drop the rest."""
        if self.reducing is not None:
            self.reducing.wait()
            mine = self.grads[self.mine].to(self.shard, copy=True)
            mine /= self.averages_over
            self.shard.grad = mine if self.shard.grad is None else self.shard.grad.add_(mine)
            self.grads = self.grad_views = self.reducing = None

    def start_replicating(self) -> None:
        """Sum `shard.grad` over the replicas, once a step."""
        if self.replicas is not None and self.replicating is None:
            grad = self.shard.grad
            self.replicating = all_reduce(grad, group=self.replicas, async_op=True)


class FullyShardedDataParallel(nn.Module):
    """Shards parameters, gradients and optimizer states of a module, and gathers unit by unit.

    module: the same on every rank, or on the meta device with `materialize(unit, name)`, which
    gives the parameters of one unit memory and values. units: the modules that are gathered in
    one, in the order of forward; None for the module's children, containers opened up. Parameters
    of no unit, or of several (tied), are gathered around the whole module.
    shard_group, replicate_group: the ranks that share out, and those that hold the same shard.
    param_dtype, reduce_dtype: of what is gathered, and of what is reduced; None for the
    parameters' own, and for `param_dtype`. cpu_offload: the shards live on the CPU.

    Step an optimizer on `shards()`, and call `finish_gradient_synchronization` after the last
    backward of a step. All ranks must use the same parameters: gathers and reductions match by
    their order. An unused one counts as zero, and holds up the units before it until backward
    ends. Raises ValueError where `materialize` leaves a parameter without values.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module] | None = None,
        shard_group: ProcessGroup | None = None,
        replicate_group: ProcessGroup | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        materialize: Callable[[nn.Module, str], None] | None = None,
        device: torch.device | None = None,
        cpu_offload: bool = False,
    ):
        super().__init__()
        self.module, self.shard_group = module, shard_group
        self.param_dtype, self.reshard_after_forward = param_dtype, reshard_after_forward
        device = device or next(module.parameters()).device
        home = torch.device("cpu") if cpu_offload else device
        groups = (shard_group, replicate_group)
        self.flat_settings = (groups, param_dtype, reduce_dtype, device, home)
        self.flats: list[FlatParameter] = []
        self.shard_units(module, opened(module) if units is None else units, materialize)
        self.launched = 0  # reductions that have started
        self.synchronizes, self.in_backward = True, False

    def shard_units(self, module: nn.Module, units: list[nn.Module], materialize) -> None:
        names = {m: name for name, m in module.named_modules()}
        users = Counter(p for unit in units for p in unit.parameters())
        shared = {n: p for n, p in module.named_parameters() if users[p] != 1}
        if any(p.is_meta for p in shared.values()):
            raise ValueError(f"{', '.join(shared)}: in no unit, or in several; cannot materialize")
        self.shard_unit(module, shared)
        for unit in units:
            before = len(list(unit.parameters()))
            if materialize is not None:
                materialize(unit, names[unit])
            params = dict(unit.named_parameters(prefix=names[unit]))
            if len(params) != before:
                raise ValueError(f"{names[unit]}: its tied parameters are apart on leaving meta")
            if any(p.is_meta for p in params.values()):
                raise ValueError(f"{names[unit]}: still on the meta device, without values")
            self.shard_unit(unit, {n: p for n, p in params.items() if users[p] < 2})
        if len({flat.unit for flat in self.flats}) == 1:
            warnings.warn(
                "one unit has all parameters: they are gathered all at once", stacklevel=3
            )

    def shard_unit(self, module: nn.Module, params: dict[str, nn.Parameter]) -> None:
        """A flat parameter for each dtype, and for what is frozen, gathered around `module`."""
        owners = [m for m in module.modules() if list(m.parameters(recurse=False))]
        # the gradient of a look-up needs no weights
        in_backward = not all(isinstance(m, nn.Embedding) for m in owners)
        for kind in sorted({(str(p.dtype), p.requires_grad) for p in params.values()}):
            alike = {n: p for n, p in params.items() if (str(p.dtype), p.requires_grad) == kind}
            flat = FlatParameter(alike, *self.flat_settings)
            flat.unit, flat.gathers_in_backward = module, in_backward
            self.flats.append(flat)
            module.register_forward_pre_hook(partial(self.before_forward, flat), with_kwargs=True)
            module.register_forward_hook(partial(self.after_forward, flat))
            for param in flat.waiting_for:
                param.register_post_accumulate_grad_hook(partial(self.mark_ready, flat))

    def forward(self, *args, **kwargs):
        for flat in self.flats:  # a forward without backward has left it, the shards have moved on
            flat.reshard()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here reduces to the shards, but not yet over the replicas."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def gather(self, flat: FlatParameter, then: int) -> None:
        """Have `flat` whole, and the one after it (`then` = 1) or before it (-1) on its way."""
        flat.unshard()
        following = self.flats.index(flat) + then
        if 0 <= following < len(self.flats):
            if then == 1 or self.flats[following].gathers_in_backward:
                self.flats[following].unshard()  # while `flat` computes
        flat.wait()

    def before_forward(self, flat: FlatParameter, module: nn.Module, args, kwargs):
        self.gather(flat, then=0 if flat.in_backward else 1)
        if self.param_dtype is not None:
            return tree_map_only(Tensor, self.cast, (args, kwargs))

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.param_dtype) if x.is_floating_point() else x

    def after_forward(self, flat: FlatParameter, module: nn.Module, args, output) -> None:
        if flat.in_backward:
            return  # forward ran again for activation checkpointing; backward needs the weights
        if self.reshard_after_forward or not torch.is_grad_enabled():
            flat.reshard()
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.before_backward, flat))

    def before_backward(self, flat: FlatParameter, _: Tensor) -> None:
        """The gradient of a unit's output is there: autograd enters the unit next."""
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        for later in self.flats[self.flats.index(flat) + 1 :]:
            # frozen: no gradient says that it is done. What surrounds all units begins before them
            if not later.shard.requires_grad and flat.unit is not self.module:
                later.reshard()
        flat.in_backward = True
        if flat.gathers_in_backward:
            self.gather(flat, then=-1)

    def mark_ready(self, flat: FlatParameter, param: nn.Parameter) -> None:
        """Note that the gradient of `param` is final for this backward; autograd calls it."""
        if param not in flat.waiting_for:
            raise RuntimeError("checkpoint with use_reentrant=False: a gradient is final once")
        flat.collect(param)
        flat.waiting_for.remove(param)
        if not flat.waiting_for:
            flat.reshard()  # all gradients are there: backward is done with these weights
            flat.in_backward = False
            self.launch_ready()

    @property
    def trained(self) -> list[FlatParameter]:
        """In reverse order, since backward finishes the last unit first."""
        return [flat for flat in self.flats[::-1] if flat.shard.requires_grad]

    def launch_ready(self, all_of_them: bool = False) -> None:
        """Reduce what is full while backward goes on, in order; at most two are whole at a time."""
        trained = self.trained
        while self.launched < len(trained):
            if trained[self.launched].waiting_for and not all_of_them:
                return
            trained[self.launched].start_reducing()
            if self.launched > 0:
                before = trained[self.launched - 1]
                before.finish_reducing()
                if self.synchronizes:
                    before.start_replicating()
            self.launched += 1

    def end_backward(self) -> None:
        """Reduce what unused parameters have held up, and free what is gathered still."""
        self.launch_ready(all_of_them=True)
        self.launched, self.in_backward = 0, False
        for flat in self.flats:
            flat.reshard()
            flat.in_backward = False
        for flat in self.trained:
            flat.waiting_for = set(flat.params.values())

    def finish_gradient_synchronization(self) -> None:
        """Wait until every shard's gradient is the average over the ranks. Once a step."""
        for flat in self.trained:
            flat.finish_reducing()
            flat.start_replicating()
        for flat in self.trained:
            if flat.replicating is not None:
                flat.replicating.wait()
                flat.replicating = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this global norm; returns the norm before."""
        grads = [flat.shard.grad for flat in self.trained]
        norm = all_reduce_control(global_norm(grads).square(), group=self.shard_group).sqrt()
        for grad in grads:
            grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def shards(self) -> list[nn.Parameter]:
        """What to give to an optimizer: this rank's slices of all that trains."""
        return [flat.shard for flat in self.flats if flat.shard.requires_grad]

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole parameters by name, in their own dtype, on the CPU of every rank."""
        state = {}
        for flat in self.flats:
            whole = torch.empty_like(flat.full, dtype=flat.shard.dtype)
            all_gather_single(whole, flat.shard.to(whole.device), group=self.shard_group)
            views = flat.views_into(whole.cpu())
            state |= {name: views[p].clone() for name, p in flat.params.items()}
        return state

    def training_state(self, optimizer: torch.optim.Optimizer) -> State:
        """The tensors of a checkpoint, under the names of the plain model, as `Shard`s."""
        state: State = {}
        for flat in self.flats:
            shapes = {name: p.shape for name, p in flat.params.items()}
            tensors = {f"optim.{k}": t for k, t in adamw_moments(optimizer, flat.shard).items()}
            tensors["model"] = flat.shard.detach()
            for prefix, tensor in tensors.items():
                state |= shards_of_flat_slice(f"{prefix}.", shapes, flat.mine.start, tensor)
        return state


def opened(module: nn.Module) -> list[nn.Module]:
    """A module's children with parameters; a row, or what has no forward, as what it contains."""
    units = []
    for child in module.children():
        if isinstance(child, nn.Sequential) or type(child).forward is nn.Module.forward:
            units += opened(child)
        elif list(child.parameters()):
            units.append(child)
    return units


def sharded_from_meta(model: Transformer, args, world: World) -> FullyShardedDataParallel:
    """Fill a model on the meta device unit by unit: no rank ever holds more than one whole."""
    mesh = (world.size // args.shard_size, args.shard_size)
    replicas = group_along(mesh, 0, "replicate", args.timeout)
    return FullyShardedDataParallel(
        model,
        model.units(),
        shard_group=group_along(mesh, 1, "shard", args.timeout),
        replicate_group=replicas if mesh[0] > 1 else None,
        param_dtype=getattr(torch, args.param_dtype),
        reduce_dtype=getattr(torch, args.reduce_dtype),
        reshard_after_forward=not args.no_reshard_after_forward,
        materialize=lambda unit, name: init_weights(unit.to_empty(device="cpu"), args.seed, name),
        device=world.device,
        cpu_offload=args.cpu_offload,
    )


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument(
        "--shard-size", type=positive_int, help="ranks that share out (default: all)"
    )
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), help="default: --dtype")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-reshard-after-forward", action="store_true", help="hold the weights")
    parser.add_argument("--cpu-offload", action="store_true", help="shards and moments on the CPU")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds until a hang ends")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    args.shard_size = args.shard_size or world_size()
    if world_size() % args.shard_size:
        refuse(f"--shard-size {args.shard_size} does not divide the {world_size()} ranks")
    args.param_dtype = args.param_dtype or args.dtype
    args.autocast = False  # units are gathered in --param-dtype, their inputs cast to it
    return args


@torch.no_grad()
def evaluate(model, tokens, args, device, world: World) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args, device, world.rank, world.size):
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

    config = model_config(args, corpus.vocab)
    with torch.device("meta"):
        model = Transformer(config)
    model = sharded_from_meta(model, args, world)
    optimizer = torch.optim.AdamW(model.shards(), **adamw_settings(args))

    run = Run(args, __file__, config, device)
    state = model.training_state(optimizer)
    first_step = load_checkpoint(run.checkpoints, args.resume, state, optimizer)
    batches = train_batches(corpus.train, args, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(args, step)
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
        grad_norm = model.clip_grad_norm_(args.grad_clip)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.saves(step):
            save_checkpoint(run.checkpoints, step + 1, state, args.keep_checkpoints)
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
