"""Stage 06: pipeline parallelism: each rank owns some layers, micro-batches pass through the ranks.

Each rank owns a pipeline stage (interleaved: several). It receives activations from the previous
rank and sends its own to the next; in backward, gradients travel the other way. The batch is split
into micro-batches, so that all ranks compute at the same time. A schedule orders their forwards and
backwards, and so decides how many are in flight and how long ranks wait: the bubble.

New since 01: `Pipeline` runs any schedule, `PipelineStage` is this rank's part of the model, and
the global norm is over all stages. Every rank reads all batches.

    p ranks, m >= p micro-batches per step, v virtual stages per rank

    memory per rank           16 bytes per parameter of its own units, and the activations of the
                              micro-batches in flight: m (gpipe), p - rank (1f1b), p on every rank
                              (zero-bubble), at most p + (p - 1) / v (interleaved)
    communication per step    m x (micro-batch x seq x d_model) floats per boundary and direction
    bubble fraction           (p - 1) / (m + p - 1) gpipe, 1f1b; (p - 1) / (v m + p - 1)
                              interleaved; (p - 1) / (3 m + p - 1) zero-bubble

Huang et al., "GPipe", 2019. Narayanan et al., "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM", 2021 (1F1B, interleaved). Qi et al., "Zero Bubble Pipeline
Parallelism", 2023 (its schedule H1).

Run it:

    torchrun --nproc-per-node 2 06_pipeline/train.py --data sample --steps 100
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A rank posts receives before its first forward. By default CUDA loads a kernel when it is first
# launched, and may wait for operations in flight: a deadlock, if a receive depends on this kernel.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.nn.utils import clip_grads_with_norm_
from torch.profiler import record_function

from common.collectives import (
    all_reduce_control,
    forbid_float16,
    global_norm,
    irecv,
    isend,
)
from common.loss import forbid_create_graph, in_autocast_dtype
from common.module_checks import check_dtype, check_plain

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import group_along
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import training_state

from common.job.arguments import base_parser, check_pipeline, model_config, positive_int
from common.job.corpus import load_corpus
from common.job.launch import cleanup, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: schedules that tell each rank what to do next, and one executor
# ------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    kind: str  # F: forward, B: backward (zero bubble: input gradients only), W: weight gradients
    micro: int  # micro-batch
    stage: int  # on rank stage % p


def source_and_destination(action: Action, n_stages: int) -> tuple[int | None, int | None]:
    """The stages that an action receives from and sends to: activations go to the next stage (F),
    their gradients to the previous one (B). None where there is no message."""
    previous = action.stage - 1 if action.stage > 0 else None
    following = action.stage + 1 if action.stage < n_stages - 1 else None
    ends = {"F": (previous, following), "B": (following, previous), "W": (None, None)}
    return ends[action.kind]


Schedule = Callable[[int, int, int], list[Action]]  # of a rank, p ranks and m micro-batches


def gpipe(rank: int, p: int, m: int) -> list[Action]:
    """All forwards, then all backwards: m micro-batches in flight. Huang et al., 2019."""
    return [Action(kind, micro, rank) for kind in "FB" for micro in range(m)]


def one_f_one_b(rank: int, p: int, m: int) -> list[Action]:
    """1F1B: p - rank - 1 forwards, then a forward and a backward in turn: p - rank in flight."""
    forwards = [Action("F", micro, rank) for micro in range(m)]
    backwards = [Action("B", micro, rank) for micro in range(m)]
    return alternate(forwards, backwards, min(m, p - rank - 1))


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Warm-up: forwards. Steady state: one forward, one backward. Cool-down: backwards."""
    pairs = zip(forwards[warm_up:], backwards, strict=False)  # until the forwards run out
    steady_state = [action for pair in pairs for action in pair]
    return forwards[:warm_up] + steady_state + backwards[len(forwards) - warm_up :]


# ---- the executor ----


class Pipeline:
    """Run a schedule: forward and backward of all micro-batches through all stages.

    stages: this rank's, by number; stage s is on rank s % p. to_lower, to_higher: two groups of the
    same ranks, for messages to a lower and to a higher rank. NCCL runs the operations between two
    ranks of a group in order: in a single group, a send could wait behind a receive that depends on
    it. message_shape: maps a micro-batch's tokens to the shape of the activations between stages.
    """

    def __init__(
        self,
        stages: dict[int, PipelineStage],
        schedule: Schedule,
        to_lower: ProcessGroup,
        to_higher: ProcessGroup,
        message_shape: Callable[[Tensor], tuple[int, ...]],
    ):
        self.schedule, self.to_lower, self.to_higher = schedule, to_lower, to_higher
        self.p, self.rank = to_lower.size(), to_lower.rank()
        self.stages, self.n_stages = stages, self.p * len(stages)
        if self.p == 1 and len(stages) > 1:
            raise ValueError(f"one rank alone takes one stage, not {len(stages)}")
        parameter = next(next(iter(stages.values())).part.parameters(), None)
        if parameter is None:
            raise ValueError(f"rank {self.rank} of the pipeline needs layers")
        self.device, self.message_shape = parameter.device, message_shape
        self.receives: dict[Action, tuple[Work, Tensor]] = {}  # in flight, by the action that waits
        self.sends: deque[tuple[Work, Tensor]] = deque()  # in flight, the oldest first
        self.open_channels()

    def run(self, micro_batches: list[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
        """Forward and backward of micro-batches (tokens, targets, dropout keys); under `no_grad`
        forward only. Returns their losses, [m]: zeros except on the last rank."""
        if torch.is_grad_enabled() and any(x.requires_grad for x, _, _ in micro_batches):
            raise ValueError("an input requires a gradient, which it would not get: detach it")
        losses = torch.zeros(len(micro_batches), device=self.device)
        shapes = [self.message_shape(tokens) for tokens, _, _ in micro_batches]
        self.compare(torch.is_grad_enabled(), *shapes)
        actions = self.actions_for(len(micro_batches))
        # post each receive one action early: data arrives meanwhile (two early could deadlock)
        self.start_receive(actions[0], shapes[actions[0].micro])
        for action, upcoming in pairwise([*actions, None]):
            if upcoming is not None:
                self.start_receive(upcoming, shapes[upcoming.micro])
            received = self.finish_receive(action) if action in self.receives else None
            name = f"{action.kind} {action.micro} {action.stage}"
            # a stage's forward enables autocast itself; backward runs without it
            with record_function(name), torch.autocast(self.device.type, enabled=False):
                result = self.run_action(action, received, micro_batches)
            _, destination = source_and_destination(action, self.n_stages)
            if destination is not None:
                self.start_send(result, destination, shapes[action.micro])
            elif action.kind == "F":
                losses[action.micro] = result  # of the last stage
        while self.sends:
            self.finish_oldest_send()
        return losses

    def compare(self, *facts) -> None:
        """Raise if the ranks disagree: messages would not fit the buffers that receive them."""
        digest = torch.full((), hash(facts) % 2**32, device=self.device)
        extremes = torch.stack([digest, -digest])
        all_reduce_control(extremes, self.to_lower, ReduceOp.MAX)
        # private, but unlike `if` it does not wait for the GPU
        torch._assert_async(extremes.sum() == 0, "ranks differ in no_grad or micro-batch shapes")

    def actions_for(self, m: int) -> list[Action]:
        """This rank's actions with m micro-batches, under `no_grad` only its forwards (any m)."""
        trains = torch.is_grad_enabled()
        # interleaving needs a multiple of p: evaluation adds micro-batches that `return` drops
        micros = range(m if trains else ceil(m / self.p) * self.p)
        actions = self.schedule(self.rank, self.p, len(micros))
        needed = [(k, i, s) for s in self.stages for k in self.stages[s].kinds for i in micros]
        if sorted(actions) != sorted(needed):
            raise ValueError("the schedule must have each action of these stages exactly once")
        return [a for a in actions if trains or (a.kind == "F" and a.micro < m)]

    def run_action(self, action: Action, received: Tensor | None, micro_batches) -> Tensor | None:
        """Run an action. received: an F's activations or a B's gradient; None in an F of the first
        stage, which starts from tokens, and in a B of the last one, which starts from the loss."""
        stage = self.stages[action.stage]
        if action.kind == "W":
            return stage.weight_gradients()
        if action.kind == "B":
            return stage.backward(action.micro, received)
        tokens, targets, keys = micro_batches[action.micro]
        x = tokens if received is None else received
        return stage.forward(action.micro, x, targets, keys, len(micro_batches))

    def start_receive(self, action: Action, shape: tuple[int, ...]) -> None:
        """Post the receive of the message that an action needs, if it needs one."""
        source, _ = source_and_destination(action, self.n_stages)
        if source is None:
            return
        src = source % self.p
        buffer = torch.empty(shape, device=self.device, dtype=torch.float32)
        work = irecv(buffer, group=self.group_for(src, self.rank), group_src=src)
        self.receives[action] = work, buffer

    def finish_receive(self, action: Action) -> Tensor:
        work, buffer = self.receives.pop(action)
        work.wait()
        return buffer

    def start_send(self, tensor: Tensor | None, destination: int, shape: tuple[int, ...]) -> None:
        """Send without waiting. Beyond p sends in flight, wait for the oldest and free it."""
        if tensor is None:
            raise ValueError("a part does not use its input, so there is no gradient to send")
        if (tensor.shape, tensor.dtype) != (shape, torch.float32):
            found = f"{list(tensor.shape)} in {tensor.dtype}"
            raise ValueError(f"a message is {list(shape)} in float32, not {found}")
        dst = destination % self.p
        work = isend(tensor, group=self.group_for(self.rank, dst), group_dst=dst)
        self.sends.append((work, tensor))
        if len(self.sends) > self.p:
            self.finish_oldest_send()

    def finish_oldest_send(self) -> None:
        send, tensor = self.sends.popleft()  # `tensor` must stay alive until it is sent
        send.wait()

    def open_channels(self) -> None:
        """Send one number between all neighbours, in an order common to all ranks: NCCL's first
        operation between two ranks connects them, and blocks until both have issued it."""
        # the last rank and the first one are neighbours with interleaving only
        forward = {((stage - 1) % self.p, stage % self.p) for stage in range(1, self.n_stages)}
        for src, dst in sorted(forward | {(dst, src) for src, dst in forward}):
            number, group = torch.zeros(1, device=self.device), self.group_for(src, dst)
            if self.rank == src:
                isend(number, group=group, group_dst=dst).wait()
            if self.rank == dst:
                irecv(number, group=group, group_src=src).wait()

    def group_for(self, src: int, dst: int) -> ProcessGroup:
        return self.to_higher if dst > src else self.to_lower


class InFlight(NamedTuple):
    """What a stage keeps of a micro-batch between its forward and its backward."""

    x: Tensor  # the input, a leaf of the graph: backward leaves its gradient in x.grad
    edge: GradientEdge  # where backward starts: a node of the graph, and which of its outputs
    grad: Tensor | None  # the gradient there; None: the next stage will send it


class PipelineStage:
    """A contiguous range of units, and its micro-batches in flight.

    part: maps tokens or activations to activations. output: in the last stage, maps activations and
    targets to their mean loss; else None. autocast: compute in bfloat16; `part` returns float32."""

    kinds = "FB"  # of the actions that a schedule must have for each micro-batch

    def __init__(self, part: nn.Module, output: nn.Module | None, autocast: bool):
        self.part, self.output, self.autocast = part, output, autocast
        self.is_checked = False  # whether the first graph has been searched for float16
        self.in_flight: dict[int, InFlight] = {}  # by micro-batch

    def forward(self, micro: int, x: Tensor, targets: Tensor, keys: Tensor | None, m: int):
        """x: activations, in the first stage tokens. Returns activations, in the last stage a loss.
        m: the number of micro-batches. Gradients are those of the mean of their losses."""
        trains = torch.is_grad_enabled()
        x = x.detach().requires_grad_(trains and x.is_floating_point())  # tokens have no gradient
        # no cache: inside an outer autocast, it would keep the cast weights until that one ends
        with torch.autocast(x.device.type, torch.bfloat16, self.autocast, cache_enabled=False):
            y = self.part(x, keys=keys)  # [micro-batch, seq, d_model]
            detached = y.detach().requires_grad_(trains)  # a leaf: the loss's backward ends here
            result = detached if self.output is None else self.output(detached, targets)
        if trains:
            if not y.requires_grad:
                raise ValueError("a first stage that is all frozen: run it before the pipeline")
            if not self.is_checked:
                forbid_float16([y, result])
                self.is_checked = True
            if self.output is not None:
                # now: the logits or the head's gradient are too large to keep for each micro-batch
                (result / m).backward()
            # the edge and not y: nothing needs y's values any more
            self.in_flight[micro] = InFlight(x, get_gradient_edge(y), detached.grad)
        return result.detach()

    def backward(self, micro: int, grad: Tensor | None) -> Tensor | None:
        """grad: of y; None in the last stage. Accumulates the weights' gradients, returns x's."""
        kept = self.in_flight.pop(micro)
        torch.autograd.backward([kept.edge], [kept.grad if grad is None else grad])
        return kept.x.grad


def units_of(stage: int, n_stages: int, n_layers: int) -> range:
    """The units of a stage: its share of the layers; in the first stage also the embedding, in the
    last one the output. Remaining layers go to the first stages, because the output is heavy."""
    each, rest = divmod(n_layers, n_stages)
    first = 1 + stage * each + min(stage, rest)  # unit 0 is `embed`, layer i is unit i + 1
    end = first + each + (stage < rest)
    return range(first if stage else 0, end if stage < n_stages - 1 else n_layers + 2)


def parts_of(model: Transformer, units: range) -> tuple[Transformer, nn.Module | None]:
    """The given units of a model: those before the output unit, and that unit or None."""
    part = Transformer(model.config, indices=())
    part.embed = model.embed if 0 in units else None
    for name, layer in model.layers.items():
        if int(name) + 1 in units:
            part.layers[name] = layer
    return part, model.output if model.config.n_units - 1 in units else None


# ---- interleaving: v shorter stages per rank ----


def interleaved_1f1b(rank: int, p: int, m: int, v: int = 1) -> list[Action]:
    """1F1B in which a micro-batch passes every rank v times. The pipeline fills v times faster,
    with messages over v p - 1 boundaries. Micro-batches go round in groups of p: p divides m."""
    if v == 1:
        return one_f_one_b(rank, p, m)
    if m % p:
        raise ValueError(f"interleaving needs a multiple of {p} micro-batches, not {m}")
    rounds = [  # chunk: which of this rank's v stages
        (micro, chunk)
        for start in range(0, m, p)
        for chunk in range(v)
        for micro in range(start, start + p)
    ]
    forwards = [Action("F", micro, chunk * p + rank) for micro, chunk in rounds]
    backwards = [Action("B", micro, (v - 1 - chunk) * p + rank) for micro, chunk in rounds]
    # the factor 2 gives messages time to arrive: with 1, each is needed the moment it is sent
    warm_up = min(v * m, (v - 1) * p + 2 * (p - rank - 1))
    return alternate(forwards, backwards, warm_up)


# ---- zero bubble: backward split into two parts ----


def zero_bubble(rank: int, p: int, m: int) -> list[Action]:
    """1F1B whose backward has two parts: B computes the gradient of the input, W the gradients of
    the weights. A micro-batch is in flight from its F to its W (Qi et al.'s H1).

    A W runs before each F that finds p micro-batches in flight, and after each B when all F have
    run: these W delay no other rank. The remaining W end the step (on rank 0 there are none). On
    rank 0 of 4, m = 6:

        F0 F1 F2 F3  B0 W0 F4  B1 W1 F5  B2 W2  B3 W3  B4 W4  B5 W5
    """
    order = one_f_one_b(rank, p, m)
    last_forward = order.index(Action("F", m - 1, rank))
    weights = iter([Action("W", micro, rank) for micro in range(m)])
    actions = []
    for i, action in enumerate(order):
        if action.kind == "F" and action.micro >= p:
            actions.append(next(weights))
        actions.append(action)
        if i > last_forward:
            actions.append(next(weights))
    return actions + list(weights)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved_1f1b}
SCHEDULES["zero-bubble"] = zero_bubble


class ZeroBubbleStage(PipelineStage):
    """A stage whose backward defers the weight gradients of its linear layers.

    Those of norms and embedding are computed in B, those of the LM head with the loss. pending:
    what each micro-batch's W needs, the oldest first: of every linear layer the weight, the input
    [tokens, in] and the output gradient [tokens, out]."""

    kinds = "FBW"

    def __init__(self, part: nn.Module, output: nn.Module | None, autocast: bool):
        super().__init__(part, output, autocast)
        self.pending: deque[list[tuple[nn.Parameter, Tensor, Tensor]]] = deque()
        for layer in self.part.layers.values():
            layer.attn.wqkv = DeferredLinear(layer.attn.wqkv, self.pending)
            layer.attn.wo = DeferredLinear(layer.attn.wo, self.pending)
            layer.mlp.w1 = DeferredLinear(layer.mlp.w1, self.pending)
            layer.mlp.w2 = DeferredLinear(layer.mlp.w2, self.pending)

    def backward(self, micro: int, grad: Tensor | None) -> Tensor | None:
        self.pending.append([])  # for the backward of each layer to fill
        return super().backward(micro, grad)

    @torch.no_grad()
    def weight_gradients(self) -> None:
        """Compute the weight gradients of the oldest micro-batch. No hooks on weights run."""
        for weight, x, grad in self.pending.popleft():
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                raise RuntimeError("hooks on a deferred weight, such as DDP's, would never run")
            weight_grad = (grad.t() @ x).to(weight.dtype)
            weight.grad = weight_grad if weight.grad is None else weight.grad.add_(weight_grad)


class DeferredLinear(nn.Module):
    """y = x W^T, with the weight of `plain`. Its backward records what dW's matmul needs."""

    def __init__(self, plain: nn.Module, pending: deque[list]):
        super().__init__()
        check_plain(plain, "weight")  # a bias, for example, would get no gradient
        self.weight, self.training, self.pending = plain.weight, plain.training, pending

    def reset_parameters(self) -> None:  # as in nn.Linear
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.weight.requires_grad and not x.requires_grad:
            raise ValueError("x needs a gradient for backward to run: train an earlier layer")
        return LinearWithDeferredGradient.apply(in_autocast_dtype(x), self)


class LinearWithDeferredGradient(torch.autograd.Function):
    """y = x W^T, whose backward computes dX and records the operands of dW's matmul."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: DeferredLinear) -> Tensor:
        check_dtype(x)
        ctx.save_for_backward(x)
        ctx.layer = layer  # its weight is no input: autograd computes no gradient of it
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    @forbid_create_graph
    def backward(ctx, grad: Tensor):
        (x,), weight = ctx.saved_tensors, ctx.layer.weight
        if weight.requires_grad:
            ctx.layer.pending[-1].append((weight, x.flatten(0, -2), grad.flatten(0, -2)))
        return grad @ weight.to(grad.dtype), None  # cast again: no bf16 copy of W is kept


# ---- clipping: the norm is that of all ranks' gradients ----


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before clipping."""
    params = list(model.parameters())  # frozen: an empty grad keeps the norm on the device
    squares = global_norm(p.new_zeros(0) if p.grad is None else p.grad for p in params).square()
    total_norm = all_reduce_control(squares).sqrt()  # all ranks are stages: squares add up
    clip_grads_with_norm_(params, max_norm, total_norm)
    return total_norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="pipeline schedule")
    stages = "stages per rank (default: 2 if interleaved, else 1)"
    parser.add_argument("--virtual-stages", type=positive_int, help=stages)
    return check_pipeline(parser.parse_args(argv), world_size(), "--nproc-per-node")


@torch.no_grad()
def evaluate(model, pipeline, tokens, args, device) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    share = eval_batches(tokens, args.batching, device)
    batches = [(inputs, targets, None) for inputs, targets in share]
    counts = torch.stack([(targets != IGNORED).sum() for _, targets, _ in batches])
    losses = pipeline.run(batches).double()
    total = all_reduce_control((losses * counts).sum())
    model.train()
    return (total / counts.sum()).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    n_stages = world.size * args.virtual_stages
    own_stages = range(world.rank, n_stages, world.size)
    units = {stage: units_of(stage, n_stages, config.n_layers) for stage in own_stages}
    with torch.device("meta"):
        model = Transformer(config, indices=[unit for own in units.values() for unit in own])
    init_weights(model.to_empty(device=device), args.seed)
    groups = [group_along((world.size,), 0, to, args.timeout) for to in ("to_lower", "to_higher")]
    schedule = SCHEDULES[args.schedule]
    if args.virtual_stages > 1:
        schedule = partial(schedule, v=args.virtual_stages)
    stage_class = ZeroBubbleStage if args.schedule == "zero-bubble" else PipelineStage
    stages = {s: stage_class(*parts_of(model, units[s]), args.autocast) for s in own_stages}
    pipeline = Pipeline(stages, schedule, *groups, lambda tokens: (*tokens.shape, config.d_model))
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = all_reduce_control(pipeline.run(micro_batches).mean())
        grad_norm = clip_grad_norm_(model, args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, pipeline, corpus.valid, args, device))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, pipeline, corpus.test, args, device))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    for group in groups:
        dist.destroy_process_group(group)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
