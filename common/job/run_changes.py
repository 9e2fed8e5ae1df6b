"""What may change when a run continues, and what makes it another run."""

import json
from collections.abc import Iterable
from pathlib import Path

from common.job.checkpoint_hooks import IncompatibleCheckpointError, checkpoints
from common.job.paths import exists

SHAPE = ("d_model", "n_layers", "n_heads")  # of the weights
# arguments that change the losses; a checkpoint of another run fits all the same
CURVE = ("seed", "seq_len", "global_batch_size", "lr", "warmup_steps", "min_lr_ratio")
CURVE += ("weight_decay", "grad_clip", "dropout")
DATA = {"vocabulary": "the hash of --data's words", "corpus": "the hash of --data"}
# what stays the same in one run: all of these, and what changes a stage's losses
ONE_RUN = (*SHAPE, *CURVE, *DATA, "edit", "dtype", "param_dtype", "reduce_dtype", "recipe")
ONE_RUN += ("n_experts", "top_k", "balance_rate", "model", "valid", "lora_rank", "lora_alpha")


def changes(old: dict, new: dict, names: Iterable[str]) -> list[str]:
    """A line like `--lr is now 0.01, was 0.001` for each of the names whose values differ.

    Both are as `config.json` describes a run. A name that one of them lacks is no change.
    """
    flags = {name: "--" + name.replace("_", "-") for name in new["arguments"]} | DATA
    old, new = ({**each, **each["arguments"]} for each in (old, new))
    differ = [name for name in names if name in old and name in new and old[name] != new[name]]
    return [f"{flags.get(name, name)} is now {new[name]}, was {old[name]!r}" for name in differ]


def compare_runs(saved: dict | None, run: dict | None) -> list[str]:
    """Report how this run differs from the one that saved a checkpoint, if both are known.

    Another shape or vocabulary is an error, even one of equal size: its meaning does not fit.
    """
    if not saved or not run:
        return []
    if not {*SHAPE, *CURVE} <= saved["arguments"].keys():
        raise IncompatibleCheckpointError("another version of this code saved it")
    if found := changes(saved, run, (*SHAPE, "vocabulary")):
        raise IncompatibleCheckpointError("; ".join(found))
    return changes(saved, run, ("stage", *CURVE, "steps", "corpus", "model", "lora_alpha"))


def last_start(folder: Path, run: dict) -> dict | None:
    """The description of the last start in a run's folder; None if it holds no run yet.

    Raises OSError if `run`, the description of this start, is that of another run, or has other
    flags and the folder no checkpoint: then it would replace all metrics.
    """
    saved, metrics = checkpoints(folder / "checkpoints"), folder / "metrics.jsonl"
    if not saved and not (exists(metrics) and metrics.stat().st_size):
        return None
    try:
        last = {"arguments": {}} | json.loads((folder / "config.json").read_text())
    except (FileNotFoundError, ValueError, TypeError):
        last = {"arguments": {}}
    if found := changes(last, run, ONE_RUN):
        fix = f"--run-dir NEW, and --resume {folder} to start from its newest checkpoint, if any"
        raise OSError(f"{folder} belongs to another run: {'; '.join(found)}: pass {fix}")
    resume = run["arguments"]["resume"]
    if resume not in (None, last["arguments"].get("resume")):
        why = "a run continues from the newest checkpoint in its folder"
        raise OSError(f"{why}: to start from another one, pass --resume {resume} --run-dir NEW")
    unknown = [] if last["arguments"] else ["config.json does not describe it"]
    if not saved and (found := changes(last, run, ("steps", "resume")) or unknown):
        what = f"metrics of another run, and no checkpoint: {'; '.join(found)}"
        raise OSError(f"{folder} has {what}: pass another --run-dir")
    return last


def other_changes(last: dict, run: dict) -> list[str]:
    """What has changed since the last start and is not reported with the checkpoint."""
    reported = {*ONE_RUN, "stage", "steps", "resume", "run_dir", "arguments", "parameters"}
    return changes(last, run, [n for n in {**run, **run["arguments"]} if n not in reported])
