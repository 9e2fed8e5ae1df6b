"""`make export`: a checkpoint as one file."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from harness import Outcome
from test_finetune import weights_of
from tokenizers import Tokenizer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.llama import Llama, LlamaConfig
from common.model import Transformer, TransformerConfig, init_weights

from common.job.checkpoint import checkpoints
from common.job.corpus import load_corpus
from tools import export

pytestmark = pytest.mark.slow

SMALL = "--d-model 32 --n-layers 2 --n-heads 2 --seq-len 16 --global-batch-size 12".split()


@pytest.fixture(scope="module")
def run(pools, corpus_dir, tmp_path_factory) -> Path:
    """A run of stage 04 on three ranks, in which no rank has a full matrix."""
    folder = tmp_path_factory.mktemp("run")
    argv = [*SMALL, "--data", str(corpus_dir), "--run-dir", str(folder)]
    pools(3).train("04", [*argv, *"--steps 60 --lr 1e-2 --checkpoint-every 30".split()])
    return folder


def run_tool(script: str, arguments: list[str]) -> None:
    with patch.object(sys, "argv", [script, *arguments]):
        sys.modules.pop(f"tools.{script}", None)  # another test's import, of which runpy would warn
        runpy.run_module(f"tools.{script}", run_name="__main__", alter_sys=True)


@pytest.fixture
def call(pools):
    """`call("export", "--out", ...)` runs a tool in a process that has imported torch."""

    def ended(script: str, *arguments) -> Outcome:
        (outcome,) = pools(1, group=False).attempt(run_tool, script, [*map(str, arguments)])
        assert outcome.traceback is None, outcome.traceback
        return outcome

    return ended


def test_export_writes_one_file_that_the_plain_model_loads(call, run, tmp_path, corpus_dir):
    done = call("export", run, "--out", tmp_path / "model.pt")
    assert not done.exit_status and "step-00000060" in done.stdout, done.stderr
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    dcp_to_torch_save(checkpoints(run / "checkpoints")[-1], tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    assert {f"model.{name}" for name in weights} == {n for n in whole if n.startswith("model.")}
    assert all(torch.equal(whole[f"model.{name}"], tensor) for name, tensor in weights.items())
    config = TransformerConfig(len(load_corpus(str(corpus_dir)).vocab), 32, 2, 2, 16)
    Transformer(config).load_state_dict(weights)


def test_an_older_checkpoint_is_exported_by_its_own_path(call, run):
    older = checkpoints(run / "checkpoints")[0]
    done = call("export", older)
    assert not done.exit_status and f"{run}/model.pt" in done.stdout, done.stderr
    assert "from " in done.stdout and done.stdout.strip().endswith("step-00000030")


def test_a_folder_of_hugging_faces_form_computes_the_same(call, run, tmp_path, corpus_dir):
    done = call("export", run, "--hf", "--out", tmp_path / "hf")
    assert not done.exit_status, done.stderr
    corpus = load_corpus(str(corpus_dir))
    ours = Transformer(TransformerConfig(len(corpus.vocab), 32, 2, 2, 16))
    ours.load_state_dict(export.tensors_of(checkpoints(run / "checkpoints")[-1]))
    theirs = Llama(LlamaConfig(json.loads((tmp_path / "hf/config.json").read_text())))
    theirs.load_state_dict(weights_of(tmp_path / "hf"))
    tokens = corpus.valid[:48].long()
    with torch.no_grad():
        expected, found = ours(tokens.view(3, 16)).flatten(0, 1), theirs(tokens, (16, 16, 16))
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    text = " ".join(corpus.vocab[i] for i in tokens)
    assert tokenizer.encode(f"{text} <eos> unheard-of").ids[:48] == tokens.tolist()
    again = call("export", run, "--hf", "--out", tmp_path / "hf")
    assert again.exit_status == 2 and "already there" in again.stderr


def test_a_mixture_of_experts_has_no_such_form(tmp_path, error_of):
    (tmp_path / "config.json").write_text('{"arguments": {"n_experts": 8}}')
    assert "experts" in error_of(export.export_folder, tmp_path, tmp_path, tmp_path / "hf")


def test_the_folder_of_a_run_of_the_sample_has_the_samples_words(tmp_path):
    corpus = load_corpus("sample")
    model = Transformer(TransformerConfig(len(corpus.vocab), 32, 2, 2, 16))
    init_weights(model, 0)
    args = {"data": "sample", "n_heads": 2, "n_layers": 2, "seq_len": 16}
    export.write_llama(tmp_path, args, model.state_dict(), corpus.vocab)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = [corpus.vocab[i] for i in corpus.train[:500]]
    assert tokenizer.encode("".join(f"{word} " for word in words)).tokens == words
    assert tokenizer.encode("return(x)").tokens == ["return", "(", "x", ")"]


def test_a_run_behind_a_link_is_found_and_a_link_without_end_is_not_followed(
    monkeypatch, run, tmp_path
):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/scratch").symlink_to(run)
    for name in ("one", "two"):
        (tmp_path / "runs" / name).symlink_to(tmp_path / "runs")
    monkeypatch.setattr(export, "__file__", str(tmp_path / "tools/export.py"))
    assert export.newest_run().samefile(run)


def test_export_to_a_folder_is_an_error_and_to_a_link_writes_what_it_links_to(call, run, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    done = call("export", run, "--out", tmp_path / "folder")
    assert done.exit_status == 2 and done.stderr.count("\n") == 1 and "folder" in done.stderr
    assert not call("export", run, "--out", tmp_path / "link").exit_status
    assert (tmp_path / "link").is_symlink() and torch.load(tmp_path / "file", weights_only=True)


def test_what_cannot_be_exported_is_a_one_line_error(call, run, tmp_path):
    done = call("export", tmp_path)
    assert done.exit_status == 2 and done.stderr.count("\n") == 1
    assert "no checkpoint" in done.stderr
    copy = shutil.copytree(checkpoints(run / "checkpoints")[-1], tmp_path / "step-00000060")
    os.truncate(copy / "__1_0.distcp", 100)
    done = call("export", copy)
    assert done.exit_status == 1 and not (tmp_path / "model.pt").exists()
    assert done.stderr.count("\n") == 1 and "__1_0.distcp: the checksum differs" in done.stderr
