"""Stage 11: Muon, with one owner per matrix.

AdamW scales each element of a gradient by its own history. Muon treats the momentum of a matrix as
a matrix: it brings all its singular values near 1, by matmuls that need the whole matrix. An
all-reduce is a reduce to one rank and a broadcast from it, and Muon fits in between: each matrix of
the layers has one owner, which gets the averaged gradient and broadcasts the update. The embedding,
the LM head and the norms keep AdamW.

    memory          4 P + 12 A + 8 O bytes per rank: P all parameters, A those of AdamW, O those of
                    the matrices that the rank owns. In backward also 4 per element of matrices that
                    it does not own, in the step the updates: 2 or 4 per element of all matrices
    communication   per step, for any number of micro-batches: all-reduces of A gradients, reduces
                    of the others and broadcasts of their updates, which are bfloat16 if --dtype is

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

Run it:

    torchrun --nproc-per-node 2 11_muon/train.py --data sample --steps 100
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import (
    all_reduce,
    all_reduce_control,
    broadcast,
    check_same,
    global_norm,
    reduce,
)
from common.guards import NoGradient

# isort: split
from common.arguments import base_parser, check_arguments, model_config, positive, seconds
from common.checkpoint import State, tensors_of
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, setup, world_size
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: reduce each matrix's gradient to its owner, which broadcasts the update
# ------------------------------------------------------------------------------------------------


class OwnedMatrix:
    """In place of a bucket, a matrix with one owner: the rank that gets its average gradient.

    The gradient needs no buffer: backward's own is reduced, and only the owner keeps it.
    waiting_for: as in `Bucket`. is_pending: whether it has a gradient that is not reduced yet.
    """

    def __init__(self, param: nn.Parameter, owner: int, group: ProcessGroup | None):
        self.param, self.owner, self.group = param, owner, group  # owner: a rank of the group
        self.params, self.n_ranks = [param], dist.get_world_size(group)
        self.owned_here = dist.get_rank(group) == owner
        self.waiting_for, self.is_pending = {param}, False
        self.reduction: Work | None = None  # the reduce in flight

    def collect(self, param: nn.Parameter, divide_by: int = 1) -> None:
        """As `Bucket.collect`, without a buffer."""
        self.is_pending = True
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        elif divide_by > 1:  # not in place: backward may go on with the same memory
            param.grad = param.grad / divide_by

    def start_reduction(self) -> None:
        if self.waiting_for:  # unused in the last backward; earlier ones may have added
            self.collect(self.param, divide_by=self.n_ranks)
        self.reduction = reduce(self.param.grad, self.owner, self.group, async_op=True)

    def finish_reduction(self) -> None:
        self.reduction.wait()
        self.reduction, self.waiting_for, self.is_pending = None, {self.param}, False
        if not self.owned_here:  # it may hold the sum of some ranks' gradients: any use is an error
            self.param.grad = NoGradient(self.param)


class Muon(torch.optim.Optimizer):
    """Update each matrix by its orthogonalized momentum, which its owner computes and broadcasts.

    matrices: those of `DistributedDataParallel`. dtype: of the matmuls in `orthogonalize` and of
    what is sent. compiles: whether torch.compile compiles it, once per shape. The momentum is on
    the owner alone, and exists from the start on.
    """

    def __init__(
        self,
        matrices: list[OwnedMatrix],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
        compiles: bool = False,
    ):
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([matrix.param for matrix in matrices], settings)
        self.matrices, self.dtype = matrices, dtype
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False, disable=not compiles)
        for matrix in matrices:
            if matrix.owned_here:
                self.state[matrix.param]["momentum_buffer"] = torch.zeros_like(matrix.param)

    def add_param_group(self, group: dict) -> None:
        if self.param_groups:
            raise ValueError("Muon has one group: give all matrices to DistributedDataParallel")
        super().add_param_group(group)

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        if set(self.state) != {matrix.param for matrix in self.matrices if matrix.owned_here}:
            raise ValueError("the momentum of another rank, or of another number of ranks")

    @torch.no_grad()
    def step(self, *, meanwhile: Callable[[], object] | None = None) -> None:
        """Compute the updates of the matrices owned here, and broadcast each one while the next is
        computed. Then apply those of all matrices.

        meanwhile: called while the last broadcasts are in flight, such as another optimizer's step.
        """
        settings = self.param_groups[0]
        lr, weight_decay, beta = settings["lr"], settings["weight_decay"], settings["momentum"]
        in_flight = []
        for matrix in self.matrices:
            param = matrix.param
            if param.grad is None:  # on no rank: the matrix stays as it is
                continue
            if matrix.is_pending:
                raise RuntimeError("step() before finish_gradient_synchronization()")
            update = torch.empty_like(param, dtype=self.dtype)
            if matrix.owned_here:
                momentum = self.state[param]["momentum_buffer"].lerp_(param.grad, 1 - beta)
                nesterov = param.grad.lerp(momentum, beta)
                update.copy_(self.orthogonalize(nesterov.to(self.dtype)))
            work = broadcast(update, group=matrix.group, group_src=matrix.owner, async_op=True)
            in_flight.append((param, update, work))
        if meanwhile is not None:
            meanwhile()
        for param, update, work in in_flight:
            work.wait()
            # from the RMS of an orthogonal matrix, 1 / sqrt(larger side), to about AdamW's
            scale = 0.2 * math.sqrt(max(param.shape))
            param.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * scale)


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

    Updates run in this order: each rank has its first matrix before any rank has a second one.
    """
    work, owners = [0] * n_ranks, {}
    for matrix in sorted(matrices, key=orthogonalization_flops, reverse=True):
        owners[matrix] = work.index(min(work))
        work[owners[matrix]] += orthogonalization_flops(matrix)
    return owners


def orthogonalization_flops(matrix: Tensor) -> int:
    n, k = sorted(matrix.shape)
    return 5 * (4 * n * n * k + 2 * n**3)


class DistributedDataParallel(nn.Module):
    """Give the replicas of a module the same initial weights, and average their gradients.

    module: complete, with the same contiguous parameters on every rank. matrices: parameters with
    one owner each, which alone gets the average gradient; frozen ones get no owner.
    process_group: the ranks whose gradients are averaged; None for all. bucket_cap_mb: the most MB
    in one all-reduce, 1 in the first, which thus starts early. A step ends with
    `finish_gradient_synchronization`.
    """

    def __init__(
        self,
        module: nn.Module,
        matrices: Iterable[nn.Parameter],
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ):
        super().__init__()
        self.module, self.group = module, process_group
        tensors = [*module.named_parameters(), *module.named_buffers()]
        chosen = {p for p in matrices if p.requires_grad}
        kinds = [(name, t.shape, t.dtype, t.requires_grad, t in chosen) for name, t in tensors]
        check_same("parameters, buffers or matrices", kinds, tensors[0][1].device, process_group)
        for _, tensor in tensors:
            broadcast(tensor.detach(), group=process_group, group_src=0)
        params = [p for p in module.parameters() if p.requires_grad][::-1]  # in backward's order
        if any(hasattr(p, "is_averaged") for p in params):
            raise ValueError("another wrapper averages a parameter of this module: use only one")
        place = {p: i for i, p in enumerate(params)}
        # in the module's order, whatever the caller's
        matrices = [p for p in params[::-1] if p in chosen and p.dim() == 2]
        if len(matrices) < len(chosen):
            raise ValueError("matrices: 2-D parameters of the module; the others are for AdamW")
        owners = choose_owners(matrices, dist.get_world_size(process_group))
        self.matrices = [OwnedMatrix(p, owner, process_group) for p, owner in owners.items()]
        others = [p for p in params if p not in owners]
        buckets = [Bucket(b, process_group) for b in split_into_buckets(others, bucket_cap_mb)]
        # by when their last parameter is ready: the embedding's bucket must not delay matrices
        self.buckets = sorted([*self.matrices, *buckets], key=lambda b: place[b.params[-1]])
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0  # how many buckets' reductions have started
        self.synchronizes = True
        for param in params:
            param.is_averaged = True  # by some wrapper
            param.register_post_accumulate_grad_hook(self.mark_ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients and start no all-reduce: for all micro-batches but the last."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def mark_ready(self, param: nn.Parameter) -> None:
        """Called by autograd in backward, when it has accumulated a gradient into `param.grad`."""
        bucket = self.bucket_of[param]
        if param not in bucket.waiting_for:
            fix = "use finish_gradient_synchronization() or no_sync()"
            raise RuntimeError(f"backward twice, or after a backward that failed: {fix}")
        if param.grad.is_sparse or param.grad.requires_grad:
            raise RuntimeError("sparse=True, or backward with create_graph=True: not supported")
        bucket.collect(param, divide_by=bucket.n_ranks if self.synchronizes else 1)
        if not self.synchronizes:
            return
        bucket.waiting_for.remove(param)
        self.launch_ready_buckets()

    def launch_ready_buckets(self, backward_has_ended: bool = False) -> None:
        """Start to reduce the next buckets that are ready; after backward, all that remain.

        Buckets are launched strictly in order: ranks may finish gradients in different orders, but
        collectives are matched by the order of the calls.
        """
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if bucket.waiting_for and not backward_has_ended:
                return
            bucket.start_reduction()
            self.launched += 1

    def finish_gradient_synchronization(self) -> None:
        """Reduce what remains, and wait until every gradient is the average over the ranks.

        A gradient that only some ranks have is zero on the others. One that none has stays None, so
        that no optimizer decays or moves its parameter.
        """
        others = (p for p in self.parameters() if p not in self.bucket_of)
        if any(p.requires_grad and not hasattr(p, "is_averaged") for p in others):
            raise RuntimeError("add, replace or unfreeze parameters before they are wrapped")
        missing = {p: i for i, p in enumerate(self.bucket_of) if p.grad is None}
        device = next(self.parameters()).device
        is_used = torch.ones(len(self.bucket_of), dtype=torch.uint8, device=device)
        for i in missing.values():
            is_used[i] = 0
        self.launch_ready_buckets(backward_has_ended=True)
        all_reduce_control(is_used, self.group, ReduceOp.MAX)  # while the last buckets travel
        for bucket in self.buckets:
            bucket.finish_reduction()
        self.launched = 0
        for param, i in missing.items():
            if not is_used[i]:
                param.grad = None


class Bucket:
    """Parameters whose gradients lie side by side in one flat buffer: one all-reduce sends all.

    grads: [numel of all parameters]; grad_views: each parameter's gradient, a view into `grads`.
    waiting_for: the parameters whose gradients the step's last backward has not produced yet.
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup | None):
        self.params, self.group, self.n_ranks = params, group, dist.get_world_size(group)
        self.grads = params[0].new_zeros(sum(p.numel() for p in params))
        self.grad_views = self.views_into(self.grads)
        self.waiting_for = set(params)
        self.reduction: Work | None = None  # the collective in flight

    def views_into(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        sizes = [p.numel() for p in self.params]
        chunks = flat[: sum(sizes)].split(sizes)
        return {p: chunk.view(p.shape) for p, chunk in zip(self.params, chunks, strict=True)}

    def collect(self, param: nn.Parameter, divide_by: int = 1) -> None:
        """Copy the gradient of `param` into the buffer, and make the view there `param.grad`.

        After `zero_grad` backward allocates a new gradient outside the buffer; later micro-batches
        add to the view. A missing gradient is zero. Dividing before the sum makes it the average.
        """
        view = self.grad_views[param]
        if view.untyped_storage() is not self.grads.untyped_storage():
            raise RuntimeError(
                "p.grad.data was replaced, or the model moved while it had gradients"
            )
        if param.grad is None:
            view.zero_()
        elif param.grad is not view or divide_by > 1:
            grad = param.grad.expand_as(view)  # an error if the parameter was resized
            torch.div(grad, divide_by, out=view)  # copies and divides, or divides in place
        param.grad = view

    def start_reduction(self) -> None:
        for param in self.waiting_for:  # unused in the last backward; earlier ones may have added
            self.collect(param, divide_by=self.n_ranks)
        self.reduction = all_reduce(self.grads, group=self.group, async_op=True)

    def finish_reduction(self) -> None:
        self.reduction.wait()
        self.reduction, self.waiting_for = None, set(self.params)


def split_into_buckets(params: list[nn.Parameter], cap_mb: float, first_cap_mb: float = 1) -> list:
    """Split parameters, in order, into lists of one dtype and device and at most `cap_mb` MB.

    The first list is limited to `first_cap_mb`. A parameter above the cap gets its own list.
    """
    lists: list[list[nn.Parameter]] = []
    room = 0.0  # MB left in the last list
    for param in params:
        mb = param.numel() * param.element_size() / 2**20
        alike = lists and (param.dtype, param.device) == (lists[-1][0].dtype, lists[-1][0].device)
        if not alike or mb > room:
            room = cap_mb if lists else min(first_cap_mb, cap_mb)
            lists.append([])
        lists[-1].append(param)
        room -= mb
    return lists


def clip_grad_norm_(model: DistributedDataParallel, max_norm: float) -> Tensor:
    """Scale the gradients to at most this global norm; returns the norm before clipping."""
    owned_here = {matrix.param: matrix.owned_here for matrix in model.matrices}
    params = [p for p in model.parameters() if p.grad is not None and owned_here.get(p, True)]
    owned = global_norm(p.grad for p in params if p in owned_here).square()
    replicated = global_norm(p.grad for p in params if p not in owned_here).square()
    # squares of owned gradients add up over the ranks; replicated gradients count once. On a rank
    # that owns nothing `owned` is a float32 on the CPU: the sum has the others' device and dtype
    p = next(model.parameters())
    zero = torch.zeros((), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
    total_norm = (all_reduce_control(zero + owned, group=model.group) + replicated).sqrt()
    clip_grads_with_norm_(params, max_norm, total_norm)
    return total_norm


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def training_state(model: nn.Module, adamw: torch.optim.AdamW, muon: Muon) -> State:
    """The tensors of a plain model and both optimizers, by their names in a checkpoint."""
    state: State = {}
    matrices = {matrix.param for matrix in muon.matrices}
    for name, param in model.named_parameters():
        tensors = {"model": param.detach()} if param in matrices else tensors_of(adamw, param)
        if param in muon.state:  # other ranks have no momentum to save or to load
            tensors["optim.momentum"] = muon.state[param]["momentum_buffer"]
        state |= {f"{kind}.{name}": t for kind, t in tensors.items()}
    return state


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile each unit")
    parser.add_argument("--bucket-cap-mb", type=positive, default=25, help="MB per bucket")
    parser.add_argument("--timeout", type=seconds, default=600, help="collective timeout, seconds")
    parser.set_defaults(lr=1e-2)  # the best of the tiny preset
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
    matrices = {p for p in model.layers.parameters() if p.dim() == 2}
    others = [p for p in model.parameters() if p not in matrices]
    model = DistributedDataParallel(model, matrices, bucket_cap_mb=args.bucket_cap_mb)
    dtype = getattr(torch, args.dtype)
    muon = Muon(model.matrices, args.lr, args.weight_decay, dtype=dtype, compiles=args.compile)
    optimizer = torch.optim.AdamW(others, **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model.module, optimizer, muon)
    first_step = run.checkpoints.load(run.resume, state, optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        set_learning_rate(muon, lr)
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
        grad_norm = clip_grad_norm_(model, args.max_norm)
        muon.step(meanwhile=optimizer.step)
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)
        muon.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.agree_to_save(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
