"""What every stage does alike with its optimizer: AdamW's settings and the learning rate."""

from __future__ import annotations

import argparse
import math

import torch


def adamw_settings(args: argparse.Namespace) -> dict:
    """Keyword arguments of `torch.optim.AdamW`, the same in every stage.

    Weight decay acts on every parameter, norms included, so that a flat buffer of many
    parameters is updated as one tensor. `fused`: one kernel over all of them.
    """
    return {
        "lr": args.lr,
        "betas": (0.9, 0.95),
        "weight_decay": args.weight_decay,
        "fused": True,
    }


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up over `--warmup-steps`, then half a cosine down to `--min-lr-ratio` of it.

    From (arguments, step) alone, so that a resumed run needs no scheduler state. Loshchilov and
    Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without the restarts.
    """
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return args.lr * (args.min_lr_ratio + (1 - args.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
