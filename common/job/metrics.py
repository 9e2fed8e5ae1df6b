"""The metrics of a run: what a logged line holds, how it prints, and where it is written.

A line goes to the console, to `metrics.jsonl` and to TensorBoard. Rank 0 writes it.
"""

import contextlib
import gc
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from common.collectives import ledger
from common.distributed import print0, replacing, warn

from common.job.launch import rank, world_size
from common.job.paths import exists

# fmt: off
PEAK_FLOPS = {  # dense bf16, in FLOP/s, by a part of the device's name; the longer name first
    "GB200": 2500e12, "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12,
    "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "V100": 125e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12, "MI250": 181e12,  # MI250: one die
}  # from NVIDIA's and AMD's data sheets
# fmt: on

# for each key of a line: its tag in TensorBoard, which groups charts by the word before the slash,
# and its format on the console, where tokens per second tell the step's time, too
COLUMNS = {
    "step": ("", "step {:5d}"),
    "loss": ("loss/train", "loss {:.4f}"),
    "grad_norm": ("optimizer/grad_norm", "norm {:.3f}"),
    "lr": ("optimizer/lr", "lr {:.1e}"),
    "tokens_per_s": ("speed/tokens_per_s", "{:,.0f} tok/s"),
    "step_ms": ("speed/step_ms", ""),
    "model_state_mb": ("memory/model_state_mb", ""),  # said at the first step
    "memory_mb": ("memory/memory_mb", "peak {:,.0f} MB"),
    "comm_mb": ("comm/comm_mb", "sent {:.2f} MB"),
    "mfu": ("speed/mfu", "MFU {:.1%}"),
    "seconds_left": ("speed/seconds_left", "ETA {}"),
    "tokens": ("data/tokens", "{:,.0f} tokens"),
    "targets": ("data/targets", "{:,.0f} targets"),
    "save_ms": ("speed/save_ms", "save {:.1f} ms"),
    "val_loss": ("loss/val", "val loss {:.4g}"),
    "val_ppl": ("perplexity/val", "val ppl {:.4g}"),
    "test_loss": ("loss/test", "test loss {:.4g}"),
    "test_ppl": ("perplexity/test", "test ppl {:.4g}"),
}


def column(key: str) -> tuple[str, str]:
    return COLUMNS.get(key, (f"stage/{key}", f"{key} {{:,.2f}}"))  # one that a stage adds


def readable(line: dict) -> str:
    """A line as the console shows it; what only some steps have is in a second row."""
    shown = dict(line)
    if "seconds_left" in line:
        shown["seconds_left"] = short_time(line["seconds_left"])
    if not torch.cuda.is_available():  # then `memory_mb` is the process's: mostly PyTorch itself
        shown.pop("memory_mb", None)
    rows = ([], [])
    for key in (key for key in COLUMNS | shown if key in shown):
        is_rare = key == "save_ms" or key.startswith(("val_", "test_"))
        rows[is_rare].append(column(key)[1].format(shown[key]))
    return "\n            ".join("  ".join(filter(None, row)) for row in rows if row)


def short_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def peak_flops(device_name: str) -> float | None:
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def model_state_bytes() -> int:
    """Count the bytes of weights, gradients and optimizer state in this rank's living tensors.

    Call it between the optimizer's step and `zero_grad`, when the activations are freed.
    """
    storages = {}
    for obj in gc.get_objects():
        # the compiler's fake tensors have no memory: subclasses, and plain tensors that wrap one
        if type(obj) not in (Tensor, nn.Parameter) or obj.is_meta:
            continue
        if obj.is_floating_point() and not torch._is_functional_tensor(obj):
            storage = obj.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_memory_bytes(device: torch.device) -> int:
    """Peak since the start: of the GPU's allocator, on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobyte = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte


class Metrics:
    """Collects the metrics of a step and writes those of the logged steps, one line each.

    n_steps: of the whole run. tokens, flops: per step, over all ranks.
    """

    def __init__(self, n_steps: int, tokens: int, flops: float, device: torch.device, folder: Path):
        self.lines: list[dict] = []  # written since the start of this process
        self.line: dict = {}  # of the present step
        self._device, self._path = device, folder / "metrics.jsonl"
        self._n_steps, self._tokens, self._flops = n_steps, tokens, flops
        self._peak_flops = peak_flops(device_name(device))
        self._model_state_mb: float | None = None
        self._first: tuple[int, float] | None = None  # this process's first step, and its end
        self._step_started = 0.0
        self._seconds: list[float] = []  # of the steps since the last line
        self._file = self._board = None

    def open(self, first: int) -> None:
        """Open the files, without the lines of steps that are done again."""
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        lines = self._path.read_bytes().splitlines() if exists(self._path) else []
        with replacing(self._path) as file:
            file.writelines(line + b"\n" for line in lines if step_of(line) < first)
        self._file = open(self._path, "a")
        with self._only_warning():
            self._board = SummaryWriter(self._path.parent, purge_step=first)

    @contextlib.contextmanager
    def _only_warning(self) -> Iterator[None]:
        """A line that cannot be written, to a full disk for example, ends no run."""
        try:
            yield
        except Exception as error:  # TensorBoard's thread may raise any
            warn(f"metrics cannot be written to {self._path.parent}: {error}")

    def start_step(self) -> None:
        self._step_started = time.perf_counter()

    def end_step(
        self, step: int, loss: Tensor, norm: Tensor, lr: float, is_logged: bool, **others: Tensor
    ) -> None:
        """Time the step. If it is logged, add the averages since the last logged step."""
        if self._model_state_mb is None:  # before the first save, which copies the model state
            self._model_state_mb = model_state_bytes() / 1e6
            state = f"model state {self._model_state_mb:,.2f} MB on rank 0"
            print0(f"{state}, {self._tokens:,} tokens per step")
        self.line = {"step": step}
        if is_logged:  # within the step's time: this waits for the GPU
            self.line |= {"loss": loss.item(), "grad_norm": float(norm), "lr": lr}
            self.line |= {name: float(value) for name, value in others.items()}
        now = time.perf_counter()
        self._seconds.append(now - self._step_started)
        self._first = self._first or (step, now)
        if not is_logged:
            return
        seconds = fmean(self._seconds)
        self.line |= {
            "tokens_per_s": self._tokens / seconds,
            "step_ms": 1e3 * seconds,
            "memory_mb": peak_memory_bytes(self._device) / 1e6,
            "model_state_mb": self._model_state_mb,
            "comm_mb": ledger.total_ring_bytes / 1e6 / len(self._seconds),
        }
        first, its_end = self._first
        if step > first:  # which warmed up: it is no measure of the others
            pace = (now - its_end) / (step - first)
            self.line["seconds_left"] = pace * (self._n_steps - step - 1)
        if self._peak_flops:
            self.line["mfu"] = self._flops / seconds / (self._peak_flops * world_size())
        self._seconds = []

    def write(self) -> None:
        """Write the step's line if it has one."""
        line, self.line = self.line, {}
        if len(line) < 2:
            return
        self.lines.append(line)
        ledger.reset()  # what an evaluation has sent belongs to no step
        if rank() != 0:
            return
        with self._only_warning():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()  # what could not be written is written with a later line
            if os.fstat(self._file.fileno()).st_nlink == 0:
                warn(f"{self._path} was removed: the metrics of this run are lost from there on")
            for name, value in line.items():
                if name != "step" and self._board:
                    self._board.add_scalar(column(name)[0], value, line["step"])
        print0(readable(line))

    def close(self) -> None:
        for file in filter(None, (self._file, self._board)):
            with self._only_warning():
                file.close()


def step_of(line: bytes) -> float:
    """The step of a line in metrics.jsonl; infinity if it is not one, or cut short by a kill."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
