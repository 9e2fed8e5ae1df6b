"""Stage 13: fine-tuning a pretrained model from safetensors files, sharded by 04."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from harness import BFLOAT16, REPO, assert_same_curve, load_stage, process_bytes, train_in
from torch import Tensor

from common.batches import global_batch
from common.llama import Llama, LlamaConfig
from common.loss import IGNORED
from common.optimization import adamw_settings, learning_rate
from common.packing import pack, packed_batches
from common.weight_files import DTYPES

from common.job.instructions import load_instructions
from tools.dry_run import dry_run
from tools.export import export_folder, run_and_checkpoint

pytestmark = pytest.mark.slow
quick = pytest.mark.quick

GOLDEN = REPO / "tests/golden"
LOGITS = torch.load(GOLDEN / "logits.pt", weights_only=True)
CPU = torch.device("cpu")
KEPT = "--no-reshard-after-forward"
FLAGS = "--steps 8 --global-batch-size 6 --seq-len 320 --lr 1e-3 --warmup-steps 2 --log-every 1"


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files, in their dtypes."""
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, end = (begin + offset for offset in entry["data_offsets"])
            values = torch.frombuffer(bytearray(content[first:end]), dtype=DTYPES[entry["dtype"]])
            found[name] = values.view(entry["shape"])
    return found


def plain(folder: Path) -> Llama:
    model = Llama(LlamaConfig.of_folder(folder))
    model.load_state_dict({name: tensor.float() for name, tensor in weights_of(folder).items()})
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of the golden models, with a tokenizer each."""
    folder = tmp_path_factory.mktemp("models")
    for name in LOGITS:
        shutil.copytree(GOLDEN / name, folder / name)
        shutil.copytree(GOLDEN / "tokenizer", folder / name, dirs_exist_ok=True)
    return folder


def examples() -> list[dict]:
    rng, words = random.Random(0), "red blue green cat dog house tree river apple stone".split()
    found = []
    for i in range(40):
        some = " ".join(rng.choices(words, k=rng.randint(1, 14)))
        found.append({"instruction": f"Repeat {i}.", "input": some * (i % 3 > 0), "output": some})
    return found


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    """A file of messages. Some documents are longer than half a micro-batch."""
    path, lines = tmp_path_factory.mktemp("data") / "chat.jsonl", []
    for each in examples():
        asked = {"role": "user", "content": f"{each['instruction']} {each['input']}"}
        answer = {"role": "assistant", "content": each["output"]}
        lines.append(json.dumps({"messages": [asked, answer]}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def alpaca(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "alpaca.json"
    path.write_text(json.dumps(examples()))
    return path


# ---- the model ----


@quick
@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_those_of_transformers(models, name):
    """Of documents side by side; the golden ones are of one document per forward."""
    golden, model = LOGITS[name], plain(models / name)
    tokens, lengths = golden["tokens"], golden["lengths"]
    with torch.no_grad():
        logits = model(tokens, lengths)
        single = torch.cat([model(each, (len(each),)) for each in tokens.split(lengths)])
    assert golden["logits"].std() > 0.5
    for found in (logits, single):
        torch.testing.assert_close(found[:, ::16], golden["logits"], rtol=0, atol=1e-5)


def test_the_golden_logits_are_those_of_the_installed_transformers(models):
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    for name, golden in LOGITS.items():
        model = auto.from_pretrained(models / name, dtype=torch.float32)
        each = golden["tokens"].split(golden["lengths"])
        with torch.no_grad():
            logits = torch.cat([model(tokens[None]).logits[0] for tokens in each])
        torch.testing.assert_close(logits[:, ::16], golden["logits"], rtol=0, atol=1e-5)


@quick
def test_a_document_has_no_influence_on_another(models):
    model = plain(models / "qwen3")
    a, b, c = (torch.randint(0, 300, (n,)) for n in (40, 40, 30))
    with torch.no_grad():
        after_a, after_b = (model(torch.cat([x, c]), (40, 30))[40:] for x in (a, b))
    assert torch.equal(after_a, after_b)


# ---- curves: against one document per forward in one process ----


def plain_documents(folder: Path, data: Path, longest: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each document, from its text."""
    from tokenizers import Tokenizer

    tokenizer, found = Tokenizer.from_file(str(folder / "tokenizer.json")), []
    text = data.read_text()
    for each in json.loads(text) if text[0] == "[" else map(json.loads, text.splitlines()):
        if "messages" in each:
            asked, answer = (message["content"] for message in each["messages"])
            prompt = f"<|bos|><|start|>user\n{asked}<|end|>\n<|start|>assistant\n"
            prompt, answer = (
                tokenizer.encode(prompt, add_special_tokens=False),
                f"{answer}<|end|>\n",
            )
        else:
            paired = ", paired with an input that provides further context" * bool(each["input"])
            prompt = f"Below is an instruction that describes a task{paired}. Write a response that"
            prompt += " appropriately completes the request.\n\n### Instruction:\n"
            prompt += each["instruction"] + "\n\n"
            prompt += f"### Input:\n{each['input']}\n\n" * bool(each["input"]) + "### Response:\n"
            prompt, answer = tokenizer.encode(prompt), each["output"] + "<|eos|>"
        answer = tokenizer.encode(answer, add_special_tokens=False).ids
        ids = torch.tensor([*prompt.ids, *answer])[: longest + 1]
        targets = torch.tensor([IGNORED] * len(prompt.ids) + answer)[: longest + 1]
        if (targets[1:] != IGNORED).any():
            found.append((ids[:-1], targets[1:]))
    return found


def plain_curve(folder: Path, data: Path, n_valid: int = 4) -> tuple[list[dict], Llama]:
    """The metrics of a run with FLAGS, by the definition: the mean over all targets of a step."""
    documents = plain_documents(folder, data, 320)
    train, valid = documents[:-n_valid], documents[-n_valid:]
    model, lines = plain(folder), []
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_settings(1e-3, 0.0))

    def loss_of(documents) -> Tensor:
        losses = [
            F.cross_entropy(model(x, (len(x),)), y, reduction="sum", ignore_index=IGNORED)
            for x, y in documents
        ]
        return sum(losses) / sum((y != IGNORED).sum() for _, y in documents)

    for step in range(8):
        optimizer.param_groups[0]["lr"] = learning_rate(step, 8, 1e-3, 2, 0.1)
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
    out, read = weights_of(tmp_path / "model"), weights_of(models / name)
    assert out.keys() == read.keys()
    for key, value in model.state_dict().items():
        assert out[key].dtype == read[key].dtype
        torch.testing.assert_close(out[key], value.to(out[key].dtype), rtol=0.01, atol=1e-4)


def test_a_curve_of_alpacas_examples(pools, models, alpaca, tmp_path):
    """Long documents, of which some are truncated."""
    argv = argv_of(models / "qwen3", alpaca, tmp_path)
    expected, _ = plain_curve(models / "qwen3", alpaca)
    assert_same_curve(pools(2).train("13", argv)[0], expected)


def test_a_resumed_run_ends_with_the_same_bits(pools, models, chat, tmp_path):
    model = models / "qwen2"
    argv = argv_of(model, chat, tmp_path / "a", "--checkpoint-every 4")
    whole = pools(2).train("13", argv)[0]
    saved = tmp_path / "a/checkpoints/step-00000004"
    resumed = pools(2).train("13", argv_of(model, chat, tmp_path / "b", f"--resume {saved}"))[0]
    names = ("step", "loss", "grad_norm", "val_loss")
    lines = [[{n: x[n] for n in names if n in x} for x in run] for run in (whole, resumed)]
    assert lines[0][4:] == lines[1] and len(lines[1]) == 4
    assert files_of(tmp_path / "a/model") == files_of(tmp_path / "b/model")
    export_folder(*run_and_checkpoint(tmp_path / "a"), tmp_path / "exported")
    assert files_of(tmp_path / "exported") == files_of(tmp_path / "a/model")


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
    found = {
        "peak": process_bytes("VmHWM") - held,
        "system_read": process_bytes("rchar") - had_read,
    }
    found |= {"counted": files.bytes_read, "headers": sum(map(len, files.headers.values()))}
    found["owned"] = sum(
        max(0, min(unit.owned.stop, size) - unit.owned.start)
        for unit in model.units
        for size in [sum(shape.numel() for shape in unit.shapes.values())]
    )
    if out is not None:
        wrote = process_bytes("wchar")
        stage.write_model(model, files, out)
        found["system_wrote"] = process_bytes("wchar") - wrote
    return found


@pytest.mark.quick_cases("2-llama")
@pytest.mark.parametrize("ranks, name", [(1, "qwen2"), (2, "llama"), (3, "qwen2"), (4, "arcee")])
def test_bytes_read_and_written_are_those_of_the_shards(pools, models, tmp_path, ranks, name):
    """And a model that is read and written is the same, bit by bit."""
    pools(ranks).run(read_and_write, models / name, None)  # imports what it needs
    each = pools(ranks).run(read_and_write, models / name, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(models / name)
    size = next(iter(weights_of(models / name).values())).itemsize
    total = sum(tensor.numel() for tensor in weights_of(models / name).values())
    assert sum(found["owned"] for found in each) == total
    for rank, found in enumerate(each):
        shard = size * found["owned"]
        assert found["owned"] <= total / ranks + 10 * ranks  # ten units, padded
        assert found["counted"] == shard + found["headers"]
        # the files that tell these numbers, and what Gloo sends to the other ranks
        assert 0 <= found["system_read"] - found["counted"] < 4096
        copied = (rank == 0) * sum(map(len, files_of(models / name).values()))
        assert shard <= found["system_wrote"] <= shard + copied + 4096


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
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_memory_while_reading_is_that_of_the_shards(fresh_pool, models, large, ranks):
    total = LlamaConfig.of_folder(large).num_parameters()
    pool = fresh_pool(ranks)
    pool.run(read_and_write, models / "qwen2", None)  # pages of the libraries count as well
    for found in pool.run(read_and_write, large, None):
        assert found["peak"] <= 4 * total / ranks + 16 * 2**20, f"{found['peak'] / 2**20:.0f} MB"


def test_the_host_waits_for_the_other_ranks_before_it_opens_files(monkeypatch, tmp_path):
    """A GPU's all-reduce is only enqueued when the call returns."""
    stage, seen = load_stage("13"), []
    monkeypatch.setattr(stage.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(stage, "all_reduce_control", seen.append)
    model = SimpleNamespace(units=[], replicate_group=None, device=torch.device("meta"))
    stage.write_model(model, None, tmp_path / "model")
    assert [tensor.device.type for tensor in seen] == ["cpu", "cpu"]


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
    assert not (tmp_path / "model").exists() and (tmp_path / ".model.writing").exists()
    assert pools(1).train("13", argv) == [[]]  # nothing was left to do but this
    assert weights_of(tmp_path / "model").keys() == weights_of(models / "qwen2").keys()
    assert not (tmp_path / ".model.writing").exists()


def test_a_model_that_is_there_is_only_accepted_from_the_same_job(
    pools, models, chat, tmp_path, monkeypatch
):
    argv = argv_of(models / "qwen2", chat, tmp_path, "--checkpoint-every 8")
    requeued = {"SLURM_JOB_ID": "7", "SUBMITTED": "today", "SLURM_RESTART_COUNT": "0"}
    (out,) = pools(1).run(train_in, requeued, "13", argv)
    before = files_of(tmp_path / "model")
    (again,) = pools(1).attempt(train_in, requeued | {"SLURM_RESTART_COUNT": "1"}, "13", argv)
    assert len(out) == 8 and not again.exit_status and files_of(tmp_path / "model") == before
    (other,) = pools(1).attempt(train_in, {}, "13", argv)
    assert other.exit_status == 2 and "is already there" in other.stderr


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
def test_prompts_are_no_targets_and_answers_end(models, chat, alpaca):
    """Against tokens and targets that are built from the text here."""
    for name, data in (("qwen2", chat), ("llama", alpaca)):
        found = load_instructions(str(data), models / name, 200, 0)
        expected = plain_documents(models / name, data, 200)
        assert len(found.train) == len(expected)
        (batch,) = packed_batches(found.tokens, found.train[:5], 1000, CPU)
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


@quick
def test_packing_wastes_little_and_gives_every_rank_the_same_number():
    rng = random.Random(0)
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
    few = "--global-batch-size 3 --steps 2"
    one = pools(1).train("13", argv_of(models / "qwen2", chat, tmp_path / "1", few))[0]
    for metrics in pools(4).train("13", argv_of(models / "qwen2", chat, tmp_path / "4", few)):
        assert_same_curve(metrics, one)


# ---- what is not supported ----


def edited(**fields):
    def edit(folder: Path) -> None:
        path = folder / "config.json"
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


def shorter(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 10_000)


def more_tokens(folder: Path) -> None:
    """Than the embedding has rows."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [first | {"id": i, "content": f"<{i}>"} for i in range(300, 305)]
    path.write_text(json.dumps(tokenizer))


NORM, INV_FREQ = "model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
UNSUPPORTED = {
    "gemma": (edited(model_type="gemma"), "model_type gemma"),
    "yarn": (edited(rope_scaling={"rope_type": "yarn"}, rope_parameters=None), "type yarn"),
    "window": (edited(use_sliding_window=True), "sliding window"),
    "quantized": (edited(quantization_config={}), "quantized"),
    "activation": (edited(hidden_act="gelu_new"), "gelu_new"),
    "reward": (edited(architectures=["Qwen2ForSequenceClassification"]), "SequenceClass"),
    "tokenizer": (edited(vocab_size=200), "of another shape"),
    "missing layer": (edited(num_hidden_layers=3), "12 tensors are missing"),
    "extra layer": (edited(num_hidden_layers=1), "12 tensors are not of this model"),
    "tied": (edited(tie_word_embeddings=True), "lm_head.weight"),
    "int8": (header(lambda entries: entries[NORM].update(dtype="I8")), "is I8"),
    "no field": (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
    "truncated": (shorter, "is truncated in"),
    "git lfs": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"),
        "no safetensors file",
    ),
    "more tokens": (more_tokens, "305 tokens, the embedding 304 rows"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "No such file"),
}


@quick
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_supported_is_an_error_in_one_line(models, alpaca, tmp_path, error_of, case):
    change, said = UNSUPPORTED[case]
    folder = shutil.copytree(models / "qwen2", tmp_path / "model")
    change(folder)
    stage = load_stage("13")
    args = stage.parse_args(argv_of(folder, alpaca, tmp_path))
    line = error_of(stage.load, args)
    assert line.startswith("train.py: --model") or "pytest" in line, line
    assert said in line


@quick
def test_without_tokenizers_the_error_names_the_package(monkeypatch, models, error_of):
    """In these words, by which `make quickstart` knows what to skip."""
    monkeypatch.setattr("common.job.instructions.find_spec", lambda _: None)
    assert " has no tokenizers" in error_of(load_instructions, "sample", models / "llama", 64, 0)


@quick
def test_rotary_frequencies_of_old_versions_are_skipped(models, alpaca, tmp_path):
    folder = shutil.copytree(models / "qwen2", tmp_path / "model")
    header(lambda entries: entries.update({INV_FREQ: entries[NORM]}))(folder)
    stage = load_stage("13")
    _, files, _ = stage.load(stage.parse_args(argv_of(folder, alpaca, tmp_path)))
    files.prepare(tmp_path / "out")
    out, read = weights_of(tmp_path / "out"), weights_of(folder)
    assert torch.equal(out[INV_FREQ], read[INV_FREQ]) and not out["lm_head.weight"].any()


BAD = {
    "--preset small": "--preset",
    "--d-model 64": "--d-model",
    "--dropout 0.1": "--dropout",
    "--micro-batch-size 2": "--micro-batch-size",
    "--shard-degree 3": "--shard-degree 3",
    "--data {absent}": "absent",
    "--data {broken}": "has no output in its object 2",
    "--valid 1000": "documents have an answer",
    "--model {absent}": "--model",
}


@quick
@pytest.mark.parametrize("flags", BAD)
def test_bad_arguments_are_an_error_in_one_line(models, alpaca, tmp_path, error_of, flags):
    (tmp_path / "broken.jsonl").write_text('{"instruction": 1, "output": ""}\n{"instruction": 1}')
    broken, absent = tmp_path / "broken.jsonl", tmp_path / "absent"
    argv = argv_of(models / "qwen2", alpaca, tmp_path, flags.format(broken=broken, absent=absent))
    stage = load_stage("13")
    assert BAD[flags] in error_of(lambda: stage.load(stage.parse_args(argv)))
