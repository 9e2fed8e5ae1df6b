"""Stage 15: adapters beside frozen, sharded weights."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from harness import BFLOAT16, assert_same_curve, load_stage
from test_finetune import (  # noqa: F401  fixtures
    FLAGS,
    KEPT,
    chat,
    files_of,
    models,
    plain_curve,
    reference_of,
    weights_of,
)
from torch import Tensor, nn

from common.counter_rng import generator_of
from common.llama import Llama, LlamaConfig

from common.job.prepared_instructions import load_instructions

pytestmark = pytest.mark.slow
quick = pytest.mark.quick

R, SCALE = 4, 2.0  # alpha / r
LORA = f"--lora-rank {R} --lora-alpha {R * SCALE} --lr 1e-2"


def with_adapters(folder: Path) -> nn.Module:
    """The model of transformers, frozen, with A and B beside its linear layers but the head."""
    model = reference_of(folder).requires_grad_(False)
    for name, linear in [*model.named_modules()]:
        if isinstance(linear, nn.Linear) and "layers" in name:
            a = (
                torch.rand(R, linear.in_features, generator=generator_of("lora", 1337, name)) * 2
                - 1
            )
            linear.lora_A = nn.Parameter(a / linear.in_features**0.5)
            linear.lora_B = nn.Parameter(torch.zeros(linear.out_features, R))
            linear.register_forward_hook(lambda m, x, y: y + SCALE * x[0] @ m.lora_A.T @ m.lora_B.T)
    return model


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Those of the plain model, with A and B merged into W."""
    found = {n: t for n, t in model.state_dict().items() if "lora_" not in n}
    for name, linear in model.named_modules():
        if hasattr(linear, "lora_A"):
            found[f"{name}.weight"] = linear.weight + SCALE * linear.lora_B @ linear.lora_A
    return found


@pytest.fixture(scope="module")
def curve(models, chat):  # noqa: F811
    """`curve(name)`: the plain curve and model, once per module."""
    return cache(lambda name: plain_curve(models / name, chat, make=with_adapters, lr=1e-2))


def argv_of(model: Path, data: Path, run: Path, flags: str = "") -> list[str]:
    load_instructions(str(data), model, 320, 0)  # so that no rank has to import transformers
    where = f"--model {model} --data {data} --run-dir {run} --valid 4"
    return [*where.split(), *FLAGS.split(), *LORA.split(), *flags.split()]


def traced(argv: list[str]) -> tuple[list[dict], Counter, list[int]]:
    """The metrics of a run, the most units that were gathered at a time, and the micro-batches."""
    stage, most, micro_batches = load_stage("15"), Counter(), []
    unshard, wrapper, count = stage.Unit.unshard, stage.FullyShardedFrozen, stage.count_targets
    finish = wrapper.finish_gradient_synchronization

    def see(where: str, units: list) -> None:
        most[where] = max(most[where], sum(unit.full is not None for unit in units))

    def unshard_and_see(unit) -> None:
        unshard(unit)
        see("backward" if stage.is_in_backward() else "forward", unit.fsdp.units)

    def finish_and_see(model) -> None:
        finish(model)
        see("finish", model.units)

    def count_and_see(each: list) -> Tensor:
        micro_batches.append(len(each))
        return count(each)

    with (
        patch.object(stage.Unit, "unshard", unshard_and_see),
        patch.object(wrapper, "finish_gradient_synchronization", finish_and_see),
        patch.object(stage, "count_targets", count_and_see),
    ):
        return stage.main(argv), most, micro_batches


def costs(folder: Path, ranks: int, shard: int, m: int, flags: str) -> tuple[float, float]:
    """Bytes that a rank holds, and sends in a step of m micro-batches."""
    config, b = LlamaConfig.of_folder(folder), 2 if "bfloat16" in flags else 4
    with torch.device("meta"):
        model = Llama(config)
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
    E, *layers, norm = (-(-size // shard) * shard for size in sizes)  # padded
    O = 0 if config.tied else layers.pop()  # noqa: E741
    linears = [m for m in model.model.modules() if type(m) is nn.Linear]
    p = sum(R * (each.in_features + each.out_features) for each in linears)
    P = E + sum(layers) + O + norm
    # in bfloat16 the norm keeps a copy in float32: the last layer stays, and the norm is not needed
    again = sum(layers) - (b == 2) * layers[-1] if KEPT not in flags else 0
    gathered = b * m * (P + config.tied * E + again) if KEPT not in flags else b * m * P
    steps = 4 * 2 * len(linears)  # AdamW's count of steps, per parameter
    sent = gathered * (shard - 1) / shard + 4 * p * 2 * (ranks - 1) / ranks
    return b * P / shard + 16 * p + steps, sent


CURVES = [  # ranks, model, further flags, backend
    (1, "llama", "--merge", "gloo"),
    (2, "qwen2-tied", "--merge", "gloo"),
    (3, "qwen3", "--activation-checkpointing --merge", "gloo"),
    (4, "llama-tied", "--shard-degree 2 --merge", "gloo"),
    (3, "llama", KEPT, "gloo"),
    (2, "llama-tied", f"{KEPT} --activation-checkpointing", "gloo"),
    (4, "arcee", "--activation-checkpointing", "gloo"),
    (2, "SmolLM3", "", "gloo"),
    (2, "qwen2", "", "late"),
    (4, "qwen2-tied", "--shard-degree 2", "late"),
    (2, "qwen2-tied", "--dtype bfloat16", "gloo"),
    (2, "llama", "--dtype bfloat16 --activation-checkpointing", "late"),
]


@pytest.mark.quick_cases("2-qwen2-tied---merge-gloo")
@pytest.mark.parametrize("ranks, name, flags, backend", CURVES)
def test_a_curve_is_that_of_a_plain_loop_and_costs_what_the_readme_says(
    pools,
    models,  # noqa: F811
    chat,  # noqa: F811
    curve,
    tmp_path,
    ranks,
    name,
    flags,
    backend,
):
    argv = argv_of(models / name, chat, tmp_path, flags)
    (expected, model), is_bf16, shard = curve(name), "bfloat16" in flags, ranks
    if "--shard-degree" in flags:
        shard = 2
    for metrics, most, micro_batches in pools(ranks, backend=backend).run(traced, argv):
        assert_same_curve(metrics, expected, **BFLOAT16["late-bf16"] if is_bf16 else {})
        assert most["finish"] == 0 and most["forward"] >= 2
        if KEPT not in flags:
            assert most["backward"] == 3 if "tied" in name or "SmolLM3" in name else 2
        for line, m in zip(metrics, micro_batches, strict=True):
            held, sent = costs(models / name, ranks, shard, m, flags)
            assert line["model_state_mb"] == pytest.approx(held / 1e6, rel=1e-9)
            assert line["comm_mb"] == pytest.approx(sent / 1e6, rel=1e-9)
    if is_bf16:
        return
    if "--merge" in flags:
        read = weights_of(models / name)
        precision = 0.01 if torch.float32 not in {t.dtype for t in read.values()} else 1e-5
        wanted = merged_weights(model)
        for key, value in reference_of(tmp_path / "model").state_dict().items():
            torch.testing.assert_close(value, wanted[key], rtol=precision, atol=1e-4)
    else:
        found = weights_of(tmp_path / "adapter")
        wanted = {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}
        assert found.keys() == {f"base_model.model.{name}.weight" for name in wanted}
        for key, value in wanted.items():
            ours = found[f"base_model.model.{key}.weight"]
            torch.testing.assert_close(ours, value, rtol=0, atol=1e-5)
