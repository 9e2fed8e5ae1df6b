"""Four ways to average gradients, from one all-reduce per parameter to the buckets of train.py.

Each rung of the ladder repairs a weakness of the previous one. All of them leave the same averaged
gradients in `param.grad`. They differ in the number of all-reduces and in when these start.

    torchrun --nproc-per-node 2 02_ddp/ladder.py
    torchrun --nproc-per-node 2 02_ddp/ladder.py --latency-ms 2 --mb-per-s 80

The second command simulates a network: one all-reduce after the other, each of which takes the
latency plus its bytes over the bandwidth, and little time of the CPU, as with a network card. Gloo
alone uses the cores on which the ranks compute.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import train
from torch import Tensor, nn

from common.distributed import print0
from common.model import Transformer, TransformerConfig, init_weights

from common.job.arguments import positive
from common.job.launch import cleanup, setup

# ---- the network ----


class Transfer:
    """An all-reduce in flight, with the `wait` of `torch.distributed.Work`."""

    def __init__(self, future: Future):
        self.wait = future.result


class Network:
    """All-reduces in the order of the calls, one at a time, on a thread of their own."""

    def __init__(self, latency_ms: float, mb_per_s: float):
        self.latency, self.bandwidth = latency_ms / 1e3, mb_per_s * 1e6
        self.calls = 0
        self.link = ThreadPoolExecutor(max_workers=1)
        self.group = dist.new_group()  # else calls of this thread and of others could change places

    def all_reduce(self, tensor: Tensor, group=None, async_op: bool = False) -> Transfer | None:
        self.calls += 1
        transfer = Transfer(self.link.submit(self.transfer, tensor))
        return transfer if async_op else transfer.wait()

    def transfer(self, tensor: Tensor) -> None:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        time.sleep(self.latency + tensor.nbytes / self.bandwidth)
        work.wait()


# ---- the rungs ----


class NoAverage:
    """Computation alone, for comparison. Each rung averages in a `finish` of its own."""

    def __init__(self, model: nn.Module, network: Network):
        self.model, self.network = model, network
        self.params, self.n_ranks = list(model.parameters()), dist.get_world_size()

    def finish(self) -> None:
        """Call it after backward."""


class PerParameter(NoAverage):
    """One all-reduce per parameter, after backward: every call pays the latency."""

    def finish(self) -> None:
        for param in self.params:
            param.grad /= self.n_ranks
            self.network.all_reduce(param.grad)


class Flat(NoAverage):
    """One all-reduce of all gradients in one buffer, after backward: one latency, two copies."""

    def finish(self) -> None:
        flat = torch.cat([param.grad.flatten() for param in self.params]) / self.n_ranks
        self.network.all_reduce(flat)
        sizes = [param.numel() for param in self.params]
        for param, chunk in zip(self.params, flat.split(sizes), strict=True):
            param.grad.copy_(chunk.view_as(param))


class Overlapped(NoAverage):
    """One all-reduce per parameter, as soon as its gradient is final, while backward continues."""

    def __init__(self, model: nn.Module, network: Network):
        super().__init__(model, network)
        self.in_flight: list[Transfer] = []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.launch)

    def launch(self, param: nn.Parameter) -> None:
        param.grad /= self.n_ranks
        self.in_flight.append(self.network.all_reduce(param.grad, async_op=True))

    def finish(self) -> None:
        for transfer in self.in_flight:
            transfer.wait()
        self.in_flight.clear()


class Bucketed(NoAverage):
    """The class of train.py: one all-reduce per bucket, as soon as the bucket is ready."""

    def __init__(self, model: nn.Module, network: Network):
        super().__init__(model, network)
        train.all_reduce = network.all_reduce
        self.wrapper = train.DistributedDataParallel(model, bucket_cap_mb=1.0)

    def finish(self) -> None:
        self.wrapper.finish_gradient_synchronization()


RUNGS = {
    "computation alone": NoAverage,
    "per parameter, after backward": PerParameter,
    "one flat buffer, after backward": Flat,
    "per parameter, overlapped": Overlapped,
    "buckets, overlapped": Bucketed,
}

# ---- the measurement ----


def new_model() -> Transformer:
    model = Transformer(TransformerConfig(vocab_size=512, n_layers=4))
    init_weights(model, seed=0)
    return model


def timed_step(rung: NoAverage, tokens: Tensor) -> float:
    """Forward, backward and averaging: ms on the slowest rank."""
    rung.model.zero_grad(set_to_none=True)
    rung.network.calls = 0
    dist.barrier()
    start = time.perf_counter()
    rung.model(tokens, tokens).backward()
    rung.finish()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return 1e3 * seconds.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=0.0, help="per all-reduce, simulated")
    parser.add_argument("--mb-per-s", type=positive, default=float("inf"), help="simulated")
    args = parser.parse_args()
    setup()
    network = Network(args.latency_ms, args.mb_per_s)
    rungs = {name: rung(new_model(), network) for name, rung in RUNGS.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(512, (16, 64), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in rungs}
    calls = {}
    # two steps to warm up; the rungs take turns, so that a busy machine slows them all
    for _ in range(2 + 10):
        for name, rung in rungs.items():
            times[name].append(timed_step(rung, tokens))
            calls[name] = network.calls
    for name in rungs:
        ms = median(times[name][2:])
        print0(f"{name:32} {calls[name]:3} all-reduces {ms:8.1f} ms")
    _, first, *others = ([param.grad for param in rung.params] for rung in rungs.values())
    for grads in others:
        torch.testing.assert_close(grads, first, rtol=1e-4, atol=1e-8)
    print0("all four leave the same gradients")


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
