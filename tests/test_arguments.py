"""Every row of `bad_arguments.txt` is an error with its message; correct arguments train."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from harness import load_stage, stage_file, stages
from late_backend import recorded_calls
from processes import end_as_a_launcher_would, start

from common.model import TransformerConfig

from common.job import arguments
from tools.stages import needs_model

TABLE = Path(__file__).with_name("bad_arguments.txt")
BASE = "--d-model 32 --n-layers 4 --n-heads 2 --seq-len 16 --global-batch-size 12 --steps 1"


class Row(NamedTuple):
    stages: list[str]
    ranks: int
    early: bool
    as_command: bool
    argv: str
    words: list[str]


def chosen(text: str) -> list[str]:
    """The stages that "-" (all), "02-" or "01,03" stands for."""
    if text.endswith("-"):
        return [s for s in stages() if s >= text[:-1] and not needs_model(s)]
    return text.split(",")


def rows() -> list[Row]:
    found = []
    for line in TABLE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        of, ranks, argv, words = (part.strip() for part in line.split("|"))
        said = [word.strip() for word in words.split(";")]
        how = ("~" not in ranks, "!" in ranks)
        found.append(Row(chosen(of), int(ranks.rstrip("~!")), *how, argv, said))
    return found


CASES = [(stage, row) for row in rows() for stage in row.stages]


@pytest.fixture(scope="module")
def places(tmp_path_factory, corpus_dir) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "file").write_text("")
    for name, valid in (("short_valid", "\n"), ("latin_1", "\na\n\nü\n")):
        shutil.copytree(corpus_dir, folder / name)
        (folder / name / "valid.txt").write_text(valid, encoding="latin-1")
    (folder / "blocked").mkdir()
    (folder / "blocked" / "checkpoints").write_text("")
    names = {path.name: str(path) for path in (*folder.iterdir(), folder / "absent")}
    return names | {"corpus": str(corpus_dir)}


def argv_of(row: Row, places: dict[str, str], run_dir: Path) -> list[str]:
    base = f"{BASE} --data {places['corpus']} --run-dir {run_dir}"
    return [*base.split(), *shlex.split(row.argv.format(**places))]


def main_with(argv: list[str], of_rank_1: dict) -> None:
    """Train with other flags, or another script, on rank 1."""
    others = of_rank_1 if torch.distributed.get_rank() == 1 else {}
    flags = [f"{name}={value}" for name, value in others.items() if name != "CODE"]
    with patch.object(sys, "argv", [others.get("CODE", f"{argv[-1]}-script/train.py")]):
        load_stage("02").main([*argv, *flags])


@pytest.mark.parametrize(
    "of_rank_1, says",
    [
        ({"--seed": "1", "--dtype": "bfloat16"}, ["--seed is 1337", "'bfloat16' on rank 1"]),
        ({"--d-model": "64"}, ["--d-model is"]),  # before any message of the model's shapes
        ({"--data": "{other}"}, ["the hash of --data is"]),
        ({"--data": "{absent}"}, ["rank 1 on", "absent/train.txt"]),
        ({"CODE": "{changed}/train.py"}, ["the hash of the code is"]),
        ({"CODE": "{beside}/train.py"}, ["the hash of the code is"]),
        ({"CODE": "{same}/train.py"}, []),
        ({"--data": "{copy}"}, []),  # each node may have its own copy
    ],
)
def test_ranks_that_differ_are_an_error_that_names_what_differs(
    fresh_pool, corpus_dir, tmp_path, of_rank_1, says
):
    for name in ("other", "copy"):
        shutil.copytree(corpus_dir, tmp_path / name)
    (tmp_path / "other/test.txt").write_text("word1 word2\n")
    scripts = {"run-script": "11", "same": "11", "changed": "21", "beside": "12"}
    for name, (script, other) in scripts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
        (tmp_path / name / "pipeline.py").write_text(other)
    places = {name: str(tmp_path / name) for name in ("other", "copy", "absent", *scripts)}
    of_rank_1 = {name: value.format(**places) for name, value in of_rank_1.items()}
    argv = f"{BASE} --data {corpus_dir} --run-dir {tmp_path}/run".split()
    ended = fresh_pool(2).attempt(main_with, argv, of_rank_1)
    said = "".join(o.stderr for o in ended)
    if says:
        assert ended[1].exit_status == 2 and said.count("\n") == 1, ended
        assert all(word in said for word in says), said
    else:
        assert not said and ended[0].exit_status is None


def main(stage: str, argv: list[str], early: bool) -> None:
    with recorded_calls() as calls:
        try:
            load_stage(stage).main(argv)
        finally:
            assert not early or not calls, "it communicates before the error"


@pytest.mark.parametrize("stage, row", CASES, ids=[f"{s}-{r.ranks}-{r.argv}" for s, r in CASES])
def test_wrong_arguments_are_a_one_line_error_with_status_2(pools, places, tmp_path, stage, row):
    run_dir = tmp_path / "run"
    pool = pools(row.ranks, group=stage != "01", backend="late")
    ended = pool.attempt(main, stage, argv_of(row, places, run_dir), row.early)
    assert [o.exit_status for o in ended] == [2] * row.ranks, ended[0].traceback or ended[0]
    said = "".join(o.stderr for o in ended)
    assert said.count("\n") == 1, said
    for word in row.words:
        assert word in said, f"{word!r} is not in: {said}"


COMMANDS = [row for row in rows() if row.as_command]


@pytest.mark.slow
@pytest.mark.wall_clock  # the launcher may end a rank before rank 0 has said what is wrong
@pytest.mark.parametrize("row", COMMANDS, ids=[f"{row.ranks}-{row.argv}" for row in COMMANDS])
def test_wrong_arguments_of_a_job_are_one_line_and_every_process_exits_with_status_2(
    places, tmp_path, row
):
    argv = argv_of(row, places, tmp_path / "run")
    # rank 0 prints the error, and starts last
    processes = start(row.stages[0], row.ranks, argv, tmp_path, slow=0 if row.ranks > 1 else None)
    said = end_as_a_launcher_would(processes)
    assert [p.returncode for p in processes] == [2] * row.ranks, said
    assert said[0].startswith("train.py: ") and said[0].count("\n") == 1, said
    assert not any(said[1:]) and all(word in said[0] for word in row.words)


@pytest.mark.parametrize("stage", stages())
def test_every_number_has_bounds(stage, error_of):
    numbers = [
        x.option_strings[-1] for x in arguments.base_parser("x")._actions if callable(x.type)
    ]
    assert len(numbers) > 15
    folders = {"--offload-dir", "--model", "--out"}  # they may have any name
    own = set(stage_file(stage).flags) - folders
    for flag in (*numbers, *own):
        for value in ("-1", "nan"):
            assert flag in error_of(load_stage(stage).parse_args, [f"{flag}={value}"])


# ---- models that cannot fit in memory ----

SMALL = TransformerConfig(201, 32, 4, 2, 16)


@pytest.mark.parametrize(
    "state_on, host, fits",
    [("device", 10**9, False), ("host", 10**9, True), ("host", 100, False), ("disk", 100, True)],
)
def test_memory_of_where_the_model_state_is_counts(monkeypatch, capsys, state_on, host, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": host}
    monkeypatch.setattr(arguments.os, "sysconf", pages.get)
    args = arguments.check_arguments(arguments.base_parser("x").parse_args([]))
    args.state_on = state_on
    with contextlib.nullcontext() if fits else pytest.raises(SystemExit):
        arguments.check_memory(args, SMALL)
    assert ("have 0.0 GB" in capsys.readouterr().err) == (not fits)


@pytest.mark.parametrize("flag", ["--data", "--resume", "--run-dir", "--offload-dir"])
def test_a_tilde_that_no_shell_has_expanded_is_the_home_folder(monkeypatch, flag):
    monkeypatch.setenv("HOME", "/home/me")
    args = load_stage("12").parse_args([f"{flag}=~/a=~"])
    assert getattr(args, flag[2:].replace("-", "_")) == "/home/me/a=~"


def test_what_identifies_a_command_is_as_given_on_any_number_of_ranks(monkeypatch):
    """Not the defaults that follow from the ranks: a requeued job may have others."""
    for ranks in ("1", "2"):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks)
        args = load_stage("04").parse_args(["--lr", "0.5"])
        assert args.shard_degree == int(ranks) and args.given == ["--lr", "0.5"]
        assert "given" not in vars(args)
