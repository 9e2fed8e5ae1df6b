"""Which modules a stage's script may use, and how it is laid out."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from harness import REPO, stage_path, stages
from mutants import read_table
from processes import executable

import common

from tools.stages import beside

FORBIDDEN = (
    "torch.nn.parallel",
    "torch.nn.DataParallel",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.optim",
)
COLLECTIVES = {
    *("all_reduce", "reduce", "broadcast", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "barrier"),
}
every_stage = pytest.mark.parametrize("stage", stages())


def tree_of(stage: str) -> ast.Module:
    return ast.parse(stage_path(stage).read_text())


def names_of(tree: ast.Module) -> set[str]:
    """Every dotted name that the code imports or uses, with `import ... as` resolved."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            aliases |= {name.asname or name.name: module + name.name for name in node.names}
    used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    parts = [name.partition(".") for name in used]
    return {*aliases.values(), *("".join((aliases.get(x, x), *rest)) for x, *rest in parts)}


def uses(names: set[str], module: str) -> list[str]:
    return sorted(n for n in names if n == module or n.startswith(module + "."))


def packages_of(tree: ast.Module) -> set[str]:
    """The top-level packages that the code imports."""
    names = [n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


@every_stage
def test_a_stage_uses_no_ready_made_technique(stage):
    names = names_of(tree_of(stage))
    assert [n for module in FORBIDDEN for n in uses(names, module)] == []


@every_stage
def test_a_stage_imports_torch_common_and_the_files_beside_it_alone(stage):
    own = {path.stem for path in beside(stage)}
    assert packages_of(tree_of(stage)) - own <= {*sys.stdlib_module_names, "torch", "common"}


def test_requirements_declare_every_imported_package():
    folders = ("common", "tools", "tests", "benchmarks")
    files = [path for folder in folders for path in (REPO / folder).rglob("*.py")]
    packages = set().union(*(packages_of(ast.parse(file.read_text())) for file in files))
    local = {"common", *(file.stem for file in files), *(file.parent.name for file in files)}
    required = (REPO / "requirements.txt").read_text().replace("markdown-it-py", "markdown_it")
    declared = re.findall(r"^[\w-]+", required, re.MULTILINE)
    assert packages - local - sys.stdlib_module_names <= set(declared)


@pytest.mark.parametrize(
    "torch, has_torch, status, installed",
    [
        ("", False, 0, "-r requirements.txt torch==2.13.0"),
        ("2.14.1", True, 0, "-r requirements.txt torch==2.14.1"),
        ("", True, 0, "-r requirements.txt"),
        ("keep", True, 0, "-r requirements.txt"),
        ("keep", False, 2, ""),
    ],
)
def test_setup_keeps_the_pytorch_of_an_environment(tmp_path, torch, has_torch, status, installed):
    python = f'[ "$1 $2" != "-c import torch" ] && echo "$@" || exit {int(not has_torch)}'
    for name in ("pip", "python"):
        executable(tmp_path / "bin" / name, f"#!/bin/sh\n{python}\n")
    command = ["sh", "tools/setup.sh", sys.executable, str(tmp_path), torch]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert ("TORCH=keep" in done.stderr) == bool(status)
    lines = [x for x in done.stdout.splitlines() if x.startswith("-m pip install")]
    assert not installed and not lines or lines[0].endswith(f"version-check {installed}")


def test_map_of_common_names_every_file():
    for folder, listed in zip(("", "job/"), common.__doc__.split("in job/, with"), strict=True):
        named = re.findall(r"^(\w+\.py) ", listed, re.MULTILINE)
        files = {path.name for path in REPO.glob(f"common/{folder}*.py")} - {"__init__.py"}
        assert sorted(named) == sorted(files)


def test_what_a_reader_of_02_opens_in_common_is_small():
    room, queue = set(), [stage_path("02")]
    while queue:
        imported = re.findall(r"^from common\.(\w+) import", queue.pop().read_text(), re.MULTILINE)
        new = {REPO / f"common/{name}.py" for name in imported} - room
        room |= new
        queue += new
    lines = sum(len(file.read_text().splitlines()) for file in room)
    assert len(room) <= 10 and lines <= 1480, f"{len(room)} files, {lines} lines"


def test_what_a_reader_needs_imports_nothing_of_what_a_job_needs():
    for file in REPO.glob("common/*.py"):
        assert not uses(names_of(ast.parse(file.read_text())), "common.job"), file.name


def test_imports_go_from_tests_to_tools_to_common_and_in_no_circle():
    folders, graph = ("common", "tools", "benchmarks"), {}
    tests = {"tests", *(file.stem for file in REPO.glob("tests/*.py"))}
    for height, folder in enumerate(folders):
        for file in (REPO / folder).rglob("*.py"):
            tree, name = ast.parse(file.read_text()), file.relative_to(REPO).with_suffix("")
            assert not packages_of(tree) & {*folders[height + 1 :], *tests}, name
            graph[".".join(name.parts)] = names_of(tree)
    used = {file: {other for other in graph if uses(graph[file], other)} for file in graph}
    list(TopologicalSorter(used).static_order())  # CycleError names a circle


# run by a new interpreter: what each file of common/ changes that the packages it needs do not
IMPORT_EACH = """
import ast, atexit, copy, copyreg, importlib, os, signal, sys, warnings
from pathlib import Path
from torch.nn.modules import module
from torch.optim import optimizer

def state():
    hooks = {**vars(optimizer), **vars(module)}
    return {
        "environment": {k: v for k, v in os.environ.items() if k != "NCCL_RUNTIME_CONNECT"},
        "descriptors": {f: os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.exists()},
        "hooks": [copy.copy(v) for k, v in hooks.items() if k.startswith("_global_")],
        "warning filters": list(warnings.filters),
        "signal handlers": [signal.getsignal(s) for s in signal.valid_signals()],
        "copyreg": dict(copyreg.dispatch_table),
        "streams": (sys.stdout, sys.stderr, sys.stdout.errors),
        "exit": (sys.excepthook, atexit._ncallbacks()),
    }

files = sorted(Path("common").rglob("*.py"))
for node in (node for file in files for node in ast.parse(file.read_text()).body):
    if isinstance(node, ast.ImportFrom) and not node.module.startswith("common"):
        importlib.import_module(node.module)
    for name in node.names if isinstance(node, ast.Import) else []:
        importlib.import_module(name.name)
for file in files:
    if not os.fork():
        before = state()
        importlib.import_module(".".join(file.with_suffix("").parts))
        for what, value in state().items():
            if value != before[what]:
                print(f"importing {file} changes {what}", flush=True)
        os._exit(0)  # faster
    os.wait()
"""


def test_importing_a_file_of_common_changes_nothing_in_the_process():
    """But for a variable that NCCL reads when it starts."""
    command = [sys.executable, "-c", IMPORT_EACH]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


@every_stage
def test_every_byte_that_a_stage_sends_goes_through_the_ledger(stage):
    sent = [n for n in names_of(tree_of(stage)) if n.startswith("torch.distributed.")]
    assert [n for n in sent if n.split(".")[-1] in COLLECTIVES] == []


def test_stage_01_has_no_process_group():
    text = stage_path("01").read_text()
    assert "torch.distributed" not in text and "World" not in text and "rank" not in text


def test_every_mutant_matches_exactly_one_place_of_the_code():
    counts = {m.name: (REPO / m.file).read_text().count(m.old) for m in read_table()}
    assert {name for name, count in counts.items() if count != 1} == set()


@every_stage
def test_all_scripts_have_the_same_layout(stage):
    tree, lines = tree_of(stage), stage_path(stage).read_text().splitlines()
    assert ast.get_docstring(tree)
    assert lines.count("# The training loop") == 1
    loop = [n for n in tree.body if n.lineno > lines.index("# The training loop")]
    functions = [n.name for n in loop if isinstance(n, ast.FunctionDef)]
    assert functions[-3:] == ["parse_args", "evaluate", "main"]
    assert ast.unparse(tree.body[-1]).startswith("if __name__ == '__main__':")
