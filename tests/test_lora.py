"""Stage 15: adapters beside frozen, sharded weights."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import test_finetune as tuning
import torch
from harness import assert_same_curve, load_stage, process_bytes
from test_finetune import (
    CPU,
    assert_same_model,
    files_of,
    on_meta,
    plain_curve,
    reference_of,
    weights_of,
)
from torch import Tensor, nn

from common.counter_rng import generator_of

from common.job.metrics import model_state_bytes

chat, models = tuning.chat, tuning.models  # fixtures
pytestmark, quick = pytest.mark.slow, pytest.mark.quick

R, SCALE = 4, 2.0  # alpha / r
LORA = f"--lora-rank {R} --lora-alpha {R * SCALE} --lr 1e-2"


def with_adapters(folder: Path) -> nn.Module:
    """The model of transformers, frozen, with A and B beside its linear layers but the head."""
    model = reference_of(folder).requires_grad_(False)
    for name, linear in [*model.named_modules()]:
        if isinstance(linear, nn.Linear) and "layers" in name:
            a = torch.rand(R, linear.in_features, generator=generator_of("lora", 1337, name))
            linear.lora_A = nn.Parameter((a * 2 - 1) / linear.in_features**0.5)
            linear.lora_B = nn.Parameter(torch.zeros(linear.out_features, R))
            linear.register_forward_hook(lambda m, x, y: y + SCALE * x[0] @ m.lora_A.T @ m.lora_B.T)
    return model


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """A and B, by the names of peft."""
    named = {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}
    return {f"base_model.model.{n}.weight": p for n, p in named.items()}


def with_peft(folder: Path) -> nn.Module:
    """The same model by peft, from our A."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=R, lora_alpha=R * SCALE, target_modules="all-linear")
    model = peft.get_peft_model(reference_of(folder), config)
    peft.set_peft_model_state_dict(model, adapter_of(with_adapters(folder)))
    return model


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Those of the plain model, with A and B merged into W."""
    found = {n: t for n, t in model.state_dict().items() if "lora_" not in n}
    for name, linear in model.named_modules():
        if hasattr(linear, "lora_A"):
            found[f"{name}.weight"] = linear.weight + SCALE * linear.lora_B @ linear.lora_A
    return found


def argv_of(model: Path, data: Path, run: Path, flags: str = "") -> list[str]:
    return tuning.argv_of(model, data, run, f"{LORA} {flags}")


def traced(argv: list[str]) -> tuple[list[dict], int, Counter, list[int]]:
    """The metrics, the bytes held before, the most units gathered at a time, the micro-batches."""
    before = model_state_bytes()  # of other tests, by hooks in a cycle
    stage, most = load_stage("15"), Counter()
    unshard, wrapper = stage.Unit.unshard, stage.FullyShardedFrozen
    finish = wrapper.finish_gradient_synchronization

    def see(where: str, units: list) -> None:
        most[where] = max(most[where], sum(unit.full is not None for unit in units))

    def unshard_and_see(unit) -> None:
        unshard(unit)
        see("backward" if stage.is_in_backward() else "forward", unit.fsdp.units)

    def finish_and_see(model) -> None:
        finish(model)
        see("finish", model.units)

    unit = patch.object(stage.Unit, "unshard", unshard_and_see)
    model = patch.object(wrapper, "finish_gradient_synchronization", finish_and_see)
    with unit, model, patch.object(stage, "count_targets", wraps=stage.count_targets) as counted:
        metrics = stage.main(argv)
    return metrics, before, most, [len(call.args[0]) for call in counted.call_args_list[1:-1]]


def costs(folder: Path, ranks: int, shard: int, m: int, flags: str) -> tuple[float, float]:
    """Bytes that a rank holds, and sends in a step of m micro-batches."""
    (model, _), b = on_meta(folder), 2 if "bfloat16" in flags else 4
    tied = model.config.tied
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
    E, *layers, norm = (-(-size // shard) * shard for size in sizes)  # padded
    O = 0 if tied else layers.pop()  # noqa: E741
    linears = [m for m in model.model.modules() if type(m) is nn.Linear]
    p = sum(R * (each.in_features + each.out_features) for each in linears)
    P = E + sum(layers) + O + norm
    gathered = b * m * (P + tied * E + sum(layers)) if tuning.KEPT not in flags else b * m * P
    sent = gathered * (shard - 1) / shard + 4 * p * 2 * (ranks - 1) / ranks
    return b * P / shard + 16 * p + 8 * len(linears), sent  # AdamW counts steps per parameter


CURVES = [  # ranks, model, further flags, backend
    (1, "llama", "--merge", "gloo"),
    (2, "qwen2-tied", "--merge", "gloo"),
    (3, "qwen3", "--activation-checkpointing --merge", "gloo"),
    (4, "llama-tied", "--shard-degree 2 --merge", "gloo"),
    (3, "llama", tuning.KEPT, "gloo"),
    (2, "llama-tied", f"{tuning.KEPT} --activation-checkpointing", "gloo"),
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
    pools, models, chat, tmp_path, ranks, name, flags, backend
):
    argv = argv_of(models / name, chat, tmp_path, flags)
    expected, model = plain_curve(models / name, chat, make=with_adapters, lr=1e-2)
    is_bf16 = "bfloat16" in flags
    shard = 2 if "--shard-degree" in flags else ranks
    for metrics, before, most, micro_batches in pools(ranks, backend=backend).run(traced, argv):
        assert_same_curve(metrics, expected, **dict(loss=0.04, norm=0.1) if is_bf16 else {})
        assert most["finish"] == 0 and most["forward"] >= 2
        if tuning.KEPT not in flags:
            assert 2 <= most["backward"] <= 2 + on_meta(models / name)[0].config.tied
        for line, m in zip(metrics, micro_batches, strict=True):
            held, sent = costs(models / name, ranks, shard, m, flags)
            more = 1e6 * line["model_state_mb"] - before - held  # the loss; what is not yet freed
            assert abs(more) < 5000
            assert line["comm_mb"] == pytest.approx(sent / 1e6, rel=1e-9)
    if "--merge" in flags:
        assert_same_model(tmp_path / "model", merged_weights(model), models / name)
    elif not is_bf16:
        found = weights_of(tmp_path / "adapter")
        torch.testing.assert_close(found, adapter_of(model), rtol=0, atol=1e-4)  # 1 % of a step


def test_the_first_loss_is_that_of_13(pools, models, chat, tmp_path):
    """To the bit: B is zero, and the units compute as those of 13."""
    where = models / "qwen3", chat
    (ours,) = pools(2).train("15", argv_of(*where, tmp_path / "15", "--steps 1"))[0]
    (theirs,) = pools(2).train("13", tuning.argv_of(*where, tmp_path / "13", "--steps 1"))[0]
    assert ours["loss"] == theirs["loss"] and ours["val_loss"] != theirs["val_loss"]


def test_peft_trains_to_the_same_adapter_and_reads_ours(pools, models, chat, tmp_path):
    peft, model = pytest.importorskip("peft"), models / "qwen2"
    expected, theirs = plain_curve(model, chat, make=with_peft, lr=1e-2)
    assert_same_curve(pools(2).train("15", argv_of(model, chat, tmp_path))[0], expected)
    found, wanted = weights_of(tmp_path / "adapter"), peft.get_peft_model_state_dict(theirs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    ours = peft.PeftModel.from_pretrained(reference_of(model), tmp_path / "adapter")
    with torch.no_grad():
        logits = [each(torch.arange(40)[None]).logits for each in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_weights_are_merged_from_the_files_and_not_from_the_shards(pools, models, chat, tmp_path):
    """With a rate of almost 0, a float32 model that trains in bfloat16 is written bit by bit."""
    flags = "--dtype bfloat16 --merge --lr 1e-30 --steps 1"
    pools(3).train("15", argv_of(models / "qwen3", chat, tmp_path, flags))
    assert files_of(tmp_path / "model") == files_of(models / "qwen3")


def read_and_merge(folder: Path, out: Path) -> list[int]:
    """The peaks of memory while the shards of a model are read, in bfloat16, and merged."""
    stage, (model, files) = load_stage("15"), on_meta(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    held = process_bytes("VmRSS")
    with patch("common.unit_parameters.check_same"):  # it uses sockets
        model = stage.FullyShardedFrozen(model, model.units(), CPU, torch.bfloat16)
    stage.read_model(model, files)
    assert not [*model.parameters()] and not [*model.buffers()]
    peaks = [process_bytes("VmHWM") - held]
    stage.add_adapters(model.module, R, SCALE, 0, CPU)
    values = partial(stage.merged, model.module, files)
    stage.write_model(model, files, out, out.with_name("aside"), values)
    return [*peaks, process_bytes("VmHWM") - held]


@pytest.mark.parametrize("ranks", [1, 4])
def test_memory_while_reading_is_that_of_the_shards(fresh_pool, models, tmp_path, ranks):
    """And while they are merged, that of a unit's shard in float32 besides."""
    large, pool = models / "large", fresh_pool(ranks)
    config = on_meta(large)[0].config
    pool.run(read_and_merge, models / "qwen2", tmp_path / "a")  # pages of the libraries count, too
    unit, more = 4 * config.vocab_size * config.d_model / ranks, 16 * 2**20  # freed, but kept
    shards = 2 * config.num_parameters() / ranks + more
    for reading, merging in pool.run(read_and_merge, large, tmp_path / "b"):
        assert reading <= shards and merging <= shards + unit + more


def change_a_weight(folder: Path) -> None:
    stage, (model, _) = load_stage("15"), on_meta(folder)
    mlp = model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda mlp, x: (mlp.up_proj.linear.weight.add_(1), x)[1])
    model = stage.FullyShardedFrozen(model.requires_grad_(False), model.units(), CPU, torch.float32)
    stage.add_adapters(model.module, 2, 1.0, 0, CPU)
    stage.guard(model, torch.optim.AdamW(model.parameters()))
    model(torch.arange(5), (5,))


@quick
def test_a_frozen_weight_that_changes_is_an_error(pools, models):
    (outcome,) = pools(1).attempt(change_a_weight, models / "qwen2")
    assert "a unit has changed a parameter in place" in outcome.traceback
