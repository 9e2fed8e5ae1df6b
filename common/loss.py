"""The loss of the output unit, in chunks of tokens, and helpers of all our autograd functions."""

from collections.abc import Callable

import torch
from torch import Tensor

IGNORED = -100  # a target that the loss leaves out


def forbid_create_graph(backward: Callable) -> Callable:
    """Make create_graph=True an error in a backward whose own gradient would be wrong. PyTorch's
    `once_differentiable` lets it pass where the incoming gradient is a constant."""

    def checked(ctx, *grads: Tensor):
        if torch.is_grad_enabled():  # in a backward: only with create_graph=True
            raise RuntimeError("create_graph=True: this function has first derivatives only")
        return backward(ctx, *grads)

    return checked


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Cast x as autocast does for a matmul: autograd functions have to do it themselves."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x  # autocast leaves other dtypes, too
    return x.to(torch.get_autocast_dtype(kind))


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x W^T, in chunks of rows, so that the full logits are never in memory.

    Forward computes a chunk's gradient too, while its logits exist: the same three matmuls as
    plain autograd, without recomputation (Hsu et al., "Liger Kernel", 2024, section 3.2).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, rows: int, count) -> Tensor:
        # x: [tokens, d_model], weight: [vocab, d_model], targets: [tokens]
        dtype = in_autocast_dtype(x[:0]).dtype  # of the matmuls: autocast's if it is enabled
        grad_x = grad_weight = None
        with torch.autocast(x.device.type, enabled=False):
            w = weight.to(dtype)
            if count is None:
                count = (targets != IGNORED).sum().clamp(min=1)
            loss = torch.zeros((), dtype=torch.float32, device=x.device)
            if any(ctx.needs_input_grad):
                grad_x = torch.empty_like(x)
            if ctx.needs_input_grad[1]:  # not of a frozen weight
                # a sum over chunks, which bf16 would round after each one
                sum_dtype = torch.promote_types(weight.dtype, torch.float32)
                grad_weight = torch.zeros_like(weight, dtype=sum_dtype)
            for start in range(0, len(x), rows):
                chunk = slice(start, start + rows)
                grad_part = None if grad_x is None else grad_x[chunk]
                x_part = x[chunk].to(dtype)
                loss += _loss_of_chunk(x_part, w, targets[chunk], count, grad_part, grad_weight)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_x, grad_weight)
        return loss

    @staticmethod
    @forbid_create_graph
    def backward(ctx, grad: Tensor):
        # not in place: a second backward (retain_graph) must find them unchanged
        grads = [None if g is None else _scaled(g, grad) for g in ctx.saved_tensors]
        return *grads, None, None, None


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    if grad.dtype != torch.bfloat16:
        return grad * factor.to(grad.dtype)
    # in float32, some rows at a time: bfloat16 would round the factor, such as 1/3
    return torch.cat([(rows.float() * factor).bfloat16() for rows in grad.split(4096)])


def _loss_of_chunk(x, weight, targets, count, grad_x, grad_weight) -> Tensor:
    """The sum of some rows' losses over `count`. Fills `grad_x`, adds to `grad_weight`, if any."""
    logits = (x @ weight.t()).float()  # [rows, vocab]
    index = targets.where(targets != IGNORED, 0)[:, None]  # `gather` checks its range
    scale = (targets != IGNORED)[:, None].float() / count  # [rows, 1], 0 where there is no target
    highest, target_logit = logits.amax(-1, keepdim=True), logits.gather(-1, index)
    softmax = logits.softmax(-1)
    del logits
    # the largest probability is e^highest / total, which gives log(total) without another pass
    log_total = highest - softmax.amax(-1, keepdim=True).log()
    loss = ((log_total - target_logit) * scale).sum()
    if grad_x is None:
        return loss
    # softmax minus one at the target; `scale` multiplies [rows, d_model], not all logits
    grad = softmax.scatter_add_(-1, index, -torch.ones_like(scale)).to(x.dtype)
    grad_x.copy_(grad @ weight).mul_(scale)
    if grad_weight is None:
        return loss
    x = (x * scale).to(x.dtype)
    if grad_weight.dtype == x.dtype:
        grad_weight.addmm_(grad.t(), x)
    else:
        grad_weight += grad.t() @ x
    return loss


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, rows: int | None = None, count: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy (float32 scalar) of logits x W^T against targets, in chunks of `rows`.

    x: [tokens, d_model], weight: [vocab, d_model], targets: int64 [tokens]. The mean is over the
    targets that are not IGNORED; if all are, it is 0. count: divide the sum by this scalar instead
    of by their number. Any other target outside the vocabulary is an error, on a GPU a device-side
    assertion.
    """
    if targets.shape != x.shape[:1]:
        raise ValueError(f"{list(targets.shape)} targets for x {list(x.shape)}")
    # On a CPU a small chunk's logits stay near the cache. On a GPU, r rows take 6 r d V FLOPs, and
    # adding to the float32 gradient moves 12 d V bytes. At 400 TFLOP/s and 3.35 TB/s (H100) that is
    # 12 % of the matmuls' time for r = 2,048, whose logits are 0.27 GB on WikiText-2.
    rows = rows or (2048 if x.is_cuda else 256)
    if not torch.is_grad_enabled():  # the function computes gradients for inputs that require one
        x, weight = x.detach(), weight.detach()
    return LinearCrossEntropy.apply(x, weight, targets, rows, count)
