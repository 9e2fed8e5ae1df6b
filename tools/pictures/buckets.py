"""Draw stage 02's gradient buckets for the tiny model, to scale: 02_ddp/buckets.svg."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from svg import Picture

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools")]

from stages import load_stage  # noqa: E402

from common.model import Transformer, TransformerConfig  # noqa: E402

VOCABULARY, CAP_MB = 2304, 25  # of the sample, padded; the default of --bucket-cap-mb
FILLS = ("blue", "green", "orange", "purple", "pink", "teal")


def buckets() -> list[list[tuple[str, float]]]:
    """(name, MB) of each parameter, bucket by bucket, as stage 02 splits them."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=VOCABULARY))
    names = {p: name for name, p in model.named_parameters()}
    split = load_stage("02").split_into_buckets(list(model.parameters())[::-1], CAP_MB)
    return [[(names[p], p.numel() * 4 / 2**20) for p in bucket] for bucket in split]


def draw() -> Picture:
    left, width, height, gap = 96, 900, 30, 30
    scale = (width - left - 16) / max(sum(mb for _, mb in bucket) for bucket in buckets())
    title = f"Gradient buckets of the tiny model, --bucket-cap-mb {CAP_MB}"
    art = Picture(width, 44 + len(buckets()) * (height + gap) + 12, title)
    units: list[str] = []
    for i, bucket in enumerate(buckets()):
        x, y = float(left), 44 + i * (height + gap)
        art.text(16, y + height / 2 + 4, f"bucket {i}")
        for name, mb in bucket:
            unit = ".".join(name.split(".")[: 2 if name.startswith("layers") else 1])
            if unit not in units:
                units.append(unit)
            label = name.removesuffix(".weight").removesuffix(".offset")
            short = label.rsplit(".", 1)[-1] if len(label) * 6.4 + 4 > mb * scale else label
            art.bar(x, y, mb * scale - 1, height, FILLS[units.index(unit)], short)
            x += mb * scale
        note = f"{sum(mb for _, mb in bucket) * 2**20 / 1e6:.2f} MB"
        if len(bucket) > 1:
            note += f": {bucket[0][0]} … {bucket[-1][0]}"
        art.text(left, y + height + 15, note, size=11, fill="faint")
    return art


if __name__ == "__main__":
    (REPO / "02_ddp/buckets.svg").write_text(str(draw()))
