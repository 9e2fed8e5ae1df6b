"""Stages 02, 03 and 04 behind one face, for tests that hold them against the same formulas.

    trainer = Trainer("zero-2", model, torch.optim.SGD, lr=0.1)
    loss = trainer.step([loss_of, loss_of_another])     functions of the model, one a micro-batch
    trainer.parameters()                                whole, by name, on every rank

The names of the ways are those of WAYS.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from harness import load_stage
from torch import Tensor, nn

WAYS = {  # stage and what its class is told
    "ddp": ("02", {}),
    "zero-1": ("03", {"zero_stage": 1}),
    "zero-2": ("03", {"zero_stage": 2}),
    "zero-3": ("03", {"zero_stage": 3}),
    "fsdp": ("04", {}),
    "fsdp-keep": ("04", {"reshard_after_forward": False}),
}


class Trainer:
    """A model under one of WAYS, with an optimizer.

    units: what stage 3 of ZeRO and FSDP gather in one; None for the model's children. bucket_mb:
    the most in a bucket of DDP and of ZeRO's stages 1 and 2. gathered: dtype of gathered weights.
    groups: FSDP's, for hybrid sharding.
    """

    def __init__(
        self,
        way: str,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        units: list[nn.Module] | None = None,
        bucket_mb: float = 25,
        gathered: torch.dtype | None = None,
        groups: dict[str, dist.ProcessGroup] | None = None,
        **defaults,
    ):
        number, options = WAYS[way]
        stage, self.way, self.plain = load_stage(number), way, model
        if number == "02":
            self.model = self.sync = stage.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
            self.optimizer = optimizer_class(model.parameters(), **defaults)
        elif number == "03":
            params, units = model.parameters(), units or list(model.children())
            if way == "zero-3":
                params = [{"params": list(unit.parameters())} for unit in units]
            self.optimizer = self.sync = stage.ZeroRedundancyOptimizer(
                params, optimizer_class, **options, bucket_cap_mb=bucket_mb, **defaults
            )
            if way == "zero-3":
                dtype = gathered or next(model.parameters()).dtype
                self.optimizer.shard_parameters(units, dtype)
            self.model = model
        else:
            self.model = self.sync = stage.FullyShardedDataParallel(
                model,
                units,
                param_dtype=gathered,
                reduce_dtype=gathered and torch.float32,
                **options,
                **(groups or {}),
            )
            self.optimizer = optimizer_class(self.model.shards(), **defaults)

    def backward(self, losses: list[Callable[[nn.Module], Tensor]]) -> Tensor:
        """Forward and backward of every micro-batch, gradients synchronized; the mean loss."""
        total = torch.zeros(())
        for i, loss_of in enumerate(losses):
            loss = loss_of(self.model) / len(losses)
            with nullcontext() if i == len(losses) - 1 else self.sync.no_sync():
                loss.backward()
            total += loss.detach()
        self.sync.finish_gradient_synchronization()
        return total

    def step(self, losses: list[Callable[[nn.Module], Tensor]], set_to_none: bool = True) -> Tensor:
        loss = self.backward(losses)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the whole parameters, under the names of the plain model."""
        if self.way.startswith("fsdp"):
            return self.model.full_state_dict()
        buckets = self.optimizer.buckets if self.way == "zero-3" else []
        for bucket in buckets:
            bucket.unshard()
            bucket.wait()
        state = {name: p.detach().clone() for name, p in self.plain.named_parameters()}
        for bucket in buckets:
            bucket.reshard()
        return state
