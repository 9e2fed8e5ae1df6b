"""Stage 13: fine-tuning a pretrained model from safetensors files, sharded by 04."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import BFLOAT16, REPO, assert_same_curve, load_stage, process_bytes, train_in
from torch import Tensor

from common.batches import global_batch
from common.instructions import documents_of, load_tokenizer, read_examples
from common.llama import Llama, LlamaConfig
from common.loss import IGNORED
from common.optimization import adamw_settings, learning_rate
from common.weight_files import HEAD, WeightFiles, header_of

from common.job.atomic_files import check_writable
from common.job.prepared_instructions import load_instructions
from tools.dry_run import dry_run
from tools.export import export_folder, run_and_checkpoint

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.slow
quick = pytest.mark.quick

GOLDEN = REPO / "tests/golden"
SAVED = [path.name for path in sorted(GOLDEN.iterdir()) if path.name != "tokenizer"]
CPU = torch.device("cpu")
KEPT = "--no-reshard-after-forward"
FLAGS = "--steps 8 --global-batch-size 6 --seq-len 320 --lr 1e-3 --warmup-steps 2 --log-every 1"

# what a config.json of the Hub says of a family beside the shapes, with the names of that time
SHAPE = dict(vocab_size=304, hidden_size=24, intermediate_size=40, num_hidden_layers=4)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
SHAPE |= dict(hidden_act="silu", rms_norm_eps=1e-6, attention_dropout=0.0, torch_dtype="bfloat16")
LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=32)
NO_WINDOW = dict(use_sliding_window=False, max_window_layers=2, rope_theta=1e6)
QWEN3 = dict(head_dim=8, attention_bias=False, rope_scaling=None, sliding_window=None)
OF_THE_HUB = {  # family, and fields; head: tied, and the head is stored as well
    "Llama-3.2": ("llama", dict(rope_scaling=LLAMA3, rope_theta=5e5, tie_word_embeddings=True)),
    "Mistral-v0.1": ("mistral", dict(sliding_window=4096, tie_word_embeddings=False)),
    "Mistral-v0.3": ("mistral", dict(sliding_window=None, rope_theta=1e6)),
    "Qwen2.5": ("qwen2", dict(sliding_window=16, tie_word_embeddings=True) | NO_WINDOW),
    "Qwen2.5-yarn": ("qwen2", dict(rope_scaling=YARN, sliding_window=16) | NO_WINDOW),
    "Qwen3-head": ("qwen3", dict(tie_word_embeddings=True) | QWEN3 | NO_WINDOW),
    # its padding token is unused, so that the row has no gradient here either
    "SmolLM3": ("smollm3", dict(no_rope_layers=[1, 0, 1, 1], pad_token_id=303)),
}


def make_model(folder: Path, family: str, fields: dict) -> None:
    """Random weights that matter, under the names that transformers gives them."""
    name = {"smollm3": "SmolLM3"}.get(family, family.capitalize())
    config = SHAPE | {"model_type": family, "architectures": [f"{name}ForCausalLM"]} | fields
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = reference_of(folder, from_files=False)
    for p in model.parameters():
        p.data = 8 * p if p.dim() > 1 else p + 0.3 * torch.randn_like(p)
    weights = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    if "head" in folder.name:
        weights[HEAD] = weights["model.embed_tokens.weight"].clone()
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def reference_of(folder: Path, from_files: bool = True) -> torch.nn.Module:
    """The model of transformers, in float32."""
    if from_files:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files, in their dtypes."""
    every = map(safetensors.load_file, sorted(folder.glob("*.safetensors")))
    return {name: tensor for each in every for name, tensor in each.items()}


def plain(folder: Path) -> Llama:
    model = Llama(LlamaConfig.of_folder(folder))
    weights = {name: tensor.float() for name, tensor in weights_of(folder).items()}
    if model.config.tied:
        weights.pop(HEAD, None)
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of models, with a tokenizer each."""
    folder = tmp_path_factory.mktemp("models")
    for name in SAVED:
        shutil.copytree(GOLDEN / name, folder / name)
    for name, (family, fields) in OF_THE_HUB.items():
        make_model(folder / name, family, fields)
    for each in folder.iterdir():
        shutil.copytree(GOLDEN / "tokenizer", each, dirs_exist_ok=True)
    return folder


def words(rng: random.Random, most: int) -> str:
    some = "red blue green cat dog house tree river apple stone".split()
    return " ".join(rng.choices(some, k=rng.randint(1, most)))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    """Conversations of one to three answers. Some are longer than half a micro-batch."""
    path, rng, lines = tmp_path_factory.mktemp("data") / "chat.jsonl", random.Random(0), []
    for i in range(40):
        turns = [("user", 20), ("assistant", 14)] * (1 + i % 3)
        messages = [{"role": role, "content": words(rng, most)} for role, most in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def alpaca(tmp_path_factory) -> Path:
    path, rng = tmp_path_factory.mktemp("data") / "alpaca.json", random.Random(0)
    given = [words(rng, 14) * (i % 3 > 0) for i in range(40)]
    path.write_text(json.dumps([{"instruction": f"{x}!", "input": x, "output": x} for x in given]))
    return path


# ---- the model ----


@quick
@pytest.mark.parametrize("name", [*SAVED, *OF_THE_HUB])
def test_logits_are_those_of_transformers(models, name):
    """Of documents side by side, each of which transformers gets alone."""
    ours, theirs = plain(models / name), reference_of(models / name)
    lengths = 5, 1, 70, 17
    tokens = torch.randint(0, SHAPE["vocab_size"], (sum(lengths),))
    with torch.no_grad():
        expected = torch.cat([theirs(each[None]).logits[0] for each in tokens.split(lengths)])
        found = ours(tokens, lengths)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# ---- curves: against transformers' model on one document per forward in one process ----


def plain_documents(folder: Path, data: Path, longest: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each document, by its tokens with and without each answer."""
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(folder), []
    for each in read_examples(data.read_bytes()):
        if "messages" in each:
            render, turns = tokenizer.apply_chat_template, each["messages"]
            ends = [i for i, message in enumerate(turns) if message["role"] == "assistant"]
            prompts = [render(turns[:i], add_generation_prompt=True)["input_ids"] for i in ends]
            wholes = [render(turns[: i + 1])["input_ids"] for i in ends]
            pairs = [*zip(prompts, wholes, strict=True)]
        else:
            paired = ", paired with an input that provides further context" * bool(each["input"])
            prompt = f"Below is an instruction that describes a task{paired}. Write a response that"
            prompt += " appropriately completes the request.\n\n### Instruction:\n"
            prompt += each["instruction"] + "\n\n"
            prompt += f"### Input:\n{each['input']}\n\n" * bool(each["input"]) + "### Response:\n"
            pairs = [tokenizer([prompt, f"{prompt}{each['output']}<|eos|>"])["input_ids"]]
        ids = torch.tensor(pairs[-1][1])
        targets = torch.full_like(ids, IGNORED)
        for before, with_answer in pairs:
            targets[len(before) : len(with_answer)] = ids[len(before) : len(with_answer)]
        ids, targets = ids[: longest + 1], targets[: longest + 1]
        if (targets[1:] != IGNORED).any():
            found.append((ids[:-1], targets[1:]))
    return found


def plain_curve(
    folder: Path, data: Path, n_valid: int = 4, make=None, lr: float = 1e-3
) -> tuple[list[dict], torch.nn.Module]:
    """The metrics of a run with FLAGS, by the definition: the mean over all targets of a step."""
    documents = plain_documents(folder, data, 320)
    train, valid = documents[:-n_valid], documents[-n_valid:]
    model, lines = (make or reference_of)(folder), []
    settings = adamw_settings(lr, 0.0) | {"betas": (0.9, 0.999)}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)

    def loss_of(documents) -> Tensor:
        losses = [
            F.cross_entropy(model(x[None]).logits[0], y, reduction="sum", ignore_index=IGNORED)
            for x, y in documents
        ]
        return sum(losses) / sum((y != IGNORED).sum() for _, y in documents)

    for step in range(8):
        optimizer.param_groups[0]["lr"] = learning_rate(step, 8, lr, 2, 0.1)
        loss = loss_of([train[i] for i in global_batch(1337, step, 6, len(train))])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lines.append({"step": step, "loss": loss.item(), "grad_norm": norm.item()})
    with torch.no_grad():
        lines[-1]["val_loss"] = loss_of(valid).item()
    return lines, model


@pytest.fixture(scope="module")
def curve(models):
    """`curve(name, data)`: the plain curve and model, once per module."""
    return cache(lambda name, data: plain_curve(models / name, data))


def argv_of(model: Path, data: Path, run: Path, flags: str = "") -> list[str]:
    if data.exists() and (model / "config.json").exists():
        load_instructions(str(data), model, 320, 0)  # so that no rank has to import transformers
    where = f"--model {model} --data {data} --run-dir {run} --valid 4"
    return [*where.split(), *FLAGS.split(), *flags.split()]


CURVES = [  # ranks, model, further flags, backend
    (1, "llama", "", "gloo"),
    (2, "qwen2-tied", "", "gloo"),
    (3, "qwen3", "--activation-checkpointing", "gloo"),
    (4, "llama-tied", "--shard-degree 2", "gloo"),
    (3, "llama", "--no-reshard-after-forward", "gloo"),
    (2, "llama-tied", "--no-reshard-after-forward --activation-checkpointing", "gloo"),
    (2, "qwen2", "--cpu-offload", "gloo"),
    (4, "arcee", "--activation-checkpointing", "gloo"),
    (2, "Qwen3-head", "", "gloo"),
    (2, "SmolLM3", "", "gloo"),
    (2, "llama", "--activation-checkpointing", "late"),
    (4, "qwen2-tied", "--shard-degree 2", "late"),
    (2, "qwen2-tied", "--dtype bfloat16", "gloo"),
    (2, "llama", "--dtype bfloat16 --activation-checkpointing --reduce-dtype bfloat16", "gloo"),
]


@pytest.mark.quick_cases("2-qwen2-tied--gloo", "3-qwen3---activation-checkpointing-gloo")
@pytest.mark.parametrize("ranks, name, flags, backend", CURVES)
def test_a_curve_is_that_of_single_documents_in_one_process(
    pools, models, chat, curve, tmp_path, ranks, name, flags, backend
):
    argv = argv_of(models / name, chat, tmp_path, flags)
    is_bf16 = "bfloat16" in flags
    expected, model = curve(name, chat)
    for metrics in pools(ranks, backend=backend).train("13", argv):
        assert_same_curve(metrics, expected, **BFLOAT16["late-bf16"] if is_bf16 else {})
    if is_bf16:
        return
    assert_same_model(tmp_path / "model", model.state_dict(), models / name)
    out = weights_of(tmp_path / "model")
    if HEAD in out and model.config.tie_word_embeddings:
        assert torch.equal(out[HEAD], out["model.embed_tokens.weight"])


def assert_same_model(folder: Path, expected: dict[str, Tensor], read: Path) -> None:
    """The weights in a folder, which has those of `read`, in their precision."""
    before = weights_of(read)
    assert weights_of(folder).keys() == before.keys()
    precision = 1e-5 if torch.float32 in {t.dtype for t in before.values()} else 0.01
    for key, value in reference_of(folder).state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=precision, atol=1e-4)


def test_a_resumed_run_ends_with_the_same_bits(pools, models, chat, tmp_path):
    model = models / "qwen2"
    argv = argv_of(model, chat, tmp_path / "a", "--checkpoint-every 4")
    whole = pools(2).train("13", argv)[0]
    saved = tmp_path / "a/checkpoints/step-00000004"
    resumed = pools(2).train("13", argv_of(model, chat, tmp_path / "b", f"--resume {saved}"))[0]
    names = ("step", "loss", "grad_norm", "tokens", "targets", "val_loss")
    lines = [[{n: x[n] for n in names if n in x} for x in run] for run in (whole, resumed)]
    assert lines[0][4:] == lines[1] and len(lines[1]) == 4
    assert files_of(tmp_path / "a/model") == files_of(tmp_path / "b/model")
    export_folder(*run_and_checkpoint(tmp_path / "a"), tmp_path / "exported")
    assert files_of(tmp_path / "exported") == files_of(tmp_path / "a/model")


@quick
@pytest.mark.parametrize("epochs", [1, 3])
def test_an_epoch_takes_every_document_once(models, chat, tmp_path, epochs):
    stage, flags = load_stage("13"), f"--epochs {epochs} --global-batch-size 5"
    argv = argv_of(models / "qwen2", chat, tmp_path, flags)
    args = stage.parse_args([word for word in argv if word not in ("--steps", "8")])
    _, _, data = stage.load(args)
    taken = [x for step in range(args.steps) for x in stage.documents_of_step(data, args, step)]
    every = data.tokens_of(data.train * epochs)
    assert sorted(ids.tolist() for ids, _ in taken) == sorted(ids.tolist() for ids, _ in every)
    assert args.steps == -(-epochs * 36 // 5)  # the last one is smaller


# ---- reading and writing ----


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_and_write(folder: Path, out: Path | None) -> dict:
    """Shard the model of a folder, and write it; what that took on this rank."""
    stage = load_stage("13")
    config = LlamaConfig.of_folder(folder)
    with torch.device("meta"):
        model = Llama(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    held, had_read = process_bytes("VmRSS"), process_bytes("rchar")
    files = stage.WeightFiles(folder, shapes)
    with patch("common.unit_parameters.check_same"):  # it uses sockets
        units = model.units()
        model = stage.FullyShardedDataParallel(model, units, read_shard=stage.no_values, device=CPU)
    stage.read_model(model, files)
    found = {"peak": process_bytes("VmHWM") - held, "counted": files.bytes_read}
    found["system_read"] = process_bytes("rchar") - had_read
    found["values"] = files.bytes_read - sum(map(len, files.headers.values()))
    if out is not None:
        wrote = process_bytes("wchar")
        stage.write_model(model, files, out, out.with_name("aside"))
        found["system_wrote"] = process_bytes("wchar") - wrote
    return found


@pytest.mark.quick_cases("2-llama")
@pytest.mark.parametrize("ranks, name", [(1, "qwen2"), (2, "llama"), (3, "qwen2"), (4, "arcee")])
def test_bytes_read_and_written_are_those_of_the_shards(pools, models, tmp_path, ranks, name):
    """And a model that is read and written is the same, bit by bit."""
    pools(ranks).run(read_and_write, models / name, None)  # imports what it needs
    each = pools(ranks).run(read_and_write, models / name, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(models / name)
    total = sum(tensor.nbytes for tensor in weights_of(models / name).values())
    assert sum(found["values"] for found in each) == total
    for rank, found in enumerate(each):
        assert found["values"] <= total / ranks + 4 * 10 * ranks  # ten units, padded
        # the files that tell these numbers, and what Gloo sends to the other ranks
        assert 0 <= found["system_read"] - found["counted"] < 4096
        copied = (rank == 0) * sum(map(len, files_of(models / name).values()))
        assert 0 <= found["system_wrote"] - found["values"] <= copied + 4096


class ReadsAPart(io.FileIO):
    def readinto(self, buffer) -> int | None:
        return super().readinto(memoryview(buffer)[:1000])


@quick
def test_a_read_that_returns_only_some_of_the_bytes_is_continued(models, monkeypatch):
    expected, stage = plain(models / "qwen2"), load_stage("13")
    monkeypatch.setattr(stage, "open", lambda path, *_, **__: ReadsAPart(path), raising=False)
    files = WeightFiles(models / "qwen2", {n: p.shape for n, p in expected.named_parameters()})
    for name, p in expected.named_parameters():
        shard = torch.full((p.numel(),), torch.nan)
        stage.read_shard(files, {name: p.shape}, slice(0, p.numel()), shard)
        assert torch.equal(shard, p.flatten())


@pytest.fixture(scope="module")
def large(tmp_path_factory, models) -> Path:
    """27 million parameters in bfloat16, in a file with holes."""
    folder = tmp_path_factory.mktemp("large")
    config = json.loads((models / "qwen2/config.json").read_text())
    config |= {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1024}
    config |= {"num_hidden_layers": 4, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = Llama(LlamaConfig.of_folder(folder))
    header, end = {}, 0
    for name, p in model.named_parameters():
        begin, end = end, end + 2 * p.numel()
        header[name] = {"dtype": "BF16", "shape": [*p.shape], "data_offsets": [begin, end]}
    with open(folder / "model.safetensors", "wb") as file:
        file.truncate(end + file.write(header_of(header)))
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_memory_while_reading_is_that_of_the_shards(fresh_pool, models, large, ranks):
    total = LlamaConfig.of_folder(large).num_parameters()
    pool = fresh_pool(ranks)
    pool.run(read_and_write, models / "qwen2", None)  # pages of the libraries count as well
    for found in pool.run(read_and_write, large, None):
        assert found["peak"] <= 4 * total / ranks + 16 * 2**20, f"{found['peak'] / 2**20:.0f} MB"


KILLED = """
import os, sys
from tools.stages import load_stage
stage, calls = load_stage("13"), []
write = stage.write_shard
def write_some(*args):
    write(*args)
    calls.append(os.kill(os.getpid(), 9) if len(calls) == 2 else None)
stage.write_shard = write_some
stage.main(sys.argv[1:])
"""


def test_a_kill_while_writing_leaves_no_model_and_the_next_run_writes_it(
    pools, models, chat, tmp_path
):
    argv = argv_of(models / "qwen2", chat, tmp_path, "--checkpoint-every 8")
    done = subprocess.run([sys.executable, "-c", KILLED, *argv], cwd=REPO, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "model").exists() and [*tmp_path.glob(".model.writing-*")]
    assert pools(1).train("13", argv) == [[]]  # nothing was left to do but this
    assert weights_of(tmp_path / "model").keys() == weights_of(models / "qwen2").keys()
    assert not [*tmp_path.glob(".model.writing-*")]


def test_a_model_that_is_there_is_only_accepted_from_the_same_run(pools, models, chat, tmp_path):
    argv = argv_of(models / "qwen2", chat, tmp_path, "--checkpoint-every 8")
    (out,) = pools(1).train("13", argv)
    before = files_of(tmp_path / "model")
    (again,) = pools(1).attempt(train_in, {}, "13", argv)
    assert len(out) == 8 and not again.exit_status and files_of(tmp_path / "model") == before
    other = argv_of(models / "qwen2", chat, tmp_path / "b", f"--out {tmp_path / 'model'}")
    for flags in (other, [*argv, "--steps", "9"]):  # or the same run, which is not done
        (ended,) = pools(1).attempt(train_in, {}, "13", flags)
        assert ended.exit_status == 2 and "is already there" in ended.stderr


def fail_to_write(*_) -> None:
    raise OSError("the disk is full")


def train_on_a_full_disk(argv: list[str], rank=1, stage="13", what: str = "write_shard") -> None:
    """Full on one rank alone."""
    is_full = dist.get_rank() == rank
    with patch.object(load_stage(stage), what, fail_to_write) if is_full else nullcontext():
        load_stage(stage).main(argv)


@quick
def test_a_model_that_cannot_be_written_is_written_from_the_checkpoint(
    fresh_pool, pools, models, chat, tmp_path
):
    argv, pool = argv_of(models / "qwen2", chat, tmp_path), fresh_pool(2)
    for outcome in pool.attempt(train_on_a_full_disk, argv):
        assert outcome.exit_status == 1 and outcome.traceback is None
        said = "disk is full; the run's checkpoint is complete: the same flags and --run-dir"
        assert not outcome.stderr or said in outcome.stderr
    pool.close()  # it has locked the folder
    assert not [*tmp_path.glob("*model*")]
    assert pools(1).train("13", argv) == [[]] and (tmp_path / "model/config.json").exists()


@quick
def test_runs_with_the_same_output_write_to_folders_of_their_own(monkeypatch, tmp_path):
    stage, seen = load_stage("13"), set()
    monkeypatch.setattr("common.job.finetuning.all_reduce_control", lambda x: x)
    for name in ("a", "b"):
        args = SimpleNamespace(out=str(tmp_path / "model"), steps=1)
        run = SimpleNamespace(folder=tmp_path / name, continues=False, check_output=lambda *_: 0)
        seen.add(stage.output_folder(args, run, SimpleNamespace(try_to_prepare=None))[1])
    assert len(seen) == 2


@quick
@pytest.mark.parametrize("name", ["model", "adapter"])
def test_what_a_killed_process_has_left_does_not_stop_the_next_one(monkeypatch, tmp_path, name):
    monkeypatch.setattr("common.job.finetuning.all_reduce_control", lambda x: x)
    args, files = SimpleNamespace(out=None, steps=1), SimpleNamespace(try_to_prepare=lambda _: 0)
    run = SimpleNamespace(folder=tmp_path, continues=True)
    run.check_output = lambda _, path, check=check_writable: check(path)
    where = load_stage("13").output_folder(args, run, files, name)
    where[1].mkdir()
    assert load_stage("13").output_folder(args, run, files, name) == where


@quick
def test_written_files_have_the_form_that_all_readers_accept(models, tmp_path):
    folder = shutil.copytree(models / "Qwen3-head", tmp_path / "model")
    old = weights_of(folder) | {INV_FREQ: torch.rand(3)}  # versions of 2023 saved it
    safetensors.save_file(old, folder / "model.safetensors")
    header(lambda entries: None)(folder)  # without metadata, and its length is odd
    (folder / "LICENSE").write_text("as you like")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    (folder / "notes.json").mkdir()
    model, stage = plain(models / "Qwen3-head"), load_stage("13")
    files = WeightFiles(folder, {name: p.shape for name, p in model.named_parameters()})
    files.prepare(tmp_path / "out")
    for name, p in model.named_parameters():
        whole = {name: p.shape}, slice(0, p.numel()), p.detach().flatten()
        stage.write_shard(files, tmp_path / "out", *whole)
    with safetensors.safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    content = (tmp_path / "out/model.safetensors").read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0
    out, read = weights_of(tmp_path / "out"), weights_of(folder)
    assert out.keys() == read.keys() and all(torch.equal(out[name], read[name]) for name in out)
    named = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert {"LICENSE", "additional_chat_templates/tools.jinja"} <= named
    assert "notes.json" not in named


@pytest.mark.parametrize("name, flags", [("qwen2", ""), ("qwen2-tied", ""), ("llama", KEPT)])
def test_a_step_sends_and_holds_what_the_readme_says(pools, models, name, flags):
    argv = f"--model {models / name} --data any --seq-len 32 {flags}".split()
    (report,) = pools(1, group=False).run(dry_run, "13", 4, 0, argv)
    config = LlamaConfig.of_folder(models / name)
    P, E, d = config.num_parameters(), config.vocab_size * config.d_model, config.d_model
    # the final norm stays from forward to backward
    gathered = P + E * config.tied * (not flags) + (not flags) * (P - (2 - config.tied) * E - d)
    reduced = P + E * config.tied
    padding = 4 * 4 * 3 * 10  # bytes: of at most ten units that do not divide by four
    for op, count in (("all_gather_single", gathered), ("reduce_scatter_single", reduced)):
        assert 0 <= report.sent.ring[op, "shard"] - 4 * count * 3 / 4 <= padding, op
    assert 0 <= report.states - 16 * P / 4 <= padding


# ---- instructions ----


@quick
@pytest.mark.parametrize("name, data", [("qwen2", "chat"), ("llama", "alpaca")])
def test_prompts_are_no_targets_and_answers_end(models, name, data, request):
    """All answers of a conversation, against tokens that are rendered answer by answer."""
    data = request.getfixturevalue(data)
    found, stage = load_instructions(str(data), models / name, 200, 0), load_stage("13")
    expected = plain_documents(models / name, data, 200)
    assert len(found.train) == len(expected)
    (batch,) = stage.micro_batches_of(found.tokens_of(found.train[:5]), 1000, CPU)
    order = sorted(range(5), key=lambda i: -len(expected[i][0]))  # the longest first
    for i in (0, 1):
        assert torch.equal(batch[i], torch.cat([expected[k][i] for k in order]))
    assert batch[2] == tuple(len(expected[k][0]) for k in order)


@quick
def test_documents_that_are_too_long_are_cut_or_left_out_and_counted(models, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    lines = [{"instruction": "a" * n, "output": "b" * n} for n in (1, 100, 300)]
    data.write_text("\n".join(map(json.dumps, lines)))
    found = load_instructions(str(data), models / "llama", 250, 1)
    assert [x.length for x in found.train + found.valid] == [found.train[0].length, 251]
    said = "2 of 3 documents truncated to 250 tokens; 1 left out, of which no answer remained"
    assert said in capsys.readouterr().out


CHAT = json.loads((GOLDEN / "tokenizer/tokenizer_config.json").read_text())["chat_template"]
REWRITES = CHAT.replace("m.content", "(m.content if loop.last else m.content.replace('yo', 'YO'))")
TOOLS = "{% for tool in tools or [] %}<|start|>{{ tool.name }}<|end|>{% endfor %}" + CHAT
ASKED, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
START, SAID = "<|bos|><|start|>user\nhi<|end|>\n<|start|>assistant\n", "yo<|end|>\n"
AGAIN = START.removeprefix("<|bos|>")
SHAREGPT = [{"from": who, "value": {"human": "hi", "gpt": "yo"}[who]} for who in ("human", "gpt")]


@quick
@pytest.mark.parametrize(
    "template, example, expected",
    [
        (CHAT, {"messages": [ASKED, ANSWER] * 2}, [START, SAID, AGAIN, SAID]),
        (CHAT, {"messages": [ASKED, ANSWER, ASKED]}, [START, SAID]),
        (  # it changes the first answer, so the second one is a document of its own
            REWRITES,
            {"messages": [ASKED, ANSWER] * 2},
            [START, SAID, START + SAID.replace("yo", "YO") + AGAIN, SAID],
        ),
        (CHAT, {"conversations": SHAREGPT}, [START, SAID]),
        (
            CHAT,
            {"conversations": SHAREGPT[::-1] + SHAREGPT[1:]},  # its first turn is only context
            [f"<|bos|><|start|>assistant\n{SAID}{AGAIN}", SAID],
        ),
        (
            TOOLS,
            {"messages": [ASKED, ANSWER], "tools": [{"name": "map"}]},
            [f"<|start|>map<|end|>{START}", SAID],
        ),
        (
            CHAT.replace("m.content", "(m.content or m.tool_calls)"),
            {"messages": [ASKED, ANSWER | {"content": None, "tool_calls": "call"}]},
            [START, "call<|end|>\n"],
        ),
    ],
)
def test_a_conversation_is_rendered_as_in_use(models, template, example, expected):
    """Prompt, answer, what is between it and the next answer, that answer: of all documents."""
    tokenizer, found = load_tokenizer(models / "qwen2"), []
    tokenizer.chat_template = template
    for ids, spans in documents_of([example], tokenizer):
        places = [0, *(place for span in spans for place in span)]
        parts = zip(places, places[1:], strict=False)
        found += [tokenizer.decode(ids[begin:end]) for begin, end in parts]
        assert places[-1] == len(ids)
    assert found == expected


def test_parts_that_a_tokenizer_joins_are_tokenized_as_in_use(models):
    """The last letters of the prompt and the first ones of the answer would be one token."""
    tokenizer = load_tokenizer(models / "qwen2")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% if m.role != 'user' %}"
    tokenizer.chat_template += "<|end|>{% endif %}{% endfor %}"
    pair = next(t for t, i in tokenizer.get_vocab().items() if i > 290 and len(t) == 2)
    turns = [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}] * 2
    (first, spans), (second, later) = documents_of([{"messages": turns}], tokenizer)
    assert len(first) == 3 and spans == [(1, 3)]
    assert len(second) == 5 and later == [(3, 5)] and tokenizer.decode(second[:1]) == pair


BAD_DATA = {  # what of it the one line says
    '{"instruction": "a", "output": "b"}\n\n{"instruction"': "in line 3",
    "[]": "no examples",
    '["a"]': "object 1: 'a'",
    '{"messages": null}': "no list of objects: None",
    '{"messages": [{"from": "human"}]}': "role is no text",
    '{"messages": [{"role": "robot", "content": ""}]}': "role 'robot' is none of",
    '{"messages": [{"role": "user", "content": "a"}]}': "have no answer",
    '{"messages": [{"role": "user", "content": [1]}]}': "content is no text: [1]",
    '{"conversations": [{"from": "bing", "value": ""}]}': "role 'bing'",
    '{"instruction": "a", "output": null}': "object 1: its output is no text: None",
    '{"instruction": "a", "output": "b"}\n{"instruction": 1}': "has no output in its object 2",
    '{"instruction": "\\ud83d", "output": "b"}': "surrogates",
    json.dumps({"messages": [ASKED, ANSWER], "tools": [{"name": "map"}]}): "does not use",
}


@quick
@pytest.mark.parametrize("content", BAD_DATA)
def test_what_is_wrong_in_the_data_is_named_in_one_line(models, tmp_path, error_of, content):
    (tmp_path / "data").write_text(content)
    line = error_of(load_instructions, str(tmp_path / "data"), models / "llama", 200, 0)
    assert BAD_DATA[content] in line


BAD_TOKENIZERS = {  # fields of its tokenizer_config.json
    "a template that is wrong": (dict(chat_template="{% if %}"), "object 1: "),
    "no template": (dict(chat_template=None), "the model no chat template"),
    "a template that raises": (dict(chat_template="{{ raise_exception('odd') }}"), "1: odd"),
    "an answer without an end": (dict(chat_template=CHAT.replace("<|end|>", "")), "token of its"),
    "an end that is no token": (dict(chat_template=CHAT.replace("end|>", "eot|>")), "token of its"),
    "an answer that changes": (dict(chat_template=CHAT + "<think>"), "after its prompt"),
    "a new token": (dict(extra_special_tokens={"x": "yo"}), "tokenizer.json has no yo"),
    "a new end": (dict(eos_token="<|new|>"), "tokenizer.json has no <|new|>"),
}


@pytest.mark.parametrize("case", BAD_TOKENIZERS)
def test_what_is_wrong_in_the_tokenizer_is_named_in_one_line(models, tmp_path, error_of, case):
    folder, (fields, said) = shutil.copytree(models / "qwen2", tmp_path / "m"), BAD_TOKENIZERS[case]
    edited("tokenizer_config.json", **fields)(folder)
    (tmp_path / "data").write_text(json.dumps({"messages": [ASKED, ANSWER]}))
    assert said in error_of(load_instructions, str(tmp_path / "data"), folder, 200, 0)


@quick
def test_data_are_prepared_again_if_code_or_a_file_of_the_tokenizer_changes(models, tmp_path):
    folder = shutil.copytree(models / "llama", tmp_path / "model")
    (tmp_path / "data").write_text(json.dumps({"messages": [ASKED, ANSWER]}))
    load = partial(load_instructions, str(tmp_path / "data"), folder, 200, 0)
    first = load()
    (folder / "chat_template.jinja").write_text(CHAT.replace("start", "bos"))
    assert load().digest != first.digest
    (folder / "chat_template.jinja").unlink()
    with patch("common.job.prepared_instructions.documents_of") as called:
        assert load().digest == first.digest and not called.called
        with patch("common.instructions.__file__", __file__):  # other code
            pytest.raises(SystemExit, load)  # there are no documents, but it asked for them
        for library in ("transformers", "tokenizers"):
            changed = {each: version(each) for each in ("transformers", "tokenizers")}
            changed[library] = "another one"
            with patch("common.job.prepared_instructions.version", changed.get):
                pytest.raises(SystemExit, load)
    assert called.called


@quick
def test_packing_wastes_little_and_gives_every_rank_the_same_number():
    rng, pack = random.Random(0), load_stage("13").pack
    for _ in range(500):
        size, most = rng.randint(1, 8), rng.randint(20, 300)
        lengths = [rng.randint(1, most) for _ in range(rng.randint(1, 60))]
        packed = pack(lengths, size, most)
        tokens = [sum(lengths[i] for i in indices) for indices in packed]
        assert len(packed) % size == 0 and max(tokens) <= most
        assert sorted(i for indices in packed for i in indices) == [*range(len(lengths))]
    lengths = [int(rng.lognormvariate(4.5, 0.6)) + 20 for _ in range(128)]  # as Alpaca's
    tokens = [sum(lengths[i] for i in indices) for indices in pack(lengths, 4, 2048)]
    assert max(tokens) < 1.02 * sum(lengths) / len(tokens)


def test_more_ranks_than_documents_train_on_a_token_without_a_target(pools, models, chat, tmp_path):
    few = "--global-batch-size 3"
    one = pools(1).train("13", argv_of(models / "qwen2", chat, tmp_path / "1", few))[0]
    for metrics in pools(4).train("13", argv_of(models / "qwen2", chat, tmp_path / "4", few)):
        assert_same_curve(metrics, one)


# ---- what is not supported ----


def edited(name: str = "config.json", **fields):
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def header(change):
    """Change the header of the weights, whose values keep their places."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:begin])
        change(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[begin:])

    return edit


def twice(folder: Path) -> None:
    """The same file again, under the name of a single one, and as a second of an index."""
    shutil.copy(folder / "model.safetensors", folder / "second.safetensors")
    index = {"weight_map": {NORM: "model.safetensors", "lm_head.weight": "second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def unlisted(folder: Path) -> None:
    """The same file again, and an index that does not name their tensors."""
    shutil.copy(folder / "model.safetensors", folder / "second.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def beside(folder: Path) -> None:
    """An index that does not name the single file."""
    index = {"weight_map": {NORM: "second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NORM, INV_FREQ = "model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
BOTH = dict(rope_scaling=YARN, rope_parameters=dict(rope_type="default", rope_theta=1e4))
UNSUPPORTED = {
    "gemma": (edited(model_type="gemma"), "model_type gemma"),
    "linear": (edited(rope_parameters=dict(rope_type="linear", factor=2)), "type linear"),
    "both": (edited(**BOTH), "rope_scaling and rope_parameters differ in rope_type"),
    "window": (edited(use_sliding_window=True, sliding_window=64), "pass --seq-len 64 or less"),
    "quantized": (edited(quantization_config={}), "quantized"),
    "activation": (edited(hidden_act="gelu_new"), "gelu_new"),
    "reward": (edited(architectures=["Qwen2ForSequenceClassification"]), "SequenceClass"),
    "tokenizer": (edited(vocab_size=200), "of another shape"),
    "missing layer": (edited(num_hidden_layers=3), "12 tensors are missing"),
    "extra layer": (edited(num_hidden_layers=1), "12 tensors are not of this model"),
    "tied": (edited(tie_word_embeddings=True), "a lm_head.weight with other values"),
    "int8": (header(lambda entries: entries[NORM].update(dtype="I8")), "is I8"),
    "no field": (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
    "truncated": (lambda x: os.truncate(x / "model.safetensors", 10_000), "is truncated in"),
    "twice": (twice, "is in model.safetensors, but in second.safetensors according to"),
    "unlisted": (unlisted, "is in model.safetensors, and in second.safetensors"),
    "beside": (beside, "does not name model.safetensors"),
    "git lfs": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"),
        "no safetensors file",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "No such file"),
}


@quick
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_supported_is_an_error_in_one_line(models, alpaca, tmp_path, error_of, case):
    change, said = UNSUPPORTED[case]
    folder = shutil.copytree(models / "qwen2", tmp_path / "model")
    change(folder)
    stage = load_stage("13")
    args = stage.parse_args(argv_of(models / "qwen2", alpaca, tmp_path))
    args.model = str(folder)
    line = error_of(stage.load, args)
    assert line.startswith("train.py: --model") or "pytest" in line, line
    assert said in line


@quick
def test_a_sliding_window_is_that_of_transformers(models):
    names = "Mistral-v0.1", "Mistral-v0.3", "Qwen2.5"
    assert [LlamaConfig.of_folder(models / name).window for name in names] == [4096, None, None]


@quick
@pytest.mark.parametrize("field", ["attention_dropout", "quantization_config"])
def test_null_is_none(models, tmp_path, field):
    folder = shutil.copytree(models / "qwen2", tmp_path / "model")
    edited(**{field: None})(folder)
    assert LlamaConfig.of_folder(folder) == LlamaConfig.of_folder(models / "qwen2")


@quick
def test_without_transformers_the_error_names_the_packages(monkeypatch, models, error_of):
    """In these words, by which `make quickstart` knows what to skip."""
    monkeypatch.setattr("common.job.prepared_instructions.find_spec", lambda _: None)
    line = error_of(load_instructions, "sample", models / "llama", 64, 0)
    assert " has no transformers" in line and "pip install transformers jinja2" in line


BAD = {
    "--preset small": "--preset",
    "--dropout 0.1": "--dropout",
    "--micro-batch-size 2": "--micro-batch-size",
    "--epochs 2": "not allowed with argument",
    "--shard-degree 3": "--shard-degree 3",
    "--data {absent}": "absent",
    "--valid 1000": "none is left to train on after --valid 1000",
    "--model {absent}": "--model",
}


@quick
@pytest.mark.parametrize("flags", BAD)
def test_bad_arguments_are_an_error_in_one_line(models, alpaca, tmp_path, error_of, flags):
    argv = argv_of(models / "qwen2", alpaca, tmp_path, flags.format(absent=tmp_path / "absent"))
    stage = load_stage("13")
    assert BAD[flags] in error_of(lambda: stage.load(stage.parse_args(argv)))
