"""Fixtures of the test harness; `harness.py` describes the objects that they return."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the bits must not depend on the cores
os.environ["KINETO_LOG_LEVEL"] = "99"

import harness
import pytest
import torch

from tools.stages import lacks_on_cpu

torch.set_num_threads(1)
logging.disable(logging.DEBUG)  # DCP's log would fill every report

# a launcher around the tests, or `make test ARGS=...`, must not change what the tests start
LAUNCH = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ARGS".split()
for name in list(os.environ):
    if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_", "PMIX_", "MAKE")) or name in LAUNCH:
        del os.environ[name]


# the files that take minutes, longest first: with several workers the short ones fill the gaps
LONG = "slurm parity costs survival figures benchmarks fake_cuda copy late_backend fp8 any_to_any"
LONG += " dry_run quickstart plan gradients ssd_offload launchers lessons stages"


NO_CASE = SimpleNamespace(params={})
RERUNS = int(os.environ.get("RERUNS", 2))  # of a test that is marked `wall_clock` and fails


@pytest.hookimpl(tryfirst=True)  # before `-k` and `-m` deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first = [f"test_{name}.py" for name in LONG.split()]
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else 99)
    collected = {item.nodeid for item in items}
    for item in items:
        if item.get_closest_marker("wall_clock"):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS))
        for run in getattr(item, "callspec", NO_CASE).params.values():
            number = getattr(run, "stage", run)
            if number in harness.stages() and (lacks := lacks_on_cpu(number)):
                item.add_marker(pytest.mark.skip(reason=lacks))
        for mark in item.iter_markers("quick_cases"):
            check_cases(config, item, mark.args, collected)
            item.add_marker("quick" if item.callspec.id in mark.args else "slow")


def check_cases(
    config: pytest.Config, item: pytest.Function, ids: tuple[str, ...], collected: set[str]
) -> None:
    test = item.nodeid.partition("[")[0]
    absent = [id for id in ids if f"{test}[{id}]" not in collected]
    if absent and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"{test} has no cases {absent}")


@pytest.fixture(scope="session", autouse=True)
def _folders(tmp_path_factory):
    """Prepare corpora and write runs in folders of this session."""
    os.environ["DATA_ROOT"] = str(tmp_path_factory.mktemp("data"))
    os.environ["RUNS_ROOT"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def pools(_folders):
    """`pools(4)`: the session's pool of four ranks, started when first used."""
    started: dict[tuple[int, bool, str], harness.Pool] = {}

    def pool(world_size: int, group: bool = True, backend: str = "gloo") -> harness.Pool:
        key = (world_size, group, backend)
        if key not in started:
            started[key] = harness.Pool(world_size, group, backend=backend)
        return started[key]

    yield pool
    for each in started.values():
        each.close()


@pytest.fixture
def fresh_pool(_folders):
    """`fresh_pool(4)`: a new pool, for a test that counts all live tensors of a process."""
    with contextlib.ExitStack() as stack:

        def pool(world_size: int) -> harness.Pool:
            return stack.enter_context(contextlib.closing(harness.Pool(world_size)))

        yield pool


@pytest.fixture(scope="session")
def reference(pools, tmp_path_factory):
    """`reference(argv)`: stage 01's metrics for these flags, run once per session. With the number
    of another stage, those of its own one-process run."""
    known: dict[tuple[str, ...], list[dict]] = {}
    folder = tmp_path_factory.mktemp("replay")

    def metrics(argv: list[str], stage: str = "01") -> list[dict]:
        key = (stage, *map(str, argv))
        if key not in known:
            job = harness.train, "record", str(folder), stage, harness.with_run_dir(list(key[1:]))
            known[key] = pools(1, group=stage != "01").run(harness.comparably, *job)[0]
        return known[key]

    metrics.folder = folder
    return metrics


@pytest.fixture
def reproduce(pools, reference, corpus_dir):
    """`reproduce(run)`: the metrics of a run of a stage's file on each rank, and its reference's.

    job: in place of the stage's training, a function of the stage and the arguments, whose results
    are returned. flags: more of them, for both runs.
    """

    def results(run, job=harness.train, backend="gloo", flags=()) -> tuple[list, list[dict]]:
        data = ["--data", str(corpus_dir), *flags]
        expected = reference([*run.reference_argv, *data], harness.stage_file(run.stage).reference)
        argv = harness.with_run_dir([*run.argv, *data])
        around = job, "replay", str(reference.folder), run.stage, argv
        pool = pools(run.ranks, group=run.stage != "01", backend=backend)
        return pool.run(harness.comparably, *around), expected

    return results


@pytest.fixture
def error_of(capsys):
    """`error_of(function, *args)`: the one line that it prints before it exits with this status."""

    def line(function, *args, status: int = 2) -> str:
        with pytest.raises(SystemExit) as exit:
            function(*args)
        said = capsys.readouterr().err
        assert exit.value.code == status and said.count("\n") == 1, said
        return said

    return line


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory) -> Path:
    """A small corpus with structure to learn: 200 words, each with a few likely successors."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = [f"word{i}" for i in range(200)]
    after = {w: rng.sample(words, 4) for w in words}

    def text(lines: int) -> str:
        rows = []
        for _ in range(lines):
            row = [rng.choice(words)]
            for _ in range(rng.randrange(12, 28)):
                likely = rng.random() < 0.9
                row.append(rng.choice(after[row[-1]]) if likely else rng.choice(words))
            rows.append(" ".join(row))
        return "\n".join(rows) + "\n"

    (folder / "train.txt").write_text(" ".join(words) + "\n" + text(590))
    (folder / "valid.txt").write_text(text(13))  # every run evaluates on both at its end
    (folder / "test.txt").write_text(text(9))
    return folder
