"""Stage 10: float8 matmuls with dynamic scaling.

A float8 number has 8 bits, and tensor cores multiply float8 up to twice as fast as bfloat16. Its
range is too small for the tensors of a training step, so each tensor, or each of its rows, is first
divided by a scale that makes its largest element fit. Here the linear layers of attention and MLP
multiply in float8. Weights, optimizer, embedding, head, norms and attention stay as they are.

New since stage 01: `float8`, which replaces these layers, and --recipe: rowwise for one scale per
row of a matrix, tensorwise for one per tensor. On a GPU, --compile fuses the casts. Every rank has
a replica of the model, as in 02; `average_gradients` runs after backward, without overlap.

    memory          16 P bytes per rank for P parameters, as in 02. For backward, a linear layer
                    saves its input in 1 byte per element and 4 per scale, and no copy of W, unless
                    the compiler chooses otherwise
    communication   all-reduces of P elements in total per step, as in 02. Scales are never sent

Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

Run it:

    torchrun --nproc-per-node 2 10_fp8/train.py --data sample --steps 100
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import ScalingType

from common.loss import forbid_create_graph, in_autocast_dtype
from common.module_checks import check_plain

# isort: split
from common.batches import eval_batches, train_batches
from common.collectives import all_reduce_control, average_gradients
from common.distributed import World
from common.loss import IGNORED
from common.model import Transformer, init_weights
from common.optimization import adamw_settings, clip_grad_norm_, learning_rate, set_learning_rate
from common.shards import training_state

from common.job.arguments import base_parser, check_arguments, model_config
from common.job.corpus import load_corpus
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

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
# n of a float8 matmul must be multiples of 16: these are `in`, `out` and, tensorwise, the tokens.

E4M3 = torch.float8_e4m3fn  # 4 bits of exponent and 3 of mantissa, largest 448: for X and W
E5M2 = torch.float8_e5m2  # a wider range and one bit less, largest 57,344: for gradients
RECIPES = {"rowwise": ScalingType.RowWise, "tensorwise": ScalingType.TensorWise}
FAST_ACCUM_IN_BACKWARD = False  # see `scaled_matmul`; its speed has not been measured here


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
    """y = x W^T in float8. weight: [out, in], the parameter of the linear layer `plain`."""

    def __init__(self, plain: nn.Module, recipe: str):
        super().__init__()
        check_plain(plain, "weight")  # a bias, for example, would be lost
        kind, shape = type(plain).__name__, list(plain.weight.shape)
        if kind != "Linear" or any(size % 16 for size in shape):
            raise ValueError(f"float8 takes a Linear with multiples of 16, not {kind} {shape}")
        self.weight = plain.weight
        self.recipe = recipe  # and not the scaling, which cannot be pickled

    def reset_parameters(self) -> None:  # as in nn.Linear
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:  # [..., tokens, in] -> [..., tokens, out]
        x = in_autocast_dtype(x)  # autocast does not cast an autograd function's inputs
        if not {x.dtype, self.weight.dtype} <= {torch.float32, torch.bfloat16}:
            raise TypeError(f"float8 takes float32 or bfloat16, not {x.dtype}, {self.weight.dtype}")
        rows = x.reshape(-1, x.shape[-1])
        n_tokens, scaling = len(rows), RECIPES[self.recipe]
        if scaling == ScalingType.TensorWise and (n_tokens % 16 or not n_tokens):
            # dW sums over the tokens: add rows of zeros, which change no scale and no gradient
            rows = F.pad(rows, (0, 0, 0, 16 - n_tokens % 16))
        y = Float8Matmuls.apply(rows, self.weight, scaling)
        if len(y) > n_tokens:  # only if padded: a slice's backward copies the gradient
            y = y[:n_tokens]
        return y.view(*x.shape[:-1], y.shape[1])


class Float8Matmuls(torch.autograd.Function):
    """The three matmuls of a linear layer. x: [tokens, in], weight: [out, in] -> [tokens, out]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scaling: ScalingType) -> Tensor:
        x8, weight8 = to_float8(x, E4M3, scaling), to_float8(weight, E4M3, scaling)
        # save the parameter itself, not a copy of W: backward rounds it again
        ctx.save_for_backward(x8.numbers, x8.scale, weight)
        ctx.scaling = scaling
        return scaled_matmul(x8, weight8, x.dtype, use_fast_accum=True)

    @staticmethod
    @forbid_create_graph
    def backward(ctx, grad: Tensor):  # [tokens, out]
        numbers, scale, weight = ctx.saved_tensors
        x8 = Float8(numbers, scale, ctx.scaling)
        is_rowwise = ctx.scaling == ScalingType.RowWise
        needs_grad_x, needs_grad_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs_grad_x or not is_rowwise:  # rowwise, dW takes the unrounded dY instead
            grad8 = to_float8(grad, E5M2, ctx.scaling)
        if needs_grad_x:
            # dX sums over `out`, so rowwise W needs scales per input. Tensorwise the result is
            # forward's weight8, transposed
            weight8 = to_float8(weight.t(), E4M3, ctx.scaling)
            grad_x = scaled_matmul(grad8, weight8, grad.dtype, FAST_ACCUM_IN_BACKWARD)
        if needs_grad_weight and is_rowwise:  # the scales of x8 vary along the tokens
            grad_weight = (grad.t() @ x8.dequantize(grad.dtype)).to(weight.dtype)
        elif needs_grad_weight:
            transposed = grad8.t(), x8.t()
            grad_weight = scaled_matmul(*transposed, weight.dtype, FAST_ACCUM_IN_BACKWARD)
        return grad_x, grad_weight, None


class Float8(NamedTuple):
    """numbers * scale. numbers: float8 [rows, columns], scale: float32 [rows, 1] or [1, 1]."""

    numbers: Tensor
    scale: Tensor
    scaling: ScalingType

    def t(self) -> Float8:
        """Tensorwise only: transposed, a rowwise scale would vary along k."""
        return Float8(self.numbers.t(), self.scale.t(), self.scaling)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """numbers * scale. Exact in bfloat16, too: the scale changes the exponent alone."""
        return self.numbers.to(dtype) * self.scale.to(dtype)


def to_float8(x: Tensor, dtype: torch.dtype, scaling: ScalingType) -> Float8:
    """Divide x [rows, columns], as a whole or row by row, by its scale, and round it to float8.

    A scale is the least power of two that brings the largest element, or 1e-24 if that is larger,
    into the range of `dtype`, so no cast overflows. A power of two only changes exponents. So above
    the subnormal range, how an element is rounded does not depend on the scale, nor on the elements
    that share it.
    """
    dims = 1 if scaling == ScalingType.RowWise else (0, 1)
    amax = vector_norm(x, torch.inf, dims, keepdim=True).float()
    # A float32 is 1.f * 2^e: a sign, e + 127 in 8 bits, f in 23. The largest float8 numbers are
    # 1.75 * 2^8 and 1.75 * 2^15, so e is rounded up if 1.f > 1.75. Then f's bits are more than
    # 0x600000, and adding 0x1FFFFF carries into e. The README works an amax of 5 through. The
    # minimum, about 2^-80, gives an amax of 0 a scale, whose inverse is below float32's 2^127
    bits = amax.clamp(min=1e-24).view(torch.int32) + 0x1FFFFF
    exponent = (bits >> 23) - (8 if dtype == E4M3 else 15)  # of the scale, plus 127
    # a cast to e4m3 would turn an infinity into 448, so all that share its scale become NaN
    scale = torch.where(amax.isfinite(), (exponent << 23).view(torch.float32), torch.nan)
    # 2^-e has the bits 127 - e = 254 - (e + 127). No division: compiled code may round one
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return Float8((x * inverse.to(x.dtype)).to(dtype), scale, scaling)


def scaled_matmul(a: Float8, b: Float8, dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    """a b^T in `dtype`. a: [m, k], b: [n, k] -> [m, n].

    A scale is a factor of each sum over k, so it must not vary along k.
    use_fast_accum: on Hopper, leave the sums in the tensor cores, in less than float32 precision.
    Without it they are moved to float32 registers at intervals, which is slower.
    """
    # rowwise on a GPU it is bfloat16: for float32, PyTorch 2.13 needs a Hopper GPU and CUDA 12.9
    writes_float32 = a.scaling == ScalingType.TensorWise or not a.numbers.is_cuda
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
        fail(f"PyTorch {torch.__version__} has no float8 matmuls on a CPU: install 2.12 or newer")


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile each unit")
    scales = "one scale per row, or one per tensor"
    parser.add_argument("--recipe", choices=RECIPES, default="rowwise", help=scales)
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
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(args.lr, args.weight_decay))

    run = Run(args, __file__, config, device, corpus)
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
        average_gradients(model.named_parameters())
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
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
