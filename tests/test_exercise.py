"""Learn by writing: exercises, the checks of a script, and where two runs begin to differ."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import REPO, stage_file, stage_path, stages

from tools.exercise import blanks_of, filled, with_blanks
from tools.first_difference import FLAGS, compare, compare_curves, read, shows_gradients

TINY = "--d-model 16 --n-layers 1 --n-heads 2 --seq-len 8 --global-batch-size 4".split()


@pytest.mark.parametrize("stage", stages()[1:])
def test_an_exercise_has_the_blanks_of_its_stage_and_is_the_stage_when_they_are_filled(stage):
    exercise, own = with_blanks(stage), stage_path(stage).read_text()
    assert blanks_of(exercise) == list(stage_file(stage).exercise) != []
    assert "exercise 1 of " in exercise and compile(exercise, stage, "exec")
    text, lines = filled(exercise, stage)
    assert text == own and len(lines) == len(own.splitlines())


@pytest.mark.parametrize("stage", stages()[1:])
def test_the_checks_of_a_stage_file_select_tests(stage):
    for which in stage_file(stage).checks.values():
        file, words = which.split(" ")
        text = (REPO / "tests" / file).read_text()
        assert [word for word in words.split("|") if word not in text] == []


BUGS = {  # stage, what is changed, and into what; what is said
    "sum": ("02", "bucket.n_ranks if self.synchronizes else 1", "1", "cause: x 2: a sum"),
    "norms": ("05", "if args.sequence_parallel:\n", "if False:\n", "replicated parameters differ"),
    "wait": ("05", "work.wait()\n        return grad_x", "return grad_x", "cause: NaN"),
}


@pytest.mark.quick_cases("sum")
@pytest.mark.parametrize("bug", BUGS)
def test_make_check_names_a_planted_bug(bug, tmp_path):
    stage, old, new, said = BUGS[bug]
    text = stage_path(stage).read_text()
    assert text.count(old) == 1
    (tmp_path / "copy.py").write_text(text.replace(old, new))
    command = [sys.executable, REPO / "tests/check.py", stage, tmp_path / "copy.py"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "RUNS_"))}
    environment |= {"PYTHONPATH": str(REPO), "RERUNS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1, done.stdout


def test_the_first_difference_of_two_runs(pools, corpus_dir, tmp_path):
    argv = [*TINY, "--data", str(corpus_dir), *FLAGS.split(), "--run-dir"]
    pools(1, group=False).train("01", [*argv, str(tmp_path / "one")])
    for name, more in {"two": "", "clipped": "--grad-clip 1", "seed": "--seed 2"}.items():
        pools(2).train("02", [*argv, str(tmp_path / name), *more.split()])
    one, two, seed = (read(tmp_path / name) for name in ("one", "two", "seed"))
    assert compare(two, one) == []
    assert compare(seed, one)[-1].startswith("likely cause: initial values")
    assert [shows_gradients(tmp_path / name) for name in ("one", "clipped")] == [True, False]
    # as of runs whose checkpoints hold no gradient
    curves = {name: compare_curves(tmp_path / name, tmp_path / "one") for name in ("two", "seed")}
    assert curves["two"] == []
    assert curves["seed"][0].startswith("step 0 is the first of 2 in both logs whose loss differs")
    assert " weights differ in step-00000001:" in curves["seed"][1]
