"""The units of arbitrary modules, for ZeRO stage 3 and FSDP (stages 03 and 04).

Which parameters are unsharded together, and in which dtype; which tensors enter a unit and leave
it. This repository's model needs little of this: its parameters have one dtype, all of them train,
none is tied, and its units take and return tensors.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

Parameters = dict[str, nn.Parameter]  # by name

# ---- which parameters are unsharded together ----


def opened(module: nn.Module) -> list[nn.Module]:
    """A module's children that have parameters, with containers replaced by what they contain."""
    units = []
    for child in module.children():
        if isinstance(child, nn.Sequential) or type(child).forward is nn.Module.forward:
            units += opened(child)
        elif list(child.parameters()):
            units.append(child)
    return units


def parameters_by_unit(
    module: nn.Module,
    units: list[nn.Module] | None,
    materialize: Callable[[nn.Module, str], None] | None = None,
) -> Iterator[tuple[nn.Module, Parameters]]:
    """Yield each unit with its parameters, by their names in `module`.

    units: None for the module's children (`opened`).
    Parameters that are unsharded during the whole forward and backward come with `module` as their
    unit: those that are in no unit or, tied, in several. A unit is yielded once per kind:
    parameters of one dtype that train, or are frozen.

    materialize(unit, name) gives the parameters of one unit memory and values. It is called when
    the unit is due, so that the caller can shard the previous one before. Raises ValueError where
    it leaves a parameter empty or unties tied ones.
    """
    units = opened(module) if units is None else units
    names = {m: name for name, m in module.named_modules()}
    users = Counter(p for unit in units for p in unit.parameters())
    shared = {n: p for n, p in module.named_parameters() if users[p] != 1}
    if any(p.is_meta for p in shared.values()):
        raise ValueError(f"{', '.join(shared)}: in no unit, or in several; cannot materialize")
    yield from by_kind(module, shared)
    for unit in units:
        count = len(list(unit.parameters()))
        if materialize is not None:
            materialize(unit, names[unit])
        params = dict(unit.named_parameters(prefix=names[unit]))
        if len(params) != count:
            raise ValueError(f"{names[unit]}: `materialize` has untied its tied parameters")
        if any(p.is_meta for p in params.values()):
            raise ValueError(f"{names[unit]}: still on the meta device, without values")
        yield from by_kind(unit, {n: p for n, p in params.items() if users[p] < 2})
    if len(units) + bool(shared) == 1:
        warnings.warn("one unit has all parameters: they are all unsharded at once", stacklevel=3)


def by_kind(unit: nn.Module, params: Parameters) -> Iterator[tuple[nn.Module, Parameters]]:
    for kind in sorted({(str(p.dtype), p.requires_grad) for p in params.values()}):
        yield unit, {n: p for n, p in params.items() if (str(p.dtype), p.requires_grad) == kind}


# ---- in which dtype, and what they read as while they are freed ----


def is_lookup(unit: nn.Module, params: Iterable[nn.Parameter]) -> bool:
    """Whether these parameters of a unit belong to embeddings alone."""
    owners = [m for m in unit.modules() if set(m.parameters(False)) & set(params)]
    return all(isinstance(m, nn.Embedding) for m in owners)


def unsharded_dtype(
    unit: nn.Module, params: list[nn.Parameter], dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype of a unit's full parameters: `dtype`, or their own where that would lose too much.

    The gradient of a row of an embedding is a sum over many tokens, most of which bfloat16 would
    round away.
    """
    own = params[0].dtype
    keeps_own = is_lookup(unit, params) or not own.is_floating_point
    return own if dtype is None or keeps_own else dtype


def not_a_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar that makes everything computed from it NaN; for integers the largest value."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), torch.nan, dtype=dtype, device=device)
    largest = True if dtype is torch.bool else torch.iinfo(dtype).max
    return torch.full((), largest, dtype=dtype, device=device)


# ---- a unit's inputs and outputs ----


def tensors_in(value) -> tuple[list[Tensor], bool]:
    """The tensors in nested containers and dataclasses, and whether other objects are there too.

    Containers are those that `torch.utils._pytree` knows. Another object may hide tensors.
    """
    if isinstance(value, Tensor):
        return [value], False
    tensors, some_are_hidden = [], False
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            inner, hidden = tensors_in([getattr(leaf, f.name, None) for f in fields(leaf)])
            tensors, some_are_hidden = tensors + inner, some_are_hidden or hidden
        elif not isinstance(leaf, (int, float, complex, str, bytes, type(None))):
            some_are_hidden = True
    return tensors, some_are_hidden


Inputs = list[tuple[Tensor, object]]


def inputs_of(args: tuple, kwargs: dict) -> Inputs:
    """The tensors in the arguments, before the unit runs, each with its `grad_fn`."""
    return [(tensor, tensor.grad_fn) for tensor in tensors_in((args, kwargs))[0]]


def outputs_of(
    unit: nn.Module, args: tuple, kwargs: dict, output, inputs: Inputs
) -> tuple[list[Tensor], bool]:
    """The outputs that require a gradient, and whether the unit may have others, hidden ones.

    Tensors that the unit has put into a list, a dict or a dataclass, or has changed in place, are
    outputs too. An input that it returns unchanged is not: its gradient may be complete long after
    backward has left the unit, and would unshard it again.

    Backward can enter a unit by a hidden output without calling a hook that unshards it. So the
    unit has to stay unsharded if it returns an object that is no container, or nothing that
    requires a gradient.
    """
    if not torch.is_grad_enabled():
        return [], False
    returned, some_are_hidden = tensors_in(output)
    arguments, _ = tensors_in((args, kwargs))
    unchanged = {(id(tensor), grad_fn) for tensor, grad_fn in inputs}
    outputs = [t for t in returned + arguments if (id(t), t.grad_fn) not in unchanged]
    outputs = [tensor for tensor in outputs if tensor.requires_grad]
    if not outputs and not any(tensor.requires_grad for tensor in returned):
        used = [*unit.parameters(), *arguments]
        some_are_hidden = any(tensor.requires_grad for tensor in used)
    return outputs, some_are_hidden


def cast_inputs(args: tuple, kwargs: dict, dtype: torch.dtype | None) -> tuple[tuple, dict]:
    """The arguments with all floating-point tensors in `dtype`, as autocast would cast them.

    A list or dict without such tensors stays the same object, because the unit may fill it.
    """
    if dtype is None:
        return args, kwargs

    def needs_cast(x: Tensor) -> bool:
        return x.is_floating_point() and x.dtype != dtype

    def stays(x) -> bool:
        return isinstance(x, (list, dict)) and not any(map(needs_cast, tensors_in(x)[0]))

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if needs_cast(x) else x

    return tree_map_only(Tensor, cast, (args, kwargs), is_leaf=stays)
