"""A run: its folder (see RUNNING.md), its steps, when it saves, and when it stops."""

import contextlib
import ctypes
import hashlib
import json
import math
import os
import platform
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.collectives import all_reduce_control, ledger
from common.distributed import print0, replacing, save0
from common.model import TransformerConfig
from common.shards import State

from common.job.arguments import Arguments
from common.job.checkpoint import Checkpointer
from common.job.corpus import Corpus
from common.job.launch import fail, interrupt, launch_environment, rank, world_size
from common.job.metrics import Metrics, device_name
from common.job.paths import check_writable, exists
from common.job.run_folder import changes_since_last_start, claim

# Signals that ask a run to save and stop: of a user, Slurm, a closed terminal, and of LSF or Grid
# Engine before a limit.
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)


class Run:
    """One training run, from its flags. script: the stage's file; its folder names the stage.

    Every rank makes one, after the model: the ranks agree on the folder, and two process groups
    are created, for votes and for checkpoints.
    """

    def __init__(
        self,
        args: Arguments,
        script: str,
        config: TransformerConfig,
        device: torch.device,
        corpus: Corpus,
    ):
        if args.state_on == "disk":
            keep_freed_memory(2**17)  # larger fragments would grow with the number of units
        elif device.type == "cpu":
            keep_freed_memory()
        script = Path(script).resolve()
        stage = script.parent.name
        self.args = args
        self._group = timeout = None
        if dist.is_initialized():
            timeout = timedelta(seconds=args.timeout)
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="stop")
        saved = {  # with every checkpoint
            "arguments": vars(args),
            "vocabulary": hashlib.sha256("\n".join(corpus.vocab).encode()).hexdigest()[:12],
            "corpus": corpus.digest,
            "stage": stage,
        }
        self._description = {
            "script": script.name,
            "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest()[:12],
            "edit": os.environ.get("EDIT", "") if script.name != "train.py" else "",
            **saved,
            "parameters": config.num_parameters(),
            "world_size": world_size(),
            "device": device_name(device),
            "launcher": launch_environment().launcher,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "git_commit": git_commit() if rank() == 0 else None,
        }
        self._lock: int | None = None  # on rank 0
        self.folder, notes, args.resume = self.of_rank_0("--run-dir", self._claim_folder)
        self._written = self.folder / f"output-{args.steps}.txt"  # names what the last step wrote
        if args.save_model:  # fail now, and not after the last step
            self.of_rank_0("--save-model", check_writable, Path(args.save_model))
        # documents of instructions are shorter than --seq-len
        tokens = round(args.global_batch_size * getattr(corpus, "mean_length", args.seq_len))
        flops = tokens * config.flops_per_token()
        self.metrics = Metrics(args.steps, tokens, flops, device, self.folder)
        self.checkpoints = Checkpointer(self.folder / "checkpoints", saved, timeout)
        self._handlers: dict = {}  # of signals, before this run
        self._asked_to_stop = False  # on this rank
        self._stopping = False  # on all ranks
        self._loss = self._grad_norm = torch.zeros(())  # of the last step
        size = f"{config.num_parameters() / 1e6:.2f} M parameters, {world_size()} x {device.type}"
        data = f"data {corpus.name} (hash {corpus.digest})"
        print0("\n".join([f"{stage}: {size}, {data}, run folder {self.folder}", *notes]))

    def of_rank_0(self, flag: str, function: Callable, *args):
        """What `function` returns on rank 0. An error there ends the run, as an error of `flag`."""
        try:
            return self._of_rank_0(function, *args)
        except (OSError, ValueError) as error:
            fail(f"{flag}: {error}")

    def _of_rank_0(self, function: Callable, *args):
        answer = [None, None]  # its value, an error
        if rank() == 0:
            try:
                answer[0] = function(*args)
            except (OSError, ValueError) as error:
                answer[1] = error
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        if answer[1]:
            raise answer[1]
        return answer[0]

    def _claim_folder(self) -> tuple[Path, list[str], str | None]:
        """The run's folder, what to say if it holds this run already, and where the run began."""
        stage, script = self._description["stage"], self._description["script"]
        command = [script, *self.args.given]
        folder, self._lock, who = claim(self.args.run_dir, Path("runs", stage), command)
        check_writable(folder / "checkpoints" / "step")
        notes = changes_since_last_start(folder, self._description, who)
        return folder, notes, self.args.resume

    def _begin(self, first: int) -> None:
        """Describe the run in its folder, now that its checkpoint is loaded."""
        with replacing(self.folder / "config.json") as file:
            file.write(json.dumps(self._description, indent=2).encode() + b"\n")
        self.metrics.open(first)

    def steps(self, first: int) -> Iterator[int]:
        """Yield the steps from `first` to `--steps`, until the ranks agree to stop.

        `--profile` traces the 4th to 6th of these steps.
        """
        self._steps_done = first
        if first >= self.args.steps:
            more = f"to go on, pass a larger --steps than {first}"
            print0(f"nothing left to do: {first} steps are done: {more}")
            return
        self.of_rank_0("--run-dir", self._begin, first)
        ledger.reset()  # communication at the start belongs to no step
        for number in STOPS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._handlers[number] = signal.signal(number, self._ask_to_stop)
        self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
        with self._profiler() if self.args.profile else contextlib.nullcontext() as profiler:
            for step in range(first, self.args.steps):
                self.metrics.start_step()
                yield step
                self._steps_done = step + 1
                if profiler:
                    profiler.step()
                if self._stopping:
                    break

    def _ask_to_stop(self, *_) -> None:
        self._asked_to_stop = True

    def _profiler(self) -> torch.profiler.profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # without two lines of its own
        schedule = torch.profiler.schedule(wait=1, warmup=2, active=3, repeat=1)
        folder, name = str(self.folder / "profile"), f"rank{rank()}"
        write = torch.profiler.tensorboard_trace_handler(folder, name)
        return torch.profiler.profile(schedule=schedule, on_trace_ready=write)

    def evaluates(self, step: int) -> bool:
        return self._is_due(step, self.args.eval_every)

    def agree_to_save_or_stop(self, step: int) -> bool:
        """Agree with all ranks whether to save a checkpoint after this step, and whether to stop.

        A checkpoint is due every `--checkpoint-every` steps and after the last one, if that flag is
        set, and when any rank has received one of STOPS; then no step follows. This is an
        all-reduce in a group of its own: a collective that only some ranks enter hangs.
        """
        votes = torch.tensor(float(self._asked_to_stop or self.checkpoints.has_failed()))
        if self._group is not None:
            all_reduce_control(votes, group=self._group)
        self._stopping = votes.item() > 0
        if self._stopping:
            self.checkpoints.wait()  # ends the run if it is a save that failed
            print0(f"asked to stop: saving after step {step}")
        every = self.args.checkpoint_every
        due = self._stopping or (every > 0 and self._is_due(step, every))
        if due:
            self._check_finite(step)
        return due

    def _is_due(self, step: int, every: int) -> bool:
        """Whether what happens every so many steps, and after the last, is due."""
        return self.is_last(step) or (every > 0 and (step + 1) % every == 0)

    def is_last(self, step: int) -> bool:
        return step + 1 == self.args.steps

    def log(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, **others: Tensor) -> None:
        """Record a step, between the optimizer's step and `zero_grad`; log it if that is due.

        loss: mean over the global batch. grad_norm: global, before clipping. others: more columns.
        """
        self._loss, self._grad_norm = loss, grad_norm
        is_logged = step == 0 or self._is_due(step, self.args.log_every) or self.evaluates(step)
        if self._is_due(step, self.args.checkpoint_every):
            loss.item()  # a save waits for the GPU anyway; here the wait counts as the step's time
        self.metrics.end_step(step, loss, grad_norm, lr, is_logged, **others)
        if is_logged:
            self._check_finite(step)
            if self.checkpoints.blocked_seconds:
                self.metrics.line["save_ms"] = 1e3 * self.checkpoints.blocked_seconds
                self.checkpoints.blocked_seconds = 0.0

    def log_evaluation(self, name: str, loss: float) -> None:
        """Add loss (nats per token) and perplexity of `val` or `test` to the step's line."""
        self.metrics.line |= {f"{name}_loss": loss, f"{name}_ppl": math.exp(min(loss, 700.0))}

    def write(self) -> None:
        """Write the step's line, before a checkpoint that counts the step as done."""
        self.metrics.write()

    def write_output(self, flag: str, out: Path, write: Callable[[], None], state: State) -> None:
        """Call `write` on every rank, after the last step. If it raises OSError (it must on all
        ranks), the run saves a checkpoint and fails."""
        self.checkpoints.wait()  # so that a kill from here on costs no step
        try:
            write()
        except OSError as error:
            last = self.checkpoints.path / f"step-{self.args.steps:08}"
            if not self.of_rank_0(flag, exists, last):
                self.checkpoints.save(self.args.steps, state, self.args.keep_checkpoints)
                self.checkpoints.wait()
            again = f"the same flags and --run-dir {self.folder} write it, without training"
            fail(f"{flag} {out}: {error}; the run's checkpoint is complete: {again}", status=1)
        if flag == "--out":  # a restart must not write it again
            self.of_rank_0("--run-dir", self._written.write_text, str(out.absolute()))
        print0(f"wrote {out}")

    def has_written(self, out: Path) -> bool:
        return exists(self._written) and self._written.read_text() == str(out.absolute())

    def finish(self, state: State) -> list[dict]:
        """Wait for the last save, and write `--save-model` if all steps are done: no signal ends
        either. Returns the lines of this process. state: what a checkpoint would hold now."""
        if (path := self.args.save_model) and self._steps_done >= self.args.steps:
            write = partial(self._of_rank_0, save0, self.checkpoints.full_weights(state), path)
            self.write_output("--save-model", Path(path), write, state)
        self.checkpoints.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.metrics.close()
        if self._lock is not None:
            os.close(self._lock)
        if self._group is not None:
            dist.destroy_process_group(self._group)
        return self.metrics.lines

    def _check_finite(self, step: int) -> None:
        """Fail if the loss, or the gradient that has just changed the weights, is not finite."""
        for name, value in (("loss", self._loss), ("gradient norm", self._grad_norm)):
            if not math.isfinite(float(value)):
                self.checkpoints.wait()  # of an earlier step, and good
                what = f"the {name} of step {step} is {float(value)}: stopped, nothing saved since"
                fix = "try a lower --lr, a lower --grad-clip or more --warmup-steps"
                fail(f"{what}; {fix}", status=1)


def keep_freed_memory(most: int = 2**30) -> None:
    """Make glibc keep freed buffers of up to `most` bytes for the next step.

    By default it returns each one over 32 MB to the system and maps it anew; with a large
    vocabulary the page faults are a third of a CPU's step. Without glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        if not libc.mallopt(-3, most):  # M_MMAP_THRESHOLD of malloc.h
            libc.mallopt(-3, 2**25)  # the most before glibc 2.35
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def git_commit() -> str | None:
    """The commit of this code, with -dirty appended if a file has changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    # a git hook has GIT_DIR, which may be that of another repository
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    options = dict(env=env, capture_output=True, text=True, timeout=5, check=True)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # an error if this is a copy within another repository
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], **options)
        described = [*git, *"describe --always --dirty --abbrev=40 --exclude=*".split()]
        return subprocess.run(described, **options).stdout.strip()
    return None
