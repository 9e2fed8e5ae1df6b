"""Stage 15: LoRA: train small matrices beside frozen weights, which are sharded.

The weight W of a linear layer stays as it was read. Two matrices are trained, A with r rows and B
with r columns, and the layer computes W x + (alpha / r) B A x. Every rank holds a shard of each
unit's W, and all of A and B. A unit is gathered for forward and again for backward, where the
gradient of x needs W. Only the gradients of A and B are averaged, once per step, as in DDP.

New since stage 13: what is sharded is frozen, without gradient and optimizer state, and what is
added afterwards trains. 13's packing, loss and files are in `finetune.py` beside this file, 04's
classes in `fsdp.py`.

    P parameters of b bytes each: E of the embedding, O of the head. p in A and B. N ranks that
    shard, m micro-batches per step

    memory per rank, bytes     b P / N + 16 p + three units
    sent per step, elements    all-gather m (2 P - E - O), of b bytes, and all-reduce p, of 4

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.

Run it:

    torchrun --nproc-per-node 2 15_lora/train.py --model DIR --data FILE --steps 100
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # of the files beside this one

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from common.collectives import average_gradients
from common.counter_rng import generator_of
from common.optimization import clip_grad_norm_
from common.unit_parameters import is_in_backward
from common.weight_files import WeightFiles, publish, write_tensors
from finetune import no_values, ranges_in, read_shard, together, write_model
from fsdp import FullyShardedDataParallel, Unit

# isort: split
from common.collectives import all_reduce_control
from common.distributed import World, group_along, print0
from common.guards import guard
from common.llama import Llama, LlamaConfig
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import training_state
from finetune import count_targets, micro_batches_of, read_model, share_of_loss

from common.job.arguments import check_memory, positive, positive_int
from common.job.finetuning import (
    complete,
    documents_of_step,
    finetuning_parser,
    load,
    output_folder,
    say_progress,
)
from common.job.launch import cleanup, setup
from common.job.prepared_instructions import Instructions
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: what is sharded is frozen, and what is added afterwards trains
# ------------------------------------------------------------------------------------------------


class FullyShardedFrozen(FullyShardedDataParallel):
    """FSDP of stage 04, but what is sharded is frozen. What is added to the module later trains.

    The contract. Each parameter is in exactly one unit, and is used in its unit's forward and
    nowhere else. All ranks run the same units in the same order. `parameters()` has only what is
    added after wrapping, for example by `add_adapters`; it must be equal on all ranks. After the
    last backward of a step come `finish_gradient_synchronization()`, clipping, the optimizer's
    `step()` and `zero_grad()`.

    units: the modules that are gathered one by one, in the order in which to prefetch them. Their
    values are not used: shards are zeros, which `read_model` fills.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],
        device: torch.device,
        param_dtype: torch.dtype,  # of the shards, of gathered units and of their inputs
        shard_group: ProcessGroup | None = None,  # the N ranks that shard each unit; default: all
        reshard_after_forward: bool = True,  # False: each unit stays until its backward
    ):
        for param in module.parameters():
            param.data = param.data.to(param_dtype)  # which is then that of the shards
            param.requires_grad_()  # as 04 expects; `make_units` freezes the shards
        # no replicate_group: gradients are averaged over all ranks, and when 13's `write_model`
        # writes, replicas write the same bytes
        super().__init__(
            module,
            units,
            shard_group,
            param_dtype=param_dtype,
            reshard_after_forward=reshard_after_forward,
            read_shard=partial(no_values, dtype=param_dtype),
            device=device,
        )

    def make_units(self, named_units: list[tuple[str, nn.Module]]) -> None:
        # `parameters()` lists no shards
        self.units = [Unit(*named_unit, self) for named_unit in named_units]
        for unit in self.units:
            unit.shard.requires_grad_(False)

    def enter(self, unit: Unit) -> None:
        """Gather the unit's parameters, and prefetch those of the next unit that will be used.

        In backward, first free the units that follow this one in forward: backward has left them.
        In 04 `Gather.backward` frees a unit, but the parameters here are frozen, so it never runs.
        If a unit is freed too early, `unpack` gathers it again.
        """
        if is_in_backward():
            for each in self.units[self.units.index(unit) + 1 :]:
                each.reshard()
        super().enter(unit)

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """After a step's last backward: average the gradients of what trains, over all ranks."""
        for unit in self.units:
            unit.reshard()  # those that no later `enter` has freed: at least the first layer
        average_gradients(self.named_parameters())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this global norm; returns the norm before clipping."""
        return clip_grad_norm_(self.parameters(), max_norm)


class LoRALinear(nn.Module):
    """y = W x + bias + (alpha / r) B A x. `linear` has W and the bias, which are frozen.

    lora_A: [r, inputs], lora_B: [outputs, r], float32, and cast to the dtype of x in each forward.
    """

    def __init__(self, linear: nn.Linear, name: str, r: int, alpha: float, seed: int, device):
        super().__init__()
        self.linear, self.scale = linear, alpha / r
        # uniform within 1 / sqrt(inputs), as in `peft`; with B = 0 the first loss is the model's
        a = torch.rand(r, linear.in_features, generator=generator_of("lora", seed, name)) * 2 - 1
        self.lora_A = nn.Parameter((a / linear.in_features**0.5).to(device))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r, device=device))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)
        return self.linear(x) + self.scale * F.linear(F.linear(x, a), b)


def add_adapters(module: nn.Module, r: int, alpha: float, seed: int, device: torch.device) -> None:
    """Put A and B beside each linear layer within `module`; subclasses, as the head, stay.

    A depends on the seed and the layer's name alone, so it is equal on all ranks.
    """
    for name, parent in [*module.named_modules()]:
        for child, linear in [*parent.named_children()]:
            if type(linear) is nn.Linear:
                full_name = f"{name}.{child}".removeprefix(".")
                setattr(parent, child, LoRALinear(linear, full_name, r, alpha, seed, device))


# ---- reading and writing ----


@torch.no_grad()
def merged(module: nn.Module, files: WeightFiles, unit: Unit) -> Tensor:
    """A unit's shard of W + (alpha / r) B A in float32, with W as the files have it.

    Of B A it computes only the rows that the shard touches.
    """
    shard = torch.zeros(len(unit.shard))
    read_shard(files, unit.shapes, unit.owned, shard)
    for tensor, first, part in ranges_in(unit.shapes, unit.owned):
        owner, _, kind = tensor.rpartition(".")
        lora = module.get_submodule(owner)
        if kind == "weight" and isinstance(lora, LoRALinear):
            last, columns = first + part.stop - part.start, unit.shapes[tensor][1]
            rows = slice(first // columns, math.ceil(last / columns))
            update = lora.scale * lora.lora_B[rows] @ lora.lora_A
            start = first - rows.start * columns
            shard[part] += update.flatten()[start : start + last - first].cpu()
    return shard


def write_adapter(model: FullyShardedFrozen, config: dict, out: Path, aside: Path) -> None:
    """Write what `peft` reads: complete, or absent. Every rank calls it, and the first writes."""
    named = {f"base_model.model.{n}.weight": p for n, p in model.module.named_parameters()}
    kinds = sorted({name.split(".")[-3] for name in named})  # q_proj of …q_proj.lora_A.weight
    text = json.dumps(config | {"target_modules": kinds}, indent=2)
    with together(aside):
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)  # what a killed process has left
            aside.mkdir(parents=True)
            write_tensors(aside / "adapter_model.safetensors", named)
            (aside / "adapter_config.json").write_text(text, "utf-8")
            publish(aside, out)


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def sharded_from_meta(model: Llama, args, world: World) -> FullyShardedFrozen:
    """Shard a model that is on the meta device; its shards have no values yet."""
    mesh = (world.size // args.shard_degree, args.shard_degree)
    group = group_along(mesh, 1, "shard", args.timeout)
    dtype, reshards = getattr(torch, args.param_dtype), not args.no_reshard_after_forward
    return FullyShardedFrozen(model, model.units(), world.device, dtype, group, reshards)


def adapter_config(args) -> dict:
    """What `peft` must know of the adapter."""
    fixed = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}
    fixed |= {"bias": "none", "lora_dropout": 0.0}
    chosen = {"r": args.lora_rank, "lora_alpha": args.lora_alpha}
    return {"base_model_name_or_path": args.model, **fixed, **chosen}


def state_bytes(args, config: LlamaConfig, world: World) -> int:
    """Of all ranks together: the sharded weights, and on each rank the adapters' AdamW."""
    with torch.device("meta"):
        shapes = [m.weight.shape for m in Llama(config).modules() if type(m) is nn.Linear]
    adapters = args.lora_rank * sum(map(sum, shapes))
    weights = getattr(torch, args.param_dtype).itemsize * config.num_parameters()
    return world.size * (weights // args.shard_degree + 16 * adapters)


def parse_args(argv: list[str] | None = None):
    parser = finetuning_parser(__doc__, "adapter/, or model/ with --merge,")
    add = parser.add_argument
    add("--merge", action="store_true", help="write a full model, A and B merged into W")
    add("--lora-rank", type=positive_int, default=16, help="rows of A, columns of B")
    add("--lora-alpha", type=positive, default=32.0, help="B A counts alpha / rank times")
    # ten times the rate of 13: Schulman et al., "LoRA Without Regret", 2025
    parser.set_defaults(lr=2e-4)
    args = complete(parser.parse_args(argv))
    args.state_on = "device"
    return args


@torch.no_grad()
def evaluate(model, data: Instructions, args, device, world: World) -> float:
    """Mean loss in nats over the targets of the documents that training leaves out."""
    model.eval()
    documents = data.tokens_of(data.valid)
    micro_batches = micro_batches_of(documents, args.seq_len, device, world.rank, world.size)
    total = count_targets(micro_batches)
    loss = sum(share_of_loss(model, each, total, n_ranks=1) for each in micro_batches)
    model.train()
    return all_reduce_control(loss).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    config, files, data = load(args)
    config.frozen = True
    check_memory(args, config, state_bytes(args, config, world))

    run = Run(args, __file__, config, device, data)
    out, aside = output_folder(args, run, files, "model" if args.merge else "adapter")
    with torch.device("meta"):
        model = Llama(config)
    model = sharded_from_meta(model, args, world)
    add_adapters(model.module, args.lora_rank, args.lora_alpha, args.seed, device)
    settings = adamw_settings(args.lr, args.weight_decay) | {"betas": (0.9, 0.999)}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    guard(model, optimizer)

    state = training_state(model.module, optimizer)
    first_step = run.checkpoints.load(args.resume, state, optimizer)
    read_model(model, files)
    print0(f"read {files.bytes_read:,} bytes of {files.folder} on rank 0")
    say_progress(args, data, first_step)
    if data.valid and first_step < args.steps:
        loss = evaluate(model, data, args, device, world)
        print0(f"val loss {loss:.4f} before step {first_step}")

    step = first_step - 1
    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        documents = documents_of_step(data, args, step)
        n_tokens = sum(len(ids) - 1 for ids, _ in documents)
        micro_batches = micro_batches_of(documents, args.seq_len, device, world.rank, world.size)
        total = count_targets(micro_batches)
        loss = torch.zeros((), device=device)
        for micro_batch in micro_batches:
            micro_loss = share_of_loss(model, micro_batch, total, world.size)
            micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        run.log(step, loss, grad_norm, lr, tokens=n_tokens, targets=total)
        optimizer.zero_grad(set_to_none=True)

        if data.valid and run.evaluates(step):
            run.log_evaluation("val", evaluate(model, data, args, device, world))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, state, args.keep_checkpoints)
    if out and step + 1 >= args.steps:  # no signal has stopped it earlier
        write = partial(write_adapter, model, adapter_config(args), out, aside)
        if args.merge:
            values = partial(merged, model.module, files)
            write = partial(write_model, model, files, out, aside, values)
        run.write_output("--out", out, write, state)
    return run.finish(state)


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
