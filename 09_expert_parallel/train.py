"""Stage 09: expert parallelism: a mixture of experts, its experts sharded across the ranks.

Each layer's MLP is replaced by E experts: smaller MLPs, of which a router picks k for each token.
So the model has E/k times the MLP parameters at the same FLOPs per token. The experts are sharded
across the ranks: an all-to-all sends every token to the ranks of its experts, and a second one
returns the results. No token is dropped, however many choose the same expert.

New since stage 01: data parallelism as in 02, but without overlap (`average_gradients`, after
backward, over all ranks or the expert's replicas); `expert_parallel`; a global norm that counts
each expert once; and a bias per expert that keeps the load balanced.

    The model has D dense parameters, and X in all experts. --ep ranks hold one set of experts. Per
    layer and micro-batch of T tokens, a rank sends S rows of d_model to others and receives R.

    memory per rank           16 (D + X / ep) bytes; kept by a layer's mixture for backward, if
                              balanced: T d_model (9 + 2 k) elements
    communication per step    all-reduces of D gradients, of X / ep over replicas, and of all loads
    per layer, micro-batch    4 all-to-alls of 2 (S + R) rows in total, one of E (1 - 1/ep) counts;
                              --activation-checkpointing: 6 of 3 (S + R), and the counts twice

Lepikhin et al., "GShard", 2020, section 3.2. Gale et al., "MegaBlocks", 2022 (no dropping). Wang
et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.

Run it:

    torchrun --nproc-per-node 2 09_expert_parallel/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import (
    all_reduce,
    all_reduce_control,
    all_to_all_single,
    average_gradients,
    global_norm,
)
from common.loss import in_autocast_dtype

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import World, group_along, print0
from common.loss import IGNORED
from common.model import MLP, Transformer, TransformerConfig, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import training_state

from common.job.arguments import (
    base_parser,
    check_arguments,
    model_config,
    non_negative,
    positive_int,
)
from common.job.corpus import load_corpus
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: tokens travel to their experts and back
# ------------------------------------------------------------------------------------------------
#
#   x [T, d] --router--> k experts per token --sort by expert--> rows [T k, d]
#     --all-to-all--> rows of the local experts, from every rank --each expert's MLP-->
#     --all-to-all--> rows [T k, d] of this rank's tokens --weighted sum over k--> y [T, d]


def expert_parallel(model: Transformer, group: ProcessGroup) -> Transformer:
    """Replace every layer's MLP, in place, with a mixture of experts sharded over `group`."""
    config = model.config
    for layer in model.layers.values():
        layer.mlp = MixtureOfExperts(
            config.d_model, config.n_experts, config.top_k, lambda _: MLP(config), group
        )
    return model


class MixtureOfExperts(nn.Module):
    """E experts, of which each token uses the k with the highest score plus bias.

    make_expert: maps an expert's global index to a module from [rows, d] to [rows, d].
    experts: those of this rank, by global index. bias: [E], added to the scores to choose experts,
    not to weight results. load: [E], this rank's tokens per expert since `balance_load`.
    """

    def __init__(
        self, d_model: int, n_experts: int, top_k: int, make_expert: Callable, group: ProcessGroup
    ):
        super().__init__()
        if n_experts % group.size() or not 1 <= top_k <= n_experts:
            raise ValueError(f"{n_experts} experts on {group.size()} ranks, {top_k} per token")
        self.group, self.n_experts, self.top_k = group, n_experts, top_k
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.register_buffer("bias", torch.zeros(n_experts, dtype=torch.float32))
        n_local = n_experts // group.size()
        own = range(group.rank() * n_local, (group.rank() + 1) * n_local)
        self.experts = nn.ModuleDict({str(i): make_expert(i) for i in own})
        self.load: Tensor | int = 0

    def reset_parameters(self) -> None:
        self.bias.zero_()  # the router and the experts have methods of their own

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, d_model] -> the same
        tokens = x.flatten(0, -2)  # [T, d]
        weights, chosen = self.route(tokens)
        expert_of_row = chosen.flatten()  # [T k], row i is a copy of token i // k
        counts = torch.zeros_like(self.bias, dtype=torch.int64)
        counts.scatter_add_(0, expert_of_row, torch.ones_like(expert_of_row))
        if self.training:  # with checkpointing every token counts twice, but only ratios matter
            self.load = self.load + counts
        order = expert_of_row.argsort(stable=True)  # so the rows for one rank are contiguous
        # copy, then cast: so backward adds up the gradients of a token's k copies in float32
        rows = in_autocast_dtype(tokens[order // self.top_k])  # [T k, d]
        if rows.dtype == torch.float16:
            raise ValueError("float16: a GradScaler would skip a step on some ranks; use bfloat16")

        counts_out, counts_in = exchange_counts(counts, self.group)
        send = [sum(of_rank) for of_rank in counts_out]  # rows for each rank
        receive = [sum(of_rank) for of_rank in counts_in]
        # the factors act in backward, the second one first: divide before the experts, multiply
        # after them. This averages only their own gradients
        n_ranks = self.group.size()
        rows = AllToAll.apply(rows, send, receive, self.group, n_ranks)
        rows = self.run_experts(rows, counts_in)
        rows = AllToAll.apply(rows, receive, send, self.group, 1 / n_ranks)

        results = torch.empty_like(rows)
        results[order] = rows  # back to the tokens' order
        results = results.unflatten(0, (-1, self.top_k))  # [T, k, d]
        return (results * weights[..., None]).sum(dim=1).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, and the weights of their results: the softmax over the logits of
        these experts, or the score if k = 1. Returns weights and indices, [T, k] each."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)  # bf16 scores would often be equal
        with torch.autocast(tokens.device.type, enabled=False):
            logits = tokens.to(dtype) @ self.router.weight.to(dtype).t()  # [T, E]
        scores = logits.softmax(dim=-1)
        chosen = self.choose(scores.detach())
        if self.top_k == 1:  # the softmax over one logit is 1, and the router's gradient zero
            return scores.gather(-1, chosen), chosen
        return logits.gather(-1, chosen).softmax(dim=-1), chosen

    def choose(self, scores: Tensor) -> Tensor:
        """Choose each token's k experts: the only discrete step. `routing.py` replays it."""
        return (scores + self.bias).topk(self.top_k, dim=-1).indices

    def run_experts(self, rows: Tensor, counts_in: list[list[int]]) -> Tensor:
        """Apply each local expert to its rows, which are ordered by source rank, then expert.

        In the example of `exchange_counts`, rank 0 has parts of 3, 1, 1 and 1 rows: its first
        expert gets parts 0 and 2, its second expert parts 1 and 3.
        """
        parts = list(rows.split([n for of_rank in counts_in for n in of_rank]))
        n_local = len(self.experts)
        for i, expert in enumerate(self.experts.values()):
            # also without rows: then its gradient is zero, and every rank has the same graph
            inputs = parts[i::n_local]  # one part per source rank
            parts[i::n_local] = expert(torch.cat(inputs)).split([len(part) for part in inputs])
        return torch.cat(parts)


class AllToAll(torch.autograd.Function):
    """Send `send[r]` rows to rank r and receive `receive[r]` from it, in the order of the ranks.
    Backward sends the gradients the way back and multiplies them by `factor`."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup, factor: float
    ):
        ctx.way_back, ctx.factor = (receive, send, group, 1.0), factor
        output = rows.new_empty(sum(receive), rows.shape[1])
        all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return AllToAll.apply(grad, *ctx.way_back).mul_(ctx.factor), None, None, None, None


def exchange_counts(counts: Tensor, group: ProcessGroup) -> list[list[list[int]]]:
    """Tell every rank how many rows it will get for each of its experts.

    counts: [E], this rank's rows per expert. Returns how many rows this rank sends to, and how many
    it receives from each rank: lists by rank, of lists by the receiver's experts. For example:

        counts      rank 0: [3, 1, 0, 2]            rank 1: [1, 1, 4, 0]
        sends       rank 0: [[3, 1], [0, 2]]        rank 1: [[1, 1], [4, 0]]
        receives    rank 0: [[3, 1], [1, 1]]        rank 1: [[0, 2], [4, 0]]
    """
    received = torch.empty_like(counts)
    all_to_all_single(received, counts, group=group)
    # an all-to-all takes its splits from the host, which waits for the GPU here
    return torch.stack([counts, received]).view(2, group.size(), -1).tolist()


# ---- after backward ----


def mixtures_of(model: nn.Module) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def replicated_and_sharded(model: nn.Module) -> tuple[list, list]:
    """The named parameters that every rank has, and those of this rank's experts."""
    experts = {p for mixture in mixtures_of(model) for p in mixture.experts.parameters()}
    named = [*model.named_parameters()]
    return [x for x in named if x[1] not in experts], [x for x in named if x[1] in experts]


@torch.no_grad()
def balance_load(model: nn.Module, rate: float, group: ProcessGroup | None = None) -> Tensor:
    """Lower the bias of every expert that had more tokens than the mean by rate / E, and raise it
    for those that had fewer; then subtract the mean change.

    rate: in units of the mean score, 1/E. group: the ranks whose tokens are counted; they have the
    same layers (default: all). Returns the load of the busiest expert, relative to the mean,
    averaged over the layers.
    """
    mixtures = mixtures_of(model)
    if any(isinstance(mixture.load, int) for mixture in mixtures):
        raise RuntimeError("a mixture has counted no tokens: run the model, in training mode")
    load = torch.stack([mixture.load for mixture in mixtures])  # [layers, E], with the same E
    all_reduce(load, group=group)
    total = load.sum(dim=1, keepdim=True)
    excess = load * load.shape[1] - total  # in integers: the same sign on any number of ranks
    signs = excess.sign().float()
    signs -= signs.mean(dim=1, keepdim=True)  # the biases' mean has no effect: keep it at zero
    for mixture, sign in zip(mixtures, signs, strict=True):
        mixture.bias = mixture.bias.float()  # model.bfloat16() casts it: small steps would be lost
        mixture.bias -= rate / mixture.n_experts * sign
        mixture.load = 0
    return (load.amax(dim=1) * load.shape[1] / total[:, 0]).mean()


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before clipping."""
    replicated, sharded = (
        [p.grad for _, p in named if p.grad is not None] for named in replicated_and_sharded(model)
    )
    # squares of sharded gradients add up over the experts' ranks; replicated ones count once
    squares = global_norm(sharded).square().to(next(model.parameters()).device)
    squares = all_reduce_control(squares, group=mixtures_of(model)[0].group)
    total_norm = (squares + global_norm(replicated).square().to(squares)).sqrt()
    clip_grads_with_norm_(model.parameters(), max_norm, total_norm)
    return total_norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixtureConfig(TransformerConfig):
    """The k experts of a token are together as wide as a dense MLP."""

    n_experts: int = 8
    top_k: int = 2

    @property
    def d_hidden(self) -> int:
        return 4 * self.d_model // self.top_k

    def num_parameters(self) -> int:
        more = (self.n_experts - 1) * 2 * self.d_hidden + self.n_experts  # experts; the router
        return super().num_parameters() + self.n_layers * self.d_model * more

    def num_active_parameters(self) -> int:
        idle = (self.n_experts - self.top_k) * 2 * self.d_hidden
        return self.num_parameters() - self.n_layers * self.d_model * idle


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--n-experts", type=positive_int, default=8, help="experts per layer")
    parser.add_argument("--top-k", type=positive_int, default=2, help="experts per token")
    degree = "ranks that share one set of experts (default: gcd of ranks and experts)"
    parser.add_argument("--ep", type=positive_int, help=degree)
    balance = "step of the experts' biases, in mean scores 1/E; 0: no balancing"
    parser.add_argument("--balance-rate", type=non_negative, default=0.08, help=balance)
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    if args.top_k > args.n_experts or 4 * args.d_model % args.top_k:
        limits = f"--n-experts {args.n_experts}, and a divisor of 4 times --d-model {args.d_model}"
        fail(f"--top-k {args.top_k} must be at most {limits}")
    n_ranks, n_experts = world_size(), args.n_experts
    fit = [d for d in range(1, n_ranks + 1) if n_ranks % d == n_experts % d == 0]
    args.ep = args.ep or fit[-1]
    if args.ep not in fit:
        both = f"the {n_ranks} ranks (--nproc-per-node) and --n-experts {n_experts}"
        fail(f"--ep {args.ep} does not divide both {both}: pass one of {fit}")
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

    config = model_config(args, corpus, MixtureConfig)
    mesh = (world.size // args.ep, args.ep)  # ep innermost: its ranks share a node
    ep = group_along(mesh, 1, "ep", args.timeout)
    replicas = group_along(mesh, 0, "replicas", args.timeout)
    model = Transformer(config)
    expert_parallel(model, ep)
    init_weights(model, args.seed)
    for name, layer in model.layers.items():
        if "0" in layer.mlp.experts:  # one expert per layer is stage 01's MLP
            init_weights(layer.mlp.experts["0"], args.seed, f"layers.{name}.mlp.")
    model.to(device)
    replicated, sharded = replicated_and_sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    print0(f"{args.n_experts} experts per layer, sharded over {args.ep} of {world.size} ranks")
    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        average_gradients(replicated)
        average_gradients(sharded, replicas)
        loss = all_reduce_control(loss) / world.size
        grad_norm = clip_grad_norm_(model, args.max_norm)
        optimizer.step()
        load = balance_load(model, args.balance_rate)
        run.log(step, loss, grad_norm, lr, load=load)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    for group in (ep, replicas):
        dist.destroy_process_group(group)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
