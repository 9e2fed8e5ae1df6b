"""Measure every GPU, node and link before a long job, and name what is slower than its peers.

    make preflight                               # the GPUs of this machine; without one, the CPU
    make submit-preflight NODES=16 GPUS=8        # under Slurm

One process per GPU measures its GPU alone, then the collectives of its node, then the links to the
two neighbouring nodes, then the collectives of all ranks. `preflight.json` holds every figure and a
summary that `make plan ARGS="--preflight preflight.json ..."` reads. Exit status 1: something is
missing or far off, and a line says what it was compared with.

No process waits for another without a limit. Before the process group exists, ranks register in a
store, so that rank 0 can name the nodes that are missing; afterwards the store holds each rank's
phase, and whoever is behind when the time is up is named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.arguments import Parser, positive_int
from common.collectives import all_gather_single, all_reduce, reduce_scatter_single
from common.distributed import Launch, group_along, launch_environment
from tools.gpu.verdict import judge, report


class Sizes(NamedTuple):
    """What is measured: n x n matmuls, bytes of a buffer in memory, bytes of messages: collectives
    have the largest, and a slow link a smaller one."""

    matmul: int
    buffer: int
    messages: tuple[int, int, int]


SIZES = {
    "cuda": Sizes(8192, 2**30, (2**20, 2**24, 2**28)),
    "cpu": Sizes(512, 2**26, (2**16, 2**20, 2**23)),
}
WARM_UP, REPEATS = 2, 10  # of every message; a slow one is repeated less often
COMPUTE_SECONDS = 2.0  # per kind of computation: long enough for a hot GPU to lower its clocks
MESSAGE_SECONDS = 1.0  # per size of a collective, and per direction of a link

Figure = tuple[float, float]  # median and worst of the repeats: FLOP/s, bytes/s, or seconds


# ---- one process ----


def rate(work: float, run: Callable[[], object], synchronize: Callable[[], object]) -> Figure:
    """`work` per second of `run`, repeated for COMPUTE_SECONDS."""

    def seconds_of(calls: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize()
        return (time.perf_counter() - start) / calls

    seconds_of(1)  # loads the kernels
    calls = max(1, int(COMPUTE_SECONDS / REPEATS / seconds_of(1)))
    rates, end = [], time.perf_counter() + COMPUTE_SECONDS
    while len(rates) < 3 or time.perf_counter() < end:
        rates.append(work / seconds_of(calls))
    return median(rates), min(rates)


def measure_device(device: torch.device, sizes: Sizes) -> dict[str, Figure]:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    figures, n = {}, sizes.matmul
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        name = f"matmul {str(dtype).removeprefix('torch.')}"
        figures[name] = rate(2.0 * n**3, lambda a=a, b=b: a @ b, synchronize)
    x = torch.zeros(sizes.buffer, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    figures["memory"] = rate(2.0 * sizes.buffer, lambda: y.copy_(x), synchronize)  # read and write
    if device.type == "cuda":
        host = torch.empty(sizes.buffer, dtype=torch.uint8, pin_memory=True)
        figures["host to device"] = rate(sizes.buffer, lambda: x.copy_(host), synchronize)
        figures["device to host"] = rate(sizes.buffer, lambda: host.copy_(x), synchronize)
    return figures


def exact_matmuls(device: torch.device) -> bool:
    """Whether matmuls of small integers, which no dtype rounds, are right on this device.

    Entries are -1 and 1 and sums have 128 terms, so every partial sum is exact in bfloat16 too.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 2, (1024, 128), generator=generator) * 2 - 1 for _ in range(2))
    right = a @ b.t()  # in integers, on the CPU
    for dtype in (torch.float32, torch.bfloat16):
        x, y = a.to(device, dtype), b.to(device, dtype)
        if any(not torch.equal((x @ y.t()).long().cpu(), right) for _ in range(10)):
            return False
    return True


def describe(device: torch.device) -> dict:
    """Versions, free bytes and clocks of this node."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    clocks = ""
    if device.type == "cuda":
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        fields = "driver_version,clocks.sm,clocks.max.sm,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        command += ["-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=20)
            versions["driver"], now, most, heat = (x.strip() for x in found.stdout.split(","))
            clocks = f"{now} of {most} MHz, {heat} C"
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            clocks = f"nvidia-smi: {type(error).__name__}"
    run_folder = Path("runs") if Path("runs").exists() else Path()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    disks = {"run folder": run_folder, "shared memory": Path("/dev/shm")}
    free = {kind: shutil.disk_usage(path).free for kind, path in disks.items() if path.exists()}
    return {"device": name, "versions": versions, "free": free, "clocks": clocks}


# ---- several processes ----


class Ranks:
    """The ranks before and after their process group exists: who is here, and in which phase.

    node: the index of this rank's node, whose ranks are consecutive. Two clients of one store: a
    call of the training thread may block, and the watchdog's must not wait for it.
    """

    def __init__(self, launch: Launch, args: argparse.Namespace):
        self.launch, self.args = launch, args
        self.node, self.n_nodes = launch.rank // launch.local_size, launch.size // launch.local_size
        host, port = launch.address
        is_first, limit = launch.rank == 0, timedelta(seconds=args.join_seconds)
        where = host or hosts_of_job()[0], port
        self.phase_name, self.started = "joining", time.monotonic()
        try:
            self.store = dist.TCPStore(
                *where, is_master=is_first, timeout=limit, wait_for_workers=False
            )
            self.watchdog_store = self.store if is_first else dist.TCPStore(*where, timeout=limit)
        except dist.DistError as error:
            self.leave(f"no answer from rank 0 at {where[0]}:{where[1]}: {error}")

    def leave(self, message: str) -> None:
        print(f"preflight: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # other threads may be in a call that does not return

    def join(self) -> None:
        """Wait until all ranks have registered; rank 0 names those that are missing."""
        rank, size = self.launch.rank, self.launch.size
        self.store.set(f"host/{rank}", socket.gethostname())
        if rank == 0:
            end = self.started + self.args.join_seconds
            missing = list(range(1, size))
            while missing and time.monotonic() < end:
                missing = [r for r in missing if not self.store.check([f"host/{r}"])]
                time.sleep(0.1)
            self.store.set("joined", "" if missing else "all")
            if missing:
                time.sleep(1.0)  # the others read the answer from this process
                where = ", ".join(self.name(r) for r in missing)
                self.leave(f"after {self.args.join_seconds:.0f} s these have not started: {where}")
        self.store.set_timeout(timedelta(seconds=self.args.join_seconds + 10))
        if self.store.get("joined") != b"all":
            os._exit(1)  # rank 0 has said why

    def name(self, rank: int) -> str:
        """Host and GPU of a rank: from its registration or, if it has none, from Slurm."""
        node, gpu = divmod(rank, self.launch.local_size)
        if self.watchdog_store.check([f"host/{rank}"]):
            host = self.watchdog_store.get(f"host/{rank}").decode()
        else:
            hosts = hosts_of_job()
            host = hosts[node] if node < len(hosts) else f"node {node}"
        return f"{host} GPU {gpu} (rank {rank})"

    def phase(self, name: str) -> None:
        self.phase_name = name
        number = int(self.store.add(f"phases/{self.launch.rank}", 1))
        self.store.set(f"phase/{self.launch.rank}", json.dumps([number, name]))

    def stragglers(self) -> str:
        """The ranks in the earliest phase that any rank is in."""
        keys = [f"phase/{r}" for r in range(self.launch.size)]
        phases = [
            json.loads(self.watchdog_store.get(k)) for k in keys if self.watchdog_store.check([k])
        ]
        behind = min(phases)
        names = [self.name(r) for r, phase in enumerate(phases) if phase == behind]
        return f"behind all others, in the phase {behind[1]!r}: {', '.join(names)}"

    def watch(self) -> None:
        """In a thread: end this process when the time is up. Rank 0 says who is behind."""
        is_first = self.launch.rank == 0
        left = self.started + self.args.limit - time.monotonic()

        def end() -> None:
            if is_first:
                self.leave(f"not finished after {self.args.limit:.0f} s; {self.stragglers()}")
            host = socket.gethostname()
            self.leave(f"{host}: rank 0 did not respond; stopped in {self.phase_name!r}")

        timer = threading.Timer(left if is_first else left + 5, end)
        timer.daemon = True
        timer.start()


def hosts_of_job() -> list[str]:
    """The nodes of this Slurm step, in the order of their ranks; none outside of Slurm."""
    nodes = os.environ.get("SLURM_STEP_NODELIST")
    if not nodes:
        return []
    command = ["scontrol", "show", "hostnames", nodes]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()


def measure_collectives(group: dist.ProcessGroup, device: torch.device, sizes: Sizes, where: str):
    """Bus bandwidth of the collectives of a group, and the latency of a small all-reduce.

    Bus bandwidth is what each rank sends on a ring, per second: comparable for any number of ranks
    (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    """
    n = dist.get_world_size(group)
    if n == 1:
        return {}
    word = torch.zeros(1, device=device)

    def seconds_of(collective: Callable[..., object], *tensors: torch.Tensor) -> Figure:
        def once() -> float:
            meet(word, group)
            start = time.perf_counter()
            collective(*tensors, group=group)
            tensors[0][:1].tolist()  # waits for the device
            return time.perf_counter() - start

        return repeated(once, longest(once, word, group))

    figures = {f"latency {where}": seconds_of(all_reduce, word)}
    full = torch.zeros(sizes.messages[-1] // 4 // n * n, device=device)
    shard = torch.empty(len(full) // n, device=device)
    for name, passes, collective, tensors in (
        ("all-reduce", 2, all_reduce, [full]),
        ("all-gather", 1, all_gather_single, [full, shard]),
        ("reduce-scatter", 1, reduce_scatter_single, [shard, full]),
    ):
        sent = passes * (n - 1) / n * full.nbytes
        typical, worst = seconds_of(collective, *tensors)
        figures[f"{name} {where}"] = sent / typical, sent / worst
    return figures


def meet(word: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """A barrier, after which all ranks start at the same time."""
    all_reduce(word, group=group)
    word.tolist()


def longest(
    once: Callable[[], float], word: torch.Tensor, group: dist.ProcessGroup | None
) -> float:
    """The longest call of WARM_UP on any rank, so that all repeat it equally often."""
    seconds = torch.full_like(word, max(once() for _ in range(WARM_UP)))
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return seconds.item()


def repeated(once: Callable[[], float], seconds: float) -> Figure:
    """Median and worst of about MESSAGE_SECONDS, if a call takes that many seconds."""
    times = [once() for _ in range(min(REPEATS, max(2, int(MESSAGE_SECONDS / seconds))))]
    return median(times), max(times)


def rounds(n_nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbouring nodes; every node meets both neighbours, in at most three rounds."""
    pairs = [(a, (a + 1) % n_nodes) for a in range(n_nodes)] if n_nodes > 2 else [(0, 1)]
    if n_nodes == 1:
        return []
    last = [pairs.pop()] if n_nodes % 2 and n_nodes > 1 else []
    return [chosen for chosen in (pairs[::2], pairs[1::2], last) if chosen]


def measure_links(ranks: Ranks, device: torch.device, sizes: Sizes) -> list[dict]:
    """What this rank receives from GPU i of the neighbouring nodes, if it is GPU i itself.

    All GPUs of all pairs communicate at the same time, first in one direction, then in the other.
    """
    found, here, n = [], ranks.launch.rank, ranks.launch.local_size
    buffer = torch.zeros(sizes.messages[-1], dtype=torch.uint8, device=device)
    word = torch.zeros(1, device=device)
    for number, pairs in enumerate(rounds(ranks.n_nodes)):
        for way in (1, -1):
            ranks.phase(f"links between nodes, round {number + 1}{' back' if way < 0 else ''}")
            links = [[node * n + ranks.launch.local_rank for node in pair[::way]] for pair in pairs]
            source, target = next((link for link in links if here in link), (-1, -1))

            def once(size: int, source: int = source, target: int = target) -> float:
                meet(word)
                start = time.perf_counter()
                if here == source:
                    dist.send(buffer[:size], target)
                elif here == target:
                    dist.recv(buffer[:size], source)
                    buffer[:1].tolist()  # waits for the device
                return time.perf_counter() - start

            least = sizes.messages[0]
            rate = least / longest(partial(once, least), word, None)
            size = max(s for s in sizes.messages if s == least or s / rate < MESSAGE_SECONDS)
            typical, worst = repeated(partial(once, size), size / rate)
            if here == target:
                rates = size / typical, size / worst
                found.append({"from": source, "to": here, "rate": rates})
    return found


# ---- the run ----


def measure(ranks: Ranks, args: argparse.Namespace) -> dict:
    """This rank's record, which JSON can hold."""
    launch = ranks.launch
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    sizes = SIZES[device.type]
    record = {"rank": launch.rank, "node": ranks.node, "host": socket.gethostname()}
    record |= {"gpu": launch.local_rank, **describe(device)}
    ranks.phase("computation on one device")
    record |= {"figures": measure_device(device, sizes), "exact": exact_matmuls(device)}
    ranks.phase("start of the process group")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", ranks.store),
        rank=launch.rank,
        world_size=launch.size,
        timeout=timedelta(seconds=args.limit),
    )
    mesh = (ranks.n_nodes, launch.local_size)
    in_node = group_along(mesh, 1, "node", args.limit)
    ranks.phase("collectives in a node")
    record["figures"] |= measure_collectives(in_node, device, sizes, "in a node")
    record["links"] = measure_links(ranks, device, sizes)
    ranks.phase("collectives over all nodes")
    if ranks.n_nodes > 1:
        everyone = dist.group.WORLD
        record["figures"] |= measure_collectives(everyone, device, sizes, "over all nodes")
    ranks.phase("done")
    return record


def summary(records: list[dict]) -> dict[str, float]:
    """The lowest figures of any rank, which `make plan` counts on: FLOP/s and bytes/s."""
    names = {"matmul_float32": "matmul float32", "matmul_bfloat16": "matmul bfloat16"}
    names |= {"memory": "memory", "inside_node": "all-reduce in a node"}
    lowest = {
        key: min(r["figures"][name][0] for r in records)
        for key, name in names.items()
        if name in records[0]["figures"]
    }
    links = [x["rate"][0] for r in records for x in r["links"]]
    return lowest | ({"across_nodes": min(links)} if links else {})


def one_rank(launch: Launch, args: argparse.Namespace) -> int:
    """What each process does; rank 0 returns 1 if something is missing or far off."""
    ranks = Ranks(launch, args)
    ranks.join()
    ranks.watch()
    try:
        record = measure(ranks, args)
    except RuntimeError as error:  # of a collective, whose peer has gone
        if launch.rank == 0:
            ranks.leave(f"failed in {ranks.phase_name!r}: {error}; {ranks.stragglers()}")
        ranks.leave(f"{socket.gethostname()}: failed in {ranks.phase_name!r}: {error}")
    ranks.store.set(f"record/{launch.rank}", json.dumps(record))
    if launch.rank > 0:
        ranks.store.get("done")  # rank 0 hosts the store
        dist.destroy_process_group()
        return 0
    records = [json.loads(ranks.store.get(f"record/{r}")) for r in range(launch.size)]
    findings = judge(records, args.tolerance)
    print(report(records, findings), flush=True)
    content = {"summary": summary(records), "findings": findings, "ranks": records}
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"every figure: {args.out}; {time.monotonic() - ranks.started:.0f} s", flush=True)
    ranks.store.set("done", "")
    dist.destroy_process_group()
    return 1 if findings else 0


def start_here(n: int) -> int:
    """Run this module once per GPU of this machine; the highest exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(n))
    command = [sys.executable, "-m", "tools.gpu.preflight", *sys.argv[1:]]
    processes = []
    try:
        for rank in range(n):
            environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            processes.append(subprocess.Popen(command, env=environment))
        return max(process.wait() for process in processes)
    finally:
        for process in processes:
            process.kill()


def main() -> int:
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--nproc", type=positive_int, help="processes on this machine: default one per GPU, or 2")
    add("--tolerance", type=float, default=0.1, help="how far below its peers is too far")
    add("--join-seconds", type=float, default=60, help="a node that is later is missing")
    add("--limit", type=float, default=110, help="seconds until it ends, whatever hangs")
    add("--out", type=Path, default=Path("preflight.json"), help="where every figure goes")
    args = parser.parse_args()
    launch = launch_environment()
    if launch.address is not None:
        return one_rank(launch, args)
    return start_here(args.nproc or torch.cuda.device_count() or 2)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
