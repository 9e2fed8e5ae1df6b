"""A stage is its folder: its `stage.toml` is complete, and a copied stage is in every list."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO, stage_file, stage_path, stages

from common.job import finetuning
from tools.stages import needs_model, problems

every_stage = pytest.mark.parametrize("stage", stages())


# ---- the stages' files ----


@every_stage
def test_the_file_of_a_stage_is_complete(stage):
    assert not problems(stage), "\n".join(problems(stage))


@every_stage
def test_the_file_of_a_stage_agrees_with_its_folder_and_is_short(stage):
    path = stage_path(stage).with_name("stage.toml")
    assert len(path.read_text().splitlines()) <= 55
    title = stage_path(stage).with_name("README.md").read_text().splitlines()[0]
    assert title == f"# {stage} · {stage_file(stage).title}", f"title in {path} and its README"
    text = stage_path(stage).read_text()
    text += Path(finetuning.__file__).read_text() * needs_model(stage)
    added = re.findall(r'add(?:_argument)?\(\s*"(--[\w-]+)"', text)
    shared = {f"--{name}" for name in ["compile", *finetuning.OTHERS.split()]}  # by many
    own = set(added) - shared
    assert set(stage_file(stage).flags) == own, f"flags in {path} and in train.py"


GOOD = (REPO / "02_ddp/stage.toml").read_text() + '[exempt]\nbench = "it is an example"\n'


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("kill ", "", 'add a run for "kill"'),
        ("kill ", "kill kill ", "2 runs are for 'kill'"),
        ("diff_lines = ", "# ", "add diff_lines"),
        ("bench =", '"bench kill" =', "runs for 'kill' and is exempt"),
        ('bench = "it is an example"', "", 'add a row "08-..." to ROWS'),
    ],
)
def test_a_missing_or_wrong_entry_is_named_with_what_to_add(tmp_path, old, new, said):
    assert old in GOOD
    for name in ("01_first/train.py", "08_example/train.py", "benchmarks/rows.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "08_example/stage.toml").write_text(GOOD.replace(old, new))
    found = problems("08", tmp_path)
    assert any(problem.startswith("08_example/stage.toml: ") for problem in found)
    assert any(said in problem for problem in found), found


# ---- a stage is added: the steps of CONTRIBUTING.md, in a copy of the repository ----


NEW = f"{int(stages()[-1]) + 1:02d}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository with one more stage, NN_example, a copy of 02_ddp."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    ignored = shutil.ignore_patterns(".git", ".venv", "data", "runs", "__pycache__", ".*_cache")
    shutil.copytree(REPO, folder, ignore=ignored, symlinks=True)
    new = folder / f"{NEW}_example"
    shutil.copytree(folder / "02_ddp", new)
    for name in ("train.sbatch", "train.py", "README.md", "stage.toml"):
        text = (new / name).read_text().replace("02_ddp", new.name)
        text = text.replace("# 02 · ", f"# {NEW} · ").replace("Stage 02", f"Stage {NEW}")
        text = text.replace('compare = "01"', 'compare = "02"')
        text = re.sub(r"make ([\w]+)-02", rf"make \1-{NEW}", text)
        if name == "stage.toml":
            text += '\n[exempt]\nbench = "it is an example"\n'
        (new / name).write_text(text)
    return folder


def in_copy(copy: Path, *words: str, **variables: str) -> str:
    settings = {**os.environ, "PYTHONPATH": str(copy / "tests"), **variables}
    done = subprocess.run(
        [sys.executable, *words], cwd=copy, capture_output=True, text=True, env=settings
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


TOOLS = """
import chaos
from tools import diff, dry_run, lessons, quickstart, stages
print([row.name for row in quickstart.rows_for(0, 2)])
print("chaos", chaos.run_of("NEW").ranks, "dry-run-all", stages.with_ranks("{ranks}", 4096),
      [run.id for run in stages.runs_for("dry-run-all")])
print(*diff.report(stages.stage_file("NEW").compare, "NEW"))
dry_run.show("NEW", 8, 0, stages.BASE["dry-run"].split(), 201)
print(lessons.framed("", lessons.comparison_page("02", "NEW"), "NEW"))
""".replace("NEW", NEW)


@pytest.mark.slow
def test_every_tool_includes_a_copied_stage(copy):
    listed = subprocess.run(["make", "help"], cwd=copy, capture_output=True, text=True).stdout
    assert f"{NEW}_example: Data parallelism" in listed
    said = in_copy(copy, "-c", TOOLS)
    assert f"'{NEW}_example'" in said and f"{NEW}-4096-" in said
    assert f"02_ddp -> {NEW}_example" in said and "Bucket" in said
    assert f"stage {NEW}, rank 0 of 8" in said and f'href="{NEW}-from-02.html"' in said


@pytest.mark.slow
def test_every_parametrized_test_includes_a_copied_stage(copy):
    names = "stages gradients costs parity late_backend any_to_any survival dry_run"
    names = [*names.split(), "arguments", "diffs", "laws", "lessons"]
    files = [f"tests/test_{name}.py" for name in names]
    found = in_copy(copy, "-m", "pytest", "--collect-only", *files)
    for file in files:
        ids = re.findall(rf"{file}::.*\[(.*)\]", found)
        assert any(re.search(rf"\b{NEW}\b", id) for id in ids), (
            f"{file} has no case for the new stage"
        )
