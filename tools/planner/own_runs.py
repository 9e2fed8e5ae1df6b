"""Predicts steps of the stages on this machine, and measures them: the table of benchmarks/README.

    python tools/planner/own_runs.py    on an idle machine; about ten minutes

The ranks share the machine's cores, so every rate is measured by as many processes at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stages import REPO, stage_path
from step_time import Gpu, Job, step_time

RUNS = [  # stage, ranks, flags of the stage, fields of the job
    ("02", 2, "", {}),
    ("04", 2, "", {"sharding": "fsdp", "gather_bytes": 4}),
    ("05", 2, "", {"tp": 2}),
    ("05", 2, "--sequence-parallel", {"tp": 2, "sequence_parallel": True}),
    ("06", 2, "--schedule gpipe", {"pp": 2, "schedule": "gpipe"}),
    ("06", 2, "--schedule 1f1b", {"pp": 2}),
    ("07", 4, "--pp 2 --tp 2", {"pp": 2, "tp": 2}),
]
SIZES = [(256, 4, 128), (512, 4, 256), (768, 6, 256)]  # d_model, layers, seq_len
BATCH, MICRO, STEPS = 8, 2, 4
WORDS = 2304  # of the sample, padded


def measure_here(ranks: int) -> Gpu:
    """This machine as `ranks` devices that work at the same time, by a preflight of its CPU."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "preflight.json"
        command = [sys.executable, REPO / "tools/gpu/preflight.py", "--nproc", str(ranks)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*command, "--out", out], env=environment, capture_output=True, text=True
        )
        if not out.exists():
            raise SystemExit(done.stderr[-2000:])
        rates = json.loads(out.read_text())["summary"]
    return Gpu(
        matmul=rates["matmul_float32"],
        memory_bandwidth=rates["memory"],
        nvlink=rates.get("inside_node", rates["memory"]),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks,
        efficiency=1.0,
        attention=0.5,
        held_to="the table in benchmarks/README.md",
        overlaps=False,  # Gloo's threads need the cores that compute
    )


def torchrun(words: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **os.environ}
    done = subprocess.run(
        [*command, "--rdzv-endpoint", "localhost:0", *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])


def measured(stage: str, ranks: int, flags: str) -> float:
    """Median seconds of a step, without the first two."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"--data sample --steps {STEPS + 2} --log-every 1 --warmup-steps 1 {flags}".split()
        torchrun(
            ["--nproc-per-node", str(ranks), str(stage_path(stage)), *words, "--run-dir", folder]
        )
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    times = [record["step_ms"] for record in map(json.loads, lines) if "step_ms" in record]
    return median(times[2:]) / 1e3


def main() -> None:
    devices = {ranks: measure_here(ranks) for ranks in sorted({ranks for _, ranks, *_ in RUNS})}
    for ranks, gpu in devices.items():
        figures = f"{gpu.matmul / 1e9:.0f} GFLOP/s, memory {gpu.memory_bandwidth / 1e9:.1f} GB/s"
        print(f"{ranks} processes, each: {figures}, ring {gpu.nvlink / 1e9:.2f} GB/s", flush=True)
    print("\n| stage | ranks | d_model | layers | seq | predicted | measured | error |")
    print("|" + " --- |" * 8)
    errors = []
    for stage, ranks, own, fields in RUNS:
        for d_model, layers, seq in SIZES:
            job = Job(
                layers=layers,
                d_model=d_model,
                heads=d_model // 64,
                seq=seq,
                vocab=WORDS,
                global_batch=BATCH,
                ranks=ranks,
                gpu=devices[ranks],
                per_node=ranks,
                micro_batch=MICRO,
                dtype="float32",
            )
            predicted = step_time(replace(job, **fields)).seconds
            shape = f"--d-model {d_model} --n-layers {layers} --n-heads {d_model // 64}"
            batch = f"--seq-len {seq} --global-batch-size {BATCH} --micro-batch-size {MICRO}"
            took = measured(stage, ranks, f"{shape} {batch} {own}")
            errors.append(predicted / took - 1)
            name = f"{stage} {own}".strip()
            row = f"| {name} | {ranks} | {d_model} | {layers} | {seq} | {predicted:.2f} s"
            print(f"{row} | {took:.2f} s | {errors[-1]:+.0%} |", flush=True)
    print(f"\nmedian error {median(map(abs, errors)):.0%}, bias {median(errors):+.0%}")


if __name__ == "__main__":
    main()
