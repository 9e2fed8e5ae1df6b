"""What stages 03, 04 and 12 to 15 do with a model's units and parameters, and what they check."""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup

from common.collectives import FLOAT16, check_same


def units_with_values(
    module: nn.Module, units: list[nn.Module], may_be_meta: bool = False
) -> list[tuple[str, nn.Module]]:
    """Each unit's full name and the unit.

    ValueError unless each parameter is in one unit alone, trains, has the dtype of the others, no
    hooks, and values. may_be_meta: the parameters, but not the buffers, may be on the meta device.
    """
    names = {unit: name for name, unit in module.named_modules()}
    users = Counter(p for unit in units for p in unit.parameters())
    named = list(module.named_parameters(remove_duplicate=False))
    locations = Counter(_location(p) for _, p in named)
    for name, p in named:
        if users[p] != 1 or (locations[_location(p)] != 1 and p.numel()):
            raise ValueError(f"{name}: tied, in no unit, or in several")
        if not p.requires_grad or p.dtype != named[0][1].dtype or not p.is_floating_point():
            raise ValueError(f"{name}: frozen, complex, or of another dtype than the others")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(f"{name}: has hooks, which its shard would lose")
    for name, tensor in [*([] if may_be_meta else named), *module.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(f"{name}: without values on the meta device")
    for unit in units:
        if not list(unit.parameters()):
            raise ValueError(f"{names[unit]}: no parameters")
    return [(names[unit], unit) for unit in units]


def _location(p: Tensor) -> tuple[torch.UntypedStorage, int]:
    """Where a parameter's values are in memory. (Fake tensors have no `data_ptr`.)"""
    return p.untyped_storage(), p.storage_offset()


def check_options(
    module: nn.Module,
    device: torch.device,
    options: list,
    group: ProcessGroup | None = None,
    replicas: ProcessGroup | None = None,
) -> None:
    """ValueError if a wrapper's options do not fit, or if they, the parameters' names, shapes and
    dtypes, or the buffers differ between the ranks of a group."""
    if replicas is not None and group is None:
        raise ValueError("replicate_group needs a shard_group: by default all ranks shard")
    if device.type == "meta":
        raise ValueError("read_shard needs a device: the meta device is none")
    dtypes = {dtype for dtype in options if isinstance(dtype, torch.dtype)}
    if not dtypes <= {torch.bfloat16, torch.float32, torch.float64}:
        raise ValueError(f"{dtypes}: weights or gradients lose digits or overflow: use bfloat16")
    for each in module.modules():  # options[0]: param_dtype
        statistics = getattr(each, "running_mean", None)  # of a BatchNorm
        if None not in (statistics, each._parameters.get("weight"), options[0]):
            if options[0] != statistics.dtype:
                raise ValueError("BatchNorm takes no param_dtype but that of its statistics")
    facts = [(name, p.shape, p.dtype) for name, p in module.named_parameters()]
    buffers = (b.detach().cpu().flatten() for b in module.buffers() if not b.is_meta)
    facts += [*options, *(zlib.crc32(b.view(torch.uint8).numpy()) for b in buffers)]
    for each in [group] if replicas is None else [group, replicas]:
        check_same("parameters, buffers or options", facts, device, each)


def take_parameters(unit: nn.Module) -> tuple[list[tuple[nn.Module, str]], Tensor]:
    """Replace a unit's parameters in its modules by `ABSENT`; any later use is an error.

    Returns their owners, as pairs (module, name), and all their values, flat: [numel].
    """
    owners = [(m, name) for m in unit.modules() for name, _ in m.named_parameters(recurse=False)]
    flat = torch.cat([getattr(owner, name).detach().flatten() for owner, name in owners])
    for owner, name in owners:
        param = getattr(owner, name)
        delattr(owner, name)
        setattr(owner, name, ABSENT)
        param.data = param.new_empty(0)
        param.__class__ = AbsentParameter
    return owners, flat


@contextmanager
def lend_parameters(
    owners: list[tuple[nn.Module, str]], params: Sequence[Tensor]
) -> Iterator[None]:
    """Give a unit's modules their parameters as attributes, while the unit computes."""
    for (owner, name), param in zip(owners, params, strict=True):
        setattr(owner, name, param)
    try:
        yield
    finally:
        for owner, name in owners:
            setattr(owner, name, ABSENT)


def owned_by(numel: int, group: ProcessGroup | None) -> tuple[slice, int]:
    """This rank's part of a flat buffer that is padded to equal parts, and the padding's length."""
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    length = math.ceil(numel / n_ranks)
    return slice(rank * length, (rank + 1) * length), n_ranks * length - numel


class Place(NamedTuple):
    """Where a view lies in its unit's flat buffer."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def place_in(full: Tensor, tensor: Tensor) -> Place | None:
    """The place of `tensor` in the flat buffer `full`, or None if it is no plain view of it."""
    is_plain = tensor.layout == torch.strided and tensor.dtype == full.dtype and not tensor.is_neg()
    if is_plain and tensor.untyped_storage() is full.untyped_storage():
        return Place(tensor.shape, tensor.stride(), tensor.storage_offset())
    return None


class AbsentParameter(Tensor):
    """What a parameter becomes whose values have been sharded: any use is an error."""

    __repr__ = object.__repr__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(
            "this parameter has been sharded: read it as an attribute of its module, within its "
            "unit's forward; not in a checkpoint() within the unit, in the unit's hooks or other "
            "methods, nor through a list, closure or optimizer from before"
        )


ABSENT = torch.empty(0).as_subclass(AbsentParameter)  # a module's attribute outside of forward


def is_in_backward() -> bool:
    """Whether a backward runs: then a forward is activation checkpointing's recomputation."""
    return torch._C._current_graph_task_id() != -1  # no public function tells this


def is_in_checkpoint() -> bool:
    """Whether a checkpoint() decides what autograd saves; in backward it runs forward again."""
    # no public function tells this
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def is_lookup(unit: nn.Module) -> bool:
    """Whether all parameters belong to modules that only look up rows: `nn.Embedding`s, or of a
    class with an attribute `is_lookup`."""
    owners = (module for module in unit.modules() if list(module.parameters(recurse=False)))
    return all(isinstance(m, nn.Embedding) or getattr(m, "is_lookup", False) for m in owners)


def cast_inputs(args: tuple, kwargs: dict, dtype: torch.dtype | None) -> tuple[tuple, dict]:
    """The arguments with floating-point tensors in `dtype`."""

    def cast(x):
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


# ---- what `guard` checks of units ----


def watch_units(guard, units: list) -> None:
    """Put checks around a unit's forward, and around what `saved_tensors_hooks` calls. Where only
    shards train, forbid the module's parameters."""
    for unit in units:
        unit.module_forward = partial(checked_forward, guard, unit, unit.module_forward)
        unit.pack = partial(checked_pack, unit, unit.pack)
        unit.unpack = partial(checked_unpack, unit.unpack)
    if not guard.places:  # 15 has some: the adapters
        forbid_parameters(guard.root())


def checked_forward(guard, unit, forward: Callable, *args, **kwargs):
    """RuntimeError if the unit changes a parameter in place."""
    full, version = unit.full, unit.full._version
    gather = getattr(*unit.owners[0]).grad_fn  # a parameter's, while the unit computes
    if gather is not None:
        gather.register_prehook(partial(check_backward, guard, unit, unit.shard._version))
    output = forward(*args, **kwargs)
    if full._version != version:
        raise RuntimeError("a unit has changed a parameter in place")
    return output


def check_backward(guard, unit, version: int, grads: tuple[Tensor | None, ...]) -> None:
    """Called before `Gather.backward`."""
    shard = unit.shard
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True: the reduced gradients have no graph")
    if shard._version != version:
        raise RuntimeError("backward through a graph from before the optimizer's last step")
    if any(grad is None for grad in grads):
        raise RuntimeError(f"unit {unit.name} has not used all of its parameters")
    if not hasattr(unit, "average"):  # in 03 autograd gets the gradient at once
        return
    if shard._backward_hooks or shard._post_accumulate_grad_hooks:
        raise RuntimeError("a hook on a shard would get no gradient: hook a unit's output")
    try:  # private; raises within autograd.grad(), which would get no gradient from here
        torch._C._will_engine_execute_node(get_gradient_edge(shard).node)
    except RuntimeError as error:
        fix = "call backward() and read .grad after finish_gradient_synchronization()"
        raise RuntimeError(f"no autograd.grad() of shards: {fix}") from error
    if shard not in guard.markers:
        guard.forbid_gradient(shard)


def checked_pack(unit, pack: Callable, tensor: Tensor) -> tuple:
    """What `unit.pack` keeps, with a version: of the tensor or, if it is a place, of the shard."""
    if tensor.dtype == torch.float16:  # of an autocast that was entered within the unit
        raise ValueError(FLOAT16)
    saved = pack(tensor)
    source = saved if isinstance(saved, Tensor) else unit.shard
    return source, source._version, saved


def checked_unpack(unpack: Callable, packed: tuple) -> Tensor:
    """Autograd's own check of versions does not cover what hooks have saved."""
    source, version, saved = packed
    if source._version != version:
        raise RuntimeError("a saved tensor was changed in place, or by the optimizer's last step")
    return unpack(saved)


def forbid_parameters(module: nn.Module) -> None:
    """Make listing, saving, loading, copying, casting and moving parameters an error."""

    def fail(*_, **__):
        fix = "load, freeze, copy, cast or move the model first; optimize, clip and save the shards"
        raise RuntimeError(f"a rank has shards only: {fix}")

    fail = MethodType(fail, module.__class__)  # compilers expect methods; bound to no module
    for each in module.modules():
        each.register_state_dict_pre_hook(fail)
        each.register_load_state_dict_pre_hook(fail)
        each._apply = each.__deepcopy__ = fail
        if not list(each.named_parameters()):  # a wrapper lists its shards
            each.named_parameters = fail  # `parameters()` calls it
