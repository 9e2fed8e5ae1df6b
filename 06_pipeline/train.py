"""Stage 06: pipeline parallelism, each rank some layers, micro-batches on their way through them.

A rank owns a run of units and nothing else. It gets vectors from the rank before, hands its own to
the rank behind, and in backward gradients come the other way. A batch is cut into micro-batches,
so that ranks work at a time; a schedule says who does what in which order, and how long they idle.

New since stage 01: a process group (`setup`, `cleanup`), four schedules, `PipelineStage`,
`Pipeline`, which runs any schedule, and a norm over all stages. Every rank reads all batches.

    memory      16 bytes a parameter of the rank's own units, and the activations of the
                micro-batches in flight: all m (gpipe), at most p (1f1b, zero-bubble)
    traffic     m x (micro batch x seq x d_model) floats over each boundary, each way
    idle        (p-1) / (m+p-1) of the time, interleaved (p-1) / (v m+p-1), zero-bubble
                (p-1) / (3m+p-1), for p ranks, m >= p micro-batches and v virtual stages a rank

Huang et al., "GPipe", 2019. Narayanan et al., "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM", 2021 (1F1B, interleaved). Qi et al., "Zero Bubble Pipeline
Parallelism", 2023 (its schedule H1).

Run it:

    torchrun --nproc-per-node 2 06_pipeline/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup, Work
from torch.nn.utils import clip_grads_with_norm_
from torch.profiler import record_function

from common.arguments import base_parser, check_pipeline, model_config, positive_int, seconds
from common.checkpoint import load_checkpoint, save_checkpoint, training_state
from common.collectives import all_reduce_control, irecv, isend
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import cleanup, setup, world_size
from common.model import IGNORED, Linear, Transformer, in_autocast_dtype, init_weights
from common.optimization import adamw_settings, global_norm, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: schedules, what they send, and one executor for all of them
# ------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """What a rank does at a time: `F` a forward, `B` a backward, or backward in two parts, `I`
    for the gradient of the input and `W` for those of the weights."""

    kind: str
    micro: int  # micro-batch
    chunk: int = 0  # the rank's virtual stage: stage = chunk * p + rank


# ---- schedules: p ranks, m micro-batches, v virtual stages a rank -> one rank's actions ----


def forwards(p: int, m: int, v: int) -> list[Action]:
    """All forwards of a rank: p micro-batches through its first chunk, then the next, and so on."""
    return [
        Action("F", micro, chunk)
        for start in range(0, m, p)
        for chunk in range(v)
        for micro in range(start, min(start + p, m))
    ]


def backwards(p: int, m: int, v: int) -> list[Action]:
    """All backwards in the same order of micro-batches, through the chunks from the last one."""
    return [Action("B", micro, v - 1 - chunk) for _, micro, chunk in forwards(p, m, v)]


def warm_up_then_alternate(p: int, m: int, v: int, warm_up: int) -> list[Action]:
    """Some forwards; then by turns one forward, one backward (steady state); then cool-down."""
    fs, bs = forwards(p, m, v), backwards(p, m, v)
    steady = zip(fs[warm_up:], bs, strict=False)  # ends with the forwards
    return fs[:warm_up] + [action for pair in steady for action in pair] + bs[len(fs) - warm_up :]


def gpipe(p: int, m: int, v: int, rank: int) -> list[Action]:
    """All forwards, then all backwards: m micro-batches in flight. Huang et al., 2019."""
    return forwards(p, m, v) + backwards(p, m, v)


def one_f_one_b(p: int, m: int, v: int, rank: int) -> list[Action]:
    """As many forwards as it takes until the first gradient is back: p - rank in flight."""
    return warm_up_then_alternate(p, m, v, min(m, p - rank - 1))


def interleaved_1f1b(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B where a rank has v short stages instead of a long one: the pipeline fills v times
    faster, for v times the traffic. Micro-batches come by p, so m is a multiple of p."""
    if v == 1:
        return one_f_one_b(p, m, v, rank)
    return warm_up_then_alternate(p, m, v, min(v * m, (v - 1) * p + 2 * (p - rank - 1)))


def zero_bubble(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B whose weight gradients, for which nobody waits, fill the time that it idles.

    A micro-batch is in flight until its W is done: it makes room for the forward of the p-th
    after it just before that. Behind the last forward a W follows each I, while the next gradient
    is on its way.
    """
    kinds: list[str] = []
    for kind, micro, _ in one_f_one_b(p, m, v, rank):
        if kind == "F":
            kinds += ["W", "F"] if micro >= p else ["F"]
        else:
            kinds += ["I", "W"] if micro >= m - (p - rank) else ["I"]
    kinds += ["W"] * (m - kinds.count("W"))
    number = {kind: count() for kind in "FIW"}  # each kind in the order of the micro-batches
    return [Action(kind, next(number[kind])) for kind in kinds]


def forward_only(p: int, m: int, v: int, rank: int) -> list[Action]:
    """For evaluation."""
    return forwards(p, m, v)


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zero-bubble": zero_bubble,
}
Schedule = Callable[[int, int, int, int], list[Action]]


# ---- what the actions make the ranks send ----


class Message(NamedTuple):
    """What an action waits for: `F` vectors, `B` their gradients, [micro batch, seq, d_model]."""

    kind: str
    micro: int
    stage: int  # that takes it

    def sender(self, p: int) -> int:
        return (self.stage + (-1 if self.kind == "F" else 1)) % p


def messages(action: Action, p: int, v: int, rank: int) -> tuple[Message | None, Message | None]:
    """What a rank's action starts from and what it ends with, where that is a message.

    The first stage starts from tokens, and nobody wants its gradient; the last ends with a loss.
    """
    if action.kind == "W":
        return None, None
    stage, last = action.chunk * p + rank, p * v - 1
    before = Message("F", action.micro, stage) if stage > 0 else None
    after = Message("B", action.micro, stage) if stage < last else None
    if action.kind == "F":
        return before, after and Message("F", action.micro, stage + 1)
    return after, before and Message("B", action.micro, stage - 1)


@lru_cache
def plan(
    schedule: Schedule, p: int, m: int, v: int, rank: int, ahead: int = 2
) -> list[tuple[list[Message], Action]]:
    """A rank's actions, each with the messages for which to post a receive before it starts.

    Posted `ahead` actions before they are needed, so that data flows while the rank computes. A
    transport may match by order alone (NCCL ignores tags): under every schedule here a rank makes
    its messages to another in the order in which that one needs them.
    """
    actions = schedule(p, m, v, rank)
    needed = [messages(action, p, v, rank)[0] for action in actions]
    steps = []
    for i, action in enumerate(actions):
        posts = needed[i + ahead if i else 0 : i + ahead + 1]
        steps.append(([message for message in posts if message], action))
    return steps


# ---- backward in two parts ----


class SplitLinear(torch.autograd.Function):
    """y = x W^T, whose backward makes the gradient of x and notes what that of W is made of.

    W comes as an attribute: were it an input, autograd would run its hooks with no gradient there.
    """

    @staticmethod
    def forward(ctx, x: Tensor, linear: Linear, queue: list) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = linear.weight, queue
        return F.linear(x, linear.weight.to(x.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        ctx.queue.append((ctx.weight, x.flatten(0, -2), grad.flatten(0, -2)))
        # cast again: no bf16 copy of W is kept
        return grad @ ctx.weight.to(grad.dtype), None, None


def split_backward(module: nn.Module, queue: list[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
    """From now on backward through the linear maps of `module` makes no gradient of a weight: it
    appends weight, input [tokens, in] and gradient of the output [tokens, out] to `queue`."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.forward = lambda x, child=child: SplitLinear.apply(
                in_autocast_dtype(x), child, queue
            )


# ---- a stage, and the pipeline ----


def units_of(stage: int, n_stages: int, n_layers: int) -> range:
    """The units of a stage: layers as evenly as they go. The embedding is with the first, the
    output with the last; that is the heavy end, so layers left over go to the first stages."""
    each, rest = divmod(n_layers, n_stages)
    first = 1 + stage * each + min(stage, rest)  # unit 0 is `embed`, layer i is unit i + 1
    end = first + each + (stage < rest)
    return range(first if stage else 0, end if stage < n_stages - 1 else n_layers + 2)


class PipelineStage:
    """A run of the units of `model`, and the micro-batches that are in flight in it.

    model: built with this rank's units alone, which may be several runs (virtual stages).
    autocast: compute in bfloat16; what goes from stage to stage is float32 all the same.
    """

    def __init__(self, model: Transformer, units: range, split: bool, autocast: bool):
        self.part = Transformer(model.config, units=())  # embedding and layers
        self.part.embed = model.embed if 0 in units else None
        for name, layer in model.layers.items():
            if int(name) + 1 in units:
                self.part.layers[name] = layer
        self.output = model.output if model.config.n_units - 1 in units else None
        self.autocast = autocast
        # input, place of the output in the graph, gradient of the output if that is a loss
        self.in_flight: dict[int, tuple[Tensor, GradientEdge, Tensor | None]] = {}
        self.queue: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.put_off: dict[int, list[tuple[nn.Parameter, Tensor, Tensor]]] = {}
        self.gradient_ready: Callable[[nn.Parameter], None] = lambda weight: None
        if split:
            # the layers' products alone: embedding and norms have none that costs, and the
            # head's gradient is made with the loss
            split_backward(self.part, self.queue)

    def forward(self, micro: int, x: Tensor, targets: Tensor, keys: Tensor | None, m: int):
        """x: vectors, or the first stage's tokens. Returns vectors, or the last stage's loss.

        m: number of micro-batches; the gradients are those of their mean loss.
        """
        if x.is_floating_point():
            x.requires_grad_(torch.is_grad_enabled())
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            y = self.part(x, keys=keys)  # [micro batch, seq, d_model]
        result, grad = y.detach(), None
        if self.output is not None:
            result, grad = self.loss(result, targets, m)
        if torch.is_grad_enabled():
            self.in_flight[micro] = x, get_gradient_edge(y), grad
        return result

    def loss(self, x: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor | None]:
        """The loss, and at once the gradient of x. The function has made the head's in forward,
        and one as large as the head for each micro-batch in flight would be too much to keep."""
        x.requires_grad_(torch.is_grad_enabled())
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.output(x, targets)
        if torch.is_grad_enabled():
            (loss / m).backward()
        return loss.detach(), x.grad

    def backward(self, micro: int, grad: Tensor | None) -> Tensor | None:
        """grad: of what `forward` returned, None in the last stage. Returns that of its input;
        those of the weights are added up, or put off if backward is split."""
        x, edge, grad_of_loss = self.in_flight.pop(micro)
        torch.autograd.backward([edge], [grad_of_loss if grad is None else grad])
        if self.queue:
            self.put_off[micro], self.queue[:] = self.queue[:], []
        return x.grad

    @torch.no_grad()
    def weight_gradients(self, micro: int) -> None:
        """The products that were put off. Autograd runs no hook of these weights: whoever listens
        to gradients, as data parallelism does, is told by `gradient_ready`."""
        for weight, x, grad in self.put_off.pop(micro):
            product = (grad.t() @ x).to(weight.dtype)
            weight.grad = product if weight.grad is None else weight.grad.add_(product)
            self.gradient_ready(weight)


class Pipeline:
    """Runs a schedule over the stages of all ranks: what to send and receive follows from it.

    runs: the units of each stage of this rank. groups: the same ranks twice, first for what goes
    to a lower rank, then for what goes to a higher one. So between two ranks a group carries one
    direction, and where it does one thing at a time, as NCCL does, no send is stuck behind a
    receive that waits for this very rank.
    """

    def __init__(
        self,
        model: Transformer,
        runs: list[range],
        schedule: Schedule,
        groups: list[ProcessGroup],
        autocast: bool = False,
    ):
        self.schedule, self.groups = schedule, groups
        self.p, self.v, self.rank = groups[0].size(), len(runs), groups[0].rank()
        split = schedule is zero_bubble
        self.stages = [PipelineStage(model, units, split, autocast) for units in runs]
        self.device, self.d_model = next(model.parameters()).device, model.config.d_model
        self.receives: dict[Message, tuple[Work, Tensor]] = {}  # under way
        self.sends: deque[tuple[Work, Tensor]] = deque()  # under way, the oldest first
        self.open_channels()

    def open_channels(self) -> None:
        """Send a number through each channel, in an order common to all ranks. NCCL connects two
        ranks in their first call and waits there for the other, which no schedule allows for."""
        for src in range(self.p):
            for dst in sorted({(src - 1) % self.p, (src + 1) % self.p} - {src}):
                group, number = self.groups[dst > src], torch.zeros(1, device=self.device)
                if self.rank == src:
                    isend(number, group=group, group_dst=dst).wait()
                if self.rank == dst:
                    irecv(number, group=group, group_src=src).wait()

    def run(self, micro_batches: list[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
        """Forward and backward of all micro-batches (tokens, targets, dropout keys), as scheduled;
        under `no_grad` forward alone. Returns their losses: [m] on the last rank, zeros elsewhere.
        """
        schedule = self.schedule if torch.is_grad_enabled() else forward_only
        m, shape = len(micro_batches), self.shape_sent(micro_batches[0][0])
        losses = torch.zeros(m, device=self.device)
        for posts, action in plan(schedule, self.p, m, self.v, self.rank):
            needed, made = messages(action, self.p, self.v, self.rank)
            for message in posts:
                self.post(message, torch.empty(shape, device=self.device))
            received = self.receive(needed) if needed else None
            with record_function(f"{action.kind} {action.micro} {action.chunk}"):  # --profile
                result = self.do(action, received, micro_batches, losses)
            if made:
                self.send(made, result)
        while self.sends:
            self.sends.popleft()[0].wait()
        return losses

    def shape_sent(self, tokens: Tensor) -> tuple[int, ...]:
        """Of what goes from stage to stage: [micro batch, seq, d_model]."""
        return *tokens.shape, self.d_model

    def do(self, action: Action, received: Tensor | None, micro_batches, losses) -> Tensor | None:
        """One action on what was received for it; returns what is to be sent, if anything is."""
        stage = self.stages[action.chunk]
        if action.kind == "W":
            return stage.weight_gradients(action.micro)
        if action.kind in "BI":  # alike: in a split stage it is but the input's part
            return stage.backward(action.micro, received)
        inputs, targets, keys = micro_batches[action.micro]
        x = inputs if received is None else received
        result = stage.forward(action.micro, x, targets, keys, len(micro_batches))
        if stage.output is not None:
            losses[action.micro] = result
        return result

    def post(self, message: Message, buffer: Tensor) -> None:
        """Begin to receive."""
        src = message.sender(self.p)
        work = irecv(buffer, group=self.groups[self.rank > src], group_src=src)
        self.receives[message] = work, buffer

    def receive(self, message: Message) -> Tensor:
        work, buffer = self.receives.pop(message)
        work.wait()
        return buffer

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send. No more than p sends are under way: what has arrived is to be freed."""
        dst = message.stage % self.p
        work = isend(tensor, group=self.groups[dst > self.rank], group_dst=dst)
        self.sends.append((work, tensor))
        if len(self.sends) > self.p:
            self.sends.popleft()[0].wait()


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, group: ProcessGroup | None = None) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before.

    The squares add up over the stages.
    """
    squares = global_norm(p.grad for p in model.parameters()).square()
    norm = all_reduce_control(squares, group=group).sqrt()
    clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="order of the work")
    parser.add_argument(
        "--virtual-stages", type=positive_int, help="a rank's (default: interleaved 2, or 1)"
    )
    parser.add_argument("--timeout", type=seconds, default=600, help="seconds until a hang ends")
    return check_pipeline(parser.parse_args(argv), world_size(), "--nproc-per-node")


@torch.no_grad()
def evaluate(model, pipeline, tokens, args, device) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    batches = [(inputs, targets, None) for inputs, targets in eval_batches(tokens, args, device)]
    counts = torch.stack([(targets != IGNORED).sum() for _, targets, _ in batches])
    total = all_reduce_control((pipeline.run(batches).double() * counts).sum())
    model.train()
    return (total / counts.sum()).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    corpus = load_corpus(args.data)

    config = model_config(args, corpus.vocab)
    n_stages = world.size * args.virtual_stages
    mine = range(world.rank, n_stages, world.size)  # my stages
    runs = [units_of(stage, n_stages, config.n_layers) for stage in mine]
    model = Transformer(config, units=[unit for run in runs for unit in run])
    init_weights(model, args.seed)
    model.to(device)
    timeout = timedelta(seconds=args.timeout)
    groups = [dist.new_group(timeout=timeout, group_desc=to) for to in ("to_lower", "to_higher")]
    pipeline = Pipeline(model, runs, SCHEDULES[args.schedule], groups, args.autocast)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args))

    run = Run(args, __file__, config, device)
    state = training_state(model, optimizer)
    first_step = load_checkpoint(run.checkpoints, args.resume, state, optimizer)
    batches = train_batches(corpus.train, args, device, first_step)

    for step in run.steps(first_step):
        lr = learning_rate(args, step)
        set_learning_rate(optimizer, lr)
        micro_batches = next(batches)
        loss = all_reduce_control(pipeline.run(micro_batches).mean())
        grad_norm = clip_grad_norm_(model, args.grad_clip)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, pipeline, corpus.valid, args, device))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, pipeline, corpus.test, args, device))
        run.write()
        if run.saves(step):
            save_checkpoint(run.checkpoints, step + 1, state, args.keep_checkpoints)
    for group in groups:
        dist.destroy_process_group(group)
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
