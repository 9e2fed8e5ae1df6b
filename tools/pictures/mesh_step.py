"""Draw one step of rank 0 on a mesh of 2 x 2 x 2, schematically: 07_3d/step.svg.

The actions are those of the schedule, at the times of the simulation. What communicates when
follows from the code: `tp` in every action, `pp` as `Pipeline.run` posts and sends, `dp` in the
backward of the last micro-batch, scalars at the end.
"""

from __future__ import annotations

from svg import Picture
from timeline import KINDS, REPO, Span, load_stage, simulate

RANKS, MICRO_BATCHES, LAYERS, BUCKETS = 2, 6, 2, 3
MESSAGE = 0.3  # time of a message, where a forward takes 1 and a backward 2
LANES = {  # fill and height
    "tp": ("teal", 20),
    "pp receive": ("pink", 20),
    "pp send": ("pink", 20),
    "dp": ("purple", 20),
    "control": ("grey", 20),
}
NOTES = (
    "tp: all-reduces in which the action waits. pp receive: from the call until the message is "
    "used. pp send, dp: in flight",
    "while the rank computes. dp: one all-reduce for each bucket; the last is ready when backward "
    "ends. control: the loss and the norm.",
)


def communication(actions: list[Span]) -> list[tuple[str, float, float]]:
    """Lane, start and end of what rank 0 sends and receives beside its actions."""
    found = []
    for previous, action in zip([None, *actions], actions, strict=False):
        length = action.end - action.start
        # embedding, attention and MLP end with an all-reduce in forward; each pair has one backward
        count = 2 * LAYERS + (action.kind == "F")
        for i in range(count):
            begin = action.start + length * (i + 0.6) / count
            found.append(("tp", begin, begin + 0.07))
        if action.kind == "F":
            found.append(("pp send", action.end, action.end + MESSAGE))
        else:
            found.append(("pp receive", previous.start, action.start))
    last = actions[-1]
    for i in range(1, BUCKETS + 1):
        ready = last.start + (last.end - last.start) * i / BUCKETS
        found.append(("dp", ready, ready + 0.6))
    scalars = [("control", last.end + 0.7 + 0.25 * i, last.end + 0.85 + 0.25 * i) for i in range(3)]
    return found + scalars


def draw() -> Picture:
    stage = load_stage("07")
    (actions, _) = simulate(stage, stage.one_f_one_b, RANKS, MICRO_BATCHES, MESSAGE)
    messages = communication(actions)
    left, top, length = 96, 48, max(end for *_, end in messages)
    scale = (900 - left - 16) / length
    art = Picture(900, 300, "2 x 2 x 2, 1F1B: one step of rank 0, schematic")
    art.rect(left, top, length * scale, 34, "track")
    art.text(16, top + 21, "actions")
    for span in actions:
        x, w = left + span.start * scale, (span.end - span.start) * scale
        art.bar(x, top, w - 1, 34, KINDS[span.kind][0], f"{span.kind}{span.micro}")
    y = top + 46
    for lane, (fill, height) in LANES.items():
        art.rect(left, y, length * scale, height, "track")
        art.text(16, y + 14, lane)
        for name, start, end in messages:
            if name == lane:
                art.bar(left + start * scale, y + 2, (end - start) * scale, height - 4, fill, "")
        y += height + 10
    for i, note in enumerate(NOTES):
        art.text(16, y + 18 + 16 * i, note, fill="faint")
    return art


if __name__ == "__main__":
    (REPO / "07_3d/step.svg").write_text(str(draw()))
