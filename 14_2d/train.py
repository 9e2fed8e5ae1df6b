"""Stage 14: FSDP x tensor parallelism: every rank owns a shard of a shard.

Tensor parallelism shards each matrix over the ranks of a node (`tp`), which exchange activations.
A rank then has 1 / tp of each matrix of a unit, and its norms. FSDP lays them side by side in a
flat buffer, and shards the buffer over nodes (`shard`), which exchange parameters and gradients
while they compute. With --shard-degree there are also replicas of the model (`replicate`):

    rank = (replicate_rank * shard_degree + shard_rank) * tp + tp_rank

The technique of 04 is in `fsdp.py` beside this file, and that of 05 in `tensor_parallel.py`.

New since stages 04 and 05: the mesh; the initial values of a shard of a shard, and its place in a
checkpoint; gradients of norms, which are replicated over `tp` and lie between sharded matrices in
the buffer; a global norm that counts every parameter once.

    Q parameters that a rank has after tensor parallelism: 1 / tp of each matrix, and the norms; E
    of them in the embedding, O in the output; S ranks that shard, m micro-batches per step; float32

    memory per rank, bytes              16 Q / S, and 04's unsharded units, now 1 / tp as large
    communication per step, elements
        over shard                      reduce-scatter m Q + all-gather m (2 Q - E - O)
        over tp                         as 05, but 1 / S of the norms' gradients
        over replicate                  all-reduce Q / S

    Backward gathers the layers again. The output stays unsharded from forward to backward, where
    05's LM head reads its weight: nothing would hide a second all-gather.

Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2; and the papers of 04 and 05.

Run it:

    torchrun --nproc-per-node 4 14_2d/train.py --data sample --tp 2 --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # of the files beside this one

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from common.collectives import all_reduce, all_reduce_control, global_norm
from common.distributed import group_along
from common.model import initial_value
from fsdp import FullyShardedDataParallel
from tensor_parallel import (
    SequenceParallelRegion,
    TensorParallelModule,
    check_equal,
    shard_dims_of,
    shard_of,
    tensor_parallel,
)

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import World
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import State, split_over, state_of_flat_tensors, tensors_of

from common.job.arguments import base_parser, check_arguments, model_config, positive_int
from common.job.corpus import load_corpus
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: a shard of a shard
# ------------------------------------------------------------------------------------------------
#
# A layer's flat buffer on the two ranks of a tp group, and the part of it that a rank owns (S = 2):
#
#   tp_rank 0   | norm | wqkv: its rows | wo: its columns | norm | w1: its rows | w2: its columns |
#   tp_rank 1   | norm | wqkv: its rows | wo: its columns | norm | w1: its rows | w2: its columns |
#               |<----------------- shard_rank 0 ----------------->|<------- shard_rank 1 ------->|
#
# Ranks of a tp group have the same layout and the same shard_rank, so they own the same range. It
# holds different elements of the matrices on each of them, but equal copies of the norms.


class FullyShardedTensorParallel(FullyShardedDataParallel):
    """04's FSDP over `shard`, of a module whose matrices 05 has sharded over `tp`.

    The contract is 04's. Ranks of a tp group get the same batches.
    """

    def __init__(self, module: nn.Module, units: list[nn.Module], mesh: Mesh, **options):
        regions = [m.region for m in module.modules() if isinstance(m, TensorParallelModule)]
        if any(region.group is not mesh.tp for region in regions):
            raise ValueError("the module's matrices are sharded over another group than mesh.tp")
        replicate_group = mesh.replicate if mesh.replicate.size() > 1 else None
        super().__init__(module, units, mesh.shard, replicate_group, **options)
        self.tp, self.shard_dims = mesh.tp, shard_dims_of(module)  # by name; norms have none
        self.sequence_parallel = any(isinstance(r, SequenceParallelRegion) for r in regions)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: give each shard its average gradient."""
        last = self.in_flight
        is_new = last is not None and last.reduction is not None  # not in a second call
        super().finish_gradient_synchronization()
        if self.sequence_parallel and is_new:
            self.all_reduce_replicated_gradients()

    def all_reduce_replicated_gradients(self) -> None:
        """Sum the norms' gradients, once per step: each rank's are of its part of the sequence."""
        grads = self.gradients_of(sharded=False)
        flat = torch.cat(grads)
        if len(flat) == 0:  # on all ranks of tp, which own the same range
            return
        all_reduce(flat, group=self.tp)
        for grad, total in zip(grads, flat.split([len(grad) for grad in grads]), strict=True):
            grad.copy_(total)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this global norm; returns the norm before clipping."""
        grads = [shard.grad for shard in self.shards if shard.grad is not None]
        # Every parameter counts once. Squares of sharded gradients add up over `tp`, where the
        # replicated ones are equal, and those of all gradients over `shard`.
        squares = global_norm(self.gradients_of(sharded=True)).square()
        squares = all_reduce_control(squares, group=self.tp)
        replicated = global_norm(self.gradients_of(sharded=False))
        check_equal(replicated, self.tp)
        norm = all_reduce_control(squares + replicated.square(), group=self.group).sqrt()
        for grad in grads:
            grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def gradients_of(self, sharded: bool) -> list[Tensor]:
        """Views of this rank's gradients of the parameters that are sharded over `tp`, or of the
        others: norms. One view per unit is empty, for a rank that owns no part of such parameters.
        """
        views = []
        for unit in self.units:
            if unit.shard.grad is None:  # no backward has reached it
                continue
            ranges = ranges_in(unit.shapes, unit.owned)
            parts = [part for name, _, part in ranges if (name in self.shard_dims) == sharded]
            views += [unit.shard.grad[part] for part in [slice(0), *parts]]
        return views


def ranges_in(shapes: dict[str, torch.Size], owned: slice) -> Iterator[tuple[str, int, slice]]:
    """Split a range of a unit's flat parameter by tensors. Yields each tensor's name, where in the
    tensor the range begins, and the slice of the range that the tensor fills."""
    begin = 0  # of the tensor
    for name, shape in shapes.items():
        start, stop = max(owned.start, begin), min(owned.stop, begin + shape.numel())
        if start < stop:
            yield name, start - begin, slice(start - owned.start, stop - owned.start)
        begin += shape.numel()


def initial_shard_of_shard(
    seed: int,
    dims: dict[str, int],
    group: ProcessGroup,
    _: str,
    shapes: dict[str, torch.Size],
    owned: slice,
) -> Tensor:
    """The `read_shard` of a unit: draw its parameters, lay this rank's shards of them over `group`
    side by side, and return the range `owned`. shapes, dims: of these shards, by the full names."""
    flat = []
    for name, local in shapes.items():  # drawn in full, one by one
        shape, dim = list(local), dims.get(name)
        if dim is not None:
            shape[dim] *= group.size()
        flat.append(shard_of(initial_value(name, shape, seed), dim, group).flatten())
    return torch.cat(flat)[owned]


# ---- the mesh ----


class Mesh(NamedTuple):
    """This rank's process groups, one per axis."""

    replicate: ProcessGroup
    shard: ProcessGroup
    tp: ProcessGroup


def build_mesh(replicas: int, shards: int, tp: int, timeout: float) -> Mesh:
    """This rank's groups on the mesh: rank = (replicate_rank * shards + shard_rank) * tp + tp_rank.

    In a mesh of (2, 2, 2), rank 5 is in the groups {4, 5} of tp, {5, 7} of shard and {1, 5} of
    replicate.
    """
    shape = (replicas, shards, tp)
    if replicas * shards * tp != dist.get_world_size():
        raise ValueError(f"a mesh of {shape} ranks does not have {dist.get_world_size()}")
    axes = enumerate(Mesh._fields)
    return Mesh(*(group_along(shape, axis, name, timeout) for axis, name in axes))


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def sharded_from_meta(model: Transformer, args, world: World) -> FullyShardedTensorParallel:
    """Shard a model that is on the meta device; its units get their initial values one by one."""
    mesh = build_mesh(args.dp // args.shard_degree, args.shard_degree, args.tp, args.timeout)
    if args.tp > 1:
        tensor_parallel(model, mesh.tp, args.sequence_parallel)
    return FullyShardedTensorParallel(
        model,
        model.units(),
        mesh,
        param_dtype=getattr(torch, args.param_dtype),
        reduce_dtype=getattr(torch, args.reduce_dtype),
        reshard_after_forward=not args.no_reshard_after_forward,
        read_shard=partial(initial_shard_of_shard, args.seed, shard_dims_of(model), mesh.tp),
        device=world.device,
    )


def training_state(model: FullyShardedTensorParallel, optimizer: torch.optim.Optimizer) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    state: State = {}
    for unit in model.units:
        tensors = tensors_of(optimizer, unit.shard)
        state |= state_of_flat_tensors(tensors, unit.shapes, unit.owned.start)
    return split_over(model.tp, model.shard_dims, state)


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--tp", type=positive_int, default=1, help="tensor-parallel degree")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard the sequence too")
    parser.add_argument(
        "--shard-degree", type=positive_int, help="ranks that shard a unit (default: all)"
    )
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), help="default: --dtype")
    parser.add_argument("--reduce-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-reshard-after-forward", action="store_true", help="until backward")
    args = parser.parse_args(argv)
    dp, rest = divmod(world_size(), args.tp)
    if rest:
        fail(f"--tp {args.tp} does not divide the {world_size()} ranks (--nproc-per-node)")
    check_arguments(args, data_parallel_size=dp, tensor_parallel_size=args.tp)
    args.shard_degree = args.shard_degree or args.dp
    if args.dp % args.shard_degree:
        ranks = f"{args.dp} data-parallel ranks"
        fail(f"--shard-degree {args.shard_degree} does not divide the {ranks}")
    args.param_dtype = args.param_dtype or args.dtype
    args.autocast = False  # units are unsharded in --param-dtype, and their inputs cast to it
    return args


@torch.no_grad()
def evaluate(model, tokens, args, device, dp_rank: int) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args.batching, device, dp_rank, args.dp):
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
    model = sharded_from_meta(model, args, world)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))
    guard(model, optimizer)

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    dp_rank = world.rank // args.tp  # ranks of a tp group read the same batches
    batches = train_batches(corpus.train, args.batching, device, first_step, dp_rank, args.dp)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, dp_rank))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, dp_rank))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
