"""`make export` and `make generate`: a checkpoint as one file, and a model that continues text."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from harness import Outcome
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.checkpoint import checkpoints
from common.data import load_corpus
from common.model import Transformer, TransformerConfig
from tools import generate

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


def test_a_checkpoint_is_exported_and_continued_by_its_own_path(call, run, tmp_path, corpus_dir):
    older = checkpoints(run / "checkpoints")[0]
    done = call("export", older)
    assert not done.exit_status and f"{run}/model.pt" in done.stdout, done.stderr
    assert "from " in done.stdout and done.stdout.strip().endswith("step-00000030")
    done = call("generate", older, "--words", 30, "--prompt", "word1 word2")
    assert not done.exit_status and "step-00000030" in done.stdout, done.stderr
    words = done.stdout.split("\n", 1)[1].replace("\n", " <eos> ").split()[:32]
    assert len(words) == 32 and words[:2] == ["word1", "word2"]
    assert set(words) <= set(load_corpus(str(corpus_dir)).vocab)
    shutil.copytree(older, tmp_path / older.name)  # without the run's other files
    assert not call("generate", tmp_path / older.name, "--prompt", "word1").exit_status


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--temperature nan", "must be a finite number"),
        ("--temperature -1e-3", "must be at least 0"),
        ("--words 0", "must be at least 1"),
        ("--temperature 1e-310 --prompt word1", ""),
        ("--prompt word1", "has another vocabulary now"),  # of a corpus that was changed
    ],
)
def test_generate_with_wrong_values_or_another_corpus_is_a_one_line_error(
    call, run, corpus_dir, flags, says
):
    text = (corpus_dir / "train.txt").read_text()
    if "vocabulary" in says:
        (corpus_dir / "train.txt").write_text(text + "another\n")
    done = call("generate", run, *flags.split())
    (corpus_dir / "train.txt").write_text(text)
    assert says in done.stderr and done.stderr.count("\n") == bool(says), done.stderr
    assert done.exit_status == (2 if says else None)


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


def test_generate_samples_each_word_from_the_models_distribution(run):
    model, vocab = generate.load_run(run)
    tokens = generate.continued(model, [3, 5], 20, temperature=0, seed=0)
    for i in range(2, len(tokens)):
        seen = torch.tensor([tokens[max(0, i - 16) : i]])
        assert tokens[i] == int(model(seen)[0, -1, : len(vocab)].argmax())
    draw = [generate.continued(model, [3], 20, temperature=1, seed=s) for s in (0, 0, 1)]
    assert draw[0] == draw[1] != draw[2]
    with pytest.raises(SystemExit):
        generate.tokens_of("a_word_that_is_not_there", vocab)
