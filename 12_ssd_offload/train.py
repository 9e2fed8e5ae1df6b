"""Stage 12: FSDP whose state is in files on an SSD, with AdamW in threads during backward.

Each unit of stage 04 has a file on every rank, with this rank's shard of its parameters, AdamW's
moments, and the gradient. When a unit's gradient has been reduced, a thread updates the unit, while
backward continues. Clipping needs the norm of all gradients, which is known only after backward. So
the threads speculate that nothing is clipped, and write the new state into a second slot of the
file. If that was wrong, the step is redone from the old slot. The files vanish with the process.

`fsdp.py` beside this file has the classes of 04. The subclasses here override what changes.

    P parameters: E of the embedding, L of a layer, O of the output; N ranks, m micro-batches per
    step; float32

    memory per rank   four full units (six on Gloo), 19 shards of a unit, P / (256 N) bytes of norms
    files per rank    28 P / N bytes: two slots of 12, and the gradient
    read per step     (4 m (2 P - E - L - O) + 12 P + 4 (m - 1) P) / N bytes
    written per step  (4 m P + 12 P) / N bytes
    if it is redone   16 P / N bytes more are read, 12 P / N more are written
    communication     as in stage 04

Rajbhandari et al., "ZeRO-Infinity", SC 2021; Liao et al. (Fuyou), 2024; Lian et al.,
"SuperOffload", ASPLOS 2026: speculation, then validation.

Run it:

    torchrun --nproc-per-node 2 12_ssd_offload/train.py --data sample --steps 100
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # of the files beside this one

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.linalg import vector_norm
from torch.optim.adamw import adamw

import fsdp
from common.collectives import all_gather_single, all_reduce_control, norms_of_rows

# isort: split
from common.batches import eval_batches, train_batches
from common.distributed import World, print0
from common.guards import guard
from common.loss import IGNORED
from common.model import Transformer, initial_shard
from common.optimization import adamw_settings, learning_rate, set_learning_rate
from common.shards import State, state_of_flat_tensors

from common.job.arguments import base_parser, check_arguments, model_config
from common.job.corpus import load_corpus
from common.job.launch import cleanup, fail, setup, world_size
from common.job.run import Run

# ------------------------------------------------------------------------------------------------
# The technique: AdamW on files, during backward
# ------------------------------------------------------------------------------------------------


class SpeculativeAdamW:
    """AdamW on files, in threads. A unit is updated as soon as its gradient of the step is reduced.

    An update reads the current slot of the unit's file and writes the other one. If `step` finds
    that gradients are clipped, it repeats the updates: the current slot still has the old state.

    folder: on a local SSD. n_micro_batches: backward passes per step. speculates: False makes all
    updates wait for `step`.
    """

    def __init__(
        self, folder: Path, *, n_micro_batches: int = 1, speculates: bool = True, **adamw_settings
    ):
        beta1, beta2 = adamw_settings.pop("betas")
        defaults = {"eps": 1e-8, "amsgrad": False, "maximize": False, "fused": True}
        self.param_groups = [defaults | adamw_settings | {"beta1": beta1, "beta2": beta2}]
        self.step_settings: dict = {}  # arguments of `adamw` in this step, once it has begun
        self.folder, self.n_micro_batches = folder, n_micro_batches
        self.may_speculate = speculates  # in any step
        self.speculates_now = speculates  # in this step
        self.files: list[StateFile] = []  # one per unit
        self.slot = 0  # the current one, 0 or 1
        self.n_summed: Counter[StateFile] = Counter()  # micro-batches in the file's gradient
        self.norms: dict[StateFile, Tensor] = {}  # of complete gradients, per 1,024 elements
        self.n_redone_steps = 0
        # for three jobs, and three units' reads; a new thread would open a context on GPU 0
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else -1  # -1 changes nothing
        self.threads = ThreadPoolExecutor(6, initializer=torch.cuda.set_device, initargs=(gpu,))
        self.jobs: dict[StateFile, Future] = {}  # the oldest first
        self.traffic: Counter[str] = Counter()  # MB moved, by the metric's name
        self.counting = threading.Lock()
        # `Unit.shard` of all units. Its version counts steps, by which `guard` finds a backward
        # through an older graph
        self.shard = nn.Parameter(torch.empty(0))
        self.state = {self.shard: {"step": torch.tensor(0.0)}}  # all else is in the files
        # one stream for all copies to and from a GPU: each stream has a memory pool of its own
        self.copies = torch.cuda.Stream() if torch.cuda.is_available() else None

    def accumulate(self, file: StateFile, average: Tensor, ready: torch.cuda.Event | None) -> None:
        """In a thread: add a micro-batch's gradient. After the last one, update the unit.

        ready: on a GPU, when `average` is."""
        gradient = file.empty(1)
        if ready is not None:
            ready.synchronize()
        with torch.cuda.stream(self.copies):
            gradient[0] = average  # the thread waits for this copy to the CPU
        if self.n_summed[file] > 0:
            gradient += file.read(GRADIENT)
        file.write(GRADIENT, gradient)
        self.n_summed[file] += 1
        if self.n_summed[file] == self.n_micro_batches:
            self.norms[file] = torch.cat(norms_of_rows(gradient))
            if self.speculates_now:
                self.update(file, gradient)

    def update(self, file: StateFile, gradient: Tensor) -> None:
        """In a thread: AdamW from the current slot to the other one."""
        rows = file.read(SLOT * self.slot, SLOT)
        param, exp_avg, exp_avg_sq = rows
        steps = self.state[self.shard]["step"].clone()
        # the function, not the class: an optimizer would keep the state in memory
        adamw([param], [gradient[0]], [exp_avg], [exp_avg_sq], [], [steps], **self.step_settings)
        file.write(SLOT * (1 - self.slot), rows)

    def update_scaled(self, file: StateFile, scale: Tensor) -> None:
        self.update(file, file.read(GRADIENT).mul_(scale))

    def step(self, max_norm: float = float("inf")) -> Tensor:
        """Validate the updates, and switch the slots. Returns the norm before clipping."""
        self.wait()
        wrong = [file.name for file in self.files if self.n_summed[file] != self.n_micro_batches]
        if wrong:
            raise RuntimeError(f"not {self.n_micro_batches} backward passes and a finish: {wrong}")
        if self.step_settings != self.param_groups[0]:
            raise RuntimeError("set the learning rate before the step's first backward")
        norms = torch.cat([self.norms[file] for file in self.files])
        # each rank has the squares of its own shards only
        norm = all_reduce_control(vector_norm(norms).square()).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        is_clipped = not scale.item() >= 1.0  # also if the norm is NaN
        if is_clipped or not self.speculates_now:  # wrong updates, or none yet
            if self.speculates_now:
                self.n_redone_steps += 1
            for file in self.files:
                self.start(file, self.update_scaled, scale)
            self.wait()
        self.slot = 1 - self.slot
        self.state[self.shard]["step"] += 1
        increment_version(self.shard)
        # a clipped step is often followed by another
        self.speculates_now = self.may_speculate and not is_clipped
        self.n_summed.clear()
        self.step_settings = {}
        return norm

    def start(self, file: StateFile, function: Callable, *args) -> None:
        """Start function(file, ...) in a thread. At most one job per file and three in total are in
        flight: with a slow disk, more would fill the memory with buffers."""
        self.step_settings = self.step_settings or dict(self.param_groups[0])
        self.wait(at_most=0 if file in self.jobs else 2)
        self.jobs[file] = self.threads.submit(function, file, *args)

    def wait(self, at_most: int = 0) -> None:
        """Wait until at most so many of the jobs are in flight. Raises what a job has raised."""
        while len(self.jobs) > at_most:
            oldest = next(iter(self.jobs))
            self.jobs[oldest].result()  # a failed job stays, so that every later step fails, too
            del self.jobs[oldest]


PAGE = 1024  # float32 elements, 4,096 bytes
SLOT = 3  # rows of a slot
GRADIENT = 2 * SLOT  # the gradient's row, which follows the two slots
ROWS = GRADIENT + 1  # of a file


class StateFile:
    """A unit's state on this rank: a file without a name, which vanishes with the process.

        slot 0      parameters, first moments, second moments: float32 [3, length]
        slot 1      the same: one slot is current, the other one is being written
        gradient    float32 [length]

    Direct I/O bypasses the page cache, which would hold the state in memory again. It needs whole
    pages, in memory too: each row is padded to `stride` elements.
    """

    def __init__(self, optimizer: SpeculativeAdamW, name: str, shard: Tensor):
        if shard.dtype != torch.float32:
            raise ValueError(f"the parameters of {name} are not float32")
        self.optimizer, self.name, self.length = optimizer, name, len(shard)
        self.stride = -(-self.length // PAGE) * PAGE
        optimizer.folder.mkdir(parents=True, exist_ok=True)
        # by O_TMPFILE or, where the file system lacks it, a file that is unlinked at once
        self.file = tempfile.TemporaryFile(dir=optimizer.folder, buffering=0)
        # macOS cannot allocate; elsewhere a full disk is an error now, not in a step
        allocate = getattr(os, "posix_fallocate", lambda fd, _, size: os.ftruncate(fd, size))
        allocate(self.file.fileno(), 0, 4 * ROWS * self.stride)  # zeros, as the moments are
        with suppress(OSError, AttributeError):  # without direct I/O the page cache takes memory
            fcntl.fcntl(self.file, fcntl.F_SETFL, os.O_DIRECT)
        rows = self.empty(1)
        rows[0] = shard
        self.write(0, rows)
        optimizer.files.append(self)

    def empty(self, n_rows: int) -> Tensor:
        """Memory for rows, [n_rows, length], that begins at a page."""
        size, pinned = n_rows * self.stride, torch.cuda.is_available()  # for copies to a GPU
        memory = torch.empty(size + PAGE, dtype=torch.float32, device="cpu", pin_memory=pinned)
        start = -memory.data_ptr() // 4 % PAGE  # elements up to the next page
        return memory[start : start + size].view(n_rows, -1)[:, : self.length]

    def read(self, row: int, n_rows: int = 1) -> Tensor:
        rows = self.empty(n_rows)
        self.move(os.preadv, row, rows, "ssd_read_mb")
        return rows

    def write(self, row: int, rows: Tensor) -> None:
        """Write rows whose memory is that of `empty` or `read`."""
        self.move(os.pwritev, row, rows, "ssd_written_mb")

    def move(self, transfer: Callable, row: int, rows: Tensor, metric: str) -> None:
        pages = rows.as_strided((len(rows) * self.stride,), (1,))  # with the padding
        data, offset = memoryview(pages.numpy()).cast("B"), 4 * self.stride * row
        with self.optimizer.counting:
            self.optimizer.traffic[metric] += len(data) / 1e6
        try:
            while data:  # Linux moves at most 2 GB at once; on macOS, more is an error
                count = transfer(self.file.fileno(), [data[: 2**30]], offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            error.filename = str(self.optimizer.folder)  # its message names it
            raise

    def mapped(self) -> Tensor:
        """The current slot, [3, length], as a view of the file: only pages in use take memory."""
        path, size = f"/dev/fd/{self.file.fileno()}", ROWS * self.stride
        rows = torch.from_file(path, True, size, dtype=torch.float32).view(ROWS, -1)
        return rows[SLOT * self.optimizer.slot :][:SLOT, : self.length]


# ---- FSDP as in stage 04, but each shard is in a file, which is read ahead of its use ----


class FullyShardedDataParallel(fsdp.FullyShardedDataParallel):
    """FSDP of stage 04, but the shards are in the files of an optimizer.

    The contract is 04's. Besides, all parameters are float32, and each unit runs once per
    micro-batch. After a step's last backward come `finish_gradient_synchronization()` and
    `optimizer.step(max_norm)`, which also clips the gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],
        optimizer: SpeculativeAdamW,  # it has the files, and gets the gradients
        param_dtype: torch.dtype | None = None,  # of gathered units and their inputs
        read_shard: Callable[[str, dict[str, torch.Size], slice], Tensor] | None = None,
        device: torch.device | None = None,  # of the unsharded parameters; default: the module's
    ):
        if optimizer.files:
            raise ValueError("the optimizer belongs to another wrapper")
        self.optimizer = optimizer  # `make_units` needs it
        super().__init__(
            module,
            units,
            param_dtype=param_dtype,
            reduce_dtype=torch.float32,  # of the files
            read_shard=read_shard,
            device=device,
            cpu_offload=True,  # a shard goes from the CPU to its file
        )

    def make_units(self, named_units: list[tuple[str, nn.Module]]) -> None:
        # `parameters()` lists no shards
        self.units = [Unit(*named_unit, self) for named_unit in named_units]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        raise RuntimeError("optimizer.step(max_norm) clips: gradients are not in memory")

    def enter(self, unit: Unit) -> None:
        """Gather the unit's parameters, prefetch those of the next unit that will be used, and
        start to read those of the unit after it."""
        for each in [unit, *self.following(unit)[:2]]:
            each.fetch()
        super().enter(unit)


class Unit(fsdp.Unit):
    """A unit of stage 04, but its shard is in a file, and the optimizer gets its gradients.

    file: has the shard's parameters, moments and gradient, [length] each.
    shard: an empty parameter, the same in all units, so that autograd calls `Gather.backward`.
    """

    def __init__(self, name: str, module: nn.Module, wrapper: FullyShardedDataParallel):
        super().__init__(name, module, wrapper)
        self.optimizer = wrapper.optimizer
        self.file = StateFile(self.optimizer, name, self.shard.detach())
        self.shard = self.optimizer.shard
        self.reading: Future[Tensor] | None = None  # what `read` will return

    def fetch(self) -> None:
        """Start to read the shard, unless a thread is reading it or `full` has it."""
        if self.full is None and self.reading is None:
            # not by `optimizer.start`, which would first wait for updates in flight
            self.reading = self.optimizer.threads.submit(self.read)

    def read(self) -> Tensor:
        """In a thread: the shard, on the device, in the dtype in which it is sent."""
        (shard,) = self.file.read(SLOT * self.optimizer.slot)
        with torch.cuda.stream(self.optimizer.copies):
            return shard.to(self.fsdp.device, self.dtype)  # the thread waits for the copy

    @torch.inference_mode(False)  # under it, `full` would have no version counter
    def unshard(self) -> None:
        """Start the all-gather that fills `full`, unless it is filled or in flight."""
        self.fetch()
        if self.full is None:
            sent, self.reading = self.reading.result(), None
            if sent.is_cuda:  # it was allocated on the stream of the copies
                sent.record_stream(torch.cuda.current_stream())
            self.full = sent.new_empty(self.n_ranks * len(sent))
            work = all_gather_single(self.full, sent, self.group, async_op=True)
            self.gathering = work, sent

    def reshard(self) -> None:
        """Wait for an all-gather in flight, then drop `full`."""
        super().reshard()
        self.reading = None  # a read that was not used

    def finish_reduction(self) -> None:
        """If a reduction is in flight, free its buffer and give its average to the optimizer.

        `finish_gradient_synchronization` of 04 calls it, too, and finds no `average` to assign.
        """
        if self.reduction is None:
            return
        work, flat = self.reduction
        work.wait()
        average = flat[self.owned] / self.n_ranks
        self.reduction = work = flat = None  # before `start`, which may wait for the disk
        ready = torch.cuda.current_stream().record_event() if average.is_cuda else None
        self.optimizer.start(self.file, self.optimizer.accumulate, average, ready)


# ------------------------------------------------------------------------------------------------
# The training loop
# ------------------------------------------------------------------------------------------------


def sharded_from_meta(
    model: Transformer, optimizer: SpeculativeAdamW, args, world: World
) -> FullyShardedDataParallel:
    """Shard a model that is on the meta device; its units get their initial values one by one."""
    size = 28 * sum(p.numel() for p in model.parameters()) / world.size
    try:
        return FullyShardedDataParallel(
            model,
            model.units(),
            optimizer,
            param_dtype=getattr(torch, args.param_dtype),
            read_shard=partial(initial_shard, args.seed),
            device=world.device,
        )
    except OSError as error:
        needs = f"the files of this rank need {size / 1e6:,.1f} MB"
        fail(f"--offload-dir {optimizer.folder}: {error.strerror}; {needs}")


def training_state(model: FullyShardedDataParallel) -> State:
    """The tensors of a checkpoint, by the plain model's names; sharded ones as `Shard`s."""
    state: State = {}
    for unit in model.units:
        kinds = ("model", "optim.exp_avg", "optim.exp_avg_sq")
        tensors = dict(zip(kinds, unit.file.mapped(), strict=True))
        state |= state_of_flat_tensors(tensors, unit.shapes, unit.owned.start)
    return state


def parse_args(argv: list[str] | None = None):
    parser = base_parser(__doc__)
    parser.add_argument("--offload-dir", help="on a local SSD; default: in the run's folder")
    parser.add_argument("--no-speculation", action="store_true", help="AdamW after backward")
    args = check_arguments(parser.parse_args(argv), data_parallel_size=world_size())
    args.state_on = "disk"
    args.autocast, args.param_dtype = False, args.dtype  # of unsharded units and their inputs
    return args


@torch.no_grad()
def evaluate(model, tokens, args, device, world: World) -> float:
    """Mean loss in nats over every token of a split but the first, each predicted once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, tokens
    for inputs, targets in eval_batches(tokens, args.batching, device, world.rank, world.size):
        loss = model(inputs, targets)
        count = (targets != IGNORED).sum()
        total += torch.stack([loss * count, count])
    all_reduce_control(total)
    model.train()
    return (total[0] / total[1]).item()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the flags say; returns the lines of metrics.jsonl."""
    args = parse_args(argv)
    world = setup(args.timeout)
    device = world.device
    corpus = load_corpus(args.data)

    config = model_config(args, corpus)
    with torch.device("meta"):
        model = Transformer(config)

    run = Run(args, __file__, config, device, corpus)
    if not args.checkpoint_every:
        print0("without --checkpoint-every, a run that is killed starts again at step 0")
    folder = Path(args.offload_dir or run.folder).resolve()
    settings = adamw_settings(args.lr, args.weight_decay)
    settings["n_micro_batches"] = args.global_batch_size // args.dp // args.micro_batch_size
    optimizer = SpeculativeAdamW(folder, speculates=not args.no_speculation, **settings)
    model = sharded_from_meta(model, optimizer, args, world)
    guard(model)
    first_step = run.checkpoints.load(args.resume, training_state(model), optimizer)
    batches = train_batches(corpus.train, args.batching, device, first_step, world.rank, world.size)

    for step in run.steps(first_step):
        lr = learning_rate(step, args.steps, args.lr, args.warmup_steps, args.min_lr_ratio)
        set_learning_rate(optimizer, lr)
        optimizer.traffic.clear()  # of the start, or of an evaluation
        micro_batches = next(batches)
        loss = torch.zeros((), device=device)
        for inputs, targets, keys in micro_batches:
            micro_loss = model(inputs, targets, keys) / len(micro_batches)
            micro_loss.backward()
            loss += micro_loss.detach()
        model.finish_gradient_synchronization()
        loss = all_reduce_control(loss) / world.size
        grad_norm = optimizer.step(args.max_norm)
        run.log(step, loss, grad_norm, lr, **optimizer.traffic, redone=optimizer.n_redone_steps)

        if run.evaluates(step):
            run.log_evaluation("val", evaluate(model, corpus.valid, args, device, world))
        if run.is_last(step):
            run.log_evaluation("test", evaluate(model, corpus.test, args, device, world))
        run.write()
        if run.agree_to_save_or_stop(step):
            run.checkpoints.save(step + 1, training_state(model), args.keep_checkpoints)
            run.checkpoints.wait()  # it reads this slot, which the step after the next overwrites
    return run.finish(training_state(model))


if __name__ == "__main__":
    try:
        main()
    finally:
        cleanup()
