"""The stages: their numbers, scripts and stage files.

A stage is its folder, `NN_name/`: `train.py`, `train.sbatch`, `README.md`, and `stage.toml`, which
says what the tools and the tests need to know of it. CONTRIBUTING.md lists the few entries outside.
`problems("04")` lists what is missing or wrong in a stage file. Its fields:

    title = "Data parallelism"      of the README, too
    compare = "01"                  the earlier stage that `make diff-NN` compares it with
    diff_lines = 199                the most lines of that diff
    copies = { "fsdp.py" = "04" }   files beside its script, each taken unchanged from an earlier
                                    stage: tools/copies.py
    flags = "--bucket-cap-mb"       its own, separated by spaces: the reference runs without them
    reference = "02"                the stage whose one-process run it reproduces: by default 01;
                                    its own number where it changes what is computed
    tolerance = { loss = 1e-5, norm = 1e-4, steps = 50 }    of float32 runs against the reference,
                                    absolute and relative, and the steps that are compared
    gradient_tolerance = 1e-4       of the gradients of one step, relative: by default the norm's
    replay = "some_module"          a file of its folder: a reference run inside of its function of
                                    that name, `how` = "record", and the others inside of it with
                                    "replay" are comparable
    cpu_torch = "2.12"              the first PyTorch that has its operators on a CPU
    ranks_differ = "why"            where ranks issue different collectives or hold more than others
    exercise = ["Class.method", "function", ...]    what `make exercise-NN` blanks, in the order in
                                    which to write it
    checks = { name = "test_file.py word|word" }    tests of its own that `make check-NN` runs:
                                    those of the file whose names contain one of the words
    [renamed]                       NewClass = ["OldClass", ...]: what to compare it with
    [refined]                       "Class: method method" or "function" = "why it is not identical
                                    to the definition of an earlier stage"
    [exempt]                        "purpose purpose" = "why it has no such run"
    [host]                          "function waits" or "function computes" = "why": what the host
                                    does in a step on a GPU. "--flag: why": only in the runs with
                                    this flag, and in all of them
    runs = [[2, "--a-flag 1", "quickstart parity* late"], ...]
                                    ranks (a number, or a list: a run for each), flags, purposes;
                                    a fourth element, { loss = 0.02, norm = 0.1 }, is the tolerance
                                    of these runs. A `*` puts the run into `make test` too

The purposes, each with the arguments in `BASE` that a run's flags are added to:

    quickstart      a row of `make quickstart`; of several numbers of ranks the machine decides
    parity          float32, evaluation included, against the reference
    accumulation    the same with dropout and clipping; the flags make several micro-batches
    bf16            bfloat16 against the reference in bfloat16
    late, late-bf16 parity over a backend that completes as late as NCCL may, and the calls' order
    resume          saved and resumed over that backend: the same bits
    agreement       on two ranks: an independent count confirms the ledger
    kill            one run: stopped by a signal, and in `make chaos` killed; resumed
    save, load      one run each: a checkpoint of any stage resumes in any other (any to any)
    dry-run         on eight ranks: memory and communication equal the dry run's
    dry-run-all     a row of `make dry-run-all` for each number of ranks: {ranks}, {4 * ranks}
    bench           no run: a row of benchmarks/rows.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]

TINY = "--d-model 32 --n-layers 2 --n-heads 4 --seq-len 16 --global-batch-size 24 --log-every 1"
FOUR_LAYERS = TINY.replace("--n-layers 2", "--n-layers 4")
SHORT = TINY.replace("--d-model 32", "--d-model 16").replace("--seq-len 16", "--seq-len 8")
BASE = {
    "quickstart": "--data sample --steps 50 --log-every 1 --dtype float32",
    "parity": f"{TINY} --steps 50 --eval-every 25",
    "accumulation": f"{TINY} --steps 20 --eval-every 10 --dropout 0.1 --grad-clip 0.3",
    "bf16": f"{TINY} --steps 30 --dtype bfloat16",
    "late": f"{SHORT} --steps 4 --dropout 0.1 --grad-clip 0.3",
    "late-bf16": f"{SHORT} --steps 4 --dropout 0.1 --grad-clip 0.3 --dtype bfloat16",
    "resume": f"{SHORT} --steps 4 --dropout 0.1 --grad-clip 0.3",
    "agreement": f"{SHORT} --steps 2 --dropout 0.1",
    "kill": f"{FOUR_LAYERS} --dropout 0.1",
    "save": f"{FOUR_LAYERS} --dropout 0.1 --eval-every 20 --steps 22",
    "load": f"{FOUR_LAYERS} --dropout 0.1 --eval-every 20 --steps 22",
    "dry-run": "--d-model 64 --n-layers 8 --n-heads 8 --seq-len 16 --global-batch-size 32",
    "dry-run-all": "--d-model 4096 --n-layers 16 --n-heads 64 --seq-len 1024 "
    "--activation-checkpointing",
}
ONCE = ("kill", "save", "load")


@dataclass(frozen=True)
class StageRun:
    """A run of a stage for one purpose. flags: without those of `BASE`."""

    stage: str
    purpose: str
    ranks: int
    flags: tuple[str, ...] = ()
    quick: bool = False
    tolerance: tuple[tuple[str, float], ...] = ()  # of this run alone
    own_flags: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return "-".join([self.stage, str(self.ranks), *([" ".join(self.flags)] * bool(self.flags))])

    @property
    def argv(self) -> list[str]:
        return [*BASE[self.purpose].split(), *self.flags]

    @property
    def reference_argv(self) -> list[str]:
        """The arguments without the stage's own, and without those that must not matter."""
        left_out = (*self.own_flags, "--micro-batch-size", "--activation-checkpointing")
        words = re.split(r" (?=--)", " ".join(self.argv))
        return " ".join(word for word in words if word.split()[0] not in left_out).split()


@dataclass(frozen=True)
class StageFile:
    """The content of a `stage.toml`; where a field is missing or wrong, its default."""

    number: str
    title: str = ""
    compare: str = ""
    diff_lines: int = 0
    copies: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    reference: str = "01"
    tolerance: dict[str, float] = field(default_factory=dict)
    gradient_tolerance: float = 0.0
    replay: str = ""
    cpu_torch: str = ""
    ranks_differ: str = ""
    renamed: dict[str, list[str]] = field(default_factory=dict)
    refined: dict[str, str] = field(default_factory=dict)
    exempt: dict[str, str] = field(default_factory=dict)
    host: dict[str, str] = field(default_factory=dict)
    exercise: tuple[str, ...] = ()
    checks: dict[str, str] = field(default_factory=dict)
    runs: tuple[StageRun, ...] = ()

    def for_(self, purpose: str) -> list[StageRun]:
        return [run for run in self.runs if run.purpose == purpose]


FIELDS = {each.name for each in fields(StageFile)} - {"number"}

# ---- numbers and scripts ----


def stages(repo: Path = REPO) -> list[str]:
    """The numbers of the stages, in order: "01", "02", ..."""
    return list(stage_paths(repo))


def stage_paths(repo: Path = REPO) -> dict[str, Path]:
    """The scripts by their stages' numbers."""
    return {path.parent.name[:2]: path for path in sorted(repo.glob("[0-9][0-9]_*/train.py"))}


def needs_model(number: str) -> bool:
    """Whether a stage trains a model and data of its own, so that it has other flags."""
    return "--model" in stage_file(number).flags


def stage_path(number: str) -> Path:
    return stage_paths()[number]


def beside(number: str, repo: Path = REPO) -> list[Path]:
    """The files that a stage has beside its script, taken unchanged from earlier stages."""
    return [stage_paths(repo)[number].with_name(name) for name in stage_file(number, repo).copies]


def load_stage(number: str) -> ModuleType:
    """`train.py` of a stage as a module; the name of its folder is no identifier for `import`.

    SCRIPT_04=path in the environment puts another script in the place of stage 04's: every test of
    a stage can test a changed copy of its script.
    """
    path = Path(os.environ.get(f"SCRIPT_{number}") or stage_path(number))
    return load_file(path, f"stage_{number}")


@cache
def load_file(path: Path, name: str) -> ModuleType:
    """A file as the module `name`.

    A script puts its folder on the path and imports the files beside it. So that no other stage
    finds them there, the path is as before afterwards, and none is imported from an earlier call.
    """
    for file_name in {file_name for number in stages() for file_name in stage_file(number).copies}:
        sys.modules.pop(file_name.removesuffix(".py"), None)
    spec, before = importlib.util.spec_from_file_location(name, path), sys.path[:]
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


# ---- stage files ----


@cache
def stage_file(number: str, repo: Path = REPO) -> StageFile:
    """A stage's file. What is wrong in it is left out: `problems` names it, in one test."""
    values, runs, _ = _read(number, repo)
    return StageFile(number, **values, runs=tuple(runs))


def problems(number: str, repo: Path = REPO) -> list[str]:
    """What is missing or wrong in a stage's file, each with what to do; empty if nothing is."""
    path = stage_paths(repo)[number].with_name("stage.toml")
    values, runs, found = _read(number, repo)
    exempt = " ".join(values.get("exempt", {})).split()
    for purpose in [*BASE, "bench"]:
        count = sum(run.purpose == purpose for run in runs)
        if count and purpose in exempt:
            found.append(f"it has runs for {purpose!r} and is exempt from it: remove one of them")
        elif purpose == "bench":
            has_row = f'    "{number}-' in (repo / "benchmarks/rows.py").read_text("utf-8")
            if not has_row and purpose not in exempt:
                found.append(f'add a row "{number}-..." to ROWS in benchmarks/rows.py, or {_why}')
        elif not count and purpose not in exempt:
            found.append(f'add a run for "{purpose}", or {_why.replace("bench", purpose)}')
        elif count > 1 and purpose in ONCE:
            found.append(f"{count} runs are for {purpose!r}: keep one")
    for name in ("title", *(("compare", "diff_lines") if number > "01" else ())):
        if not values.get(name):
            found.append(f"add {name} = ...")
    return [f"{path.relative_to(repo)}: {problem}" for problem in found]


_why = 'say why there is none: bench = "..." below [exempt]'


def _read(number: str, repo: Path) -> tuple[dict, list[StageRun], list[str]]:
    """The valid fields of a stage's file, its runs, and what is wrong."""
    path = stage_paths(repo)[number].with_name("stage.toml")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        return {}, [], [f"it is no TOML: {error}"]
    found = []
    for name in values.keys() - FIELDS:
        found.append(f"remove {name} = {values.pop(name)!r}, which means nothing")
    for name in ("compare", "reference"):
        if name in values and (values[name] not in stages(repo) or values[name] > number):
            found.append(f"{name} = {values.pop(name)!r} is not one of the stages up to this one")
    for name, origin in [*values.get("copies", {}).items()]:
        if origin not in stages(repo) or origin >= number:
            found.append(f"copies: {name} is of {values['copies'].pop(name)!r}, no earlier stage")
    values["flags"] = tuple(values.get("flags", "").split())
    values["exercise"] = tuple(values.get("exercise", ()))
    runs: list[StageRun] = []
    for entry in values.pop("runs", []):
        try:
            runs += _runs(number, entry, values["flags"])
        except (AttributeError, TypeError, ValueError) as error:
            found.append(f"the run {entry} is wrong: {error!r}; see tools/stages.py")
    return values, runs, found


def _runs(number: str, entry: list, own_flags: tuple[str, ...]) -> list[StageRun]:
    """The runs of one line: one for each of its purposes and numbers of ranks."""
    ranks, flags, purposes, *more = entry
    tolerance = tuple(sorted(more[0].items())) if more else ()
    found = []
    for purpose in purposes.split():
        name = purpose.rstrip("*")
        if name not in BASE:
            raise ValueError(f"there is no purpose {name!r}, but {', '.join(BASE)}")
        for each in ranks if isinstance(ranks, list) else [ranks]:
            if not isinstance(each, int) or each < 1:
                raise ValueError(f"{each!r} is no number of ranks")
            quick = purpose.endswith("*")
            words = tuple(with_ranks(flags, each).split())
            found.append(StageRun(number, name, each, words, quick, tolerance, own_flags))
    return found


def with_ranks(flags: str, ranks: int) -> str:
    """`flags` with the number of ranks for {ranks}, and a multiple of it for {4 * ranks}."""
    return re.sub(r"\{(?:(\d+) \* )?ranks\}", lambda found: str(int(found[1] or 1) * ranks), flags)


def runs_for(purpose: str) -> list[StageRun]:
    """All stages' runs for one purpose."""
    return [run for number in stages() for run in stage_file(number).for_(purpose)]


def lacks_on_cpu(number: str) -> str:
    """What a stage needs to run on a CPU and this PyTorch is not; empty if it can run."""
    import torch  # `make diff` needs none

    needed = stage_file(number).cpu_torch
    if not needed or torch.__version__ >= needed:
        return ""
    return f"on a CPU {number} needs PyTorch {needed} or newer, and this is {torch.__version__}"


def pairs() -> list[tuple[str, str]]:
    """Each stage after the one that it is compared with, and after 01."""
    compared = {(stage_file(new).compare, new) for new in stages()[1:]}
    return sorted({*(pair for pair in compared if pair[0]), *(("01", b) for b in stages()[1:])})


def renamed(repo: Path = REPO) -> dict[str, list[str]]:
    """The classes that have a new name, and the older ones that each is compared with."""
    return {k: v for n in stages(repo) for k, v in stage_file(n, repo).renamed.items()}
