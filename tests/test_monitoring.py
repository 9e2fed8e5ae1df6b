"""Metrics about the run itself: the time left, and the GPU's utilization."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from common.run import _readable, gpu_utilisation

SMALL = "--d-model 16 --n-layers 1 --n-heads 2 --seq-len 16 --global-batch-size 4".split()
GPU = torch.device("cuda", 3)


class Driver:
    """A replacement for NVIDIA's library: one GPU with this UUID and a utilization of 87 %."""

    def __init__(self, uuid: str, status: int = 0):
        self.uuid, self.status = uuid, status

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle) -> int:
        handle._obj.value = 77
        return 0 if uuid == b"GPU-" + self.uuid.encode() else 6

    def nvmlDeviceGetUtilizationRates(self, handle, rates) -> int:
        assert handle.value == 77
        rates[0], rates[1] = 87, 12
        return self.status


def absent(_: str):
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    "library, expected",
    [
        (lambda _: Driver("a-b"), 87),
        (lambda _: Driver("a-b", status=3), None),  # a part of a GPU (MIG) has no utilization
        (lambda _: Driver("c-d"), None),
        (lambda _: object(), None),
        (absent, None),
    ],
    ids=["supported", "not supported", "another GPU", "another library", "no library"],
)
def test_gpu_utilization_or_none_where_it_is_unknown(monkeypatch, library, expected):
    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a-b"), raising=False
    )
    assert gpu_utilisation(GPU)() == expected
    assert gpu_utilisation(torch.device("cpu"))() is None


@pytest.mark.slow
def test_metrics_report_the_seconds_left(pools, corpus_dir):
    flags = [*SMALL, "--data", str(corpus_dir), "--steps", "6", "--log-every", "2"]
    (metrics,) = pools(1, group=False).train("01", flags)
    left = [line["seconds_left"] for line in metrics]
    assert all(x > 0 for x in left[:-1]) and left[-1] == 0
    line = metrics[1] | {"seconds_left": 3723.4, "gpu_utilisation": 87}
    assert "GPU 87 %  left 1:02:03" in _readable(line)
