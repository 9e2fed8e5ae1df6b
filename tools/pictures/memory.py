"""Draw a rank's memory over one training step, from measured steps of stages 02, 03 and 04.

    python -m tools.pictures.memory      # the READMEs' pictures: make pictures

Each panel trains the tiny model for two steps with the stage's own class, as rank 0 of two ranks.
PyTorch's fake process group answers for the other rank, so Gloo's buffers are not counted. After
every operator of the second step, each live storage of floating-point numbers is counted for what
it holds. The operators are drawn in order, at equal distances within each phase.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.model import Transformer, TransformerConfig, init_weights
from common.optimization import adamw_settings
from tools.memory import PeakMemory, live_storages
from tools.pictures.svg import Picture
from tools.stages import REPO
from tools.techniques import Trainer

VOCABULARY, SAMPLES, LENGTH = 2304, 2, 64  # of the embedded sample, padded; of the micro-batch
OTHER = "activations, temporaries"
KINDS = {  # from the bottom of a panel to its top
    "optimizer state": "purple",
    "parameter shards": "teal",
    "full parameters": "blue",
    "gradient shards": "pink",
    "full gradients": "orange",
    OTHER: "grey",
}
PHASES = {"forward": (0.0, 0.38), "backward": (0.38, 0.84), "step": (0.84, 1.0)}  # of the width
MEGABYTES, WIDTH, HEIGHT = 24, 384, 132  # the end of every panel's axis; its size in pixels
STEPS = {  # a panel's title: the strategy of tools/techniques.py, and its bucket size
    "02": ("ddp", 25),
    "03, --zero-stage 1": ("zero-1", 25),
    "03, --zero-stage 2": ("zero-2", 25),
    "03, --zero-stage 2 --bucket-cap-mb 0.5": ("zero-2", 0.5),
    "03, --zero-stage 3": ("zero-3", 25),
    "04": ("fsdp", 25),
    "04, --no-reshard-after-forward": ("fsdp-keep", 25),
}
PICTURES = {"03_zero/memory.svg": list(STEPS)[:5], "04_fsdp/memory.svg": list(STEPS)[4:]}


class Recorder(PeakMemory):
    """After each operator, `samples` gets the phase and the live bytes of each kind."""

    def __init__(self, trainer: Trainer, others: list[torch.UntypedStorage]):
        super().__init__()
        self.buckets = trainer.sync.buckets
        self.optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.others = {storage._cdata for storage in others}  # not of this training
        self.phase, self.samples = "", []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.samples.append((self.phase, self.bytes_by_kind()))
        return result

    def bytes_by_kind(self) -> Counter:
        params = [p for bucket in self.buckets for p in getattr(bucket, "params", ())]
        names = ("shard", "full", "average", "grads")
        shards, full, averages, grads = (
            [getattr(bucket, name, None) for bucket in self.buckets] for name in names
        )
        reductions = [getattr(bucket, "reduction", None) for bucket in self.buckets]
        joined = [t for r in reductions if isinstance(r, tuple) for t in r]  # 04's in flight
        tensors = {  # a storage with several views counts as the last kind
            "optimizer state": [t for s in self.optimizer.state.values() for t in s.values()],
            "parameter shards": shards,
            "full parameters": params + full,
            "gradient shards": averages + [s.grad for s in shards if s is not None],
            "full gradients": grads + joined + [p.grad for p in params],
        }
        kind_of = {
            t.untyped_storage()._cdata: kind
            for kind, found in tensors.items()
            for t in found
            if type(t) in (Tensor, nn.Parameter)
        }
        count: Counter = Counter()
        for address in self.known.keys() - self.others:
            storage = torch.UntypedStorage._new_with_weak_ptr(address)
            if storage is not None:
                count[kind_of.get(address, OTHER)] += storage.nbytes()
        return count


def recorded(strategy: str, bucket_mb: float) -> list[tuple[str, Counter]]:
    """The samples of a step with one micro-batch."""
    others = live_storages()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = Transformer(TransformerConfig(vocab_size=VOCABULARY))
    init_weights(model, 0)
    more = {"bucket_mb": bucket_mb, **adamw_settings(1e-3, 0.1)}
    trainer = Trainer(strategy, model, units=model.units(), **more)
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    recorder = Recorder(trainer, others)
    for recording in (nullcontext(), recorder):  # the first step creates the optimizer state
        with recording:
            recorder.phase = "forward"
            loss = trainer.model(tokens, tokens)
            recorder.phase = "backward"
            loss.backward()
            trainer.sync.finish_gradient_synchronization()
            recorder.phase = "step"
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    dist.destroy_process_group()
    return recorder.samples


def draw_panel(art: Picture, x: int, top: int, title: str, samples: list) -> None:
    """Areas on top of each other. Where several operators share a pixel: the one with the most."""
    bottom, scale = top + HEIGHT, HEIGHT / MEGABYTES / 1e6
    columns: dict[int, Counter] = {}
    for phase, (start, end) in PHASES.items():
        counts = [count for name, count in samples if name == phase]
        for i, count in enumerate(counts):
            column = int((start + (end - start) * i / len(counts)) * WIDTH)
            columns[column] = max(columns.get(column, count), count, key=Counter.total)
    for kind in reversed(KINDS):  # each area reaches down to the axis; the next one covers it
        below = list(KINDS)[: list(KINDS).index(kind) + 1]
        path, before = f"M{x} {bottom}", ""
        for column, count in columns.items():
            height = f"V{bottom - scale * sum(count[k] for k in below):.1f}"
            path += "" if height == before else f"H{x + column}{height}"
            before = height
        art.path(f"{path}H{x + WIDTH}V{bottom}Z", KINDS[kind], kind)
    for phase, (start, end) in PHASES.items():
        art.line(x + start * WIDTH, top, x + start * WIDTH, bottom + 6, "faint")
        art.text(x + (start + end) / 2 * WIDTH, bottom + 16, phase, 11, "faint", "middle")
    for value in range(0, MEGABYTES + 1, 8):
        art.text(x - 6, bottom + 4 - scale * value * 1e6, str(value), 11, "faint", "end")
    peak = max(count.total() for count in columns.values())
    art.line(x, bottom - scale * peak, x + WIDTH, bottom - scale * peak, "ink", dash="4 3")
    art.text(x, top - 8, title, weight="bold")
    art.text(x + WIDTH, top - 8, f"peak {peak / 1e6:.1f} MB", anchor="end")


def draw(titles: list[str]) -> Picture:
    rows = (len(titles) + 2) // 2  # the legend takes a place too
    title = "Memory of rank 0 of 2 over one training step, tiny model, in MB"
    art = Picture(900, 40 + rows * (HEIGHT + 60), title)
    for place in range(len(titles) + 1):
        x, y = 48 + place % 2 * (WIDTH + 56), 68 + place // 2 * (HEIGHT + 60)
        if place < len(titles):
            draw_panel(art, x, y, titles[place], recorded(*STEPS[titles[place]]))
    for i, (kind, fill) in enumerate(reversed(KINDS.items())):
        art.legend(x, y + 12 + 20 * i, {fill: kind})
    return art


if __name__ == "__main__":
    for name, titles in PICTURES.items():
        (REPO / name).write_text(str(draw(titles)))
