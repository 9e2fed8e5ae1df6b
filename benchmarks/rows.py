"""The contenders of `make bench`: for each row our version of a technique and PyTorch's own.

A contender is a function `build(shape) -> step`; `step(tokens, targets)` trains on one batch,
optimizer and `zero_grad` included, and returns its loss. Both contenders of a row start from the
same weights and see the same batches. To add a row: two such functions and a line in `ROWS`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from common.model import Linear, Transformer, TransformerConfig, init_weights, linear_cross_entropy

from common.job.run import keep_freed_memory
from tools.stages import load_stage

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """A model, and the samples per rank and step."""

    vocab_size: int
    d_model: int = 128
    n_layers: int = 2
    n_heads: int = 4
    seq_len: int = 64
    batch: int = 8

    @property
    def config(self) -> TransformerConfig:
        return TransformerConfig(
            self.vocab_size, self.d_model, self.n_layers, self.n_heads, self.seq_len
        )


SHAPES = {
    "small": Shape(vocab_size=2048, n_layers=4),
    "large-vocabulary": Shape(vocab_size=33_280),
    "deep": Shape(vocab_size=2048, n_layers=8, batch=16),
    "deep-large-vocabulary": Shape(vocab_size=33_280, n_layers=8, batch=16),
    "long": Shape(vocab_size=2048, seq_len=4096, batch=1),
    "wide": Shape(vocab_size=2048, d_model=256),
}
GPU_SHAPES = {
    "small": Shape(2048, d_model=512, n_layers=8, n_heads=8, seq_len=512),
    "large-vocabulary": Shape(33_280, d_model=512, n_layers=4, n_heads=8, seq_len=512),
    "deep": Shape(2048, d_model=512, n_layers=16, n_heads=8, seq_len=512, batch=32),
    "deep-large-vocabulary": Shape(33_280, 512, n_layers=16, n_heads=8, seq_len=512, batch=32),
    "long": Shape(2048, d_model=512, n_layers=4, n_heads=8, seq_len=16_384, batch=1),
    "wide": Shape(2048, d_model=2048, n_layers=4, n_heads=16, seq_len=512),
}


def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def transformer(shape: Shape, units: Sequence[int] | None = None) -> Transformer:
    model = Transformer(shape.config, indices=units)
    init_weights(model, seed=1)
    return model.to(device())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def step_of(optimizer, forward_and_backward: Step, finish: Callable[[], None] | None = None):
    """Forward, backward, `finish` if there is one, optimizer step, no gradients left."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = forward_and_backward(tokens, targets)
        if finish is not None:
            finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def plain_step(model: nn.Module, optimizer=None, finish: Callable[[], None] | None = None) -> Step:
    """The step of a model whose forward returns the loss. optimizer: by default AdamW."""

    def forward_and_backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        return loss

    return step_of(optimizer or adamw(model), forward_and_backward, finish)


# ---- 01: the model against a plain one ----


class PlainBlock(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        d, self.n_heads = shape.d_model, shape.n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, d_model] -> the same
        batch, seq, d = x.shape
        qkv = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (t.view(batch, seq, self.n_heads, -1).transpose(1, 2) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainTransformer(nn.Module):
    """The decoder as it is usually written, nanoGPT's recipe in its plainest form: LayerNorm
    without bias, learned positions, full logits and `F.cross_entropy`. The head is untied, so
    that it has the matmuls of ours."""

    def __init__(self, shape: Shape):
        super().__init__()
        rows = shape.config.padded_vocab
        self.tokens = nn.Embedding(rows, shape.d_model)
        self.positions = nn.Embedding(shape.seq_len, shape.d_model)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(shape.d_model, bias=False)
        self.head = nn.Linear(shape.d_model, rows, bias=False)
        for weight in (w for w in self.parameters() if w.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def our_model(shape: Shape) -> Step:
    return plain_step(transformer(shape))


def plain_model(shape: Shape) -> Step:
    return plain_step(PlainTransformer(shape).to(device()))


def loss_of_full_logits(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), targets)


def loss_step(shape: Shape, loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    """The output layer alone, forward and backward."""
    rows, d = shape.config.padded_vocab, shape.d_model
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape.batch * shape.seq_len, d, generator=generator).to(device())
    weight = (0.02 * torch.randn(rows, d, generator=generator)).to(device())
    x.requires_grad_(), weight.requires_grad_()

    def step(_: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(x, weight, targets.flatten())
        loss.backward()
        x.grad = weight.grad = None
        return loss.detach()

    return step


# ---- 02: DistributedDataParallel ----

torchs_ddp = partial(DistributedDataParallel, gradient_as_bucket_view=True)


def our_ddp(shape: Shape) -> Step:
    model = load_stage("02").DistributedDataParallel(transformer(shape))
    return plain_step(model, finish=model.finish_gradient_synchronization)


def torch_ddp(shape: Shape) -> Step:
    return plain_step(torchs_ddp(transformer(shape)))


# ---- 03: ZeroRedundancyOptimizer ----


def our_zero(shape: Shape, name: str) -> Step:
    model, zero = transformer(shape), getattr(load_stage("03"), name)
    optimizer = zero(model, torch.optim.AdamW, **ADAMW)
    return plain_step(model, optimizer, optimizer.finish_gradient_synchronization)


def torch_zero(shape: Shape) -> Step:
    model = torchs_ddp(transformer(shape))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    return plain_step(model, optimizer)


# ---- 04: fully_shard ----


def our_fsdp(
    shape: Shape, reshard: bool = True, dtype: torch.dtype | None = None, cpu_offload: bool = False
) -> Step:
    module = transformer(shape)
    model = load_stage("04").FullyShardedDataParallel(
        module,
        module.units(),
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        reshard_after_forward=reshard,
        cpu_offload=cpu_offload,
    )
    return plain_step(model, finish=model.finish_gradient_synchronization)


def torch_fsdp(shape: Shape, reshard: bool = True, dtype: torch.dtype | None = None) -> Step:
    model = transformer(shape)
    settings = {
        "mesh": init_device_mesh(device().type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32),
        "reshard_after_forward": reshard,
    }
    for module in (*model.units(), model):
        fully_shard(module, **settings)
    return plain_step(model)


# ---- 05: parallelize_module ----


def our_tensor_parallel(shape: Shape, sequence_parallel: bool) -> Step:
    stage, group = load_stage("05"), dist.group.WORLD
    model = stage.tensor_parallel(transformer(shape), group, sequence_parallel)
    finish = None
    if sequence_parallel:
        finish = partial(stage.all_reduce_replicated_gradients, model, group)
    return plain_step(model, finish=finish)


def with_torchs_linears(model: nn.Module) -> nn.Module:
    """Replace our linear layers by `nn.Linear`, the only ones that `parallelize_module` takes."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                rows, columns = child.weight.shape
                linear = nn.Linear(columns, rows, bias=False, device="meta")
                linear.weight = child.weight
                setattr(module, name, linear)
    return model


def parallel_plan(sequence_parallel: bool) -> dict:
    """PyTorch's tutorial of tensor parallelism, on the names of our model."""
    # the layout of hidden states between two pairs of linear layers
    between = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output.head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for column, row in (("attn.wqkv", "attn.wo"), ("mlp.w1", "mlp.w2")):
        plan[f"layers.*.{column}"] = ColwiseParallel()
        plan[f"layers.*.{row}"] = RowwiseParallel(output_layouts=between)
    if sequence_parallel:
        for norm in ("layers.*.attn_norm", "layers.*.mlp_norm", "output.norm"):
            plan[norm] = SequenceParallel()
        for pair in ("layers.*.attn", "layers.*.mlp"):
            plan[pair] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            )
    return plan


def loss_parallel_step(model: nn.Module) -> Step:
    """The step of a model whose logits are a DTensor, sharded along the vocabulary."""
    # fused AdamW takes no group that mixes DTensors with the plain weights of the norms
    kinds: dict[type, list[nn.Parameter]] = {}
    for p in model.parameters():
        kinds.setdefault(type(p.data), []).append(p)
    optimizer = torch.optim.AdamW([{"params": ps} for ps in kinds.values()], **ADAMW)

    def forward_and_backward(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.full_tensor()

    return step_of(optimizer, forward_and_backward)


def torch_tensor_parallel(shape: Shape, sequence_parallel: bool) -> Step:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = with_torchs_linears(transformer(shape))
    return loss_parallel_step(parallelize_module(model, mesh, parallel_plan(sequence_parallel)))


# ---- 06: torch.distributed.pipelining ----

MICRO_BATCHES = 8


def stages_of(shape: Shape, virtual_stages: int) -> tuple[dict[int, range], Transformer]:
    """The units of each of this rank's stages, and the model that holds them."""
    p, units_of = dist.get_world_size(), load_stage("06").units_of
    n_stages = p * virtual_stages
    own_stages = range(dist.get_rank(), n_stages, p)
    units = {stage: units_of(stage, n_stages, shape.n_layers) for stage in own_stages}
    return units, transformer(shape, [unit for part in units.values() for unit in part])


def on_all_ranks(losses: Sequence[Tensor]) -> Tensor:
    """The mean of the last rank's losses, which the others do not have."""
    loss = sum(losses, torch.zeros((), device=device())) / MICRO_BATCHES
    dist.all_reduce(loss)
    return loss


def run_ours(pipeline, tokens: Tensor, targets: Tensor) -> Tensor:
    pairs = zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
    return on_all_ranks(pipeline.run([(x, y, None) for x, y in pairs]))


def our_pipeline(shape: Shape, schedule: str, virtual_stages: int) -> Step:
    stage = load_stage("06")
    units, model = stages_of(shape, virtual_stages)
    groups = [dist.new_group(group_desc=to) for to in ("to_lower", "to_higher")]
    stage_class = stage.ZeroBubbleStage if schedule == "zero-bubble" else stage.PipelineStage
    parts = {number: stage.parts_of(model, units[number]) for number in units}
    stages = {number: stage_class(*part, False) for number, part in parts.items()}
    actions = stage.SCHEDULES[schedule]
    if virtual_stages > 1:
        actions = partial(actions, v=virtual_stages)
    message_shape = lambda tokens: (*tokens.shape, shape.config.d_model)  # noqa: E731
    pipeline = stage.Pipeline(stages, actions, *groups, message_shape)
    return step_of(adamw(model), partial(run_ours, pipeline))


class Part(nn.Module):
    """A stage for PyTorch's schedules. The last one leaves the head to the loss, so that both
    contenders have the chunked loss."""

    def __init__(self, model: Transformer, units: range):
        super().__init__()
        self.embed = model.embed if 0 in units else None
        names = (str(unit - 1) for unit in units)
        self.layers = nn.ModuleList(model.layers[name] for name in names if name in model.layers)
        self.output = model.output if model.config.n_units - 1 in units else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.output is None else self.output.norm(x)


def run_torchs(schedule, is_first: bool, tokens: Tensor, targets: Tensor) -> Tensor:
    losses: list[Tensor] = []  # of the last rank
    schedule.step(*[tokens] * is_first, target=targets, losses=losses)
    return on_all_ranks(losses)


def torch_pipeline(shape: Shape, schedule: type, virtual_stages: int) -> Step:
    p, rank = dist.get_world_size(), dist.get_rank()
    units, model = stages_of(shape, virtual_stages)
    stages = [
        pipelining.PipelineStage(Part(model, part), stage, p * virtual_stages, device())
        for stage, part in units.items()
    ]

    def loss_of(x: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x.flatten(0, -2), model.output.head.weight, targets.flatten())

    is_single = issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
    runner = schedule(stages[0] if is_single else stages, MICRO_BATCHES, loss_fn=loss_of)
    return step_of(adamw(model), partial(run_torchs, runner, rank == 0))


# ---- 08: the ring of PyTorch's context parallelism, over its flash operator for CPUs ----

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchRing(torch.autograd.Function):
    """`context_parallel` has no CPU operator to call; these templates of it take any."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, logsumexp, *_ = _templated_ring_attention(
            dist.group.WORLD, 2, FLASH, query=q, key=k, value=v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, logsumexp = ctx.saved_tensors
        inputs = {"query": q, "key": k, "value": v, "out": out, "logsumexp": logsumexp}
        inputs |= {"grad_out": grad, "grad_out_name": "grad_out"}
        inputs |= {"is_causal": True, "dropout_p": 0.0}
        group = dist.group.WORLD
        return _templated_ring_attention_backward(group, 2, FLASH_BACKWARD, **inputs)[:3]


def ring_step(shape: Shape, attend: Callable | None = None) -> Step:
    """Stage 08, with `attend` in place of its own attention if it is given."""
    stage, model = load_stage("08"), transformer(shape)
    chunks = stage.context_parallel(model, dist.group.WORLD)
    for layer in model.layers.values() if attend else ():
        layer.attn.attend = attend
    step = plain_step(model, finish=lambda: stage.average_gradients(model.named_parameters()))
    return lambda *batch: step(*(stage.local_tokens(x, chunks, shape.seq_len) for x in batch))


# ---- 09: experts on every rank ----


def experts(shape: Shape, group: dist.ProcessGroup) -> Transformer:
    stage = load_stage("09")
    model = Transformer(stage.MixtureConfig(**vars(shape.config)))
    stage.expert_parallel(model, group)
    init_weights(model, seed=1)
    return model.to(device())


def our_experts(shape: Shape) -> Step:
    stage, everyone = load_stage("09"), dist.group.WORLD
    model = experts(shape, everyone)
    replicas, _ = dist.new_subgroups(1)
    replicated, sharded = stage.replicated_and_sharded(model)

    def finish() -> None:
        stage.average_gradients(replicated)
        stage.average_gradients(sharded, replicas)
        stage.balance_load(model, 0.08)

    return plain_step(model, finish=finish)


def replicated_experts(shape: Shape) -> Step:
    alone, _ = dist.new_subgroups(1)
    model = experts(shape, alone)
    parallel = torchs_ddp(model, forward_sync_buffers=False)
    return plain_step(parallel, finish=lambda: load_stage("09").balance_load(model, 0.08))


# ---- 10: float8 ----


def our_float8(shape: Shape) -> Step:
    return plain_step(load_stage("10").float8(transformer(shape), "rowwise"))


# ---- 11: Muon on every rank, under DDP ----


def matrices_and_others(model: Transformer) -> tuple[list, list]:
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    return matrices, [p for p in model.parameters() if p not in set(matrices)]


def muon_step(model: nn.Module, muon, others: list, reduce: Callable = lambda: None) -> Step:
    def muon_then_zero_grad() -> None:
        reduce()
        muon.step()
        muon.zero_grad(set_to_none=True)

    return plain_step(model, torch.optim.AdamW(others, **ADAMW), muon_then_zero_grad)


def our_muon(shape: Shape) -> Step:
    stage, model = load_stage("11"), transformer(shape)
    matrices, others = matrices_and_others(model)
    owners = stage.choose_owners(matrices, dist.get_world_size())
    muon = stage.Muon(owners, lr=ADAMW["lr"])
    named = list(model.named_parameters())
    return muon_step(model, muon, others, lambda: stage.reduce_gradients(named, muon))


def torch_muon(shape: Shape) -> Step:
    model = transformer(shape)
    matrices, others = matrices_and_others(model)
    replica = torchs_ddp(model)
    # nesterov=False would change the momentum of bfloat16 parameters in place before PyTorch 2.15
    muon = torch.optim.Muon(matrices, lr=ADAMW["lr"], adjust_lr_fn="match_rms_adamw")
    return muon_step(replica, muon, others)


# ---- 12: the state in files, against 04's in the host's memory ----


def our_ssd(shape: Shape) -> Step:
    stage, module = load_stage("12"), transformer(shape)
    Path("runs").mkdir(exist_ok=True)  # on a disk, as /tmp may not be
    folder = tempfile.TemporaryDirectory(dir="runs")
    optimizer = stage.SpeculativeAdamW(Path(folder.name), **ADAMW)
    model = stage.FullyShardedDataParallel(module, module.units(), optimizer)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        keep_freed_memory(2**17)  # as a run of 12 does, and one of 04 does not
        loss = model(tokens, targets)
        loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step(math.inf)
        keep_freed_memory()
        return loss.detach()

    step.folder = folder  # it is deleted with the step
    return step


# ---- 14: parallelize_module, then fully_shard ----

TP = 2  # the tensor-parallel degree


def our_2d(shape: Shape) -> Step:
    stage, module = load_stage("14"), transformer(shape)
    mesh = stage.build_mesh(1, dist.get_world_size() // TP, TP, timeout=600)
    stage.tensor_parallel(module, mesh.tp, sequence_parallel=True)
    model = stage.FullyShardedTensorParallel(module, module.units(), mesh)
    return plain_step(model, finish=model.finish_gradient_synchronization)


def torch_2d(shape: Shape) -> Step:
    sizes = dist.get_world_size() // TP, TP
    mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("shard", "tp"))
    model = with_torchs_linears(transformer(shape))
    model = parallelize_module(model, mesh["tp"], parallel_plan(sequence_parallel=True))
    for module in (*model.units(), model):
        fully_shard(module, mesh=mesh["shard"])
    return loss_parallel_step(model)


# ---- the table ----


@dataclass(frozen=True)
class Row:
    """Two contenders, the numbers of ranks to run on, and the table's name for PyTorch's side."""

    ours: Callable[[Shape], Step]
    theirs: Callable[[Shape], Step]
    against: str
    ranks: tuple[int, ...] = (2, 4)
    same_loss: bool = True  # both contenders compute the same function
    may_be_slower: bool = False  # the other one is ours as well
    shapes: tuple[str, ...] = ("small", "large-vocabulary")
    share_of: Callable[[int], int] = lambda rank: rank  # the rank's share of the batch


def tensor_parallel_row(sequence_parallel: bool, against: str) -> Row:
    contenders = our_tensor_parallel, torch_tensor_parallel
    ours, theirs = (partial(each, sequence_parallel=sequence_parallel) for each in contenders)
    return Row(ours, theirs, against, share_of=lambda rank: 0)


def pipeline_row(schedule: str, v: int, theirs: type, their_v: int) -> Row:
    return Row(
        partial(our_pipeline, schedule=schedule, virtual_stages=v),
        partial(torch_pipeline, schedule=theirs, virtual_stages=their_v),
        f"pipelining.{theirs.__name__}, {their_v} stage{'s' * (their_v > 1)} per rank",
        shapes=("deep", "deep-large-vocabulary"),
        share_of=lambda rank: 0,
    )


ROWS = {
    "01-model": Row(
        our_model, plain_model, "plain GPT, full logits, AdamW fused", (1,), same_loss=False
    ),
    "01-loss": Row(
        partial(loss_step, loss_of=linear_cross_entropy),
        partial(loss_step, loss_of=loss_of_full_logits),
        "x @ W.t(), F.cross_entropy",
        (1,),
        shapes=("large-vocabulary",),
    ),
    "02-ddp": Row(our_ddp, torch_ddp, "DistributedDataParallel(gradient_as_bucket_view=True)"),
    "03-zero-1": Row(
        partial(our_zero, name="ZeroRedundancyOptimizer"),
        torch_zero,
        "ZeroRedundancyOptimizer under DDP",
    ),
    "03-zero-2": Row(
        partial(our_zero, name="ZeroStage2"), torch_zero, "ZeroRedundancyOptimizer under DDP"
    ),
    "04-fsdp": Row(our_fsdp, torch_fsdp, "fully_shard on each unit and the root"),
    "04-fsdp-no-reshard": Row(
        partial(our_fsdp, reshard=False),
        partial(torch_fsdp, reshard=False),
        "fully_shard(reshard_after_forward=False)",
    ),
    "04-fsdp-bf16": Row(
        partial(our_fsdp, dtype=torch.bfloat16),
        partial(torch_fsdp, dtype=torch.bfloat16),
        "fully_shard, parameters in bf16, reduced in float32",
    ),
    "05-tensor": tensor_parallel_row(False, "parallelize_module, loss_parallel"),
    "05-sequence": tensor_parallel_row(True, "the same with SequenceParallel"),
    "06-gpipe": pipeline_row("gpipe", 1, pipelining.ScheduleGPipe, 1),
    "06-1f1b": pipeline_row("1f1b", 1, pipelining.Schedule1F1B, 1),
    "06-interleaved": pipeline_row("interleaved", 2, pipelining.ScheduleInterleaved1F1B, 2),
    "06-zero-bubble": pipeline_row("zero-bubble", 1, pipelining.ScheduleInterleavedZeroBubble, 2),
    "08-ring": Row(
        ring_step,
        partial(ring_step, attend=TorchRing.apply),
        "_templated_ring_attention over PyTorch's flash operator",
        shapes=("long",),
        share_of=lambda rank: 0,
    ),
    "09-experts": Row(
        our_experts,
        replicated_experts,
        "all experts on every rank, under DistributedDataParallel",
        shapes=("small",),
    ),
    "10-float8": Row(
        our_float8, our_model, "01's model: PyTorch has no float8 layer", (1,), same_loss=False
    ),
    "11-muon": Row(
        our_muon,
        torch_muon,
        "torch.optim.Muon on every rank, under DistributedDataParallel",
        shapes=("wide",),
    ),
    "12-ssd": Row(
        our_ssd,
        partial(our_fsdp, cpu_offload=True),
        "04 with --cpu-offload: PyTorch has no counterpart",
        may_be_slower=True,
        shapes=("wide",),
    ),
    "14-2d": Row(
        our_2d,
        torch_2d,
        "parallelize_module, SequenceParallel, loss_parallel; then fully_shard",
        (4,),
        share_of=lambda rank: rank // TP,
    ),
}
