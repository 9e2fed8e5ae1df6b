"""Stage 10: float8 matmuls with dynamic scaling.

A float8 number has 8 bits, and tensor cores multiply float8 up to twice as fast as bfloat16. Its
range is too small for the tensors of a training step, so each tensor, or each of its rows, is first
divided by a scale that makes its largest element fit. Here the linear layers of attention and MLP
compute in float8; weights, optimizer, embedding, head, norms and attention stay as they are.

New since stage 02: `float8`, which replaces these layers, and --recipe. Rowwise gives each row of a
matrix a scale of its own, tensorwise has one per tensor. On a GPU, --compile fuses the casts.

    memory          16 P bytes per rank for P parameters, as in 02. For backward, a linear layer
                    saves its input in 1 byte per element, 4 per scale, and no copy of W (compiled,
                    the compiler chooses)
    communication   02's: all-reduces of P elements in total per step. Scales are never reduced

Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

Run it:

    torchrun --nproc-per-node 2 10_fp8/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.linalg import vector_norm
from torch.nn.functional import ScalingType

from common.collectives import all_reduce, all_reduce_control, broadcast, check_same

# isort: split
from common.arguments import base_parser, check_arguments, model_config, positive, seconds
from common.checkpoint import training_state
from common.data import eval_batches, load_corpus, train_batches
from common.distributed import World, cleanup, fail, setup, world_size
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, clip_grad_norm_, learning_rate, set_learning_rate
from common.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: scale, round to float8, multiply
# ------------------------------------------------------------------------------------------------
#
#              sums over   [m, k] x [k, n] -> [m, n]                       operands
#   Y  = X W^T    in       [tokens, in]  x [in, out]    -> [tokens, out]   X, W in e4m3
#   dX = dY W     out      [tokens, out] x [out, in]    -> [tokens, in]    dY in e5m2, W in e4m3
#   dW = dY^T X   tokens   [out, tokens] x [tokens, in] -> [out, in]       dY in e5m2, X in e4m3
#
# Rowwise, dW is not in float8: dY multiplies the dequantized X, in the dtype of dY. On a GPU, k and
# n of a float8 matmul must be multiples of 16: `in` and `out`, and tensorwise the tokens, for dW.

E4M3 = torch.float8_e4m3fn  # 4 bits of exponent and 3 of mantissa, largest 448: for X and W
E5M2 = torch.float8_e5m2  # a wider range and one bit less, largest 57,344: for gradients
RECIPES = {"rowwise": ScalingType.RowWise, "tensorwise": ScalingType.TensorWise}


def float8(model: Transformer, recipe: str) -> Transformer:
    """Replace the linear layers of attention and MLP, in place.

    Their weights remain the same float32 parameters with the same names, so the optimizer,
    checkpoints and data parallelism see no difference.
    """
    for layer in model.layers.values():
        layer.attn.wqkv = Float8Linear(layer.attn.wqkv, recipe)
        layer.attn.wo = Float8Linear(layer.attn.wo, recipe)
        layer.mlp.w1 = Float8Linear(layer.mlp.w1, recipe)
        layer.mlp.w2 = Float8Linear(layer.mlp.w2, recipe)
    return model


class Float8Linear(nn.Module):
    """y = x W^T in float8. weight: [out, in], the parameter of the linear layer `plain`.

    ValueError if `plain` does anything else that would be lost: a bias, a parametrization, a hook.
    """

    def __init__(self, plain: nn.Module, recipe: str):
        super().__init__()
        has = [name for name, _ in [*plain.named_parameters(), *plain.named_buffers()]]
        has += [k for k, v in vars(plain).items() if ("hooks" in k and v) or k == "forward"]
        is_linear = type(plain).__name__ == "Linear" and type(plain).__base__ is nn.Module
        if not is_linear or has != ["weight"]:
            kind = f"{type(plain).__name__} with {', '.join(has)}"
            raise ValueError(f"float8 takes a Linear, no subclass, with a weight alone, not {kind}")
        if any(size % 16 for size in plain.weight.shape):
            raise ValueError(f"float8 needs multiples of 16, not {list(plain.weight.shape)}")
        self.weight = plain.weight
        self.scaling = RECIPES[recipe]

    def forward(self, x: Tensor) -> Tensor:  # [..., tokens, in] -> [..., tokens, out]
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # which casts for the operators that it knows
            x = x.to(torch.get_autocast_dtype(kind))
        if not {x.dtype, self.weight.dtype} <= {torch.float32, torch.bfloat16}:
            raise TypeError(f"float8 takes float32 or bfloat16, not {x.dtype}, {self.weight.dtype}")
        rows = x.flatten(0, -2)
        n_tokens = len(rows)
        if self.scaling == ScalingType.TensorWise and (n_tokens % 16 or not n_tokens):
            # dW sums over the tokens; rows of zeros change no scale and no gradient
            rows = F.pad(rows, (0, 0, 0, 16 - n_tokens % 16))
        y = Float8Matmuls.apply(rows, self.weight, self.scaling)
        if len(y) > n_tokens:  # without padding this would copy the gradient, to no end
            y = y[:n_tokens]
        return y.unflatten(0, x.shape[:-1])


class Float8Matmuls(torch.autograd.Function):
    """The three matmuls of a linear layer. x: [tokens, in], weight: [out, in] -> [tokens, out]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scaling: ScalingType) -> Tensor:
        x8, weight8 = to_float8(x, E4M3, scaling), to_float8(weight, E4M3, scaling)
        # the parameter itself: no copy of W is kept, and backward rounds it again
        ctx.save_for_backward(x8.numbers, x8.scale, weight)
        ctx.scaling = scaling
        return scaled_matmul(x8, weight8, x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx, grad: Tensor):  # [tokens, out]
        if torch.is_grad_enabled():  # once_differentiable raises only if grad itself has a graph
            raise RuntimeError("create_graph=True: Float8Linear has no second derivative")
        numbers, scale, weight = ctx.saved_tensors
        x8 = Float8(numbers, scale, ctx.scaling)
        is_rowwise = ctx.scaling == ScalingType.RowWise
        needs_grad_x, needs_grad_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs_grad_x or not is_rowwise:  # rowwise, dW takes the unrounded dY
            grad8 = to_float8(grad, E5M2, ctx.scaling)
        if needs_grad_x:
            # dX sums over `out`: W needs one scale per column. Tensorwise this repeats forward's
            weight8 = to_float8(weight.t(), E4M3, ctx.scaling)
            grad_x = scaled_matmul(grad8, weight8, grad.dtype, use_fast_accum=False)
        if needs_grad_weight and is_rowwise:  # the scales of x8 vary along the tokens
            grad_weight = (grad.t() @ x8.dequantize(grad.dtype)).to(weight.dtype)
        elif needs_grad_weight:
            grad_weight = scaled_matmul(grad8.t(), x8.t(), weight.dtype, use_fast_accum=False)
        return grad_x, grad_weight, None


class Float8(NamedTuple):
    """numbers * scale. numbers: float8 [rows, columns], scale: float32 [rows, 1] or [1, 1]."""

    numbers: Tensor
    scale: Tensor
    scaling: ScalingType

    def t(self) -> Float8:
        """Tensorwise alone: a transposed rowwise scale would vary along k."""
        return Float8(self.numbers.t(), self.scale.t(), self.scaling)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """numbers * scale. Exact in bfloat16, too: the scale changes the exponent alone."""
        return self.numbers.to(dtype) * self.scale.to(dtype)


def to_float8(x: Tensor, dtype: torch.dtype, scaling: ScalingType) -> Float8:
    """Round x [rows, columns] to float8, each row, or all of x, with the scale that it needs.

    A scale is the least power of two that brings the largest element, or 1e-24 if that is larger,
    into the range of `dtype`, so no cast overflows. A power of two only moves exponents: how an
    element is rounded depends neither on the scale nor on the elements that share it, above the
    range of subnormal numbers.
    """
    dims = 1 if scaling == ScalingType.RowWise else (0, 1)
    amax = vector_norm(x, torch.inf, dims, keepdim=True).float()
    # a float32 is 1.f * 2^e: a sign, e + 127 in 8 bits, f in 23. The largest float8 numbers are
    # 1.75 * 2^8 and 1.75 * 2^15, so the sum carries into e if 1.f exceeds 1.75. An amax of 0 would
    # have no scale: it counts as 1e-24, about 2^-80. From 2^-111 on, scale and inverse are normal
    bits = amax.clamp(min=1e-24).view(torch.int32) + 0x1FFFFF
    exponent = (bits >> 23) - (8 if dtype == E4M3 else 15)  # of the scale, plus 127
    # a cast to e4m3 would turn an infinity into 448: here all that share its scale become NaN
    scale = torch.where(amax.isfinite(), (exponent << 23).view(torch.float32), torch.nan)
    # 2^-e has -e + 127 = 254 - (e + 127) in its bits; compiled code may round a division
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return Float8((x * inverse.to(x.dtype)).to(dtype), scale, scaling)


def scaled_matmul(a: Float8, b: Float8, dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    """a b^T in `dtype`. a: [m, k], b: [n, k] -> [m, n].

    No scale may vary along k, over which the matmul sums: it is a factor in front of each sum.
    use_fast_accum: on Hopper, leave the sums in the tensor cores, in less than float32 precision;
    without it they move to float32 registers at intervals, which is slower.
    """
    is_tensorwise = a.scaling == ScalingType.TensorWise
    writes_float32 = is_tensorwise or rowwise_writes_float32(a.numbers.device)
    return F.scaled_mm(
        # float8 tensor cores read both operands along k, so a transposed operand has to be copied
        a.numbers.contiguous(),
        b.numbers.contiguous().t(),
        scale_a=a.scale,
        scale_recipe_a=a.scaling,
        scale_b=b.scale.t(),
        scale_recipe_b=b.scaling,
        output_dtype=dtype if writes_float32 else torch.bfloat16,
        use_fast_accum=use_fast_accum,
    ).to(dtype)


def rowwise_writes_float32(device: torch.device) -> bool:
    """Whether rowwise kernels can write float32. On GPUs in PyTorch 2.13, only Hopper's can, from
    CUDA 12.9 on, which has cuBLAS 12.9; others write bfloat16."""
    if device.type != "cuda":
        return True
    cuda = [int(number) for number in (torch.version.cuda or "0").split(".")]
    return torch.cuda.get_device_properties(device).major == 9 and cuda >= [12, 9]


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def check_float8(args, device: torch.device) -> None:
    """Fail where a GPU's float8 kernels would, also on a CPU, and say why."""
    if args.d_model % 16:
        fail(f"--d-model {args.d_model} is not a multiple of 16, which float8 matmuls require")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        fail(f"{name} has no float8 matmuls: they need compute capability 8.9 (Ada, Hopper, later)")
    if device.type == "cpu" and torch.__version__ < "2.12":
        fail(f"float8 matmuls on a CPU need PyTorch 2.12 or newer, and this is {torch.__version__}")


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile each unit")
    scales = "one scale per row, or one per tensor"
    parser.add_argument("--recipe", choices=RECIPES, default="rowwise", help=scales)
    parser.add_argument("--bucket-cap-mb", type=positive, default=25, help="MB per bucket")
    parser.add_argument("--timeout", type=seconds, default=600, help="collective timeout, seconds")
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
    check_float8(args, device)
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    model = Transformer(config)
    init_weights(model, args.seed)
    float8(model, args.recipe)
    model.to(device)
    if args.compile:
        for unit in model.units():
            unit.compile()
    model = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
    state = training_state(model.module, optimizer)
    first_step = run.checkpoints.load(run.resume, state, optimizer)
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
        grad_norm = clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr)
        optimizer.zero_grad(set_to_none=True)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.agree_to_save(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish()


# ------------------------------------------------------------------------------------------------
# Data parallelism, repeated to the letter from 02
# ------------------------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Keep the replicas of a module identical: same initial weights, same averaged gradients.

    module: complete, with the same contiguous parameters on every rank. process_group: the ranks
    whose gradients are averaged; None for all. bucket_cap_mb: the most MB in one all-reduce, 1 in
    the first, which thus starts early. A step ends with `finish_gradient_synchronization`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ):
        super().__init__()
        self.module, self.group = module, process_group
        tensors = [*module.named_parameters(), *module.named_buffers()]
        kinds = [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]
        check_same("parameters or buffers", kinds, tensors[0][1].device, process_group)
        for _, tensor in tensors:
            broadcast(tensor.detach(), group=process_group, group_src=0)
        params = [p for p in module.parameters() if p.requires_grad][::-1]  # in backward's order
        if any(hasattr(p, "is_averaged") for p in params):
            raise ValueError("another wrapper averages a parameter of this module: use only one")
        self.buckets = [Bucket(b, process_group) for b in split_into_buckets(params, bucket_cap_mb)]
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


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
