"""Errors for training loops that break the contract of a wrapper of 02, 03, 04 or 12 to 15.

    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    guard(model, optimizer)

A wrapper trains the same without a guard, but then a mistake in the loop is silent, or an error
that does not say what to do. The guard watches through hooks, and changes no gradient.
"""

from collections.abc import Callable
from functools import partial
from weakref import WeakMethod, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import optimizer as every_optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from common.collectives import forbid_float16_in_graph

TWICE = (
    "a gradient came twice: every backward of a step but the last belongs in no_sync(), and "
    "finish_gradient_synchronization() after the last; after a backward that failed, restart the "
    "run; a checkpoint() needs use_reentrant=False"
)
NOT_AS_LEFT = (
    "a gradient is not as it was left: after finish_gradient_synchronization() come step() and "
    "zero_grad(set_to_none=True), nowhere else; after a backward that failed, restart the run"
)
GUARDS = WeakTensorKeyDictionary()  # by parameter: as its attribute it could not be pickled
NOT_AS_WRAPPED = (
    "add, replace, freeze, unfreeze, resize, move or cast parameters before they are wrapped"
)
HOOKS = (
    "a hook on a parameter that was registered after wrapping would meet a gradient in flight, and "
    "one that steps would use this rank's: register hooks before wrapping, step after the finish"
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
    before = every_optimizer.register_optimizer_step_pre_hook(weak(sync.guard.before_step))
    after = every_optimizer.register_optimizer_step_post_hook(weak(sync.guard.after_step))
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
    in the module and trains, what must not change of it. arrived: the parameters whose gradient has
    arrived in the step's last backward (ZeRO-2: in the latest one). expected: what `.grad` must be
    until the next finish, for the parameters and shards that have a gradient.
    """

    def __init__(self, sync):
        self.sync = ref(sync)
        sync.__deepcopy__ = self.__deepcopy__  # else a process group would fail first
        self.root = ref(sync if isinstance(sync, nn.Module) else sync.module)
        self.reduces_every_backward = getattr(sync, "zero_stage", 1) == 2
        flat = [*getattr(sync, "buckets", ()), *getattr(sync, "units", ())]
        # frozen shards do not count: in 15 the parameters that train are beside them
        self.shards = {x.shard for x in flat if hasattr(x, "shard") and x.shard.requires_grad}
        self.places = {p: self.place(p) for p in sync.module.parameters() if p.requires_grad}
        self.arrived: set[Tensor] = set()
        self.expected: dict[Tensor, Tensor | None] = {}
        self.grad_places: dict[Tensor, int] = {}
        self.hooks: dict[Tensor, list[int]] = {}
        self.version = 0  # of the parameter whose hooks are running
        self.in_flight: dict[object, int] = {}  # per bucket whose reduction has begun, its version
        self.versions: list[int] = []  # of the parameters, when a forward begins
        self.has_no_float16 = not self.shards  # else the first graph is searched
        self.root().register_forward_pre_hook(weak(self.before_forward))
        self.root().register_forward_hook(weak(self.after_forward))
        for param in self.places:
            if GUARDS.get(param, lambda: None)() is not None:
                raise ValueError("another wrapper averages a parameter of this module: use one")
            GUARDS[param] = ref(self)
            first = param.register_post_accumulate_grad_hook(weak(self.before_the_wrappers_hook))
            hooks = first.hooks_dict_ref()  # in the order in which they run: this one comes first
            hooks.update({i: hooks.pop(i) for i in [*hooks] if i != first.id})
            if not isinstance([*hooks.values()][-1], weak):  # the wrapper's is not the last
                raise RuntimeError(HOOKS)
            param.register_post_accumulate_grad_hook(weak(self.after_the_wrappers_hook))
            self.hooks[param] = [*hooks]
        if hasattr(sync, "units"):
            # not at the top: whoever copies 02 does not need that file
            from common.unit_parameters import watch_units

            watch_units(self, sync.units)

    def __deepcopy__(self, _):
        raise RuntimeError("a copy would not be synchronized: copy the module that is wrapped")

    # ---- in forward ----

    def before_forward(self, *_) -> None:
        self.versions = [p._version for p in self.places]

    def after_forward(self, _, inputs: tuple, output) -> None:
        if [p._version for p in self.places] != self.versions:
            raise RuntimeError("a forward has changed a parameter in place, maybe by its own data")
        if torch.is_grad_enabled() and not self.has_no_float16:
            forbid_float16_in_graph(output)
            self.has_no_float16 = True

    # ---- in backward ----

    def before_the_wrappers_hook(self, param: nn.Parameter) -> None:
        """Called when autograd has accumulated a gradient, before the wrapper's own hook."""
        if torch.is_grad_enabled() or param.grad.is_sparse:
            raise RuntimeError("create_graph=True and sparse=True are not supported")
        if self.place(param) != self.places[param]:
            raise RuntimeError(NOT_AS_WRAPPED)
        if [*param._post_accumulate_grad_hooks] != self.hooks[param]:
            raise RuntimeError(HOOKS)
        self.version = param._version
        if self.reduces_every_backward and len(self.arrived) == len(self.places):
            self.arrived.clear()
        if param in self.arrived:
            raise RuntimeError(TWICE)
        if self.sync().synchronizes:
            if not self.arrived:  # it is the first gradient
                for shard in self.shards:
                    self.forbid_gradient(shard)
            self.arrived.add(param)

    def after_the_wrappers_hook(self, param: nn.Parameter) -> None:
        """Called after the wrapper's own hook."""
        if param._version != self.version:  # by a hook from before the wrapper's
            raise RuntimeError(HOOKS)
        sync, self.expected[param] = self.sync(), param.grad
        if hasattr(sync, "buckets") and not self.reduces_every_backward:  # 15 has no buckets
            for bucket in sync.buckets[len(self.in_flight) : sync.launched]:
                self.in_flight[bucket] = bucket.grads._version
        if not self.shards:  # DDP, whose buckets stay until the next finish
            self.check_grad_place(param)

    def check_grad_place(self, param: nn.Parameter) -> None:
        place = param.grad.data_ptr()
        if self.grad_places.setdefault(param, place) != place:
            raise RuntimeError("p.grad.data was replaced, or the model moved with gradients")

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
        if any(bucket.grads._version != version for bucket, version in self.in_flight.items()):
            raise RuntimeError(NOT_AS_LEFT)
        for param in self.grad_places:
            self.check_grad_place(param)
        self.grad_places.clear()
        self.in_flight.clear()
        for shard in self.shards & self.expected.keys():
            shard.grad = None
        sync = self.sync()
        type(sync).finish_gradient_synchronization(sync)
        if self.shards and self.expected:  # the optimizer does not use the parameters' own
            for param in self.places:
                param.grad = NoGradient(param)
        self.expected.clear()
        self.arrived.clear()

    def check_parameters(self) -> None:
        trained = {p for p in self.root().parameters() if p.requires_grad}
        if trained != self.places.keys() or any(self.place(p) != self.places[p] for p in trained):
            raise RuntimeError(NOT_AS_WRAPPED)

    def place(self, param: nn.Parameter) -> tuple:
        return param.shape, param.data_ptr() if self.shards else None  # DDP's values may move

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Called before a step of any optimizer."""
        params = params_of(optimizer)
        if self.expected and not params.isdisjoint(self.shards | self.places.keys()):
            raise RuntimeError("incomplete: step() before finish_gradient_synchronization()")
        if self.shards and self.places and optimizer is not self.sync().optimizer:
            if not params.isdisjoint(self.shards):
                raise RuntimeError("no all-gather: only `.optimizer` of the wrapper takes steps")

    def after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Count the step as a change, which `fused=True` does not do: older graphs are stale."""
        params = params_of(optimizer)
        if params.isdisjoint(self.shards | self.places.keys()):
            return
        increment_version([p for p in params if p.grad is not None])
        if self.shards:
            increment_version([*self.places])


def params_of(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}


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
