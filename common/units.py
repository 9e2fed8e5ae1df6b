"""What stages 03, 04 and 12 do with a model's units and their parameters, and what they check."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook


def count_changes(optimizer: torch.optim.Optimizer, *_) -> None:
    """Count an optimizer's step as a change of its parameters, which `fused=True` does not do."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    increment_version([p for p in params if p.grad is not None])


register_optimizer_step_post_hook(count_changes)  # of every optimizer


def units_with_values(
    module: nn.Module,
    units: list[nn.Module],
    materialize: Callable[[nn.Module, str], None] | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each unit's full name and the unit. ValueError if the contract fails.

    materialize(unit, name) gives the parameters of a unit memory and values. It is called when the
    unit is due, so that the caller can shard the previous one before.
    """
    names = {unit: name for name, unit in module.named_modules()}
    users = Counter(p for unit in units for p in unit.parameters())
    paths = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
    places = Counter(map(_place, module.parameters()))
    dtype = next(module.parameters()).dtype
    for name, p in module.named_parameters():
        if users[p] != 1 or paths[p] != 1 or (places[_place(p)] != 1 and p.numel()):
            raise ValueError(f"{name}: tied, in no unit, or in several")
        if not p.requires_grad or p.dtype != dtype or not p.is_floating_point():
            raise ValueError(f"{name}: frozen, complex, or of another dtype than the others")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(f"{name}: has hooks, which its shard would lose")
    del users, paths, name, p  # else the full parameters would stay alive here
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"{name}: a buffer without values on the meta device")
    for unit in units:
        if materialize is not None:
            materialize(unit, names[unit])
        if not list(unit.parameters()) or any(p.is_meta for p in unit.parameters()):
            raise ValueError(f"{names[unit]}: no parameters, or without values on the meta device")
        yield names[unit], unit


def _place(p: Tensor) -> tuple[int, int]:
    """Where its values are. Fake tensors have no `data_ptr`."""
    return p.untyped_storage()._cdata, p.storage_offset()


def take_parameters(unit: nn.Module) -> tuple[list[tuple[nn.Module, str]], Tensor]:
    """Remove a unit's parameters from its modules; any later use of them is an error.

    Returns who owned them, as pairs (module, name), and all their values, flat: [numel].
    """
    owners = [(m, name) for m in unit.modules() for name, _ in m.named_parameters(recurse=False)]
    flat = torch.cat([getattr(owner, name).detach().flatten() for owner, name in owners])
    for owner, name in owners:
        param = getattr(owner, name)
        delattr(owner, name)
        param.data = param.new_empty(0)
        param.__class__ = ShardedParameter
    return owners, flat


@contextmanager
def lend_parameters(
    owners: list[tuple[nn.Module, str]], params: Sequence[Tensor], pack: Callable, unpack: Callable
) -> Iterator[None]:
    """Give a unit's modules their parameters as attributes, while the unit computes.

    `pack` says what autograd saves for backward and `unpack` what backward reads, except within
    checkpoint(), which decides this itself. RuntimeError if the unit changes a parameter in place.
    """
    version = params[0]._version  # all are views of one buffer: they share its version
    for (owner, name), param in zip(owners, params, strict=True):
        setattr(owner, name, param)
    # whether a checkpoint() decides here what is saved; private, as nothing public tells it
    in_checkpoint = torch._C._autograd._top_saved_tensors_default_hooks(True)
    try:
        with nullcontext() if in_checkpoint else saved_tensors_hooks(pack, unpack):
            yield
        if params[0]._version != version:
            raise RuntimeError("a unit has changed a parameter in place")
    finally:
        for owner, name in owners:
            setattr(owner, name, None)  # an LSTM has a list of its weights, which follows this
            delattr(owner, name)


class ShardedParameter(nn.Parameter):
    """What a parameter becomes whose values have been sharded, for whoever still refers to it."""

    __repr__ = object.__repr__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(
            "this parameter has been sharded: a list, closure or optimizer from before still has "
            "it; read it as an attribute of its module, in its unit's forward"
        )


def is_lookup(unit: nn.Module) -> bool:
    """Whether all parameters are those of `nn.Embedding`s, which look rows up and do no more."""
    return all(isinstance(m, nn.Embedding) for m in unit.modules() if list(m.parameters(False)))


def cast_inputs(args: tuple, kwargs: dict, dtype: torch.dtype | None) -> tuple[tuple, dict]:
    """The arguments with floating-point tensors in `dtype`."""

    def cast(x):
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


class NoGradient(Tensor):
    """In place of a gradient that is incomplete or sharded: without memory, any use is an error."""

    def __new__(cls, param: Tensor):
        like = {"dtype": param.dtype, "device": param.device, "storage_size": 0}
        return Tensor._make_wrapper_subclass(cls, param.shape, **like)

    __repr__ = object.__repr__

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        fix = "call finish_gradient_synchronization(), and clip by the class that shards"
        raise RuntimeError(f"this gradient is incomplete or sharded ({function}): {fix}")


def forbid_parameters(module: nn.Module) -> None:
    """Make listing, saving, loading, copying, casting and moving parameters an error."""

    def fail(*_, **__):
        fix = "load, freeze, copy, cast or move the model first; optimize, clip and save the shards"
        raise RuntimeError(f"a rank has shards only: {fix}")

    for each in module.modules():
        each.register_state_dict_pre_hook(fail)
        each.register_load_state_dict_pre_hook(fail)
        each._apply = each.__deepcopy__ = fail
        if not list(each.named_parameters(recurse=False)):  # a wrapper lists its shards
            each.named_parameters = fail  # `parameters()` calls it


def check_no_parameters(module: nn.Module, shards: Collection[nn.Parameter] = ()) -> None:
    """RuntimeError if a module has a parameter after `take_parameters`: nobody would average it."""
    known = {None, *shards}
    for name, each in module.named_modules():
        if not known.issuperset(each._parameters.values()):
            raise RuntimeError(f"{name}: a parameter was added or replaced after sharding")
