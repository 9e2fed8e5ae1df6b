"""The preflight: its verdict on written tables, and what it says of real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from harness import REPO
from processes import free_port

from tools.gpu.preflight import rounds
from tools.gpu.verdict import judge, report

H100 = "NVIDIA H100 80GB HBM3"


def records(nodes: int, gpus: int, link: float = 50e9) -> list[dict]:
    """The records of a healthy cluster; the figures of two ranks are never equal."""
    made = []
    for rank in range(nodes * gpus):
        node, gpu = divmod(rank, gpus)
        more = 1 + rank / 10000
        figures = {"matmul float32": 50e12, "matmul bfloat16": 650e12, "memory": 2.6e12}
        figures |= {"latency in a node": 20e-6, "all-reduce in a node": 350e9}
        figures |= {"all-reduce over all nodes": 300e9}
        neighbours = {x for pairs in rounds(nodes) for pair in pairs if node in pair for x in pair}
        made.append(
            {
                **{"rank": rank, "node": node, "host": f"n{node}", "gpu": gpu, "device": H100},
                **{"versions": {"torch": "2.13.0", "driver": "570"}, "clocks": "1980 of 1980 MHz"},
                **{"free": {"run folder": 9e12, "shared memory": 9e11}, "exact": True},
                "figures": {k: (v * more, v * more * 0.98) for k, v in figures.items()},
                "links": [
                    {"from": other * gpus + gpu, "to": rank, "rate": (link * more, link)}
                    for other in sorted(neighbours - {node})
                ],
            }
        )
    return made


def slow_card(table: list[dict], rank: int, way: str) -> None:
    for record in table:
        for link in record["links"]:
            if link[way] == rank:
                link["rate"] = (6e9, 5e9)


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 2), (1, 8), (2, 1), (2, 8), (3, 4), (16, 8)], ids=str
)
def test_verdict_on_a_healthy_cluster_is_empty(shape):
    table = records(*shape)
    assert judge(table, 0.1) == []
    rows = [line for line in report(table, []).splitlines() if line.startswith("| n")]
    assert len(rows) == shape[0] + 1  # with the head of the table


def slower(figure: str, rank: int, value: float):
    return lambda table: table[rank]["figures"].update({figure: (value, 0.98 * value)})


def slow_link(table: list[dict]) -> None:
    table[2]["links"][0]["rate"] = (6e9, 5e9)


SLOW_GPU, SLOW_BF16 = slower("matmul float32", 1, 40e12), slower("matmul bfloat16", 0, 300e12)
IS_SLOW = "n0 GPU 1: matmul float32 40 TFLOP/s, "
VERDICTS = [  # nodes and GPUs, what is wrong, and how the only line begins
    ((1, 2), SLOW_GPU, f"{IS_SLOW}the other's: 5"),
    ((1, 8), SLOW_GPU, f"{IS_SLOW}the median of its peers: 5"),
    ((4, 8), SLOW_GPU, f"{IS_SLOW}the median of its peers: 5"),
    ((1, 1), SLOW_BF16, "n0 GPU 0: matmul bfloat16 300 TFLOP/s, 30% of the data sheet's 989 TF"),
    ((2, 1), partial(slow_card, rank=1, way="from"), "n1 GPU 0 to n0 GPU 0: 6 GB/s, expected: 50"),
    ((4, 1), slow_link, "n1 GPU 0 to n2 GPU 0: 6 GB/s"),
]
VERDICTS += [  # the card that both slow links have in common
    (
        (nodes, 2),
        partial(slow_card, rank=3, way=way),
        f"n1 GPU 1: its network card {verb} slowly: 6 GB/s and 6 GB/s",
    )
    for nodes in (3, 4, 5, 8)
    for way, verb in (("from", "sends"), ("to", "receives"))
]


@pytest.mark.parametrize(("shape", "change", "said"), VERDICTS)
def test_verdict_names_what_is_slow_and_what_it_was_compared_with(shape, change, said):
    table = records(*shape)
    change(table)
    (line,) = judge(table, 0.1)
    assert line.startswith(said), line


def test_verdict_names_versions_wrong_results_latency_and_full_disks():
    table = records(3, 1)
    table[1]["versions"]["driver"] = "535"
    table[2]["exact"] = False
    table[0]["figures"]["latency in a node"] = (40e-6, 50e-6)
    table[2]["free"]["shared memory"] = 64e6
    assert judge(table, 0.1) == [
        "n0: latency in a node 40 us, the median of its peers: 20 us",
        "n2 GPU 0: wrong results in matmuls of small integers",
        "n2: 0.1 GB free in the shared memory",
        "driver: n1 535; the other nodes have 570",
    ]


@pytest.mark.parametrize("n", range(1, 10))
def test_rounds_pair_every_node_with_both_neighbours_and_once_per_round(n):
    all_pairs = [pair for pairs in rounds(n) for pair in pairs]
    expected = {frozenset((a, (a + 1) % n)) for a in range(n)} if n > 1 else set()
    assert {frozenset(pair) for pair in all_pairs} == expected
    assert len(all_pairs) == len(expected) and len(rounds(n)) <= 3
    for pairs in rounds(n):
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))


# ---- real processes ----

QUICK = "preflight.COMPUTE_SECONDS = 0.3; preflight.MESSAGE_SECONDS = 0.05; "
RUN = "import sys; from tools.gpu import preflight; {change} sys.exit(preflight.main())"
# a fifth of the work in the same time, as on a GPU whose clock has dropped
SLOW = "r = preflight.rate; preflight.rate = lambda w, f, s: r(w / 5, f, s); "
HANG = "import time; preflight.exact_matmuls = lambda device: time.sleep(300); "


def start(changes: list[str], folder: Path, *flags: str) -> tuple[list[int], str, float]:
    """Run a process per change, each a node of its own; exit statuses, output, seconds."""
    shared = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    begin, processes = time.monotonic(), []
    for rank, change in enumerate(changes):
        words = ["-c", RUN.format(change=QUICK + change), "--out", str(folder / "out.json")]
        process = subprocess.Popen(
            [sys.executable, *words, *flags],
            cwd=REPO,
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
    try:
        output = "".join(process.communicate(timeout=120)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], output, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.wall_clock
def test_process_that_is_slowed_down_is_named(tmp_path):
    statuses, output, _ = start(["", SLOW, ""], tmp_path, "--tolerance", "0.6")
    assert statuses == [1, 0, 0], output
    found = json.loads((tmp_path / "out.json").read_text())["findings"]
    slow = {line.split(":")[1].split(",")[0].rsplit(maxsplit=2)[0] for line in found}
    assert " matmul float32" in slow and all("GPU 0" in x for x in found if "matmul" in x), output
    ranks = json.loads((tmp_path / "out.json").read_text())["ranks"]
    rates = [r["figures"]["matmul float32"][0] for r in ranks]
    assert rates[1] < 0.5 * min(rates[0], rates[2])


@pytest.mark.slow
def test_preflight_starts_a_process_per_gpu_of_this_machine(tmp_path):
    command = [sys.executable, "-m", "tools.gpu.preflight", "--nproc", "1", "--out"]
    done = subprocess.run([*command, tmp_path / "out.json"], cwd=REPO, capture_output=True)
    assert done.returncode == 0, done
    assert json.loads((tmp_path / "out.json").read_text())["summary"]["memory"] > 0


@pytest.mark.slow
def test_process_that_never_joins_is_named(tmp_path):
    statuses, output, _ = start(["", ""], tmp_path, "--join-seconds", "10")
    assert statuses == [1, 1], output
    assert "these have not started: " in output and "node 2 GPU 0 (rank 2)" in output


@pytest.mark.slow
@pytest.mark.wall_clock  # the others must have computed when the limit comes
def test_process_that_hangs_is_named_and_the_run_ends(tmp_path):
    statuses, output, seconds = start(["", "", HANG], tmp_path, "--limit", "20")
    assert statuses == [1, 1, 1] and seconds < 60, output
    host = socket.gethostname()
    behind = "behind all others, in the phase 'computation on one device'"
    assert f"{behind}: {host} GPU 0 (rank 2)" in output, output
