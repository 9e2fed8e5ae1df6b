"""Stage 13: fine-tuning a pretrained model from safetensors files, sharded by 04."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from harness import BFLOAT16, REPO, assert_same_curve, load_stage, process_bytes, train_in
from torch import Tensor

from common.batches import global_batch
from common.instructions import documents_of, load_tokenizer
from common.llama import Llama, LlamaConfig
from common.loss import IGNORED, linear_cross_entropy
from common.optimization import adamw_settings, learning_rate
from common.weight_files import EMBEDDING, HEAD, INDEX, SINGLE, WeightFiles

from common.job.prepared_instructions import load_instructions
from tools.dry_run import dry_run
from tools.export import export_folder, run_and_checkpoint

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.slow
quick = pytest.mark.quick

PREPARED, GOLDEN = "common.job.prepared_instructions", REPO / "tests/golden"
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
    "Qwen2.5-yarn": ("qwen2", dict(rope_parameters=YARN, sliding_window=16) | NO_WINDOW),
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
    read = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32)
    for p in model.parameters():
        p.data = 8 * p if p.dim() > 1 else p + 0.3 * torch.randn_like(p)
    weights = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    if "head" in folder.name:
        weights[HEAD] = weights[EMBEDDING].clone()
    safetensors.save_file(weights, folder / SINGLE, metadata={"format": "pt"})


def reference_of(folder: Path) -> torch.nn.Module:
    """The model of transformers, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files, in their dtypes."""
    every = map(safetensors.load_file, sorted(folder.glob("*.safetensors")))
    return {name: tensor for each in every for name, tensor in each.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def on_meta(folder: Path) -> tuple[Llama, WeightFiles]:
    """A folder's model without values, and where they are."""
    with torch.device("meta"):
        model = Llama(LlamaConfig.of_folder(folder))
    return model, WeightFiles(folder, {name: p.shape for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of models, with a tokenizer each but the large one."""
    folder = tmp_path_factory.mktemp("models")
    for name in SAVED:
        shutil.copytree(GOLDEN / name, folder / name)
    for name, (family, fields) in OF_THE_HUB.items():
        make_model(folder / name, family, fields)
    for each in folder.iterdir():
        shutil.copytree(GOLDEN / "tokenizer", each, dirs_exist_ok=True)
    large = dict(vocab_size=16384, hidden_size=512, intermediate_size=1024)
    make_model(folder / "large", "qwen2", large)  # 27 million parameters
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    """Conversations of one to three answers. Some are longer than half a micro-batch."""
    path, rng, examples = tmp_path_factory.mktemp("data") / "chat", random.Random(0), []
    words = "red blue green cat dog house tree river apple stone".split()
    for i in range(40):
        turns = [("user", 20), ("assistant", 14)] * (1 + i % 3)
        texts = [(role, rng.choices(words, k=rng.randint(1, most))) for role, most in turns]
        messages = [{"role": role, "content": " ".join(text)} for role, text in texts]
        examples.append({"messages": messages})
    path.write_text(json.dumps(examples))
    return path


# ---- the model ----


@quick
@pytest.mark.parametrize("name", [*SAVED, *OF_THE_HUB])
def test_logits_are_those_of_transformers(models, name):
    """Of documents side by side, each of which transformers gets alone."""
    stage, theirs = load_stage("13"), reference_of(models / name)
    ours, files = on_meta(models / name)
    ours.to_empty(device="cpu")
    for key, p in ours.named_parameters():
        stage.read_shard(files, {key: p.shape}, slice(0, p.numel()), p.detach().flatten())
    lengths = 5, 1, 70, 17
    tokens = torch.randint(0, SHAPE["vocab_size"], (sum(lengths),))
    with torch.no_grad():
        expected = torch.cat([theirs(each[None]).logits[0] for each in tokens.split(lengths)])
        found = ours(tokens, lengths)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert ours.config.window == getattr(theirs.config, "sliding_window", None)


# ---- curves: against transformers' loss of one document per forward in one process ----

# the chat template of tests/golden, which marks the answers for transformers
MARKED = """{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}
{% if m.role == "assistant" %}{% generation %}{{ m.content }}<|end|>
{% endgeneration %}{% else %}{{ m.content }}<|end|>
{% endif %}{% endfor %}"""


@cache
def plain_curve(
    folder: Path, data: Path, make=reference_of, lr: float = 1e-3
) -> tuple[list[dict], torch.nn.Module]:
    """The metrics of a run with FLAGS, by the definition: the mean over all targets of a step."""
    tokenizer, documents = transformers.AutoTokenizer.from_pretrained(folder), []
    render = partial(tokenizer.apply_chat_template, chat_template=MARKED, return_tensors="pt")
    for example in json.loads(data.read_text()):
        found = render(example["messages"], return_assistant_tokens_mask=True)
        ids, is_target = found["input_ids"][:, :321], found["assistant_masks"][:, :321].bool()
        documents.append((ids, torch.where(is_target, ids, IGNORED)))
    train, valid = documents[:-4], documents[-4:]
    model, lines = make(folder), []
    settings = adamw_settings(lr, 0.0) | {"betas": (0.9, 0.999)}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)

    def loss_of(documents) -> Tensor:
        n = sum((labels != IGNORED).sum() for _, labels in documents)
        return sum(model(x, labels=y, num_items_in_batch=n).loss for x, y in documents)

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


def train_and_watch(argv: list[str]) -> tuple[list[dict], set[float]]:
    """The metrics of a run, and by what its losses were divided."""
    with patch("common.llama.linear_cross_entropy", wraps=linear_cross_entropy) as loss:
        lines = load_stage("13").main(argv)
    return lines, {float(each.kwargs["count"]) for each in loss.mock_calls}


def argv_of(model: Path, data: Path, run: Path, flags: str = "") -> list[str]:
    load_instructions(str(data), model, 320, 0)  # so that no rank has to import transformers
    where = f"--model {model} --data {data} --run-dir {run} --valid 4"
    return [*where.split(), *FLAGS.split(), *flags.split()]


CURVES = [  # ranks, model, further flags, backend
    (1, "llama", "", "gloo"),
    (2, "qwen2-tied", "", "gloo"),
    (3, "qwen3", "--activation-checkpointing", "gloo"),
    (2, "llama-tied", "--no-reshard-after-forward --activation-checkpointing", "gloo"),
    (2, "qwen2", "--cpu-offload", "gloo"),
    (2, "SmolLM3", "", "gloo"),
    (2, "llama", "--activation-checkpointing", "late"),
    (4, "qwen2-tied", "--shard-degree 2", "late"),
    (2, "qwen2-tied", "--dtype bfloat16", "gloo"),
    (2, "llama", "--dtype bfloat16 --activation-checkpointing --reduce-dtype bfloat16", "gloo"),
]


@pytest.mark.quick_cases("2-qwen2-tied--gloo", "3-qwen3---activation-checkpointing-gloo")
@pytest.mark.parametrize("ranks, name, flags, backend", CURVES)
def test_a_curve_is_that_of_single_documents_in_one_process(
    pools, models, chat, tmp_path, ranks, name, flags, backend
):
    argv = argv_of(models / name, chat, tmp_path, flags)
    is_bf16 = "bfloat16" in flags
    expected, model = plain_curve(models / name, chat)
    for metrics, divisors in pools(ranks, backend=backend).run(train_and_watch, argv):
        assert_same_curve(metrics, expected, **BFLOAT16["late-bf16"] if is_bf16 else {})
        targets = {line["targets"] for line in metrics}
        assert targets <= divisors and max(targets) > 256  # not rounded to bfloat16's eight bits
    if not is_bf16:
        assert_same_model(tmp_path / "model", model.state_dict(), models / name)


def assert_same_model(folder: Path, expected: dict[str, Tensor], read: Path) -> None:
    """The weights in a folder, which has those of `read`, in their precision."""
    before = weights_of(read)
    assert weights_of(folder).keys() == before.keys()
    precision = 1e-5 if torch.float32 in {t.dtype for t in before.values()} else 0.01
    for key, value in reference_of(folder).state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=precision, atol=1e-4)


@quick
def test_an_epoch_takes_every_document_once(models, chat):
    stage = load_stage("13")
    flags = f"--model {models}/qwen2 --data {chat} --epochs 3 --global-batch-size 7"
    args = stage.parse_args(flags.split())
    _, _, data = stage.load(args)
    taken = [x for step in range(args.steps) for x in stage.documents_of_step(data, args, step)]
    every = data.tokens_of(data.train * 3)
    assert sorted(ids.tolist() for ids, _ in taken) == sorted(ids.tolist() for ids, _ in every)
    assert args.steps == 18  # of which the last has one document


# ---- reading and writing ----


def read_and_write(folder: Path, out: Path) -> dict:
    """Shard the model of a folder, and write it; what that took on this rank."""
    stage = load_stage("13")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    held, had_read = process_bytes("VmRSS"), process_bytes("rchar")
    model, files = on_meta(folder)
    with patch("common.unit_parameters.check_same"):  # it uses sockets
        units = model.units()
        model = stage.FullyShardedDataParallel(model, units, read_shard=stage.no_values, device=CPU)
    stage.read_model(model, files)
    found = {"peak": process_bytes("VmHWM") - held, "counted": files.bytes_read}
    found["system_read"], wrote = process_bytes("rchar") - had_read, process_bytes("wchar")
    stage.write_model(model, files, out, out.with_name("aside"))
    found["system_wrote"] = process_bytes("wchar") - wrote
    return found | {"values": files.bytes_read - sum(map(len, files.headers.values()))}


@pytest.mark.quick_cases("2")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_and_memory_are_those_of_the_shards(fresh_pool, models, tmp_path, ranks):
    """And a model that is read and written is the same, bit by bit."""
    pool, large, more = fresh_pool(ranks), models / "large", 12 * 2**20
    pool.run(read_and_write, models / "qwen2", tmp_path / "first")  # pages of libraries count, too
    each = pool.run(read_and_write, large, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(large)
    total = sum(tensor.nbytes for tensor in weights_of(large).values())
    assert sum(found["values"] for found in each) == total
    for found in each:
        assert found["values"] <= total / ranks + 2 * 10 * ranks  # ten units, padded
        assert found["peak"] <= 2 * total / ranks + more, f"{found['peak'] / 2**20:.0f} MB"
        # the configuration, these numbers, headers, and what Gloo sends to the other ranks
        assert 0 <= found["system_read"] - found["counted"] < 4096
        assert 0 <= found["system_wrote"] - found["values"] < 2**14


def fail_to_write(how: Callable | OSError, argv: list[str], stage: str, what: str, rank: int):
    """Train. On one rank the function of the stage that writes its output fails."""
    if dist.get_rank() == rank:  # of a pool for this alone: the function is not put back
        setattr(load_stage(stage), what, Mock(side_effect=how))
    load_stage(stage).main(argv)


def die(*_) -> None:
    signal.raise_signal(signal.SIGKILL)


# stage, what writes its output, a rank that calls it, and the output's name
OUTPUTS = [("13", "write_shard", 1, "model"), ("15", "write_tensors", 0, "adapter")]


@pytest.mark.quick_cases("13-write_shard-1-model")
@pytest.mark.parametrize("stage, what, rank, name", OUTPUTS)
def test_a_resumed_run_writes_the_same_output_which_is_complete_or_absent(
    fresh_pool, pools, models, chat, tmp_path, stage, what, rank, name
):
    """After a kill or an error while writing, whatever another run with the same --out does."""
    out, argv = tmp_path / "a" / name, partial(argv_of, models / "qwen2", chat)
    a = argv(tmp_path / "a", f"--checkpoint-every 4 --save-model {tmp_path}/a.pt")
    killed = fresh_pool(2).attempt(fail_to_write, die, a, stage, what, rank)
    assert "exit code -9" in killed[rank].traceback and not out.exists()
    (left,) = out.parent.glob(f".{name}.writing-*")
    b, pool = argv(tmp_path / "b", f"--out {out}"), fresh_pool(2)
    for failed in pool.attempt(fail_to_write, OSError("no room"), b, stage, what, rank):
        assert failed.exit_status == 1 and failed.traceback is None
        said = "no room; the run's checkpoint is complete: the same flags and --run-dir"
        assert not failed.stderr or said in failed.stderr
    pool.close()  # it has locked the folder
    assert [*out.parent.glob(f"*{name}*")] == [left]
    assert pools(1).train(stage, b) == [[]]
    expected = weights_of(out)
    shutil.rmtree(out)
    for _ in range(2):  # the second time it is there
        assert pools(1).train(stage, a) == [[]]
    assert not left.exists()
    # other processes trained it: the last bits may differ
    torch.testing.assert_close(weights_of(out), expected, rtol=0.01, atol=5e-3)
    if stage == "13":
        export_folder(*run_and_checkpoint(tmp_path / "a"), tmp_path / "exported")
        assert files_of(tmp_path / "exported") == files_of(out)
    pools(2).train(stage, argv(tmp_path / "c", "--checkpoint-every 4"))
    resumed = f"--run-dir {tmp_path}/e --resume {tmp_path}/c/checkpoints/step-00000004"
    assert len(pools(2).train(stage, argv(tmp_path / "c", resumed))[0]) == 4
    assert files_of(tmp_path / "e" / name) == files_of(tmp_path / "c" / name)
    wrong = [(argv(tmp_path / "d", f"--out {out}"), "is already there")]
    wrong += [([*a, "--steps", "9"], "is already there")]  # the same run, which is not done
    wrong += [(argv(tmp_path / "c", f"--out {out}"), "is already there")]  # a run that is done
    wrong += [(argv(tmp_path / "d", f"--out {chat}/{name}"), "--out: [Errno ")]
    for flags, said in wrong:
        (ended,) = pools(1).attempt(train_in, {}, stage, flags)
        assert ended.exit_status == 2 and said in ended.stderr


@quick
def test_written_files_have_the_form_that_all_readers_accept(models, tmp_path):
    folder, stage = shutil.copytree(models / "Qwen3-head", tmp_path / "model"), load_stage("13")
    change(folder / SINGLE, {"rotary_emb.inv_freq": torch.rand(3)})  # as in 2023
    change(folder / CONFIG, dict(attention_dropout=None, quantization_config=None))  # null is none
    (folder / "additional_chat_templates").mkdir()
    (folder / "notes.json").mkdir()
    for name in ("LICENSE", "additional_chat_templates/tools.jinja"):
        (folder / name).write_text("as you like")
    (model, files), out = on_meta(folder), tmp_path / "out"
    with patch("shutil.disk_usage", **{"return_value.free": 10_000}):
        pytest.raises(OSError, files.try_to_prepare, out)
    files.prepare(out)
    for name, p in model.named_parameters():
        whole, values = ({name: p.shape}, slice(0, p.numel())), torch.full((p.numel(),), torch.nan)
        stage.read_shard(files, *whole, values)
        stage.write_shard(files, out, *whole, values)
    torch.testing.assert_close(weights_of(out), weights_of(folder), rtol=0, atol=0)
    with safetensors.safe_open(out / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes((out / SINGLE).read_bytes()[:8], "little") % 8 == 0
    assert (out / "additional_chat_templates/tools.jinja").exists() and (out / "LICENSE").exists()
    assert not (out / "notes.json").exists()
    (folder / "x.json").symlink_to("gone")
    pytest.raises(FileNotFoundError, on_meta(folder)[1].try_to_prepare, out)


@pytest.mark.parametrize("name, flags", [("qwen2", ""), ("qwen2-tied", ""), ("llama", KEPT)])
def test_a_step_sends_and_holds_what_the_readme_says(pools, models, name, flags):
    argv = f"--model {models / name} --data any --seq-len 32 {flags}".split()
    (report,) = pools(1, group=False).run(dry_run, "13", 4, 0, argv)
    config = on_meta(models / name)[0].config
    P, E, d = config.num_parameters(), config.vocab_size * config.d_model, config.d_model
    # gathered and reduced; the final norm stays from forward to backward
    counts = {"qwen2": (2 * P - 2 * E - d, P), "qwen2-tied": (2 * P - d, P + E), "llama": (P, P)}
    padding = 4 * 4 * 3 * 10  # bytes: of at most ten units that do not divide by four
    for op, count in zip(("all_gather_single", "reduce_scatter_single"), counts[name], strict=True):
        assert 0 <= report.sent.ring[op, "shard"] - 4 * count * 3 / 4 <= padding, op
    assert 0 <= report.states - 16 * P / 4 <= padding


# ---- instructions ----


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
CALLS = CHAT.replace("m.content", "(m.content or m.tool_calls)")
JOINED = "{% for m in messages %}{{ m.content + '<|end|>' * (m.role != 'user') }}{% endfor %}"
ASKED, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CALL = ANSWER | {"content": None, "tool_calls": "call"}
TALK, TWICE = {"messages": [ASKED, ANSWER]}, {"messages": [ASKED, ANSWER] * 2}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
BEGIN, SAID = "<|start|>assistant\n", "yo<|end|>\n"
AGAIN = f"<|start|>user\nhi<|end|>\n{BEGIN}"
START = f"<|bos|>{AGAIN}"
ALPACA = """<|bos|>Below is an instruction that describes a task{}. Write a response that \
appropriately completes the request.

### Instruction:
hi

{}### Response:
"""
INSTRUCTION = {"instruction": "hi", "output": "yo"}
WITH_INPUT = ", paired with an input that provides further context", "### Input:\nred\n\n"


@quick
@pytest.mark.parametrize(
    "template, example, expected",
    [
        (CHAT, TWICE, [START, SAID, AGAIN, SAID]),
        (CHAT, {"messages": [ASKED, ANSWER, ASKED]}, [START, SAID]),
        # it changes the first answer, so the second one is a document of its own
        (REWRITES, TWICE, [START, SAID, f"{START}YO<|end|>\n{AGAIN}", SAID]),
        # its first turn is only context
        (CHAT, {"conversations": [GPT, HUMAN, GPT]}, [f"<|bos|>{BEGIN}{SAID}{AGAIN}", SAID]),
        (TOOLS, TALK | {"tools": [{"name": "map"}]}, [f"<|start|>map<|end|>{START}", SAID]),
        (CALLS, {"messages": [ASKED, CALL]}, [START, "call<|end|>\n"]),
        (  # "th" is one token: after a prompt that ends with t, the answer has an h of its own
            JOINED,
            {"messages": [ASKED | {"content": "t"}, ANSWER | {"content": "h"}] * 2},
            ["t", "h<|end|>", "th<|end|>t", "h<|end|>"],
        ),
        (CHAT, INSTRUCTION, [ALPACA.format("", ""), "yo<|eos|>"]),
        (CHAT, INSTRUCTION | {"input": "red"}, [ALPACA.format(*WITH_INPUT), "yo<|eos|>"]),
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


@quick
def test_data_are_prepared_again_if_code_or_a_file_of_the_tokenizer_changes(
    models, tmp_path, monkeypatch
):
    folder, versions = shutil.copytree(models / "llama", tmp_path / "model"), {}
    (tmp_path / "data").write_text(json.dumps(TALK))
    load = partial(load_instructions, str(tmp_path / "data"), folder, 200, 0)
    monkeypatch.setattr(f"{PREPARED}.version", lambda library: versions.get(library, "1"))
    load()
    monkeypatch.setattr(f"{PREPARED}.documents_of", lambda *_: [])  # an error from now on
    load()
    newer = [patch.dict(versions, {library: "2"}) for library in ("transformers", "tokenizers")]
    for changed in (*newer, patch("common.instructions.__file__", __file__)):
        with changed:
            pytest.raises(SystemExit, load)
    (folder / "chat_template.jinja").write_text(CHAT)
    pytest.raises(SystemExit, load)


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


@quick
def test_targets_are_the_answers_of_documents_side_by_side():
    short, long = (torch.arange(4), [(2, 4)]), (torch.arange(10, 16), [(1, 2), (4, 6)])
    ((inputs, targets, lengths),) = load_stage("13").micro_batches_of([short, long], 8, CPU)
    assert inputs.tolist() == [10, 11, 12, 13, 14, 0, 1, 2] and lengths == (5, 3)
    assert targets.tolist() == [11, IGNORED, IGNORED, 14, 15, IGNORED, 2, 3]


# ---- what is wrong ----


def change(path: Path, what: str | dict | Callable[[Path], None]) -> None:
    """Change a file: its text, fields of its JSON, or tensors, with which it has no metadata."""
    if callable(what):
        what(path)
    elif isinstance(what, str):
        path.write_text(what)
    elif path.name == SINGLE:
        safetensors.save_file(safetensors.load_file(path) | what, path)
    else:
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | what))


CONFIG, TEXT, DATA = "config.json", "tokenizer_config.json", "data"
SECOND, NORM = "second.safetensors", "model.norm.weight"  # the second file is like the first
BOTH = dict(rope_scaling=YARN, rope_parameters=dict(rope_type="default", rope_theta=1e4))
ENDS_TEXTS = dict(type="BertProcessing", cls=["<|bos|>", 0], sep=["<|eos|>", 1])
OTHERS = "--preset small --dropout 0 --micro-batch-size 2"  # flags of other stages
WRONG = {  # what the one line says: flags, or a file of the model or the data and its change
    "model_type gemma": (CONFIG, dict(model_type="gemma")),
    "type linear": (CONFIG, dict(rope_parameters=dict(rope_type="linear", factor=2))),
    "rope_scaling and rope_parameters differ": (CONFIG, BOTH),
    "--seq-len 64 or less": (CONFIG, dict(use_sliding_window=True, sliding_window=64)),
    "quantized": (CONFIG, dict(quantization_config={})),
    "gelu_new": (CONFIG, dict(hidden_act="gelu_new")),
    "SequenceClass": (CONFIG, dict(architectures=["Qwen2ForSequenceClassification"])),
    "2 tensors of the files do not fit: lm_head.weight is": (CONFIG, dict(vocab_size=200)),
    "input_layernorm.weight is absent there": (CONFIG, dict(num_hidden_layers=3)),
    "12 tensors of the files do not fit": (CONFIG, dict(num_hidden_layers=1)),
    "a lm_head.weight with other values": (CONFIG, dict(tie_word_embeddings=True)),
    "a header is wrong: KeyError('model_type')": (CONFIG, "{}"),
    "a header is wrong: TypeError": (CONFIG, "[]"),
    "no safetensors file": (SINGLE, "version of Git LFS"),
    "is I8": (SINGLE, {NORM: torch.zeros(24, dtype=torch.int8)}),
    "is truncated in": (SINGLE, lambda path: os.truncate(path, 10_000)),
    "No such file": (SINGLE, Path.unlink),
    f"is in {SINGLE}, but in {SECOND}": (INDEX, dict(weight_map={HEAD: SECOND, "a": SINGLE})),
    f"is in {SINGLE}, and in {SECOND}": (INDEX, dict(weight_map={"a": SINGLE, "b": SECOND})),
    f"does not name {SINGLE}": (INDEX, dict(weight_map={NORM: SECOND})),
    "in line 3": (DATA, '{"instruction": "a", "output": "b"}\n\n{"instruction"'),
    "no examples": (DATA, "[]"),
    "object 1: 'a'": (DATA, '["a"]'),
    "no list of objects: None": (DATA, '{"messages": null}'),
    "role is no text": (DATA, '{"messages": [{"from": "human"}]}'),
    "role 'robot' is none of": (DATA, '{"messages": [{"role": "robot", "content": ""}]}'),
    "have no answer": (DATA, '{"messages": [{"role": "user", "content": "a"}]}'),
    "content is no text: [1]": (DATA, '{"messages": [{"role": "user", "content": [1]}]}'),
    "object 2: its output is no text: None": (DATA, json.dumps([INSTRUCTION, {"instruction": ""}])),
    "would be lost": (DATA, json.dumps(TALK | {"system": "a"})),
    "have weights": (DATA, json.dumps({"messages": [ASKED, ANSWER | {"weight": 0}]})),
    "surrogates": (DATA, '{"instruction": "\\ud83d", "output": "b"}'),
    "does not use": (DATA, json.dumps(TALK | {"tools": [{"name": "map"}]})),
    "cannot be used, object 1: ": (TEXT, dict(chat_template="{% if %}")),
    "chat_template is not set": (TEXT, dict(chat_template=None)),
    "1: odd": (TEXT, dict(chat_template="{{ raise_exception('odd') }}")),
    # <|eot|> is no token
    "end with a token of its own": (TEXT, dict(chat_template=CHAT.replace("end|>", "eot|>"))),
    "also behind a prompt": ("tokenizer.json", dict(post_processor=ENDS_TEXTS)),
    "after its prompt": (TEXT, dict(chat_template=CHAT + "<think>")),
    "tokenizer.json has no yo": (TEXT, dict(extra_special_tokens={"x": "yo"})),
    "tokenizer.json has no <|new|>": (TEXT, dict(eos_token="<|new|>")),
    OTHERS: OTHERS,
    "not allowed with argument": "--steps 3 --epochs 2",
    "--shard-degree 3": "--shard-degree 3",
    "--data absent": "--data absent",
    "none is left to train on after --valid 1000": "--valid 1000",
    "--model absent": "--model absent",
}


@quick
@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_an_error_in_one_line(models, tmp_path, error_of, said):
    stage, folder = load_stage("13"), shutil.copytree(models / "qwen2", tmp_path / "model")
    shutil.copy(folder / SINGLE, folder / SECOND)
    (folder / DATA).write_text(json.dumps([TALK, INSTRUCTION]))
    flags = f"--model {folder} --data {folder / DATA}"
    if isinstance(WRONG[said], str):
        flags += f" {WRONG[said]}"
    else:
        name, what = WRONG[said]
        change(folder / name, what)
    assert said in error_of(lambda: stage.load(stage.parse_args(flags.split())))


@quick
def test_without_transformers_the_error_names_the_packages(monkeypatch, models, error_of):
    """In these words, by which `make quickstart` knows what to skip."""
    monkeypatch.setattr(f"{PREPARED}.find_spec", lambda _: None)
    line = error_of(load_instructions, "sample", models / "llama", 64, 0)
    assert " has no transformers" in line and "pip install transformers jinja2" in line
