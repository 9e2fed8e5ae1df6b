"""Errors for training loops that break the contract of a wrapper of 02, 03, 04 or 12 to 15.

    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    guard(model, optimizer)

A wrapper trains the same without a guard, but then a mistake in the loop is silent, or an error
that does not say what to do. The guard watches through hooks. From a step's last backward until
the finish, a `NoGradient` takes each gradient's place: any use of it is an error.
"""

from collections.abc import Callable
from functools import partial
from weakref import WeakMethod, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import optimizer as hooks_of_all

from common.collectives import forbid_float16

NOT_AS_LEFT = (
    "a gradient is not as it was left: after finish_gradient_synchronization() come step() and "
    "zero_grad(set_to_none=True), nowhere else; after a backward that failed, restart the run"
)
NOT_AS_WRAPPED = (
    "add, replace, freeze, unfreeze, resize, move or cast parameters before they are wrapped"
)
HOOKS = (
    "a parameter has a gradient hook of another wrapper, or of yours: it would see a gradient in "
    "flight, or this rank's alone. Wrap a module once, and step after the finish"
)


def guard(model: nn.Module, *optimizers) -> None:
    """Watch the wrapper among these: the one that has `finish_gradient_synchronization`.

    Call it once, when the model and its optimizer are complete. The hooks keep nothing alive.
    """
    model = getattr(model, "_orig_mod", model)  # of what torch.compile returned
    (sync,) = (x for x in (model, *optimizers) if hasattr(x, "finish_gradient_synchronization"))
    if hasattr(sync, "guard"):
        raise ValueError("it already has a guard")
    sync.guard = Guard(sync)
    sync.finish_gradient_synchronization = weak(sync.guard.finish)
    sync.__getstate__ = partial(state_to_pickle, ref(sync))
    # an optimizer that is made later may update these parameters or shards, too
    before = hooks_of_all.register_optimizer_step_pre_hook(weak(sync.guard.before_step))
    after = hooks_of_all.register_optimizer_step_post_hook(weak(sync.guard.after_step))
    for handle in (before, after):
        finalize(sync.guard, handle.remove)


def state_to_pickle(sync: ref) -> dict:
    """The attributes of a wrapper but for what `guard` has added: nothing watches a copy."""
    added = ("guard", "finish_gradient_synchronization", "__deepcopy__", "__getstate__")
    return {name: value for name, value in vars(sync()).items() if name not in added}


class weak:
    """Call the method while its object exists, without keeping it alive."""

    def __init__(self, method: Callable | None):
        self.method = method and WeakMethod(method)

    def __call__(self, *args):
        return bound(*args) if self.method and (bound := self.method()) else None

    def __reduce__(self):
        return weak, (None,)  # nothing watches a copy of a module


class Guard:
    """What has happened since the last `finish_gradient_synchronization`.

    shards: what the optimizer updates in place of parameters. places: for each parameter that stays
    in the module and trains, what must not change of it. markers: for each parameter and shard
    whose gradient is incomplete, the `NoGradient` in its place, and the gradient.
    """

    def __init__(self, sync):
        self.sync = ref(sync)
        sync.__deepcopy__ = self.__deepcopy__  # else a process group would fail first
        self.root = ref(sync if isinstance(sync, nn.Module) else sync.module)
        flat = [*getattr(sync, "buckets", ()), *getattr(sync, "units", ())]
        # frozen shards do not count: in 15 the parameters that train are beside them
        self.shards = {x.shard for x in flat if hasattr(x, "shard") and x.shard.requires_grad}
        self.places = self.find_places()
        self.markers: dict[Tensor, tuple[NoGradient, Tensor | None]] = {}
        self.is_incomplete = False  # whether a gradient has arrived, maybe under no_sync()
        self.versions: list[int] = []  # of the parameters, when a forward begins
        self.has_no_float16 = not self.shards  # else the first graph is searched
        self.root().register_forward_pre_hook(weak(self.before_forward))
        self.root().register_forward_hook(weak(self.after_forward))
        for param in self.places:
            hooks = param._post_accumulate_grad_hooks or {}
            # except those of a wrapper that no longer exists
            found = [h for h in hooks.values() if not isinstance(h, weak) or h.method()]
            if len(found) > hasattr(sync, "mark_ready"):  # the wrapper's own hook
                raise ValueError(HOOKS)
            hooks.clear()
            param.register_post_accumulate_grad_hook(weak(self.mark_ready))
        if hasattr(sync, "units"):
            # not at the top: whoever copies 02 does not need that file
            from common.unit_parameters import watch_units

            watch_units(self, sync.units)

    def __deepcopy__(self, _):
        raise RuntimeError("a copy would not be synchronized: copy the module that is wrapped")

    def find_places(self) -> dict[Tensor, tuple]:
        # sharded units make `parameters()` an error
        params = (p for module in self.root().modules() for p in module._parameters.values())
        trained = {p for p in params if p is not None and p.requires_grad} - self.shards
        # 02 keeps no views of the parameters, so their values may move
        return {p: (p.shape, p.data_ptr() if self.shards else None) for p in trained}

    # ---- in forward ----

    def before_forward(self, *_) -> None:
        self.versions = [p._version for p in self.places]

    def after_forward(self, _, inputs: tuple, output) -> None:
        if [p._version for p in self.places] != self.versions:
            raise RuntimeError("a forward has changed a parameter in place: ranks would diverge")
        if torch.is_grad_enabled() and not self.has_no_float16:
            forbid_float16(output)
            self.has_no_float16 = True

    # ---- in backward ----

    def mark_ready(self, param: nn.Parameter) -> None:
        """Called by autograd in place of the wrapper's `mark_ready`, which it calls."""
        sync = self.sync()
        if torch.is_grad_enabled() or param.grad.is_sparse:
            raise RuntimeError("create_graph=True and sparse=True are not supported")
        if len(param._post_accumulate_grad_hooks) > 1:
            raise RuntimeError(HOOKS)
        if param in self.markers:  # but somebody has replaced the marker
            raise RuntimeError(NOT_AS_LEFT)
        self.is_incomplete = True
        if not hasattr(sync, "mark_ready"):  # 15, which averages in the finish
            return
        sync.mark_ready(param)
        grad, flat = param.grad, sync.bucket_of[param].grads
        if grad is not None and grad.untyped_storage() is not flat.untyped_storage():
            raise RuntimeError("p.grad.data was replaced, or the model moved with gradients")
        if sync.synchronizes:
            if not self.markers:  # it is the first gradient
                for shard in self.shards:
                    self.forbid_gradient(shard)
            self.forbid_gradient(param)
            is_last = len(self.markers) == len(self.shards) + len(self.places)
            if is_last and getattr(sync, "zero_stage", 1) == 2:  # another backward may follow
                for param in self.places:
                    _, param.grad = self.markers.pop(param)

    def forbid_gradient(self, tensor: Tensor) -> None:
        """Make any use of `tensor.grad` an error until the next finish."""
        if tensor in self.shards and tensor.grad is not None:  # left from the previous step
            raise RuntimeError(NOT_AS_LEFT)
        self.is_incomplete = True
        marker = NoGradient(tensor)
        self.markers[tensor] = marker, tensor.grad
        tensor.grad = marker

    # ---- after backward ----

    def finish(self) -> None:
        """In place of the wrapper's `finish_gradient_synchronization`, which it calls."""
        if self.find_places() != self.places:
            raise RuntimeError(NOT_AS_WRAPPED)
        for tensor, (marker, grad) in self.markers.items():
            if tensor.grad is not marker:
                raise RuntimeError(NOT_AS_LEFT)
            tensor.grad = grad
        sync = self.sync()
        type(sync).finish_gradient_synchronization(sync)
        if self.shards:  # the optimizer does not use the parameters' own
            for param in self.places:
                param.grad = NoGradient(param)
        self.markers.clear()
        self.is_incomplete = False

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Called before a step of any optimizer."""
        updated = self.own_params(optimizer)
        if updated and self.is_incomplete:
            raise RuntimeError("incomplete: step() before finish_gradient_synchronization()")
        if updated & self.shards and self.places and optimizer is not self.sync().optimizer:
            raise RuntimeError("no all-gather: only `.optimizer` of the wrapper takes steps")

    def after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Count the step as a change, which `fused=True` does not do: older graphs are stale."""
        updated = self.own_params(optimizer)
        increment_version([p for p in updated if p.grad is not None])
        if updated & self.shards:
            increment_version([*self.places])

    def own_params(self, optimizer: torch.optim.Optimizer) -> set[Tensor]:
        params = {p for group in optimizer.param_groups for p in group["params"]}
        return params & (self.shards | self.places.keys())


class NoGradient(Tensor):
    """In place of a gradient that is incomplete or sharded: without memory, any use is an error."""

    def __new__(cls, param: Tensor):
        like = {"dtype": param.dtype, "device": param.device, "storage_size": 0}
        return Tensor._make_wrapper_subclass(cls, param.shape, **like)

    __repr__ = object.__repr__

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(
            f"this gradient is incomplete or sharded ({function}): every backward of a step but "
            "the last belongs in no_sync(); after the last come finish_gradient_synchronization() "
            "(11: reduce_gradients()), clipping by the class that shards, step() and zero_grad(); "
            "a checkpoint() needs use_reentrant=False"
        )
