"""`make bench --against COMMIT` runs that commit's own code, and a slower row fails the run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import bench
from rows import ROWS, Shape

pytestmark = pytest.mark.slow

ROW, SHAPE = "01-loss", Shape(vocab_size=300, d_model=8, seq_len=6, batch=2)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A copy of the repository whose loss is twice as large."""
    folder = tmp_path_factory.mktemp("tree") / "copy"
    kept = shutil.ignore_patterns(".*", "data", "runs", "__pycache__")
    shutil.copytree(REPO, folder, ignore=kept)
    loss = folder / "common/loss.py"
    old = "return LinearCrossEntropy.apply("
    assert loss.read_text().count(old) == 1
    loss.write_text(loss.read_text().replace(old, "return 2 * LinearCrossEntropy.apply("))
    return folder


def losses(folder: Path) -> tuple[float, float]:
    tokens = torch.arange(12).view(2, 6)
    contenders = (ROWS[ROW].ours, bench.OtherTree(str(folder)).builder(ROW))
    return tuple(build(SHAPE)(tokens, tokens).item() for build in contenders)


def test_the_other_tree_runs_its_own_code_and_leaves_ours_imported(other):
    modules, path = dict(sys.modules), sys.path[:]
    ours, theirs = losses(other)
    assert theirs == pytest.approx(2 * ours)
    assert sys.path == path
    assert all(sys.modules[name] is module for name, module in modules.items())


def test_a_row_that_the_other_tree_lacks_runs_over_its_code(other):
    rows = other / "benchmarks/rows.py"
    text = rows.read_text()
    rows.write_text(text.replace(f'"{ROW}": Row(', '"another name": Row('))
    try:
        ours, theirs = losses(other)
    finally:
        rows.write_text(text)
    assert theirs == pytest.approx(2 * ours)


def test_rows_run_in_processes_of_their_own_against_the_other_tree(other):
    (result,) = bench.run_jobs(1, [("01-model", "small")], 2, str(other))
    assert result.loss_difference > 1
    assert len(result.ratios) == 2


def test_a_commit_is_checked_out_and_removed_again(tmp_path, monkeypatch):
    def git(*args: str) -> str:
        identity = ["-c", "user.name=name", "-c", "user.email=mail"]
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    for text in ("old", "new"):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "--quiet", "-m", text)
    monkeypatch.setattr(bench, "REPO", tmp_path)
    commit = bench.parse_args(["--against", "HEAD~1"]).against
    with bench.checkout(commit) as folder:
        assert (Path(folder) / "file").read_text() == "old"
    assert not Path(folder).exists() and folder not in git("worktree", "list")
    with pytest.raises(SystemExit):
        bench.parse_args(["--against", "nowhere"])


@pytest.mark.parametrize("ratio", [1.0, 1.01, 1.03])
@pytest.mark.parametrize("same_model", [True, False])
def test_a_slower_row_fails_the_run(monkeypatch, capsys, ratio, same_model):
    difference = 0.0 if same_model else None
    equal = bench.Result(ROW, "small", 2, [1.0] * 40, [1.0] * 40, 1.0, 1.0, 0.0)
    other = replace(equal, ours_ms=[ratio] * 40, loss_difference=difference)
    monkeypatch.setattr(bench, "run_rows", lambda *_: [equal, other])
    fails = ratio > 1.02 and same_model
    assert bench.main(["--rows", ROW]) == fails
    assert ("slower than" in capsys.readouterr().out) == fails
