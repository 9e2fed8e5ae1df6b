"""Stages 02, 03 and 04 behind one interface, for tests that hold them to the same formulas.

    trainer = Trainer("zero-2", model, torch.optim.SGD, lr=0.1)
    loss = trainer.step([loss_of, loss_of_another])     functions of the model, one per micro-batch
    trainer.parameters()                                unsharded, by name, on every rank

STRATEGIES lists the names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.collectives import all_gather_single
from common.guards import guard

from tools.stages import load_stage

STRATEGIES = {  # stage, and arguments of its class
    "ddp": ("02", {}),
    "zero-1": ("03", {}),
    "zero-2": ("03", {}),
    "zero-3": ("03", {}),
    "fsdp": ("04", {}),
    "fsdp-keep": ("04", {"reshard_after_forward": False}),
}


def no_sync_of(sync) -> AbstractContextManager:
    """Without effect in stage 04."""
    return sync.no_sync() if hasattr(sync, "no_sync") else nullcontext()


class Trainer:
    """A model under one of STRATEGIES, with an optimizer.

    units: the modules that ZeRO's stage 3 and FSDP gather together (default: the model's children).
    bucket_mb: bucket size of DDP and of ZeRO's stages 1 and 2. gathered: dtype of the gathered
    weights. groups: FSDP's, for hybrid sharding.
    """

    def __init__(
        self,
        strategy: str,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        units: list[nn.Module] | None = None,
        bucket_mb: float = 25,
        gathered: torch.dtype | None = None,
        groups: dict[str, dist.ProcessGroup] | None = None,
        guarded: bool = True,
        **defaults,
    ):
        number, options = STRATEGIES[strategy]
        stage, self.strategy, self.plain = load_stage(number), strategy, model
        if number == "02":
            self.model = self.sync = stage.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
            self.optimizer = optimizer_class(model.parameters(), **defaults)
        elif number == "03":
            options = {"bucket_cap_mb": bucket_mb}
            if strategy == "zero-3":
                options = {"units": list(model.children()) if units is None else units}
            classes = {
                "zero-1": stage.ZeroRedundancyOptimizer,
                "zero-2": stage.ZeroStage2,
                "zero-3": stage.ZeroStage3,
            }
            self.optimizer = self.sync = classes[strategy](
                model, optimizer_class, **options, **defaults
            )
            self.model = model
        else:
            self.model = self.sync = stage.FullyShardedDataParallel(
                model,
                list(model.children()) if units is None else units,
                param_dtype=gathered,
                reduce_dtype=gathered and torch.float32,
                **options,
                **(groups or {}),
            )
            self.optimizer = optimizer_class(self.model.parameters(), **defaults)
        if guarded:
            guard(self.model, self.optimizer)

    def backward(self, losses: list[Callable[[nn.Module], Tensor]]) -> Tensor:
        """Run forward and backward of every micro-batch, synchronize; returns the mean loss."""
        total = torch.zeros(())
        for i, loss_of in enumerate(losses):
            loss = loss_of(self.model) / len(losses)
            with nullcontext() if i == len(losses) - 1 else no_sync_of(self.sync):
                loss.backward()
            total += loss.detach()
        self.sync.finish_gradient_synchronization()
        return total

    def step(self, losses: list[Callable[[nn.Module], Tensor]]) -> Tensor:
        loss = self.backward(losses)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the unsharded parameters, under the names of the plain model."""
        if self.strategy not in ("zero-3", "fsdp", "fsdp-keep"):
            return {name: p.detach().clone() for name, p in self.plain.named_parameters()}
        state = {}
        for bucket in getattr(self.sync, "units", None) or self.sync.buckets:
            full = torch.empty(sum(bucket.sizes), dtype=bucket.shard.dtype)
            all_gather_single(full, bucket.shard.detach(), group=bucket.group)
            *flats, _ = full.split(bucket.sizes)
            for (name, shape), flat in zip(bucket.shapes.items(), flats, strict=True):
                state[name] = flat.view(shape)
        return state
