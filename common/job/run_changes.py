"""What may change when a run continues from a checkpoint, and what may not."""

from common.job.checkpoint_hooks import IncompatibleCheckpointError

SHAPE = ("d_model", "n_layers", "n_heads")  # of the weights
# arguments that may differ from those of the run that saved, but not silently
REPORTED = ("seed", "seq_len", "global_batch_size", "lr", "warmup_steps", "min_lr_ratio", "steps")
REPORTED += ("weight_decay", "grad_clip", "dropout")
HASHES = {"vocabulary": "the hash of --data's words", "corpus": "the hash of --data"}


def compare_runs(saved: dict | None, run: dict | None) -> list[str]:
    """Report how this run differs from the one that saved the checkpoint, if both are known.

    Another shape or vocabulary is an error, even one of equal size: its meaning does not fit.
    """
    if not saved or not run:
        return []
    old, new = ({**each, **each["arguments"]} for each in (saved, run))

    def changed(*names: str) -> list[str]:
        known_as = {name: HASHES.get(name, "--" + name.replace("_", "-")) for name in names}
        differ = [name for name in names if old[name] != new[name]]
        return [f"{known_as[name]} is now {new[name]}, was {old[name]!r}" for name in differ]

    if found := changed(*SHAPE, "vocabulary"):
        raise IncompatibleCheckpointError("; ".join(found))
    return changed(*REPORTED, "corpus")
