"""Draw GPipe with two micro-batches on two ranks, its receives, waits and sends, as
`Pipeline.run` of stage 06 executes it: 06_pipeline/messages.svg."""

from __future__ import annotations

from svg import Picture
from timeline import KINDS, REPO, load_stage, simulate

RANKS = MICRO_BATCHES = 2
MESSAGE = 0.5  # time of a message, where a forward takes 1 and a backward 2
NOTES = (
    "h: hidden states; g: their gradient. A receive is posted before the action that precedes the "
    "one that needs it;",
    "the first action of rank 1 posts two. A line is a message in flight, from the end of the "
    "action that sends it.",
)


def message(action) -> str:
    """The name of what an action waits for: `h0`, hidden states, or `g0`, their gradient."""
    return f"{'h' if action.kind == 'F' else 'g'}{action.micro}"


def draw() -> Picture:
    art = Picture(900, 330, "GPipe, two ranks, two micro-batches: receives, waits and sends")
    left, scale = 96, 78
    tops = {0: (48, 88), 1: (240, 178)}  # by rank: the lane of actions, the lane of receives
    stage = load_stage("06")
    spans = simulate(stage, stage.gpipe, RANKS, MICRO_BATCHES, MESSAGE)
    posted, arrives = {}, {}  # when, by rank and the action that waits for the message
    for rank, (actions, receives) in tops.items():
        art.text(16, actions + 22, f"rank {rank}", weight="bold")
        length = max(row[-1].end for row in spans)
        art.rect(left, actions, length * scale, 34, "track")
        art.text(16, receives + 20, "receives")
        free = 0.0
        order = stage.gpipe(rank, RANKS, MICRO_BATCHES)
        for i, (action, span) in enumerate(zip(order, spans[rank], strict=True)):
            for later in order[i + 1 : i + 2] if i else order[:2]:
                source, _ = stage.source_and_destination(later, RANKS)
                if source is not None:
                    posted[rank, later] = free
            if span.start > free:
                middle, gap = left + (free + span.start) / 2 * scale, f"waits for {message(action)}"
                art.text(middle, actions + 21, gap, 11, "faint", "middle")
            x, w = left + span.start * scale, (span.end - span.start) * scale
            art.bar(x, actions, w - 1, 34, KINDS[span.kind][0], f"{span.kind}{span.micro}")
            free = span.end
            _, receiver = stage.source_and_destination(action, RANKS)
            if receiver is not None:
                arrives[receiver, action._replace(stage=receiver)] = span.end + MESSAGE
    for (rank, action), begin in posted.items():
        x, y = left + begin * scale, tops[rank][1] + 24 * action.micro
        end = left + arrives[rank, action] * scale
        art.bar(x, y, end - x - 1, 18, "pink", f"{message(action)} posted")
        # sent at the end of the sender's action; the slope is the time that the message takes
        sent, top = end - MESSAGE * scale, tops[1 - rank][0] + 34 * rank
        art.line(sent, top, end, y + 18 * (1 - rank), "ink")
        art.text(sent - 4, top + (14 if rank else -6), "send", 10, "ink", "end")
    for i, note in enumerate(NOTES):
        art.text(16, 306 + 16 * i, note, fill="faint")
    return art


if __name__ == "__main__":
    (REPO / "06_pipeline/messages.svg").write_text(str(draw()))
