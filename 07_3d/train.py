"""Stage 07: data, tensor and pipeline parallelism together, on a three-dimensional mesh of ranks.

Every rank has a coordinate on each of three axes. The one on `pp` says which layers the rank owns,
the one on `tp` which shard of their matrices, and the one on `dp` which part of each batch:

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

Ranks that differ in only one coordinate form a process group, which communicates along that axis.
`tp` is innermost so that its ranks share a node: its collectives block several times per layer.
`pp` is outermost: its messages travel while other micro-batches compute.

New since 06: the mesh; ZeRO-1 over `dp`, after the pipeline has drained (Megatron-LM's distributed
optimizer); and a global norm that counts every parameter once. The parts of 05 and 06 that it takes
unchanged are beside this file, in tensor_parallel.py and pipeline.py.

    P parameters, of which a rank has Q, about P / (pp tp), in l layers; m micro-batches per step
    H = micro-batch x seq x d_model; e = 1 with the embedding, and 1 more with the LM head

    memory per rank   4 Q + 12 Q / dp bytes, and until the gradients are reduced 8 Q + 8 Q / dp;
                      06's activations for 1 / dp of the batch, sharded as in 05
    sent per step     over dp: reduce-scatter Q + all-gather Q
                      over tp: all-reduces of m (4 l + e) H elements, and 05's for the loss
                      over pp: m H per boundary and direction (--sequence-parallel: m H / tp)

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021; and the papers of 03, 05 and 06.

Run it:

    torchrun --nproc-per-node 8 07_3d/train.py --data sample --pp 2 --tp 2 --steps 100
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # of the files beside this one

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import (
    all_gather_single,
    all_reduce_control,
    global_norm,
    reduce_scatter_single,
)
from common.distributed import group_along
from common.model import Transformer
from common.unit_parameters import owned_by
from tensor_parallel import check_equal, shard_dims_of

# isort: split
from common.batches import eval_batches, train_batches
from common.loss import IGNORED
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import State, split_over, state_of_flat_tensors, tensors_of
from pipeline import Pipeline, PipelineStage, interleaved_1f1b, units_of
from tensor_parallel import all_reduce_replicated_gradients, init_shards, tensor_parallel

from common.job.arguments import base_parser, check_pipeline, model_config, positive_int
from common.job.corpus import load_corpus
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

# With one hardware queue kernels start in launch order, so an all-reduce is in flight before the
# matmul that hides it starts. From Blackwell on GPUs do not need it (Megatron-LM, arguments.py).
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# ------------------------------------------------------------------------------------------------
# The technique: a mesh of ranks, with 06 along pp, 05 along tp, and ZeRO-1 along dp
# ------------------------------------------------------------------------------------------------


class Mesh(NamedTuple):
    """This rank's process groups, one per axis; along `pp` two, one per direction."""

    to_lower: ProcessGroup
    to_higher: ProcessGroup
    dp: ProcessGroup
    tp: ProcessGroup

    @property
    def pp(self) -> ProcessGroup:
        return self.to_lower  # of the same ranks as `to_higher`


def build_mesh(pp: int, dp: int, tp: int, timeout: float, device: torch.device) -> Mesh:
    """This rank's groups on the mesh: rank = (pp_rank * dp + dp_rank) * tp + tp_rank.

    In a mesh of (2, 2, 2), rank 5 is in the groups {4, 5} of tp, {5, 7} of dp and {1, 5} of pp.
    """
    shape = (pp, dp, tp)
    if pp * dp * tp != dist.get_world_size():
        raise ValueError(f"a mesh of {shape} ranks does not have {dist.get_world_size()}")
    mesh = Mesh(
        to_lower=group_along(shape, 0, "to_lower", timeout),
        to_higher=group_along(shape, 0, "to_higher", timeout),
        dp=group_along(shape, 1, "dp", timeout),
        tp=group_along(shape, 2, "tp", timeout),
    )
    # NCCL connects a group's ranks in its first collective, which can wait for a receive in flight,
    # whose sender may wait for this rank: a deadlock. So connect dp and tp now
    for group in (mesh.dp, mesh.tp):
        all_reduce_control(torch.zeros(1, device=device), group=group)
    return mesh


def message_shape(tokens: Tensor, d_model: int, sequence_shards: int) -> tuple[int, int, int]:
    """The shape of the hidden states, or their gradients, that pipeline stages exchange."""
    batch, seq = tokens.shape
    return batch, seq // sequence_shards, d_model


def parts_of(model: Transformer, units: range) -> tuple[Transformer, nn.Module | None]:
    """The given units of a model: those before the output unit, and that unit or None."""
    part = Transformer(model.config, indices=())
    part.embed = model.embed if 0 in units else None
    for name, layer in model.layers.items():
        if int(name) + 1 in units:
            part.layers[name] = layer
    return part, model.output if model.config.n_units - 1 in units else None


# ---- along dp: ZeRO-1 ----


class DistributedOptimizer:
    """ZeRO-1 over `group`: an element-wise optimizer updates this rank's shard of the model's part.

    Call after the pipeline: `reduce_scatter_gradients()`, `clip_grad_norm_()`, `step()` and
    `zero_grad()`. This is 03's ZeRO-1, with one bucket and without overlap.

    full: [dp * length], padded; the parameters are views into it. shard: [length], a view of what
    `optimizer` updates.
    """

    def __init__(self, model: nn.Module, optimizer_class: type, group: ProcessGroup, **defaults):
        self.group = group
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if len({p.dtype for p in self.params.values()}) != 1:  # `cat` would convert them
            raise ValueError("a rank needs parameters that train, all of one dtype")
        flat = torch.cat([p.detach().flatten() for p in self.params.values()])
        self.owned, self.padding = owned_by(len(flat), group)
        self.full = F.pad(flat, (0, self.padding))
        *views, _ = self.full.split([*map(torch.numel, self.params.values()), self.padding])
        for param, view in zip(self.params.values(), views, strict=True):
            param.data = view.view(param.shape)
        self.shard = nn.Parameter(self.full[self.owned])
        self.optimizer = optimizer_class([self.shard], **defaults)

    @torch.no_grad()
    def reduce_scatter_gradients(self) -> None:
        """Give the shard its average gradient, and free the full gradients."""
        if missing := [name for name, p in self.params.items() if p.grad is None]:
            raise RuntimeError(f"no gradient: {', '.join(missing)}")
        grads = [p.grad.flatten() for p in self.params.values()]
        flat = torch.cat([*grads, self.full.new_zeros(self.padding)]).div_(self.group.size())
        self.zero_grad()
        self.shard.grad = torch.empty_like(self.shard)  # a view would keep `flat` alive
        reduce_scatter_single(self.shard.grad, flat, group=self.group)

    def gradients(self) -> dict[str, Tensor]:
        """Each parameter's gradient, as far as it is in the shard: a view, maybe empty."""
        found, begin = {}, -self.owned.start
        for name, param in self.params.items():
            end = begin + param.numel()
            found[name] = self.shard.grad[max(begin, 0) : max(end, 0)]
            begin = end
        return found

    def step(self) -> None:
        """Update this rank's shard, and all-gather the parameters."""
        self.optimizer.step()
        all_gather_single(self.full, self.shard.detach(), group=self.group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, whatever `set_to_none` is."""
        self.optimizer.zero_grad()
        for param in self.params.values():  # else the next backward adds to this step's gradient
            param.grad = None


# ---- clipping: one norm for the whole model ----


def clip_grad_norm_(
    model: nn.Module, optimizer: DistributedOptimizer, max_norm: float, mesh: Mesh
) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before clipping."""
    dims, grads = shard_dims_of(model), optimizer.gradients()
    sharded = [grad for name, grad in grads.items() if name in dims]
    replicated = [grad for name, grad in grads.items() if name not in dims]
    # Every parameter counts once. Squares of gradients that are sharded over `tp` add up over it,
    # and replicated ones are equal there. The squares of all shards add up over `dp` and `pp`.
    norm = global_norm(replicated).to(optimizer.shard.device)  # of no gradients it is on the CPU
    squares = norm.square()
    if sharded:  # with tp = 1, nothing is
        squares = squares + all_reduce_control(global_norm(sharded).square(), group=mesh.tp)
        check_equal(norm, mesh.tp)
    squares = all_reduce_control(squares, group=mesh.dp)
    total_norm = all_reduce_control(squares, group=mesh.pp).sqrt()
    clip_grads_with_norm_([optimizer.shard], max_norm, total_norm)
    return total_norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def training_state(model: nn.Module, optimizer: DistributedOptimizer, tp: ProcessGroup) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    shapes = {name: p.shape for name, p in optimizer.params.items()}
    tensors = tensors_of(optimizer.optimizer, optimizer.shard)
    state = state_of_flat_tensors(tensors, shapes, optimizer.owned.start)
    # parameters are loaded in full, not only their shard
    state |= state_of_flat_tensors({"model": optimizer.full}, shapes, 0)
    return split_over(tp, shard_dims_of(model), state)


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--pp", type=positive_int, default=1, help="pipeline-parallel degree")
    parser.add_argument("--tp", type=positive_int, default=1, help="tensor-parallel degree")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard the sequence too")
    schedules = ["1f1b", "interleaved"]
    parser.add_argument("--schedule", choices=schedules, default="1f1b", help="pipeline schedule")
    stages = "stages per rank (default: 2 if interleaved, else 1)"
    parser.add_argument("--virtual-stages", type=positive_int, help=stages)
    args = parser.parse_args(argv)
    dp, rest = divmod(world_size(), args.pp * args.tp)
    if rest:
        ranks = f"{world_size()} ranks (--nproc-per-node)"
        fail(f"--pp {args.pp} times --tp {args.tp} does not divide the {ranks}")
    return check_pipeline(args, args.pp, "--pp", dp, args.tp)  # with args.dp, args.virtual_stages


@torch.no_grad()
def evaluate(model, pipeline, tokens, args, device, mesh: Mesh) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    share = eval_batches(tokens, args.batching, device, mesh.dp.rank(), mesh.dp.size())
    batches = [(inputs, targets, None) for inputs, targets in share]
    counts = torch.stack([(targets != IGNORED).sum() for _, targets, _ in batches])
    losses = pipeline.run(batches).double()
    total = all_reduce_control((losses * counts).sum()) / mesh.tp.size()  # equal losses over tp
    count = all_reduce_control(counts.sum(), group=mesh.dp)  # ranks of dp have their own batches
    model.train()
    return (total / count).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    mesh = build_mesh(args.pp, args.dp, args.tp, args.timeout, device)
    dp, tp = mesh.dp, mesh.tp
    # pp chooses this rank's layers, then tp its shards of their matrices; dp chooses its batches
    n_stages = args.pp * args.virtual_stages
    own_stages = range(mesh.pp.rank(), n_stages, args.pp)
    units = {stage: units_of(stage, n_stages, config.n_layers) for stage in own_stages}
    with torch.device("meta"):
        model = Transformer(config, indices=[unit for own in units.values() for unit in own])
    if args.tp > 1:
        tensor_parallel(model, tp, args.sequence_parallel)
    init_shards(model, args.seed, tp, device)
    stages = {s: PipelineStage(*parts_of(model, units[s]), args.autocast) for s in own_stages}
    schedule = partial(interleaved_1f1b, v=args.virtual_stages)  # v = 1: 1F1B
    sequence_shards = args.tp if args.sequence_parallel else 1
    shape = partial(message_shape, d_model=config.d_model, sequence_shards=sequence_shards)
    pipeline = Pipeline(stages, schedule, mesh.to_lower, mesh.to_higher, shape)
    settings = adamw_settings(args.lr, args.weight_decay)
    optimizer = DistributedOptimizer(model, torch.optim.AdamW, dp, **settings)

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer, tp)
    first_step = run.checkpoints.load(args.resume, state, optimizer.optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, dp.rank(), dp.size())

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer.optimizer, lr)
        micro_batches = next(batches)
        losses = pipeline.run(micro_batches)
        if args.sequence_parallel and args.tp > 1:
            all_reduce_replicated_gradients(model, tp)
        optimizer.reduce_scatter_gradients()
        # losses are zeros except on the last pipeline stage, where they are equal over tp
        loss = all_reduce_control(losses.mean()) / (args.dp * args.tp)
        grad_norm = clip_grad_norm_(model, optimizer, args.max_norm, mesh)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, pipeline, corpus.valid, args, device, mesh))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, pipeline, corpus.test, args, device, mesh))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    for group in mesh:
        dist.destroy_process_group(group)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
