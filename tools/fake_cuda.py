"""`make dry-run-NN ARGS="--device cuda"`: a stage's main on CUDA tensors, on a machine without GPU.

Fake tensors compute nothing, and what PyTorch's core asks of a GPU is compiled from fake_cuda.cpp.
So all of a run uses the operators that PyTorch chooses on a GPU, and has their memory. Tensors on
different devices are an error. `Watch` counts, by its place in the code, what a real run does
without a word: the host waits for the GPU, or computes itself. tests/README.md: what it cannot see.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from common.collectives import ledger

from common.job.launch import fail
from common.job.run import Run
from tools.fake_stage import Report, fake_stage, report_of
from tools.memory import PeakMemory, device_of
from tools.stages import load_stage

GPUS = 8  # per node, as in fake_cuda.cpp
GPU = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30)


@cache
def load() -> None:
    """Make this process believe in GPUs, until it ends. Compiles fake_cuda.cpp once (7 s)."""
    source, root = Path(__file__).with_suffix(".cpp"), Path(torch.__file__).parent
    digest = hashlib.sha256(source.read_bytes() + repr((torch.__version__, root)).encode())
    library = source.parent / f"__pycache__/fake_cuda-{digest.hexdigest()[:12]}.so"
    if not library.exists():
        compiler = shutil.which("g++") or fail("--device cuda needs g++, which is not installed")
        library.parent.mkdir(exist_ok=True)
        aside = library.with_suffix(f".{secrets.token_hex(6)}")
        flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib"]
        command = [compiler, *flags, source, "-lc10", "-ltorch_cpu", "-o", aside]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr.strip())
            fail(f"g++ cannot compile {source.name} for PyTorch {torch.__version__}: {why}")
        aside.replace(library)
    ctypes.CDLL(str(library))
    if not torch.backends.cuda.is_built():  # then a fused norm is decomposed, unlike on a GPU
        load.norm = torch.library.Library("aten", "IMPL")  # unregisters when it is collected
        load.norm.impl("_fused_rms_norm", lambda *_: None, "CUDA")


def torch_cuda(watch: Watch) -> list:
    """Patches: torch.cuda as it answers on a node with eight H100."""
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: GPUS,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(device.index),
        "get_device_properties": lambda *_: GPU,
        "get_device_capability": lambda *_: (GPU.major, GPU.minor),
        "get_device_name": lambda *_: GPU.name,
        "max_memory_allocated": lambda *_: 0,
        "synchronize": lambda *_: watch.note("waits", "synchronize"),
        "is_current_stream_capturing": lambda: False,
        "Stream": lambda *_: None,
        "current_stream": lambda *_: MagicMock(),
    }
    return [
        patch.multiple(torch.cuda, **answers),
        patch.object(torch.version, "cuda", "13.0"),
        patch.object(Tensor, "record_stream", lambda *_: None),
        patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        # fake tensors would initialize the GPU that they now believe in
        patch.object(fake_tensor, "init_gpu_context", lambda *_: None),
        patch.object(FakeTensorMode, "avoid_device_init", True),
    ]


# ---- what the host does ----

# their kernels on a GPU tell the host a size or a value
READ_BY_HOST = {
    *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    *("repeat_interleave", "histc", "multinomial", "_linalg_check_errors"),
}
NO_WORK = {"device", "empty", "empty_like", "new_empty", "is_pinned"}
PHASES = {"log": "log", "evaluate": "evaluate", "agree_to_save_or_stop": "save", "save": "save"}


def line_of(frame: FrameType, line: int) -> str:
    """`04_fsdp/train.py:123` for a line of a stage's script or of common/, "" for any other."""
    ours = frame.f_globals.get("__name__", "").startswith(("stage_", "common."))
    return "/".join(Path(frame.f_code.co_filename).parts[-2:]) + f":{line}" if ours else ""


def place_of(error: Exception) -> str:
    """The innermost such line that the error has passed."""
    lines = [line_of(*each) for each in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, reversed(lines)), "PyTorch")


class Watch(TorchDispatchMode):
    """Sees every operator before the fake tensors do.

    events: how often, by (phase, function, what, file and line). A phase is "start", "step", or one
    of PHASES. what: "waits: ..." for the GPU, or "computes: ..." on the CPU.
    """

    def __init__(self, gpu: int) -> None:
        super().__init__()
        self.gpu, self.phase = gpu, "start"
        self.events: Counter[tuple[str, str, str, str]] = Counter()

    def note(self, kind: str, what: str) -> None:
        """Count an event at the innermost line of the stage's script or common/ on the stack."""
        phase, function, line, frame = self.phase, "autograd", "", sys._getframe(1)
        while frame is not None:
            if place := line_of(frame, frame.f_lineno):
                if not line and not place.startswith("common/collectives.py"):
                    function, line = frame.f_code.co_qualname, place
                phase = PHASES.get(frame.f_code.co_name, phase)
            frame = frame.f_back
        if kind == "waits" or phase in ("step", "evaluate"):
            self.events[phase, function, f"{kind}: {what}", line] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        devices = [device_of(t) for t in inputs]
        on_gpu = any(d.type == "cuda" for d in devices)
        if any(d.type == "cuda" and d.index != self.gpu for d in devices):
            raise RuntimeError(f"{name} on another GPU than this rank's, cuda:{self.gpu}")
        if name == "_local_scalar_dense":  # fake tensors have no numbers: 0 is a vote, 1 a loss
            if on_gpu:
                self.note("waits", "item()")
            dtype = inputs[0].dtype
            return (float if dtype.is_floating_point else int)(on_gpu and dtype != torch.bool)
        if on_gpu and (name in READ_BY_HOST or self.has_mask(name, args)):
            self.note("waits", name)
        result = func(*args, **kwargs)
        outputs = [device_of(t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        kinds = {device.type for device in (*devices, *outputs)}
        if name in ("_to_copy", "copy_") and kinds >= {"cpu", "cuda"}:
            if not (kwargs.get("non_blocking") or (name == "copy_" and any(args[2:]))):
                to = "GPU" if outputs[0].type == "cuda" else "CPU"
                self.note("waits", f"copies to the {to}")
        elif {device.type for device in devices} >= {"cpu", "cuda"}:
            raise RuntimeError(f"{name} has tensors on the GPU and on the CPU")
        elif "cpu" in kinds and not (func.is_view or name in NO_WORK):
            self.note("computes", name)
        return result

    @staticmethod
    def has_mask(name: str, args: tuple) -> bool:
        """Whether the operator indexes with a mask, whose count of true elements the host reads."""
        if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
            return False
        fills = name != "index" and args[2].numel() == 1  # then it is a masked_fill
        return not fills and any(i is not None and i.dtype == torch.bool for i in args[1])


# ---- the run ----


def batches_in_this_process(steps, collate_fn, **_) -> Iterator:
    """In place of a DataLoader: real tensors, without a worker."""
    for step in steps:
        with _disable_current_modes():
            batch = collate_fn(step)
        yield batch


def stage_only(state, storage_writer, **_) -> Future:
    """In place of `dcp.async_save`: copies to host memory, and writes nothing."""
    storage_writer.stage(state)
    (saved := Future()).set_result(None)
    return saved


def run(
    number: str, ranks: int, rank: int, argv: list[str], vocabulary: int
) -> tuple[Report, Counter]:
    """Run two steps of stage `number`, then evaluate and save. Returns the memory and communication
    of the first step, and `Watch.events`."""
    load()
    watch, memory = Watch(rank % GPUS), PeakMemory("cuda", only_touched=True)
    reports = []

    class TwoSteps(Run):
        def steps(self, first: int) -> Iterator[int]:
            self.stepped, self.sent_before = [], Counter(ledger.ring)
            hook = register_optimizer_step_pre_hook(lambda each, *_: self.stepped.append(each))
            for step in super().steps(first):
                watch.phase = "step"
                yield step
            hook.remove()

        def log(self, *args, **others) -> None:
            if not reports:
                reports.append(report_of(self.stepped, self.sent_before, "cuda"))
                reports[0].peak = memory.bytes
            super().log(*args, **others)

    local = {"LOCAL_RANK": rank % GPUS, "LOCAL_WORLD_SIZE": min(ranks, GPUS)}
    launch = {"RANK": rank, "WORLD_SIZE": ranks, **local} if number != "01" else {}
    exchange, new_group = getattr(load_stage(number), "exchange_counts", None), dist.new_group
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        folder = enter(tempfile.TemporaryDirectory())
        argv = [*argv, *"--steps 2 --log-every 1 --checkpoint-every 2".split()]
        argv += ["--run-dir", folder]
        for each in (
            *torch_cuda(watch),
            patch.dict(os.environ, {name: str(value) for name, value in launch.items()}),
            patch.dict(sys.modules, {"torch.utils.tensorboard": MagicMock()}),
            patch("common.batches.DataLoader", batches_in_this_process),
            patch.object(dist, "broadcast_object_list"),
            patch("common.job.run.rank", lambda: 0),  # which makes the folder
            patch("common.job.checkpoint.dcp.async_save", stage_only),
            patch("common.job.checkpoint.Checkpointer.load", lambda *_: 0),
            patch.object(dist, "new_group", lambda *ranks, backend=0, **k: new_group(*ranks, **k)),
        ):
            enter(each)
        enter(contextlib.redirect_stdout(None))
        enter(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer")  # a guard compares them
        stage = enter(fake_stage(number, ranks, rank, argv, vocabulary, exchange, Run=TwoSteps))
        # shards on the CPU have a thread of their own in backward, and fake tensors allow only one
        enter(torch.autograd.set_multithreading_enabled(False))
        enter(memory)
        enter(watch)
        stage.main(argv)
    return reports[0], watch.events


def show_events(events: Counter) -> None:
    print(f"\n{'what the host does':42}{'in':36}{'times':>6}")
    for phase in ("start", "step", *dict.fromkeys(PHASES.values())):
        for (when, _, what, line), count in sorted(events.items()):
            if when == phase:
                print(f"  {phase:10}{what:30}{line:36}{count:6}")
