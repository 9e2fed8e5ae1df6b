"""Learn by writing: exercises, the checks of a script, and where two runs begin to differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import REPO, stage_file, stage_path, stages

from tools.exercise import blanks_of, filled, with_blanks
from tools.first_difference import FLAGS, State, compare, read

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
    "wait": ("05", "work.wait()\n        return grad_x", "return grad_x", "cause: NaN"),
    "norms": ("05", "        if args.sequence_parallel:", "        if False:", "cause: only"),
    "blocks": ("02", "async_op=True)", "async_op=True); self.reduction.wait()", "✗ overlap:"),
}


@pytest.mark.quick_cases("sum")
@pytest.mark.parametrize("bug", BUGS)
def test_make_check_names_a_planted_bug(bug, tmp_path):
    stage, old, new, said = BUGS[bug]
    text = stage_path(stage).read_text()
    assert text.count(old) == 1
    (tmp_path / "copy.py").write_text(text.replace(old, new))
    command = [sys.executable, REPO / "tests/check_script.py", stage, tmp_path / "copy.py"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "RUNS_"))}
    environment |= {"PYTHONPATH": str(REPO), "RERUNS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1, done.stdout
    assert bug != "blocks" or done.stdout.count("✗") == 1  # the other checks pass


NAMES = ["output.head.weight", "layers.1.attn.wo.weight", "layers.1.attn_norm.offset"]
NAMES += ["layers.0.mlp.w1.weight", "embed.tokens.weight"]


def gradients() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn((8, 4) if "weight" in name else 4).double() for name in NAMES}


def scale(by: float, *names: str):
    return {name: g * by if name in (names or NAMES) else g for name, g in gradients().items()}


def noise(*names: str, rows: slice = slice(None)):
    found = gradients()
    for name in names:
        found[name][rows] += torch.rand_like(found[name][rows]) + 0.5
    return found


PATTERNS = {
    "": gradients(),
    "x 1/4: divided twice": scale(0.25, NAMES[1]),
    "one rank's part": noise(NAMES[1], NAMES[3], rows=slice(4, 8)),
    "the gradient of the hidden states is wrong from layers.0.mlp.w1": noise(NAMES[3], NAMES[4]),
    "no cause": noise(NAMES[0], NAMES[3]),
    "the loss as a number": gradients(),
    "data or dropout of a later step": gradients(),
}


@pytest.mark.parametrize("said", PATTERNS)
def test_a_clear_pattern_has_a_likely_cause_and_no_other_has(said):
    weights = {name: torch.zeros(4).double() for name in NAMES}
    metrics = [{"step": i, "loss": 1.0, "grad_norm": 1.0} for i in range(2)]
    reference = State(weights, gradients(), {}, metrics, set())
    wrong = [said.startswith("the loss"), said.startswith("data")]  # the step with another loss
    metrics = [line | {"loss": 1.0 + off} for line, off in zip(metrics, wrong, strict=True)]
    lines = compare(State(weights, PATTERNS[said], {}, metrics, {2, 4}), reference)
    causes = [line for line in lines if line.startswith("likely cause: ")]
    assert bool(lines) == bool(said)
    has_a_cause = said not in ("", "no cause")
    assert [c.startswith(f"likely cause: {said}") for c in causes] == [True] * has_a_cause
    assert not said.startswith("one") or sum("rows 4 to 7 of 8" in x for x in lines) == 2


def test_the_first_difference_of_two_runs_and_its_errors(pools, corpus_dir, tmp_path, capsys):
    argv = [*TINY, "--data", str(corpus_dir), *FLAGS.split(), "--run-dir"]
    pools(1, group=False).train("01", [*argv, str(tmp_path / "one")])
    for name, more in {"two": "", "clipped": "--grad-clip 1", "seed": "--seed 2"}.items():
        pools(2).train("02", [*argv, str(tmp_path / name), *more.split()])
    one, two, seed = (read(tmp_path / name) for name in ("one", "two", "seed"))
    assert compare(two, one) == []
    assert compare(seed, one)[-1].startswith("likely cause: initial values")
    for path, what in ((tmp_path / "clipped", "clipped"), (Path("/nowhere"), "no checkpoint")):
        with pytest.raises(SystemExit):
            read(path)
        said = capsys.readouterr().err
        assert what in said and said.count("--grad-clip 0") == 2
