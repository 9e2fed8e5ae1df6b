"""Draw what each rank holds, and what connects the ranks: the pictures of 05 to 09.

    python tools/pictures/diagrams.py mlp --svg 05_tensor_parallel/mlp.svg
    python tools/pictures/diagrams.py all

Blue is rank 0's shard, orange rank 1's, green rank 2's, purple rank 3's; grey is a tensor that
every rank holds in full.
"""

from __future__ import annotations

import argparse
import sys
from math import exp, log
from pathlib import Path

from svg import Picture

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))

from stages import load_stage  # noqa: E402

RANKS = ("blue", "orange")


def arrow(art: Picture, x: float, y: float, text: str = "→") -> None:
    art.text(x, y, text, size=15, fill="faint", anchor="middle")


def matrix(
    art: Picture, x: float, y: float, w: float, h: float, fill: str, columns=(0, 1), rows=(0, 1)
) -> None:
    """The full matrix as an outline, and the part of it that a rank holds, filled."""
    art.rect(x, y, w, h, "track")
    (left, right), (top, bottom) = columns, rows
    art.rect(x + w * left, y + h * top, w * (right - left), h * (bottom - top), fill)


def collective(art: Picture, x: float, y: float, h: float, name: str, forward: str, back: str):
    """A bar across both ranks, and above it what it does in each direction."""
    art.rect(x - 7, y, 14, h, "purple")
    art.text(x, y - 38, name, size=15, weight="bold", anchor="middle")
    art.text(x, y - 22, f"forward: {forward}", size=11, anchor="middle")
    art.text(x, y - 8, f"backward: {back}", size=11, anchor="middle")


# ---- 05 ----


def draw_mlp() -> Picture:
    art = Picture(900, 344, "The MLP on two ranks: W1 by columns, W2 by rows, one all-reduce")
    top, height, gap = 104, 88, 18
    places = {"x": 76, "W1": 256, "gelu(x W1)": 408, "W2": 556, "partial y": 634, "y": 832}
    for name, x in places.items():
        width = {"W1": 112, "gelu(x W1)": 112, "W2": 28, "x": 28}.get(name, 28)
        art.text(x + width / 2, top - 8, name, anchor="middle", weight="bold")
    for rank, fill in enumerate(RANKS):
        y = top + rank * (height + gap)
        half = (rank / 2, rank / 2 + 0.5)
        art.text(16, y + height / 2 + 4, f"rank {rank}")
        matrix(art, 76, y, 28, height, "grey")
        matrix(art, 256, y + 30, 112, 28, fill, columns=half)
        arrow(art, 388, y + 49)
        matrix(art, 408, y, 112, height, fill, columns=half)
        arrow(art, 538, y + 49)
        matrix(art, 556, y - 6, 28, height + 12, fill, rows=half)
        arrow(art, 608, y + 49)
        matrix(art, 634, y, 28, height, fill)
        matrix(art, 832, y, 28, height, "grey")
        art.text(118, y + height / 2 + 4, "→", size=15, fill="faint")
        art.text(232, y + height / 2 + 4, "→", size=15, fill="faint")
        art.text(672, y + height / 2 + 4, "→", size=15, fill="faint")
        art.text(806, y + height / 2 + 4, "→", size=15, fill="faint")
    both = 2 * height + gap
    collective(art, 180, top, both, "f", "nothing", "all-reduce")
    collective(art, 746, top, both, "g", "all-reduce", "nothing")
    art.text(
        16,
        328,
        "x, y: [tokens, d]   W1: [d, 4d]   gelu(x W1): [tokens, 4d]   W2: [4d, d]. The GELU works "
        "on each column alone, so it needs no other rank.",
        fill="faint",
    )
    return art


def draw_heads() -> Picture:
    art = Picture(900, 262, "Attention on two ranks: four heads, two on each")
    left, cell, height = 190, 57, 30
    rows = (50, 94, 138, 182)
    names = ("rows of wqkv [3d, d]", "attention, per head", "columns of wo [d, d]")
    for name, y in zip((*names, "output [tokens, d], a sum"), rows, strict=True):
        art.text(16, y + 19, name)
    for head in range(4):
        fill, x = RANKS[head // 2], left + 3 * head * cell
        for i, kind in enumerate("qkv"):
            art.bar(x + i * cell, rows[0], cell - 2, height, fill, f"{kind}{head}")
        art.bar(x, rows[1], 3 * cell - 2, height, fill, f"head {head}: softmax(q kᵀ) v")
        art.bar(x, rows[2], 3 * cell - 2, height, fill, f"columns of head {head}")
    for rank, fill in enumerate(RANKS):
        x = left + 6 * rank * cell
        art.bar(x, rows[3], 6 * cell - 2, height, fill, f"rank {rank}'s term of every output")
    art.rect(left, rows[3] + height + 4, 12 * cell - 2, 10, "purple")
    art.text(left + 6 * cell, rows[3] + height + 32, "g: one all-reduce", anchor="middle")
    x = left + 6 * cell - 1
    art.line(x, rows[0] - 6, x, rows[3] + height, "ink", dash="4 3")
    return art


def draw_vocabulary() -> Picture:
    """The loss of one token by numbers: six words on two ranks."""
    logits, target = (2.0, 1.0, 0.0, 3.0, 0.5, -1.0), 1
    shards = (logits[:3], logits[3:])
    highest = max(logits)
    sums = [sum(exp(x - highest) for x in shard) for shard in shards]
    art = Picture(900, 250, "Vocabulary-parallel loss of one token: six words on two ranks")
    columns = {"this rank's logits": 90, "maximum": 330, "Σ exp(logit − max)": 440}
    columns |= {"target's logit − max": 610}
    for name, x in columns.items():
        art.text(x, 54, name, weight="bold")
    for rank, (shard, fill) in enumerate(zip(shards, RANKS, strict=True)):
        y = 66 + rank * 44
        art.text(16, y + 20, f"rank {rank}")
        for i, x in enumerate(shard):
            word = 3 * rank + i
            art.bar(90 + i * 76, y, 74, 30, fill, f"w{word}: {x:g}")
        art.bar(330, y, 90, 30, fill, f"{max(shard):g}")
        art.bar(440, y, 150, 30, fill, f"{sums[rank]:.3f}")
        owns = target in range(3 * rank, 3 * rank + 3)
        art.bar(610, y, 150, 30, fill, f"{logits[target] - highest:g}" if owns else "0: not here")
    for x, w in ((330, 90), (440, 150), (610, 150)):
        art.rect(x, 154, w, 10, "purple")
        art.text(x, 181, "all-reduce, max" if x == 330 else "all-reduce, sum", size=11)
    total, own = sum(sums), logits[target] - highest
    for x, text in ((330, f"{highest:g}"), (440, f"{total:.3f}"), (610, f"{own:g}")):
        art.text(x, 204, text, weight="bold")
    art.text(16, 204, "on both ranks")
    loss = f"loss of target w{target} = log {total:.3f} − ({own:g}) = {log(total) - own:.3f}"
    art.text(330, 234, loss, weight="bold")
    return art


STEPS = ("norm", "wqkv", "attention", "wo", "add", "norm", "w1", "gelu", "w2", "add")
REGION = range(1, 4), range(6, 9)  # the pairs: features are sharded in their middle


def draw_layer() -> Picture:
    """Along a layer: full, sharded by features, or sharded by the sequence."""
    art = Picture(900, 440, "The activations of a layer on two ranks, after each operation")
    left, cell, height = 100, 80, 48
    for panel, sequence_parallel in enumerate((False, True)):
        top = 92 + 190 * panel
        name = "with --sequence-parallel" if sequence_parallel else "tensor parallelism alone"
        art.text(16, top - 40, name, weight="bold")
        for i, step in enumerate(STEPS):
            x = left + i * cell
            sharded, partial = step in ("wqkv", "attention", "w1", "gelu"), step in ("wo", "w2")
            for rank, fill in enumerate(RANKS):
                y, half = top + rank * (height + 8), (rank / 2, rank / 2 + 0.5)
                if i == 0:
                    art.text(16, y + height / 2 + 4, f"rank {rank}")
                if sharded:
                    matrix(art, x, y, 54, height, fill, columns=half)
                elif partial:
                    matrix(art, x, y, 54, height, fill)
                elif sequence_parallel:
                    matrix(art, x, y, 54, height, fill, rows=half)
                else:
                    matrix(art, x, y, 54, height, "grey")
            art.text(x + 27, top + 2 * height + 26, step, size=11, anchor="middle")
        names = ("all-gather", "reduce-scatter") if sequence_parallel else ("", "all-reduce")
        for i, operator in ((1, 0), (4, 1), (6, 0), (9, 1)):
            x = left + i * cell - 16
            art.rect(x, top, 6, 2 * height + 8, "purple")
            text = f"{'fg'[operator]}: {names[operator] or 'nothing'}"
            art.text(x + 3, top - 8, text, size=11, anchor="middle")
    art.text(
        16,
        426,
        "height: the sequence; width: features. Grey: equal on both ranks. After wo and w2 each "
        "rank has one term of every output. f and g as in forward.",
        fill="faint",
    )
    return art


# ---- 06 ----

MESSAGE = 0.5  # time of a message, where a forward takes 1 and a backward 2


def run_plans(p: int, m: int) -> tuple[dict, dict, dict]:
    """GPipe as `Pipeline.run` executes it: each action with its rank, start and end; when each
    receive is posted; when its message arrives."""
    stage = load_stage("06")
    plans = [stage.plan(stage.gpipe(rank, p, m), p) for rank in range(p)]
    ran, posted, arrives, at = {}, {}, {}, [0] * p
    while any(at[rank] < len(plan) for rank, plan in enumerate(plans)):
        for rank, plan in enumerate(plans):
            while at[rank] < len(plan):
                upcoming, action = plan[at[rank]]
                free = max((end for r, _, _, end in ran.values() if r == rank), default=0.0)
                for later in upcoming:
                    posted.setdefault((rank, later), free)
                if stage.source_of(action, p) is not None and (rank, action) not in arrives:
                    break
                start = max(free, arrives.get((rank, action), 0.0))
                end = start + {"F": 1, "B": 2}[action.kind]
                ran[rank, action] = rank, action, start, end
                destination = stage.destination_of(action, p)
                if destination is not None:
                    arrives[destination, action._replace(stage=destination)] = end + MESSAGE
                at[rank] += 1
    return ran, posted, arrives


def message(action) -> str:
    """The name of what an action waits for: `h0`, hidden states, or `g0`, their gradient."""
    return f"{'h' if action.kind == 'F' else 'g'}{action.micro}"


def draw_messages() -> Picture:
    """GPipe with two micro-batches on two ranks: what is posted, waited for and sent, and when."""
    art = Picture(900, 330, "GPipe, two ranks, two micro-batches: receives, waits and sends")
    ran, posted, arrives = run_plans(2, 2)
    left, scale = 96, 78
    tops = {0: (48, 88), 1: (240, 178)}  # by rank: the lane of actions, the lane of receives
    length = max(end for *_, end in ran.values())
    for rank, (actions, receives) in tops.items():
        art.text(16, actions + 22, f"rank {rank}", weight="bold")
        art.rect(left, actions, length * scale, 34, "track")
        art.text(16, receives + 20, "receives")
        free = 0.0
        for _, action, start, end in (x for x in ran.values() if x[0] == rank):
            if start > free:
                gap = f"waits for {message(action)}"
                art.text(
                    left + (free + start) / 2 * scale, actions + 21, gap, 11, "faint", "middle"
                )
            fill = {"F": "blue", "B": "green"}[action.kind]
            name = f"{action.kind}{action.micro}"
            art.bar(left + start * scale, actions, (end - start) * scale - 1, 34, fill, name)
            free = end
    for (rank, action), begin in posted.items():
        y, end = tops[rank][1] + 24 * action.micro, arrives[rank, action]
        x, w = left + begin * scale, (end - begin) * scale
        art.bar(x, y, w - 1, 18, "pink", f"{message(action)} posted")
        sender = 1 - rank
        top = tops[sender][0] + (34 if sender == 0 else 0)
        # sent at the end of the sender's action; the slope is the time that the message takes
        art.line(x + w - MESSAGE * scale, top, x + w, y + (0 if rank else 18), "ink")
        art.text(
            x + w - MESSAGE * scale - 4, top + (14 if sender == 0 else -6), "send", 10, "ink", "end"
        )
    notes = (
        "h: hidden states; g: their gradient. A receive is posted before the action that precedes "
        "the one that needs it;",
        "the first action of rank 1 posts two. A line is a message in flight, from the end of the "
        "action that sends it.",
    )
    for i, note in enumerate(notes):
        art.text(16, 306 + 16 * i, note, fill="faint")
    return art


def draw_deadlock() -> Picture:
    """GPipe with receives posted two actions ahead, in one hardware queue per GPU."""
    art = Picture(900, 318, "Receives posted two actions ahead: a deadlock")
    queues = {  # what each rank launches, in order; and its state
        0: ["recv g0", "F0", "send h0", "recv g1", "F1", "send h1", "B0"],
        1: ["recv h0", "recv h1", "F0", "F1", "B0", "send g0", "B1"],
    }
    done, flying = (
        {(0, "F0"), (0, "send h0"), (1, "recv h0"), (1, "F0")},
        {(0, "recv g0"), (1, "recv h1")},
    )
    left, cell, place = 96, 112, {}
    for rank, (y, names) in enumerate(zip((66, 166), queues.values(), strict=True)):
        art.text(16, y + 22, f"rank {rank}", weight="bold")
        for i, name in enumerate(names):
            key = rank, name
            fill = "grey" if key in done else "pink" if key in flying else "track"
            place[key] = left + i * cell, y
            art.bar(left + i * cell, y, cell - 14, 34, fill, name)
            if i:
                art.text(left + i * cell - 7, y + 22, "›", 15, "faint", "middle")

    def across(sender: tuple[int, str], receiver: tuple[int, str], label: str) -> None:
        (x1, _), (x2, _) = place[sender], place[receiver]
        low, high = (100, 166) if sender[0] == 0 else (166, 100)
        art.line(x1 + 49, low, x2 + 49, high, "ink", dash="4 3")
        near = (x1 + 49, 114) if sender[0] == 0 else (x2 + 49, 114)
        art.text(near[0] + (-28 if sender[0] == 0 else 28), near[1], label, 11, "ink", "middle")

    across((0, "send h1"), (1, "recv h1"), "3")
    across((1, "send g0"), (0, "recv g0"), "4")
    (first, y), (second, _) = place[0, "recv g0"], place[0, "recv g1"]
    for x in (first, second):
        art.line(x + 49, y - 4, x + 49, y - 12, "ink")
    art.line(first + 49, y - 12, second + 49, y - 12, "ink")
    art.text((first + second) / 2 + 49, y - 16, "1", 11, "ink", "middle")
    art.text(place[0, "F1"][0] - 7, y - 4, "2", 11, "ink", "middle")
    reasons = (
        "1  recv g1 starts when recv g0, from the same rank, has ended.",
        "2  F1 was launched after recv g1, so in one hardware queue it starts later, and so does "
        "send h1.",
        "3  recv h1 waits for send h1. F1, B0 and send g0 of rank 1 come after it.",
        "4  recv g0 waits for send g0. Posted one action ahead, recv g1 would come after send h1.",
    )
    for i, reason in enumerate(reasons):
        art.text(16, 228 + 18 * i, reason)
    entries = {"grey": "done", "pink": "in flight", "track": "cannot start"}
    art.legend(16, 306, entries)
    return art


# ---- 07 ----


def draw_mesh() -> Picture:
    """Eight ranks at their coordinates, and the groups in which they communicate."""
    art = Picture(900, 384, "pp 2 × dp 2 × tp 2: rank = (pp_rank · dp + dp_rank) · tp + tp_rank")
    box_w, box_h = 138, 66

    def corner(pp: int, dp: int, tp: int) -> tuple[float, float]:
        return 40 + pp * 430 + tp * 194, 84 + dp * 128

    for pp, units in enumerate(("embedding, layer 0", "layer 1, output")):
        x, y = corner(pp, 0, 0)
        art.rect(x - 16, y - 42, 364, 274, "track")
        art.text(x - 4, y - 22, f"node {pp}: pp_rank {pp}: {units}", weight="bold")
    for pp in (0, 1):
        for i in (0, 1):
            x, y = corner(pp, i, 0)
            art.rect(x + box_w, y + 26, 56, 12, "teal")  # tp
            x, y = corner(pp, 0, i)
            art.rect(x + 26, y + box_h, 12, 62, "purple")  # dp
    for dp in (0, 1):  # pp: from below each rank to below its counterpart
        for tp in (0, 1):
            (x1, y), (x2, _) = corner(0, dp, tp), corner(1, dp, tp)
            drop = box_h + 12 + 14 * tp
            for x in (x1, x2):
                art.rect(x + 96, y + box_h, 3, drop - box_h, "pink")
            art.rect(x1 + 96, y + drop, x2 - x1 + 3, 3, "pink")
    for rank in range(8):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        x, y = corner(pp, dp, tp)
        art.rect(x, y, box_w, box_h, "card")
        art.text(x + 8, y + 19, f"rank {rank}", weight="bold")
        art.text(x + 8, y + 38, f"dp_rank {dp}: batch half {dp}", size=10)
        art.text(x + 8, y + 54, f"tp_rank {tp}: matrix half {tp}", size=10)
    entries = {"teal": "tp: activations, all-reduced several times per layer"}
    art.legend(24, 340, entries)
    art.legend(460, 340, {"purple": "dp: gradients, all-reduced once per step"})
    entries = {"pink": "pp: activations sent on, gradients sent back, per micro-batch"}
    art.legend(24, 366, entries)
    return art


# ---- 08 ----

FOUR = (*RANKS, "green", "purple")


def draw_ring() -> Picture:
    """Which keys and values each of four ranks has in each turn of forward."""
    art = Picture(900, 276, "Four turns of a ring of four: queries stay, keys and values travel")
    left, top, cell, row = 190, 86, 172, 40
    art.text(100, top - 14, "its queries", weight="bold", anchor="middle")
    for turn in range(4):
        x = left + turn * cell
        art.text(x + 62, top - 14, f"turn {turn}", weight="bold", anchor="middle")
        for rank in range(4):
            y, source = top + rank * row, (rank - turn) % 4
            art.bar(x, y, 124, 28, FOUR[source], f"k{source} v{source}")
            if turn < 3:  # to the next rank: one row below, from the last one to the first
                art.text(
                    x + 148,
                    y + 19,
                    "↘" if rank < 3 else "⤴",
                    size=15,
                    fill="faint",
                    anchor="middle",
                )
    for rank, fill in enumerate(FOUR):
        y = top + rank * row
        art.text(16, y + 19, f"rank {rank}")
        art.bar(72, y, 56, 28, fill, f"q{rank}")
    art.text(
        16,
        262,
        "Each arrow is a message to the next rank (from rank 3 to rank 0), in flight while the "
        "ranks compute the turn on its left.",
        fill="faint",
    )
    return art


def draw_zigzag() -> Picture:
    """The scores that the causal mask leaves, by the rank that computes them."""
    art = Picture(900, 366, "Who computes which scores: four ranks, eight chunks")
    owners = {
        "naive: rank r has chunks 2r and 2r + 1": [0, 0, 1, 1, 2, 2, 3, 3],
        "zigzag: rank r has chunks r and 7 − r": [0, 1, 2, 3, 3, 2, 1, 0],
    }
    cell = 27
    for panel, (name, owner) in enumerate(owners.items()):
        left, top = 60 + 440 * panel, 84
        art.text(left - 44, top - 28, name, weight="bold")
        work = [0.0] * 4
        for query in range(8):
            art.text(left - 10, top + query * cell + 18, f"{query}", size=11, anchor="end")
            art.text(left + query * cell + 13, top - 6, f"{query}", size=11, anchor="middle")
            for key in range(8):
                x, y = left + key * cell, top + query * cell
                if key > query:
                    art.rect(x, y, cell - 2, cell - 2, "track")
                    continue
                art.rect(
                    x, y, cell - 2, cell - 2, FOUR[owner[query]], opacity=0.6 if key == query else 1
                )
                work[owner[query]] += 0.5 if key == query else 1
        for rank, fill in enumerate(FOUR):
            y = top + 12 + rank * 48
            art.bar(left + 236, y, 9 * work[rank], 24, fill, f"{work[rank]:g}")
            art.text(left + 236, y + 38, f"rank {rank}", size=11)
    art.text(
        16,
        334,
        "Rows: chunks of queries. Columns: chunks of keys. Grey: hidden by the mask, not computed. "
        "Paler: half hidden.",
        fill="faint",
    )
    art.text(
        16, 354, "Bars: blocks of scores per rank. The slowest rank sets the pace.", fill="faint"
    )
    return art


# ---- 09 ----


def draw_routing() -> Picture:
    """Two tokens per rank, four experts, k = 2: every copy of a token travels there and back."""
    art = Picture(900, 396, "Two ranks, four experts, k = 2: there and back by two all-to-alls")
    chosen = {"a": (0, 2), "b": (2, 3), "c": (1, 2), "d": (0, 1)}  # by token; a, b are rank 0's
    tokens, owned = (("a", "b"), ("c", "d")), ((0, 1), (2, 3))
    top, height, w, h = 92, 132, 40, 22
    titles = {"tokens": 96, "sorted by expert": 200, "at their experts": 430}
    titles |= {"back, sorted": 660, "weighted sum": 800}
    for name, x in titles.items():
        art.text(x + w / 2, top - 16, name, anchor="middle", weight="bold")
    for x, name in ((324, "dispatch"), (572, "combine")):
        art.rect(x, top, 14, 2 * height - 10, "purple")
        art.text(x + 7, top - 34, name, size=15, weight="bold", anchor="middle")
        art.text(x + 7, top - 16, "all-to-all", size=11, anchor="middle")
    for rank, fill in enumerate(RANKS):
        y = top + rank * height
        art.text(16, y + 34, f"rank {rank}", weight="bold")
        art.text(16, y + 52, "experts", size=10, fill="faint")
        art.text(16, y + 66, " and ".join(map(str, owned[rank])), size=10, fill="faint")
        for i, token in enumerate(tokens[rank]):
            middle = y + 24 + 44 * i
            art.bar(titles["tokens"], middle, w, h, fill, token)
            art.text(titles["tokens"] - 4, middle + 40, "chooses {}, {}".format(*chosen[token]), 10)
            art.bar(titles["weighted sum"], middle, w, h, fill, token)
        rows = sorted((e, token) for token in tokens[rank] for e in chosen[token])
        for x in (titles["sorted by expert"], titles["back, sorted"]):
            for i, (expert, token) in enumerate(rows):
                art.bar(x, y + 6 + 26 * i, w, h, fill, token)
                art.text(x + w + 6, y + 21 + 26 * i, f"expert {expert}", size=10, fill="faint")
        arrived = 0
        for i, expert in enumerate(owned[rank]):
            x = titles["at their experts"] - 50 + 76 * i
            art.rect(x - 6, y, 58, height - 22, "track")
            art.text(x + 23, y + height - 28, f"expert {expert}", size=10, anchor="middle")
            users = [
                (source, t) for source in (0, 1) for t in tokens[source] if expert in chosen[t]
            ]
            for j, (source, token) in enumerate(users):
                art.bar(x + 3, y + 6 + 26 * j, w, h, RANKS[source], token)
            arrived += len(users)
        art.text(titles["at their experts"] + 15, y + height - 8, f"{arrived} rows", 10, "faint")
    art.legend(24, 372, {"blue": "a token of rank 0", "orange": "a token of rank 1"})
    return art


DRAW = {
    "mlp": draw_mlp,
    "heads": draw_heads,
    "layer": draw_layer,
    "vocabulary": draw_vocabulary,
    "messages": draw_messages,
    "deadlock": draw_deadlock,
    "mesh": draw_mesh,
    "ring": draw_ring,
    "zigzag": draw_zigzag,
    "routing": draw_routing,
}
FOLDERS = {"messages": "06_pipeline", "deadlock": "06_pipeline", "mesh": "07_3d"}
FOLDERS |= {"ring": "08_context_parallel", "zigzag": "08_context_parallel"}
FOLDERS |= {"routing": "09_expert_parallel"}
PICTURES = {  # of the READMEs
    f"{FOLDERS.get(name, '05_tensor_parallel')}/{name}.svg": draw for name, draw in DRAW.items()
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=(*DRAW, "all"))
    parser.add_argument("--svg", type=Path, help="default: WHAT.svg")
    args = parser.parse_args()
    pictures = {args.svg or Path(f"{args.what}.svg"): DRAW.get(args.what)}
    if args.what == "all":
        pictures = {REPO / name: draw for name, draw in PICTURES.items()}
    for path, draw in pictures.items():
        path.write_text(str(draw()))


if __name__ == "__main__":
    main()
