"""Stage 11: Muon, with one owner per matrix.

AdamW scales each element of a gradient by its own history. Muon treats a matrix's momentum as a
matrix: it brings all singular values near 1, by matmuls that need the whole matrix. An all-reduce
can be split into a reduce and a broadcast, and Muon computes in between: each matrix of the layers
has one owner, which gets the average gradient and broadcasts the update. All else keeps AdamW.

New since stage 02: `Muon`; `reduce_gradients`, after backward, replaces `DistributedDataParallel`.

    memory          4 P + 12 A + 8 O bytes per rank for P parameters, of which A are AdamW's and O
                    belong to the matrices that the rank owns.
                    During backward, 4 more per element of the matrices that it does not own.
                    During the step, 2 or 4 more per element of all matrices, for the updates.
    communication   per step: all-reduces of A gradients, reduces of the others, and broadcasts of
                    their updates, which are bfloat16 if --dtype is. More micro-batches add nothing.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. The scale of the
updates: Liu et al., "Muon is Scalable for LLM Training", 2025.

Run it:

    torchrun --nproc-per-node 2 11_muon/train.py --data sample --steps 100
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import all_reduce_control, average_gradients, broadcast, global_norm, reduce
from common.guards import NoGradient

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import World
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import State, tensors_of

from common.job.arguments import base_parser, check_arguments, model_config
from common.job.corpus import load_corpus
from common.job.launch import cleanup, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: reduce each matrix's gradient to its owner, which broadcasts the update
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def reduce_gradients(named_parameters: Iterable[tuple[str, nn.Parameter]], muon: Muon) -> None:
    """After a step's last backward, average each matrix's gradient on its owner, and all other
    gradients on every rank. RuntimeError, before any collective, if a gradient is missing."""
    named, owners, group = list(named_parameters), muon.owners, muon.group
    missing = [name for name, p in named if p in owners and p.grad is None]
    if missing:
        raise RuntimeError(f"no gradient: {', '.join(missing)}")
    n_ranks = dist.get_world_size(group)
    for param in owners:
        param.grad = param.grad / n_ranks  # not in place: gradients may share memory
    average_gradients([(name, p) for name, p in named if p not in owners], group)
    options = dict(group=group, async_op=True)
    reductions = [reduce(p.grad, group_dst=owner, **options) for p, owner in owners.items()]
    for param, reduction in zip(owners, reductions, strict=True):
        reduction.wait()
        if param not in muon.owned:  # a reduce may leave a partial sum here: make its use an error
            param.grad = NoGradient(param)


class Muon(torch.optim.Optimizer):
    """Update each matrix by its orthogonalized momentum, which its owner computes and broadcasts.

    owners: each matrix's rank in `group`, by `choose_owners`. dtype: of the matmuls and broadcasts.
    compiles: whether torch.compile compiles `orthogonalize`, once per shape. The momentum of a
    matrix exists on its owner only, from construction on.
    """

    def __init__(
        self,
        owners: dict[nn.Parameter, int],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
        compiles: bool = False,
        group: ProcessGroup | None = None,
    ):
        if any(p.dim() != 2 or not p.requires_grad or p.is_complex() for p in owners):
            raise ValueError("Muon takes real 2-D parameters that train; the others are for AdamW")
        if dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"small updates would become zero in {dtype}: use bfloat16")
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(list(owners), settings)
        self.owners, self.dtype, self.group = owners, dtype, group
        # in their order, which decides the last bits of the global norm
        self.owned = dict.fromkeys(p for p in owners if owners[p] == dist.get_rank(group))
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False, disable=not compiles)
        for param in self.owned:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, *, meanwhile: Callable[[], object] | None = None) -> None:
        """Broadcast each owned update while the next one is computed. Then apply all updates.

        meanwhile: called while the last broadcasts are in flight, such as another optimizer's step.
        """
        settings = self.param_groups[0]
        lr, weight_decay, beta = settings["lr"], settings["weight_decay"], settings["momentum"]
        elsewhere = {p for p in self.owners if isinstance(p.grad, NoGradient)}
        if elsewhere != self.owners.keys() - self.owned:
            raise RuntimeError("step() before reduce_gradients()")
        in_flight = []
        for param, owner in self.owners.items():
            update = torch.empty_like(param, dtype=self.dtype)
            if param in self.owned:
                # M <- beta M + (1 - beta) G, and for Nesterov's momentum the same once more
                momentum = self.state[param]["momentum_buffer"].lerp_(param.grad, 1 - beta)
                nesterov = param.grad.lerp(momentum, beta)
                update.copy_(self.orthogonalize(nesterov.to(self.dtype)))
            work = broadcast(update, group=self.group, group_src=owner, async_op=True)
            in_flight.append((param, update, work))
        if meanwhile is not None:
            meanwhile()
        for param, update, work in in_flight:
            work.wait()
            # an orthogonal matrix has RMS 1 / sqrt(larger side): scale to 0.2, about AdamW's
            scale = 0.2 * math.sqrt(max(param.shape))
            param.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * scale)

    def add_param_group(self, group: dict) -> None:
        if self.param_groups:
            raise ValueError("Muon has one group: give all matrices to its constructor")
        super().add_param_group(group)

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        if self.state.keys() != self.owned.keys():
            raise ValueError("this is the momentum of another rank, or of another number of ranks")


def orthogonalize(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Bring singular values above 1/660 of the norm to 0.68 ... 1.20; keep singular vectors.

    Newton-Schulz: each iteration applies s -> a s + b s^3 + c s^5 to every singular value s.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix  # [n, k], n <= k, so that X X^T is small
    # by the Frobenius norm, so that no singular value exceeds 1; a zero gradient remains zero
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.t()  # [n, n]
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if is_tall else x


def choose_owners(matrices: Iterable[nn.Parameter], n_ranks: int) -> dict[nn.Parameter, int]:
    """Give each matrix to a rank: the most expensive first, to the rank with the least work.

    matrices: in the same order on all ranks (no set). Updates run in the order of the result, in
    which every rank has its first matrix before any rank has a second one.
    """
    work, owners = [0] * n_ranks, {}
    for matrix in sorted(matrices, key=orthogonalization_flops, reverse=True):
        owners[matrix] = work.index(min(work))
        work[owners[matrix]] += orthogonalization_flops(matrix)
    return owners


def orthogonalization_flops(matrix: Tensor) -> int:
    n, k = sorted(matrix.shape)
    return 5 * (4 * n * n * k + 2 * n**3)


def clip_grad_norm_(model: nn.Module, muon: Muon, max_norm: float) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before clipping."""
    others = [p for p in model.parameters() if p.grad is not None and p not in muon.owners]
    # a rank without matrices still has to all-reduce a tensor
    zero = next(model.parameters()).new_zeros(1)
    owned = global_norm([zero, *(p.grad for p in muon.owned)]).square()
    replicated = global_norm(p.grad for p in others).square()
    # squares of owned gradients add up over the ranks; replicated gradients count once
    total_norm = (all_reduce_control(owned, group=muon.group) + replicated).sqrt()
    clip_grads_with_norm_([*muon.owned, *others], max_norm, total_norm)
    return total_norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def training_state(model: nn.Module, adamw: torch.optim.AdamW, muon: Muon) -> State:
    """The tensors of a plain model and both optimizers, by their names in a checkpoint."""
    state: State = {}
    for name, param in model.named_parameters():
        tensors = {"model": param.detach()} if param in muon.owners else tensors_of(adamw, param)
        if param in muon.state:  # other ranks have no momentum to save or to load
            tensors["optim.momentum"] = muon.state[param]["momentum_buffer"]
        state |= {f"{kind}.{name}": t for kind, t in tensors.items()}
    return state


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile each unit")
    parser.set_defaults(lr=1e-2)  # tuned for the tiny preset
    return check_arguments(parser.parse_args(argv), data_parallel_size=world_size())


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
    model = Transformer(config)
    init_weights(model, args.seed)
    model.to(device)
    if args.compile:
        for unit in model.units():
            unit.compile()
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    owners = choose_owners(matrices, world.size)
    others = [p for p in model.parameters() if p not in owners]
    dtype = getattr(torch, args.dtype)
    muon = Muon(owners, args.lr, args.weight_decay, dtype=dtype, compiles=args.compile)
    optimizer = torch.optim.AdamW(others, **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer, muon)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        set_learning_rate(muon, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        reduce_gradients(model.named_parameters(), muon)
        loss = all_reduce_control(loss) / world.size
        grad_norm = clip_grad_norm_(model, muon, args.max_norm)
        muon.step(meanwhile=optimizer.step)
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)
        muon.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
