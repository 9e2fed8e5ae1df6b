"""Errors for training loops that break the contract of a wrapper of stage 02, 03, 04, 12, 13 or 15.

    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    guard(model, optimizer)

A wrapper trains the same without a guard, but then a mistake in the loop is silent, or an error
that does not say what to do. The guard watches through hooks, and changes no gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.utils.weak import WeakTensorKeyDictionary

TWICE = (
    "a gradient came twice: every backward of a step but the last belongs in no_sync(), and "
    "finish_gradient_synchronization() after the last; after a backward that failed, restart the "
    "run; a checkpoint() needs use_reentrant=False"
)
NOT_AS_LEFT = (
    "a gradient is not as it was left: after finish_gradient_synchronization() come step() and "
    "zero_grad(set_to_none=True), nowhere else; after a backward that failed, restart the run"
)
GUARDS = WeakTensorKeyDictionary()  # of parameters, which attributes would make unpicklable
BEFORE = "add, replace, freeze, unfreeze, resize, move or cast parameters before they are wrapped"


def guard(model: nn.Module, *optimizers) -> None:
    """Watch the one of these that has `finish_gradient_synchronization`. Call it once, at the end
    of the construction. The hooks keep nothing alive."""
    (sync,) = (x for x in (model, *optimizers) if hasattr(x, "finish_gradient_synchronization"))
    if hasattr(sync, "guard"):
        raise ValueError("it already has a guard")
    sync.guard = Guard(sync)
    sync.finish_gradient_synchronization = weak(sync.guard.finish)
    for optimizer in (getattr(each, "optimizer", each) for each in optimizers):
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(weak(sync.guard.before_step))
            optimizer.register_step_post_hook(weak(sync.guard.after_step))


def weak(method: Callable) -> Callable:
    """Call the method while its object exists, without keeping it alive."""
    method = WeakMethod(method)
    return lambda *args: bound(*args) if (bound := method()) else None


class Guard:
    """What has happened since the last `finish_gradient_synchronization`.

    shards: what the optimizer updates in place of parameters. places: parameters that stay in the
    module and train, and what must not change of them. came: those whose gradient has come in the
    last backward of the step (ZeRO-2: in the last one so far). expected: what `.grad` must be until
    the next finish, for the parameters and shards that have a gradient.
    """

    def __init__(self, sync):
        self.sync = ref(sync)
        sync.__deepcopy__ = self.__deepcopy__  # else a process group would fail first
        self.root = ref(sync if isinstance(sync, nn.Module) else sync.module)
        self.reduces_every_backward = getattr(sync, "zero_stage", 1) == 2
        flat = [*getattr(sync, "buckets", ()), *getattr(sync, "units", ())]
        # frozen shards are none: in 15 the parameters that train are beside them
        shards = {each.shard for each in flat if hasattr(each, "shard")}
        self.shards = {shard for shard in shards if shard.requires_grad}
        self.places = {p: self.place(p) for p in sync.module.parameters() if p.requires_grad}
        self.came: set[Tensor] = set()
        self.expected: dict[Tensor, Tensor | None] = {}
        self.grad_places: dict[Tensor, int] = {}
        for param in self.places:
            if GUARDS.get(param, lambda: None)() is not None:
                raise ValueError("another wrapper averages a parameter of this module: use one")
            GUARDS[param] = ref(self)
            first = param.register_post_accumulate_grad_hook(weak(self.before_it_is_taken))
            hooks = first.hooks_dict_ref()  # in the order in which they run: this one comes first
            hooks.update({i: hooks.pop(i) for i in [*hooks] if i != first.id})
            param.register_post_accumulate_grad_hook(weak(self.after_it_was_taken))
        if not self.places:
            for shard in self.shards:
                shard.register_hook(partial(weak(self.after_a_unit), ref(shard)))
            forbid_parameters(self.root())
        for unit in getattr(sync, "units", ()):
            check_uses(unit)

    def __deepcopy__(self, _):
        raise RuntimeError("a copy would not be synchronized: copy the module that is wrapped")

    # ---- in backward ----

    def before_it_is_taken(self, param: nn.Parameter) -> None:
        """Called when autograd has accumulated a gradient, before the wrapper's own hook."""
        if torch.is_grad_enabled() or param.grad.is_sparse:
            raise RuntimeError("create_graph=True and sparse=True are not supported")
        if self.place(param) != self.places[param]:
            raise RuntimeError(BEFORE)
        if self.reduces_every_backward and len(self.came) == len(self.places):
            self.came.clear()
        if param in self.came:
            raise RuntimeError(TWICE)
        if self.sync().synchronizes:
            for shard in () if self.came else self.shards:  # the first gradient
                self.forbid_gradient(shard)
            self.came.add(param)

    def after_it_was_taken(self, param: nn.Parameter) -> None:
        """Called after the wrapper's own hook."""
        self.expected[param] = param.grad
        if not self.shards:  # DDP, whose buckets stay until the next finish
            place = param.grad.data_ptr()
            if self.grad_places.setdefault(param, place) != place:
                raise RuntimeError("p.grad.data was replaced, or the model moved with gradients")

    def after_a_unit(self, shard: ref, grad: Tensor | None) -> None:
        """Called when a unit's backward has ended. grad: None in 04 and 12, still to be reduced."""
        if grad is None:
            # private; raises within autograd.grad(), which would get no gradient from here
            torch._C._will_engine_execute_node(get_gradient_edge(shard()).node)
            self.forbid_gradient(shard())

    def forbid_gradient(self, shard: Tensor) -> None:
        """Make any use of `shard.grad` an error until the gradients are complete."""
        if shard.grad is not self.expected.get(shard):
            raise RuntimeError(NOT_AS_LEFT)
        if shard not in self.expected:
            self.expected[shard] = shard.grad = NoGradient(shard)

    # ---- after backward ----

    def finish(self) -> None:
        """In place of the wrapper's `finish_gradient_synchronization`, which it calls."""
        self.check_parameters()
        if any(tensor.grad is not grad for tensor, grad in self.expected.items()):
            raise RuntimeError(NOT_AS_LEFT)
        for param in self.grad_places:
            self.after_it_was_taken(param)
        self.grad_places.clear()
        for shard in self.shards & self.expected.keys():
            shard.grad = None
        sync = self.sync()
        type(sync).finish_gradient_synchronization(sync)
        if self.shards and self.expected:  # the optimizer does not use the parameters' own
            for param in self.places:
                param.grad = NoGradient(param)
        self.expected.clear()
        self.came.clear()

    def check_parameters(self) -> None:
        if not self.places:
            return check_no_parameters(self.root(), self.shards)
        trained = {p for p in self.root().parameters() if p.requires_grad}
        if trained != self.places.keys() or any(self.place(p) != self.places[p] for p in trained):
            raise RuntimeError(BEFORE)

    def place(self, param: nn.Parameter) -> tuple:
        return param.shape, param.data_ptr() if self.shards else None  # DDP's values may move

    def before_step(self, *_) -> None:
        if self.expected:
            raise RuntimeError("incomplete: step() before finish_gradient_synchronization()")

    def after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Count the step as a change, which `fused=True` does not do: older graphs are stale."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        increment_version([p for p in params if p.grad is not None])
        if self.shards:
            increment_version([*self.places])


# ---- what a unit computes with, saves for backward and reads there: 03 (ZeRO-3), 04, 12 and 15 ----


def check_uses(unit) -> None:
    """Put a check around the unit's forward, and around what `saved_tensors_hooks` calls."""
    unit.module_forward = partial(checked_forward, unit, unit.module_forward)
    unit.pack = partial(checked_pack, unit, unit.pack)
    unit.unpack = partial(checked_unpack, unit.unpack)


def checked_forward(unit, forward: Callable, *args, **kwargs):
    """RuntimeError if the unit changes a parameter in place. ValueError if it is in float16."""
    params = [getattr(owner, name) for owner, name in unit.owners]  # while it computes
    forbid_float16(params)
    full, version = unit.full, unit.full._version
    if params[0].requires_grad:
        params[0].grad_fn.register_prehook(partial(check_backward, unit, unit.shard._version))
    output = forward(*args, **kwargs)
    if full._version != version:
        raise RuntimeError("a unit has changed a parameter in place")
    return output


def forbid_float16(params: Sequence[Tensor], *_) -> None:
    """ValueError if a forward that trains is in float16, by a parameter's dtype or by autocast."""
    kind, dtypes = params[0].device.type, {p.dtype for p in params}
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    if torch.float16 in dtypes and torch.is_grad_enabled():
        # a shard's gradient can overflow on one rank alone, whose GradScaler skips the step
        raise ValueError("float16 needs a GradScaler, which decides per rank: use bfloat16")


def check_backward(unit, version: int, grads: tuple[Tensor | None, ...]) -> None:
    """Called before `Gather.backward`."""
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True: the reduced gradients have no graph")
    if unit.shard._version != version:
        raise RuntimeError("backward through a graph from before the optimizer's last step")
    if any(grad is None for grad in grads):
        raise RuntimeError(f"unit {unit.name} has not used all of its parameters")


def checked_pack(unit, pack: Callable, tensor: Tensor) -> tuple:
    """What `unit.pack` keeps, with a version: of the tensor or, if it is a place, of the shard."""
    saved = pack(tensor)
    source = saved if isinstance(saved, Tensor) else unit.shard
    return source, source._version, saved


def checked_unpack(unpack: Callable, packed: tuple) -> Tensor:
    """Autograd's own check of versions does not cover what hooks have saved."""
    source, version, saved = packed
    if source._version != version:
        raise RuntimeError("changed in place, or by the optimizer's last step")
    return unpack(saved)


class NoGradient(Tensor):
    """In place of a gradient that is incomplete or sharded: without memory, any use is an error."""

    def __new__(cls, param: Tensor):
        like = {"dtype": param.dtype, "device": param.device, "storage_size": 0}
        return Tensor._make_wrapper_subclass(cls, param.shape, **like)

    __repr__ = object.__repr__

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        fix = "after backward come finish_gradient_synchronization(), clipping by the class that "
        fix += "shards, step() and zero_grad()"
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
        if not list(each.named_parameters()):  # a wrapper lists its shards
            each.named_parameters = fail  # `parameters()` calls it


def check_no_parameters(module: nn.Module, shards: set[Tensor]) -> None:
    """RuntimeError if a module has a parameter of its own: nobody would average it."""
    for name, each in module.named_modules():
        if not {None, *shards}.issuperset(each._parameters.values()):
            raise RuntimeError(f"{name}: a parameter was added or replaced after sharding")
