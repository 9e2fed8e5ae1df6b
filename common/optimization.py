"""What all stages share of the optimizer: AdamW's settings, learning-rate schedule, clipping."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import global_norm


def adamw_settings(lr: float, weight_decay: float) -> dict:
    """Keyword arguments of `torch.optim.AdamW`, the same in every stage.

    Weight decay acts on every parameter, norms included, so that a flat buffer of many parameters
    can be updated as one tensor. `fused`: one kernel for all of them.
    """
    return dict(lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)


def learning_rate(step: int, n_steps: int, peak: float, warmup: int, min_ratio: float) -> float:
    """Linear warm-up over `warmup` steps, then half a cosine to `min_ratio` of the peak.

    A function of its arguments alone, so a resumed run needs no scheduler state. Loshchilov and
    Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without the restarts.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, n_steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return peak * (min_ratio + (1 - min_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` with `global_norm`. Returns the norm before clipping."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = global_norm(p.grad for p in parameters)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
