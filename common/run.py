"""A run: its folder, its steps, what it logs, and when it stops.

The folder holds `config.json`, `metrics.jsonl` (one object a line), TensorBoard events and
`checkpoints/`. Rank 0 writes; the numbers are the same on every rank.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import itertools
import json
import math
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from common.checkpoint import Checkpointer, checkpoints
from common.collectives import all_reduce_control, ledger
from common.data import Corpus
from common.distributed import launch_environment, print0, rank, refuse, world_size
from common.model import TransformerConfig

# dense bf16 tensor-core peaks in FLOP/s by a part of the device's name, from NVIDIA's and AMD's
# data sheets; the longer name first where one holds the other
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250": 362e12,
}


# where TensorBoard, which groups its charts by the word before the slash, shows a metric
TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/val",
    "test_loss": "loss/test",
    "val_ppl": "perplexity/val",
    "test_ppl": "perplexity/test",
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "tokens_per_s": "speed/tokens_per_s",
    "step_ms": "speed/step_ms",
    "save_ms": "speed/save_ms",
    "seconds_left": "speed/seconds_left",
    "gpu_utilisation": "speed/gpu_utilisation",
    "mfu": "speed/mfu",
    "memory_mb": "memory/memory_mb",
    "model_state_mb": "memory/model_state_mb",
    "comm_mb": "comm/comm_mb",
}


def peak_flops(device_name: str) -> float | None:
    """bf16 peak of a GPU by its name, None if it is not known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


def live_storages() -> dict[int, int]:
    """Bytes of each storage of floating-point numbers that a living Python tensor refers to."""
    found = {}
    for obj in gc.get_objects():
        # the compiler's stand-ins have no memory: subclasses, and plain tensors that wrap one
        if type(obj) not in (Tensor, torch.nn.Parameter) or obj.is_meta:
            continue
        if obj.is_floating_point() and not torch._is_functional_tensor(obj):
            storage = obj.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def model_state_bytes() -> int:
    """Bytes of weights, gradients and moments on this rank, counted and not computed.

    Called between the optimizer's step and `zero_grad`, when they are all there and the
    activations are gone.
    """
    return sum(live_storages().values())


def gpu_utilisation(device: torch.device) -> Callable[[], int | None]:
    """A function that tells in which share of the last moments, in percent, the GPU was at work.

    It asks what `nvidia-smi` asks, the library of NVIDIA's driver, which answers at once; None
    where there is no such GPU.
    """
    handle, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)()  # of the GPU, and of its memory
    if device.type != "cuda":
        return lambda: None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return lambda: None
    except (OSError, AttributeError):
        return lambda: None
    return lambda: None if nvml.nvmlDeviceGetUtilizationRates(handle, rates) else rates[0]


class SecondSignal:
    """End the process when SIGTERM or Ctrl-C comes again, two seconds or more after the first.

    Python runs its handlers between two of its own instructions, and a backward is one of them,
    however long. The C handler writes the signal's number to a wake-up socket at once, and a
    thread reads it there. A launcher may pass on what a process has got already: that is no second
    signal. `ignored` is set when the first was heeded, and a checkpoint is being written.

    It knows nothing of the run, and its thread ends with `close`: a process group that a thread
    keeps alive to the interpreter's exit aborts the process.
    """

    def __init__(self) -> None:
        self.ignored = False
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)  # as set_wakeup_fd wants it
        self.before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        first = math.inf
        while numbers := self.reader.recv(64):
            for number in set(numbers) & {signal.SIGTERM, signal.SIGINT}:
                now = time.monotonic()
                first = min(first, now)
                if now - first >= 2.0 and not self.ignored:
                    print0("ended at once by a second signal, without saving", file=sys.stderr)
                    os._exit(128 + number)

    def close(self) -> None:
        signal.set_wakeup_fd(self.before)
        self.writer.shutdown(socket.SHUT_RDWR)  # ends the thread
        self.thread.join()
        self.writer.close()
        self.reader.close()


class Run:
    """One training run, from the flags; see the module's docstring.

    script: the stage's file, whose folder names the stage.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        script: str,
        config: TransformerConfig,
        device: torch.device,
        corpus: Corpus,
    ):
        self.args, self.config, self.device = args, config, device
        if device.type == "cpu":
            keep_freed_memory()
        self.stage = Path(script).resolve().parent.name
        stage_folder = Path("runs", self.stage)
        self.folder = Path(args.run_dir or stage_folder / run_id(stage_folder))
        self.history: list[dict] = []
        self.stop_group = timeout = None
        if dist.is_initialized():
            timeout = timedelta(seconds=args.timeout)
            self.stop_group = dist.new_group(backend="gloo", timeout=timeout, group_desc="stop")
        vocabulary = hashlib.sha256("\n".join(corpus.vocab).encode()).hexdigest()[:12]
        self._described = {
            "arguments": {k: 0 if v == math.inf else v for k, v in vars(args).items()},
            **{"vocabulary": vocabulary, "corpus": corpus.digest},
        }
        self.checkpoints = Checkpointer(self.folder / "checkpoints", timeout, self._described)
        self._handlers: dict = {}
        self._asked_to_stop = False
        self._stopping = False
        self._line: dict = {}
        self._clock, self._busy, self._steps_timed = 0.0, 0.0, 0
        self._board = self._metrics = self._bar = None
        self._model_state_mb: float | None = None
        name = torch.cuda.get_device_name() if device.type == "cuda" else ""
        self._peak = peak_flops(name)
        self._gpu_utilisation = gpu_utilisation(device)
        sys.excepthook = _calm_interrupt
        trouble = self._open(name) if rank() == 0 else None
        if self._any_rank(trouble is not None):
            refuse(str(trouble))
        # the flag says how a run begins; in a later life it goes on from what it has saved itself
        later_life = has_restarted() and bool(checkpoints(self.checkpoints.path))
        if args.resume != "auto" and self._any_rank(later_life):
            args.resume = "auto"

    def _open(self, device_name: str) -> str | None:
        """Make the folder and begin its files; returns what has gone wrong."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._make_checkpoint_folder()
            described = {
                "stage": self.stage,
                **self._described,
                "parameters": self.config.num_parameters(),
                "world_size": world_size(),
                "launcher": launch_environment().launcher,
                "device": device_name or platform.processor() or platform.machine(),
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
                "git_commit": git_commit(),
            }
            (self.folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
            self._board = SummaryWriter(self.folder)
        except OSError as error:
            return f"--run-dir {self.folder}: cannot write there: {error}"
        millions = described["parameters"] / 1e6
        print0(
            f"{self.stage}: {millions:.2f} M parameters, {world_size()} x {self.device.type}, "
            f"data {self.args.data} (hash {described['corpus']}), run folder {self.folder}"
        )
        return None

    def _make_checkpoint_folder(self) -> None:
        """And try it; under `--resume never` an earlier run's checkpoints are moved aside."""
        folder = self.checkpoints.path
        if self.args.resume == "never" and not has_restarted() and checkpoints(folder):
            earlier = _new_folder(self.folder, "checkpoints-earlier")
            folder.rename(earlier)
            print0(f"--resume never: the checkpoints of the earlier run are now in {earlier}")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()

    # ---- steps ----

    def steps(self, first: int) -> Iterator[int]:
        """The steps from `first` to `--steps`, until the ranks agree to stop.

        Drops the lines that a run which went further has left behind; shows a progress bar at a
        terminal; with `--profile` traces steps 4 to 6 after the first.
        """
        if first >= self.args.steps:
            print0(f"nothing left to do: {first} steps are done, --steps is {self.args.steps}")
        self._drop_lines_from(first)
        ledger.reset()  # what the start has sent belongs to no step
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, self._ask_to_stop)
        self._second_signal = SecondSignal()
        self._bar = tqdm(
            total=self.args.steps,
            initial=first,
            unit="step",
            disable=rank() != 0 or not sys.stderr.isatty(),
        )
        profiler = self._profiler() if self.args.profile else None
        self._first, self._started = first, time.perf_counter()
        try:
            for step in range(first, self.args.steps):
                self._clock = time.perf_counter()
                yield step
                self._bar.update()
                if profiler:
                    profiler.step()
                if self._stopping:
                    break
        finally:
            self._second_signal.close()
            if profiler:
                profiler.stop()
            self._bar.close()

    def _ask_to_stop(self, *_) -> None:
        self._asked_to_stop = True

    def _profiler(self) -> torch.profiler.profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would print two lines of its own
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=1, warmup=2, active=3, repeat=1),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                str(self.folder / "profile"), worker_name=f"rank{rank()}"
            ),
        )
        profiler.start()
        return profiler

    def evaluates(self, step: int) -> bool:
        """Is the validation loss due after this step? Every `--eval-every`, and at the end."""
        return self._is_due(step, self.args.eval_every)

    def saves(self, step: int) -> bool:
        """Is a checkpoint due after this step? Every `--checkpoint-every`, at the end if that is
        set, and when any rank was asked to stop (SIGTERM, SIGUSR1), after which no step follows.

        The ranks agree on it, in a group of their own: a collective that only some enter hangs.
        """
        self._stopping = self._any_rank(self._asked_to_stop or self.checkpoints.has_failed())
        if self._stopping:
            self._second_signal.ignored = True
            self.checkpoints.wait()  # which ends the run if it was a save that failed
            print0(f"asked to stop: saving after step {step}")
        due = self.args.checkpoint_every > 0 and self._is_due(step, self.args.checkpoint_every)
        if due or self._stopping:
            self._refuse_nan(step)
        return due or self._stopping

    def _any_rank(self, mine: bool) -> bool:
        wish = torch.tensor(float(mine))
        if self.stop_group is not None:
            all_reduce_control(wish, group=self.stop_group)
        return wish.item() > 0

    def _is_due(self, step: int, every: int) -> bool:
        return self.is_last(step) or (every > 0 and (step + 1) % every == 0)

    def is_last(self, step: int) -> bool:
        return step + 1 == self.args.steps

    # ---- logging ----

    def log(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Note a step's numbers; every `--log-every` steps, and at both ends, in a line.

        loss: mean over the global batch. grad_norm: global, before clipping. Call it between the
        optimizer's step and `zero_grad`.
        """
        self._loss, self._grad_norm, args = loss, grad_norm, self.args
        logs = step == 0 or self._is_due(step, args.log_every) or self.evaluates(step)
        self._line = {"step": step}
        if self._model_state_mb is None:  # before the first save, which makes a copy of it
            self._model_state_mb = model_state_bytes() / 1e6
        if logs:
            self._line |= {"loss": loss.item(), "grad_norm": float(grad_norm), "lr": lr}
            self._refuse_nan(step)
        self._busy += time.perf_counter() - self._clock
        self._steps_timed += 1
        if not logs:
            return
        seconds = self._busy / self._steps_timed
        tokens = args.global_batch_size * args.seq_len
        self._line |= {
            "tokens_per_s": tokens / seconds,
            "step_ms": 1e3 * seconds,
            "memory_mb": self._memory_mb(),
            "model_state_mb": self._model_state_mb,
            "comm_mb": ledger.total_ring_bytes / 1e6 / self._steps_timed,
        }
        if self.checkpoints.blocked_seconds:
            self._line["save_ms"] = 1e3 * self.checkpoints.blocked_seconds
            self.checkpoints.blocked_seconds = 0.0
        if self._peak:
            flops = self.config.flops_per_token() * tokens / seconds
            self._line["mfu"] = flops / (self._peak * world_size())
        utilisation = self._gpu_utilisation()
        if utilisation is not None:
            self._line["gpu_utilisation"] = utilisation
        # at the pace so far, with its evaluations and saves
        pace = (time.perf_counter() - self._started) / (step + 1 - self._first)
        self._line["seconds_left"] = pace * (args.steps - step - 1)
        self._busy, self._steps_timed = 0.0, 0
        ledger.reset()

    def log_evaluation(self, name: str, loss: float) -> None:
        """Add `val` or `test` loss (nats a token) and its perplexity to the step's line."""
        self._line |= {f"{name}_loss": loss, f"{name}_ppl": math.exp(min(loss, 700.0))}

    def write(self) -> None:
        """Write the step's line, before a checkpoint that counts the step as done."""
        line = self._line
        self._line = {}
        if len(line) < 2:
            return
        self.history.append(line)
        if rank() != 0:
            return
        if self._metrics is None:
            self._metrics = open(self.folder / "metrics.jsonl", "a")
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        for name, value in line.items():
            if name != "step":
                self._board.add_scalar(TAGS.get(name, name), value, line["step"])
        if self._bar is not None:
            self._bar.clear()
        print0(_readable(line))

    def finish(self) -> list[dict]:
        """Wait for the last save and close the files; returns the lines of this process.

        Signals are taken until then, so that a second one does not end the save.
        """
        self.write()
        self.checkpoints.close()
        if self.history and not self.args.checkpoint_every and not self._stopping:
            print0("no checkpoint was saved: pass --checkpoint-every to resume or export a run")
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if rank() == 0:
            self._board.close()
            if self._metrics is not None:
                self._metrics.close()
        if self.stop_group is not None:
            dist.destroy_process_group(self.stop_group)
        return self.history

    def _refuse_nan(self, step: int) -> None:
        """Stop at a loss that is no number, or at a gradient that has just made weights so."""
        for name, value in (("loss", self._loss), ("gradient norm", self._grad_norm)):
            if not math.isfinite(float(value)):
                self.checkpoints.wait()  # of an earlier step, and good
                refuse(
                    f"the {name} of step {step} is {float(value)}: stopped, nothing saved since; "
                    "try a lower --lr, a lower --grad-clip or more --warmup-steps",
                    status=1,
                )

    def _memory_mb(self) -> float:
        """Peak so far: of the GPU's allocator, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e6
        kilo = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo / 1e6

    def _drop_lines_from(self, first: int) -> None:
        path = self.folder / "metrics.jsonl"
        if rank() != 0 or not path.exists():
            return
        kept = [x for x in path.read_text().splitlines(True) if _step_of(x) < first]
        aside = path.with_suffix(".writing")
        aside.write_text("".join(kept))
        aside.replace(path)


def _calm_interrupt(kind, error, trace) -> None:
    """Ctrl-C is no failure: one line in place of a traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print0("\ninterrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _step_of(line: str) -> float:
    """A line's step; of a line cut short by a kill, infinity."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return math.inf


def _readable(line: dict) -> str:
    parts = [f"step {line['step']:5d}"]
    if "loss" in line:
        parts += [
            f"loss {line['loss']:.4f}",
            f"norm {line['grad_norm']:.3f}",
            f"lr {line['lr']:.2e}",
            f"{line['tokens_per_s']:,.0f} tok/s",
            f"{line['step_ms']:.1f} ms",
            f"{line['memory_mb']:,.0f} MB",
            f"sent {line['comm_mb']:.2f} MB",
        ]
    if "save_ms" in line:
        parts.append(f"save {line['save_ms']:.1f} ms")
    if "gpu_utilisation" in line:
        parts.append(f"GPU {line['gpu_utilisation']} %")
    if "mfu" in line:
        parts.append(f"MFU {100 * line['mfu']:.1f} %")
    if "seconds_left" in line:
        parts.append(f"left {timedelta(seconds=round(line['seconds_left']))}")
    parts += [
        f"{k.replace('_', ' ')} {v:.4g}" for k, v in line.items() if k[:4] in ("val_", "test")
    ]
    return "  ".join(parts)


def keep_freed_memory() -> None:
    """Have glibc keep large buffers that are freed, for those of the next step.

    By default it maps each one over 32 MB anew and hands it back; with a large vocabulary the page
    faults are a third of a CPU's step. Where there is no glibc nothing happens.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_threshold, 2**30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):
        pass


def run_id(parent: Path) -> str:
    """The launcher's id of this run, which a requeued job keeps; else the time on rank 0.

    parent: of the run's folder.
    """
    env = os.environ
    elastic = env.get("TORCHELASTIC_RUN_ID", "none")
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env:
        job, step = env["SLURM_JOB_ID"], env["SLURM_STEP_ID"]
        return job if step == "0" else f"{job}.{step}"  # each srun of a job is a run
    if elastic != "none":
        return elastic
    told = [_new_folder(parent, time.strftime("%Y%m%d-%H%M%S")).name if rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return told[0]


def _new_folder(parent: Path, name: str) -> Path:
    """Make a folder of this name, or with a number behind it where another has the name."""
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            pass  # `Run._open` will meet it too, and reports it
        return folder


def has_restarted() -> bool:
    """Whether Slurm has requeued this job, or torchrun has started its processes again."""
    counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return any(int(os.environ.get(count, 0)) > 0 for count in counts)


def annotate(name: str) -> AbstractContextManager:
    """Name the work inside in the trace of --profile.

    `record_function` alone takes 0.2 ms in the middle of a step on a CPU, even if nothing is
    traced. Only a private function tells whether something is.
    """
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return nullcontext()


def git_commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--verify", "-q", "HEAD"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
