"""The routing of stage 09, recorded and compared: which experts each token chose, in every step.

Routing is discrete. Two runs that differ in the order of a sum agree to seven digits until two
experts of a token are nearly tied: then each run may take a different one, and the runs diverge for
good. So they are compared up to that token, or with the routing of one replayed in both.

    python 09_expert_parallel/routing.py record FOLDER [flags of train.py]     writes all choices
    torchrun ... 09_expert_parallel/routing.py compare FOLDER [flags]   finds the first other one

    with routing("record", folder, train): ...    the same for runs of that module in this process
    with routing("replay", folder, train): ...    a run inside takes the recorded choices, from
                                                  which its own may differ only at near ties
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import print0
from common.model import Transformer

from common.job.launch import cleanup, fail, rank, setup, world_size

NEARLY_TIED = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # difference of two scores, by --dtype

# the arguments that decide about the routing
NAMES = "data seed d_model n_layers n_heads seq_len global_batch_size steps lr warmup_steps dtype "
NAMES += "min_lr_ratio weight_decay grad_clip dropout n_experts top_k balance_rate"


class Routing:
    """The choices of a run. how: "record", "replay" or "compare".

    chosen: the experts [seq, k] of a sample in a layer. A sample of training is identified by its
    dropout key, one of evaluation by the previous step and its tokens. first: the first choice
    that differs from the recorded one, with its step, layer and margin.
    """

    def __init__(self, how: str, folder: str | Path):
        self.how, self.folder = how, Path(folder)
        self.chosen: dict[tuple, Tensor] = {}
        self.step_of: dict[int, int] = {}  # by sample
        self.samples: list = []  # of the present micro-batch
        self.layers: list = []
        self.step = -1
        self.first: dict | None = None

    def open(self, args) -> None:
        """Read what was recorded with the same arguments."""
        values = {name: getattr(args, name) for name in NAMES.split()}
        digest = hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:16]
        self.path, self.batch = self.folder / f"routing-{digest}.pt", args.global_batch_size
        if self.how == "record" and world_size() > 1:
            fail("one process records: start it without a launcher")
        if self.how != "record":
            self.chosen, self.step_of = torch.load(self.path, weights_only=True)

    def begin(self, model: Transformer, tokens: Tensor, keys: Tensor | None) -> None:
        """Note the samples of the next micro-batch."""
        self.layers = [layer.mlp for layer in model.layers.values()]
        if keys is None:
            self.samples = [(self.step, row.cpu().numpy().tobytes()) for row in tokens]
            return
        self.samples = keys.tolist()
        if self.how == "record":
            self.step_of |= dict.fromkeys(self.samples, len(self.step_of) // self.batch)
        self.step = self.step_of[self.samples[-1]]

    def choose(self, mixture, scores: Tensor, own: Tensor) -> Tensor:
        """The experts to use [T, k] in place of `own`."""
        layer = self.layers.index(mixture)
        by_sample = own.unflatten(0, (len(self.samples), -1))
        places = [(layer, sample) for sample in self.samples]
        if self.how == "record":
            self.chosen |= {place: c.cpu() for place, c in zip(places, by_sample, strict=True)}
            return own
        # windows past the end of a split exist on some topologies only
        found = [self.chosen.get(p, c).to(c) for p, c in zip(places, by_sample, strict=True)]
        recorded = torch.cat(found)
        biased = scores + mixture.bias
        differs = (own.sort(-1).values != recorded.sort(-1).values).any(-1)
        margins = (biased.gather(-1, own) - biased.gather(-1, recorded)).sum(-1)[differs]
        if self.how == "compare":
            if differs.any() and self.first is None:
                token = int(differs.nonzero()[0])
                self.first = {"step": self.step, "layer": layer, "margin": margins.max().item()}
                self.first |= {"own": own[token].tolist(), "recorded": recorded[token].tolist()}
            return own
        autocast = torch.is_autocast_enabled(own.device.type)
        most = NEARLY_TIED[torch.bfloat16 if autocast else torch.float32]
        if differs.any() and margins.max() > most:
            raise AssertionError(
                f"step {self.step}, layer {layer}: the ranks choose other experts than one process "
                f"does, and not for a near tie: their scores differ by {margins.max().item():.2g}"
            )
        return recorded

    def close(self) -> None:
        if self.how == "record" and rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save((self.chosen, self.step_of), self.path)


@contextmanager
def routing(how: str, folder: str | Path, stage: ModuleType) -> Iterator[Routing]:
    """Record, replay or compare the routing of a run of `stage`, this folder's train.py."""
    found = Routing(how, folder)
    mixture, parse_args = stage.MixtureOfExperts, stage.parse_args
    plain_choose, plain_forward = mixture.choose, Transformer.forward

    def open_and_parse(argv=None):
        args = parse_args(argv)
        found.open(args)
        return args

    def forward(model, tokens, targets=None, keys=None):
        found.begin(model, tokens, keys)
        return plain_forward(model, tokens, targets, keys)

    def choose(self, scores):
        return found.choose(self, scores, plain_choose(self, scores))

    with (
        patch.object(stage, "parse_args", open_and_parse),
        patch.object(Transformer, "forward", forward),
        patch.object(mixture, "choose", choose),
    ):
        yield found
    found.close()


def main(how: str, folder: str, argv: list[str]) -> None:
    import train

    sys.argv[0] = train.__file__
    setup()
    with routing(how, folder, train) as found:
        train.main(argv)
    if how == "compare":
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, found.first)
        if not any(every):
            print0("every token has the same experts as in the recorded run")
            return
        # of several ranks in one layer the widest margin
        first = min(filter(None, every), key=lambda x: (x["step"], x["layer"], -x["margin"]))
        print0(
            "the first token with other experts: step {step}, layer {layer}, experts {own} and not "
            "{recorded}, whose scores differ by {margin:.1e}".format(**first)
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
    finally:
        cleanup()
