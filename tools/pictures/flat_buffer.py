"""Draw flat buffers: where parameters begin and end, and where buckets or shards do.

    python tools/pictures/flat_buffer.py buckets --cap 25 --svg 02_ddp/buckets.svg
    python tools/pictures/flat_buffer.py shards --params norm:4 w1:4x3 --ranks 3 --svg shards.svg
    python tools/pictures/flat_buffer.py all

`buckets`: stage 02's gradient buckets for the tiny model on the sample, to scale, as
`split_into_buckets` computes them. `shards`: the flat buffer of stages 03 and 04 for a few small
parameters, one cell per element, above the equal shards of the ranks and their padding.
"""

from __future__ import annotations

import argparse
import sys
from math import prod
from pathlib import Path

import torch
from svg import Picture

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools")]

from stages import load_stage  # noqa: E402

VOCABULARY = 2304  # of the sample, padded
FILLS = ("blue", "green", "orange", "purple", "pink", "teal")


PARAMETERS = {"norm": 4, "w1": 12, "w2": 4}


def buckets_of(cap_mb: float) -> list[list[tuple[str, float]]]:
    """(name, MB) of each parameter, bucket by bucket, as stage 02 splits them."""
    from common.model import Transformer, TransformerConfig

    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=VOCABULARY))
    names = {p: name for name, p in model.named_parameters()}
    split = load_stage("02").split_into_buckets(list(model.parameters())[::-1], cap_mb)
    return [[(names[p], p.numel() * 4 / 2**20) for p in bucket] for bucket in split]


def draw_buckets(cap_mb: float) -> Picture:
    buckets = buckets_of(cap_mb)
    left, width, height, gap = 96, 900, 30, 30
    longest = max(sum(mb for _, mb in bucket) for bucket in buckets)
    scale = (width - left - 16) / longest
    title = f"Gradient buckets of the tiny model, --bucket-cap-mb {cap_mb:g}"
    art = Picture(width, 44 + len(buckets) * (height + gap) + 12, title)
    units: list[str] = []
    for i, bucket in enumerate(buckets):
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


def draw_shards(params: dict[str, int], ranks: int, title: str) -> Picture:
    total = sum(params.values())
    length = -(-total // ranks)  # of a shard, rounded up
    left, width, height = 96, 900, 30
    cell = min(34.0, (width - left - 16) / (ranks * length))
    art = Picture(width, 196, title)
    x, top, middle, low = float(left), 52, 90, 128
    for name, y in (("parameters", top), ("flat buffer", middle), ("shards", low)):
        art.text(16, y + height / 2 + 4, name)
    fills = []
    for i, (name, size) in enumerate(params.items()):
        fills += [FILLS[i % len(FILLS)]] * size
        art.bar(x, top, size * cell - 2, height, fills[-1], f"{name} [{size}]")
        x += size * cell
    padding = ranks * length - total
    if padding:
        art.bar(x, top, padding * cell - 2, height, "grey", "padding")
    for i in range(ranks * length):
        fill = fills[i] if i < total else "grey"
        art.rect(left + i * cell, middle, cell - 2, height, fill)
        art.text(left + (i + 0.5) * cell - 1, middle + 19, str(i), size=10, anchor="middle")
    for rank in range(ranks):
        begin = left + rank * length * cell
        art.bar(begin, low, length * cell - 2, height, "track", f"rank {rank} owns {length}")
        if rank:
            art.line(begin - 1, top - 4, begin - 1, low + height + 4, "ink", dash="4 3")
    note = f"{total} elements in {ranks} shards of {length}; grey: {padding} of padding"
    art.text(left, 182, note, size=11, fill="faint")
    return art


PICTURES = {  # of the READMEs
    "02_ddp/buckets.svg": lambda: draw_buckets(25),
    "03_zero/shards.svg": lambda: draw_shards(PARAMETERS, 3, "A bucket of 03 on 3 ranks"),
}


def parameter(text: str) -> tuple[str, int]:
    """`w1:4x3` is a parameter of 12 elements."""
    name, _, shape = text.partition(":")
    return name, prod(map(int, shape.split("x")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("buckets", "shards", "all"))
    parser.add_argument("--cap", type=float, default=25, help="--bucket-cap-mb of stage 02")
    parser.add_argument("--params", type=parameter, nargs="+", help="NAME:ROWSxCOLUMNS ...")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--title", default="A flat buffer and its shards")
    parser.add_argument("--svg", type=Path, default=Path("flat_buffer.svg"))
    args = parser.parse_args()
    params = dict(args.params or PARAMETERS)
    pictures = {args.svg: lambda: draw_shards(params, args.ranks, args.title)}
    if args.what == "buckets":
        pictures = {args.svg: lambda: draw_buckets(args.cap)}
    elif args.what == "all":
        pictures = {REPO / name: draw for name, draw in PICTURES.items()}
    for path, draw in pictures.items():
        path.write_text(str(draw()))


if __name__ == "__main__":
    main()
