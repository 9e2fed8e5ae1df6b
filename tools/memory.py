"""The memory of live tensors: now, and its peak over a block."""

from __future__ import annotations

import gc

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def device_of(tensor: Tensor) -> torch.device:
    """As `tensor.device`, which for a fake tensor is an operator, as slow as others."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def live_storages() -> list[torch.UntypedStorage]:
    """Every live CPU storage of floating-point numbers that Python can reach, once."""
    found = {}
    for obj in gc.get_objects():
        if type(obj) not in (Tensor, torch.nn.Parameter):  # other subclasses may have no memory
            continue
        # a gradient that Python has never accessed exists in C++ alone
        for tensor in (obj, obj.grad if obj.is_leaf else None):
            if tensor is not None and tensor.is_floating_point() and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage
    return list(found.values())


def live_bytes() -> int:
    """Bytes of weights, gradients, optimizer state and buffers: each live float storage once."""
    return sum(storage.nbytes() for storage in live_storages())


class PeakMemory(TorchDispatchMode):
    """Peak bytes of all live floating-point storages on a device during the block.

    It looks at every storage that an operator of this thread touches, before and after the
    operator. So it sees tensors that autograd holds in C++, and storages that are resized. It does
    not see the scratch memory of a kernel, or allocations of C++ threads. only_touched: what was
    live before the block does not count until an operator touches it, as on fake tensors.

        with PeakMemory() as peak:
            ...
        peak.bytes      the peak
        peak.above      the peak minus the bytes that were live when the block began
        peak.left       bytes that the block leaves behind (negative: it freed some)
    """

    def __init__(self, device: str = "cpu", only_touched: bool = False) -> None:
        super().__init__()
        self.device, self.only_touched = device, only_touched
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, and the last size
        self.at_most = 0  # with storages freed since the last sweep

    def __enter__(self) -> PeakMemory:
        if not self.only_touched:
            gc.collect()
            for storage in live_storages():
                self.watch(storage)
        self.before = self.bytes = self.sweep()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        if not self.only_touched:
            gc.collect()
        now = self.sweep()
        self.bytes = max(self.bytes, now)
        self.above, self.left = self.bytes - self.before, now - self.before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.see(args, kwargs)
        result = func(*args, **(kwargs or {}))
        self.see(result)
        return result

    def see(self, *values) -> None:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor) or device_of(tensor).type != self.device:
                continue
            if tensor.is_floating_point():
                self.watch(tensor.untyped_storage())
        if self.at_most > self.bytes:
            self.bytes = max(self.bytes, self.sweep())

    def watch(self, storage: torch.UntypedStorage) -> None:
        # a weak reference keeps the address taken
        reference, before = self.known.get(storage._cdata) or (StorageWeakRef(storage), 0)
        if storage.nbytes() != before:
            self.known[storage._cdata] = reference, storage.nbytes()
            self.at_most += storage.nbytes() - before

    def sweep(self) -> int:
        """Forget what has been freed; the bytes that are live now."""
        for address, (reference, _) in list(self.known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.known[address]
            else:
                self.known[address] = reference, storage.nbytes()
        self.at_most = sum(size for _, size in self.known.values())
        return self.at_most
