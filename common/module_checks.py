"""What a stage checks of a module that it replaces, and of what it sends."""

import torch
from torch import Tensor, nn

from common.collectives import FLOAT16


def check_dtype(x: Tensor) -> None:
    """ValueError unless x is in float32, bfloat16 or float64."""
    if x.dtype == torch.float16:
        raise ValueError(FLOAT16)
    if not x.is_floating_point():
        raise ValueError(f"{x.dtype}: neither a real nor a floating-point dtype")


# fields that `check_plain` accepts of every module
HANDLED = ["training", "_parameters", "_modules", "in_features", "out_features"]
HANDLED += ["num_embeddings", "embedding_dim", "norm_type"]


def check_plain(plain: nn.Module, *known: str) -> None:
    """Raise ValueError if the module `plain` has what its replacement would lose.

    known: the parameters and modules that the replacement takes over. It would lose all else: a
    bias, a buffer, hooks, a parametrization, a field such as padding_idx, a subclass's own forward.
    """
    fields = {**vars(plain), **plain._parameters, **plain._modules}
    unset = (None, {}, set())  # False too, but not 0, which is equal to it
    lost = [n for n, v in fields.items() if v is not False and v not in unset]
    lost = [n for n in lost if n not in (*HANDLED, *known)]
    kind = type(plain).__name__
    if kind not in ("Linear", "Embedding", "Output") or type(plain).__base__ is not nn.Module:
        lost.append(f"the class {kind}")
    for p in plain.parameters(recurse=False):
        if not p.is_floating_point():
            lost.append(f"what is specific to {p.dtype}")
        attributes = type(p) is nn.Parameter and vars(p)
        if attributes or p._backward_hooks or p._post_accumulate_grad_hooks:
            lost.append("attributes or hooks of a parameter")
    if lost:
        raise ValueError(f"replacing {kind} would lose: {', '.join(lost)}")
