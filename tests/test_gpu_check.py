"""`make gpu-check` on CPU processes: what it runs, compares and writes, also after a failure."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest
from harness import REPO, stage_path, stages

from tools.gpu import check
from tools.gpu.check import Check, Outcome, Row, RowFailed, Workers, hidden_share, run_rows

SHAPE = "--d-model 16 --n-layers 2 --n-heads 2 --seq-len 8"
TINY = f"--data sample {SHAPE} --steps 2 --log-every 1"


def row(name: str, run) -> Row:
    return Row("a section", name, run)


def fails(_: float) -> Outcome:
    raise RowFailed("rank 1: the process died")


def test_report_is_written_after_every_row_and_a_failure_stops_nothing():
    texts: list[str] = []
    rows = [
        row("first", lambda left: Outcome("fine")),
        row("second", fails),
        row("third", lambda left: Outcome("loss off by 2.0e-03", True)),
        row("last", lambda left: Outcome("fine")),
    ]
    assert run_rows(rows, 60, texts.append, "2 x H100", n=2) == 2
    assert [text.count("- **") for text in texts] == [1, 2, 3, 4]
    assert "1 rows, 0 failures, 3 not run" in texts[0] and "- a section: last" in texts[0]
    assert "FAILED: RowFailed: rank 1: the process died" in texts[-1]
    assert "FAILED: loss off by 2.0e-03" in texts[-1] and "4 rows, 2 failures" in texts[-1]


def test_rows_that_the_budget_leaves_out_are_listed():
    texts: list[str] = []
    rows = [row(name, lambda left: Outcome(str(time.sleep(0.3)))) for name in "abc"]
    run_rows(rows, 0.2, texts.append, "", n=1)
    assert len(texts) == 1 and "a section: b" in texts[0] and "a section: c" in texts[0]
    assert "between ranks it stays unproven" in texts[0]


def test_rows_cover_every_stage_with_a_default_for_any_number_of_gpus():
    for n in (1, 2, 4, 8):
        rows = list(Check(n, on_cpu=True).rows())
        sections = [r.section for r in rows]
        order = ["preflight", "float8", "defaults", "speed", "checkpoint", "bench", "other runs"]
        assert list(dict.fromkeys(sections)) == order[: len(set(sections))]
        defaults = {r.name[:2] for r in rows if r.section == "defaults"}
        assert defaults == set(stages())
        compiled = [r.name for r in rows if r.section != "speed" and "--compile" in r.name]
        assert [name[:2] for name in compiled] == ["10", "10"]
        speeds = {r.name.split()[0] for r in rows if "--compile" in r.name}
        assert speeds == {"01", "10"}


def test_a_loss_may_be_off_by_a_thousandth_but_for_float8_and_routing():
    every = ((n, f"--dtype {dtype}") for n in stages() for dtype in ("float32", "bfloat16"))
    found = {(n, flags[8:]): check.allowed(n, flags) for n, flags in every}
    looser = {key: value for key, value in found.items() if value != 1e-3}
    float8 = {("10", "float32"): 5e-3, ("10", "bfloat16"): 0.05}
    assert looser == {("09", "float32"): math.inf, ("09", "bfloat16"): math.inf, **float8}


def test_predicted_step_stands_beside_the_measured_one_on_a_known_gpu():
    flags = "--data sample --steps 20 --preset gpt2"
    assert check.predicted_step(flags, "Tesla T4") == ""
    h100 = check.predicted_step(flags, "NVIDIA H100 80GB HBM3")
    assert float(h100.removeprefix(", predicted ")) > 1
    slower = check.predicted_step(flags, "NVIDIA A100-SXM4-80GB")
    assert float(slower.removeprefix(", predicted ")) > float(h100.removeprefix(", predicted "))


def test_hidden_share_of_communication_in_a_trace():
    def kernel(name: str, start: float, end: float) -> dict:
        return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}

    events = [
        kernel("ncclDevKernel_AllReduce", 0, 10),
        kernel("gemm", 2, 5),
        kernel("gemm", 4, 6),  # on another stream
        kernel("ncclDevKernel_AllReduce", 20, 30),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 20, "dur": 10},
    ]
    assert hidden_share(events) == pytest.approx(4 / 20)
    with pytest.raises(RowFailed, match="no kernel of NCCL"):
        hidden_share(events[1:2])


@pytest.mark.parametrize("stage", ["05", "07"])
def test_tensor_parallel_scripts_ask_for_one_hardware_queue_before_torch(stage, monkeypatch):
    path = stage_path(stage)
    before_torch = path.read_text().partition("\nimport torch\n")[0]
    for given, expected in (None, "1"), ("8", "8"):
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        if given:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
        exec(before_torch, {"__file__": str(path), "__name__": "script"})
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == expected


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    words = [sys.executable, str(REPO / "tools/gpu/check.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == "gpu-check: PyTorch sees no GPU on this machine\n"


def test_float8_matmuls_are_judged_by_their_error(monkeypatch):
    monkeypatch.chdir(REPO)
    outcome = Check(1, on_cpu=True).script(check.MATMULS, 100)
    assert not outcome.is_failure, outcome.text
    first = next(line for line in outcome.text.splitlines() if "float32 " in line)
    assert first.startswith("dX, e5m2 x e4m3, rowwise")


@pytest.mark.slow
def test_workers_run_stages_one_after_another_and_start_again_after_a_failure(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    workers = Workers(2, {})
    try:
        first = workers.train("02", TINY.split(), 100)
        assert len(first) == 2 and len(first[0][0]) == 2
        pids = [process.pid for process in workers.processes]
        workers.train("04", TINY.split(), 100)
        assert [process.pid for process in workers.processes] == pids
        with pytest.raises(RowFailed, match="SystemExit: 2; .*--global-batch-size"):
            workers.train("02", [*TINY.split(), "--global-batch-size", "3"], 100)
        assert workers.train("02", TINY.split(), 100)[0][0][-1]["loss"] == first[0][0][-1]["loss"]
        with pytest.raises(RowFailed, match="did not finish in 1 s"):
            workers.train("02", [*TINY.split(), "--steps", "100000"], 1)
    finally:
        workers.close()


@pytest.mark.slow
def test_rows_on_the_cpu_agree_with_stage_01(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "CURVE", TINY)
    (tmp_path / check.FOLDER).mkdir(parents=True)
    tried = Check(2, on_cpu=True)

    def small(*args, train=tried.train, **more):  # the checkpoint's run names its flags
        more |= {"flags": f"{more['flags']} {SHAPE}"} if "flags" in more else {}
        return train(*args, **more)

    tried.train = small
    try:
        for each in tried.rows():
            if each.name in ("06 on 2 GPUs, float32", "09 on 2 GPUs, float32"):
                outcome = each.run(100)
                assert not outcome.is_failure and "off by" in outcome.text, each.name
        assert tried.checkpoint(100) == Outcome("the same bits")
        monkeypatch.setattr(check, "FAILURE", -1.0)
        assert tried.curve("02", 2, "", TINY, TINY, 100).is_failure
    finally:
        tried.close()


@pytest.mark.slow
def test_peak_memory_is_compared_with_the_dry_run():
    tried = Check(2, on_cpu=True)
    text = tried.memory("02", 2, f"{TINY} --dtype float32", [10**9, 0])
    predicted = float(text.split("predicted ")[1].split()[0])
    assert predicted > 1 and text.endswith("(more than 5 % apart)"), text
    near = tried.memory("02", 2, f"{TINY} --dtype float32", [int(1e6 * predicted), 0])
    assert "apart" not in near, near
