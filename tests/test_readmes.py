"""Links, anchors, files, make targets, flags and identifiers in the READMEs exist."""

from __future__ import annotations

import re
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest
from harness import REPO, stages

from tools import experiments
from tools.stages import needs_model

SKIPPED = {".venv", "runs", "data", ".pytest_cache", "cluster"}
READMES = sorted(
    path.relative_to(REPO)
    for path in REPO.rglob("*.md")
    if not SKIPPED & set(path.relative_to(REPO).parts)
)
LESSONS = [path for path in READMES if re.match(r"\d\d_", str(path))]
# files of a corpus, a run or a site: not in the repository
NOT_OURS = {*"gpu-check.md train.txt valid.txt test.txt table.md all.pt".split()}
# flags of torchrun, srun, sbatch, mpirun, pip, git, hf and nvidia-smi
OTHERS_FLAGS = set(
    "--standalone --nproc-per-node --nnodes --max-restarts --rdzv-backend --rdzv-id"
    " --rdzv-endpoint --ntasks-per-node --sync-tensorboard"
    " --nodes --gpus-per-node --exclude --array --requeue --signal --help --logdir --format"
    " --no-reload --no-index --include --bind --label --mpi --nodelist --exclusive --mem"
    " --batch --cpus-per-task --local-dir --export".split()
)


@pytest.fixture(params=READMES, ids=str)
def readme(request) -> Path:
    return request.param


def text_of(path: Path) -> str:
    return (REPO / path).read_text()


def code_of(path: Path) -> list[str]:
    """A README's code: its blocks line by line, continuations joined, and its code spans."""
    text = text_of(path)
    blocks = re.findall(r"^```\w*\n(.*?)^```|^((?:    \S[^\n]*\n?)+)", text, re.M | re.S)
    joined = "\n".join(a or b for a, b in blocks).replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = re.findall(r"`([^`]+)`", prose)
    return joined.splitlines() + [" ".join(span.split()) for span in spans]


# ---- links ----


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", text_of(path), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def test_links_lead_somewhere(readme):
    for target in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text_of(readme)):
        target = "".join(target)
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (REPO / readme).parent / name if name else REPO / readme
        assert path.exists(), target
        if anchor:
            assert anchor in anchors_of(path.resolve().relative_to(REPO)), target


# ---- files, commands and flags ----


def test_named_files_exist(readme):
    folders = [REPO, (REPO / readme).parent, *REPO.glob("[0-9][0-9]_*")]
    copies = re.findall(r" as `(\w+\.py)`", text_of(readme))  # files that a reader makes
    for code in code_of(readme):
        for name in re.findall(r"(?<![\w./*-])[\w][\w./-]*\.(?:py|md|sh|svg|sbatch|toml)\b", code):
            if Path(name).name not in {*NOT_OURS, *copies} and not name.startswith("runs/"):
                assert any((folder / name).exists() for folder in folders), name


@lru_cache
def make_targets() -> set[str]:
    """All targets of the Makefile, as make itself lists them."""
    listed = subprocess.run(["make", "-pRrq", ":"], cwd=REPO, capture_output=True, text=True)
    targets = re.findall(r"^([a-z][\w-]*%?):", listed.stdout, re.M)
    return {target.replace("%", stage) for target in targets for stage in stages()}


def test_make_targets_and_their_variables_exist(readme):
    variables = re.findall(r"\b([A-Z]+)\b *[?:]?=|\$\(([A-Z]+)\)", text_of(Path("Makefile")))
    known = {"".join(pair) for pair in variables}
    for code in code_of(readme):
        for target, rest in re.findall(r"(?:^|[\s(`])make ([a-z][\w-]*)(?!\w)([^#|;&]*)", code):
            assert target.replace("-NN", "-01") in make_targets(), code
            for variable in re.findall(
                r"(?<=\s)([A-Z]+)=", re.sub(r"\"[^\"]*\"|'[^']*'", "", rest)
            ):
                assert variable in known, code


@lru_cache
def flags_in(*patterns: str) -> set[str]:
    """The flags that the parsers in these files add."""
    texts = (path.read_text() for pattern in patterns for path in REPO.glob(pattern))
    return {flag for text in texts for flag in re.findall(r"\"(--[a-z][\w-]*)\"", text)}


def test_flags_exist_and_a_command_has_only_those_of_its_stage(readme):
    everywhere = (
        "[0-9][0-9]_*/*.py",
        "common/**/*.py",
        "tools/**/*.py",
        "benchmarks/*.py",
        "tests/*.py",
    )
    for code in code_of(readme):
        found = set(re.findall(r"\b(\d\d)_\w+/train\.py|make (?:run|submit)-(\d\d)", code))
        files = everywhere
        if len(found) == 1:
            number = "".join(found.pop())
            shared = ("arguments", "finetuning") if needs_model(number) else ("arguments",)
            files = f"{number}_*/train.py", *(f"common/job/{name}.py" for name in shared)
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
            assert flag in flags_in(*files) | OTHERS_FLAGS, code


@pytest.mark.parametrize("lesson", LESSONS, ids=str)
def test_identifiers_of_the_walk_through_exist(lesson):
    """Method names stand in the walk through the code; a renamed one must not stay behind."""
    walk = re.search(r"^## Walk through the code\n(.*?)(?=^## )", text_of(lesson), re.M | re.S)
    files = [*(REPO / lesson).parent.glob("*.py"), *(REPO / "common").rglob("*.py")]
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in files)))
    for code in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", walk[1]):
        if not Path(code).suffix == ".py":
            assert set(code.split(".")) <= words, code


# ---- lessons and their experiments ----

SECTIONS = ["Problem", "Idea", "Walk through the code", "Cost", "Experiments", "When to use it"]


@pytest.mark.parametrize("lesson", LESSONS, ids=str)
def test_lessons_have_the_same_sections(lesson):
    headings = re.findall(r"^## (.*)$", text_of(lesson), re.M)
    assert [h for h in headings if h in SECTIONS] == SECTIONS


@pytest.mark.parametrize("lesson", LESSONS, ids=str)
def test_experiments_state_what_they_check(lesson):
    found = experiments.experiments_of(REPO / lesson)
    assert 3 <= len(found) <= 6
    for experiment in found:
        assert "Predict" in experiment.text and "<details>" in experiment.text, experiment.title
        assert experiment.checks, experiment.title
        for check in experiment.checks:
            re.compile(check.pattern)
            for figure in check.figures if check.pattern != "exit" else ():
                assert figure in experiment.text, f"{experiment.title}: {figure} is not stated"


def test_a_wrong_figure_fails_an_experiment():
    lines = "loss ([\\d.]+) => 5.3, 5.20 ± 0.01\n(\\d+) tok/s => 900 within 2x\nstopped\nexit => 1"
    checks = [experiments.parse_check(line) for line in lines.splitlines()]
    experiment = experiments.Experiment("01", "", "", "", checks)
    good = "loss 9.9\nloss 5.301\nloss 5.195  1500 tok/s\nstopped"
    assert experiments.failures(experiment, good, 1) == []
    assert len(experiments.failures(experiment, good, 0)) == 1
    assert len(experiments.failures(experiment, good.replace("5.195", "5.21001"), 1)) == 1
    assert len(experiments.failures(experiment, good.replace("5.301", "5.32"), 1)) == 1
    assert len(experiments.failures(experiment, good.replace("1500", "1900"), 1)) == 1
    assert len(experiments.failures(experiment, "", 1)) == 3


@pytest.mark.slow
def test_an_experiment_ends_as_its_readme_says():
    """`make experiments` runs all of them."""
    everything = experiments.all_experiments()
    (chosen,) = (e for e in everything if e.stage == "01" and e.title.startswith("The first loss"))
    problems, _, output = experiments.run(chosen)
    assert not problems, f"{problems}\n{output}"
