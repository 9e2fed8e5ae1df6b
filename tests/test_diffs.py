"""The diff between two stages is the lesson: no shared line is moved, respaced or reworded."""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from functools import cache, lru_cache
from itertools import combinations

import pytest
from harness import REPO, stage_path, stages

sys.path.insert(0, str(REPO / "tools"))

from compare import Comparison, compare_stages, split_stage
from compare import compare as compare_texts

PAIRS = sorted(
    {*zip(stages(), stages()[1:], strict=False), *(("01", s) for s in stages() if s > "01")}
)
pairs = pytest.mark.parametrize("before, after", PAIRS)


@cache
def code_of(line: str) -> str:
    """A line's code without comments and white space; if it is not code, without white space."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return re.sub(r"\s+", "", line)
    return "".join(t.string for t in tokens if t.type != tokenize.COMMENT and t.string.strip())


def hunks(before: list[str], after: list[str]) -> list[tuple[list[str], list[str]]]:
    """The removed and added lines of each hunk of a minimal diff."""
    n, m = len(before), len(after)
    # length[i][j]: of the longest common subsequence of before[i:] and after[j:]. A line with words
    # counts double, so that it is not given up for a bracket
    length = [[0] * (m + 1) for _ in range(n + 1)]
    weight = [2 if re.search(r"\w", line) else 1 for line in before]
    for i in reversed(range(n)):
        row, below = length[i], length[i + 1]
        for j in reversed(range(m)):
            equal = before[i] == after[j]
            row[j] = below[j + 1] + weight[i] if equal else max(below[j], row[j + 1])
    found, i, j = [([], [])], 0, 0
    while i < n or j < m:
        if i < n and j < m and before[i] == after[j]:
            i, j = i + 1, j + 1
            if found[-1] != ([], []):
                found.append(([], []))
        elif j == m or (i < n and length[i + 1][j] >= length[i][j + 1]):
            found[-1][0].append(before[i])
            i += 1
        else:
            found[-1][1].append(after[j])
            j += 1
    return found


def noise(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """Added lines whose code was also removed: in another hunk (moved), or in the same hunk with
    other white space or another trailing comment (respaced).

    A line that is only indented because a new block surrounds it is neither. Lines that a file has
    several times are not compared.
    """
    once = [Counter(map(code_of, lines)) for lines in (before, after)]
    changes = hunks(before, after)
    removed = {code_of(x): (x, k) for k, (gone, _) in enumerate(changes) for x in gone}
    moved, respaced = [], []
    for k, (_, added) in enumerate(changes):
        for line in added:
            code = code_of(line)
            if len(re.findall(r"\w", code)) < 8 or any(count[code] != 1 for count in once):
                continue
            twin, place = removed.get(code, (None, None))
            if twin is not None and place != k:
                moved.append(line)
            elif twin is not None and twin.strip() != line.strip():
                respaced.append(line)
    return moved, respaced


BANNER = "# The training loop"


@lru_cache
def lines_of(stage: str) -> list[str]:
    return stage_path(stage).read_text().splitlines()


def without_technique(stage: str) -> list[str]:
    """The imports and the training loop, which all stages share.

    The technique is left out: it is replaced as a whole, so an equal line elsewhere was not moved.
    """
    lines = lines_of(stage)
    technique = next((i for i, x in enumerate(lines) if x.startswith("# The technique")), None)
    loop = lines.index(BANNER)
    return lines if technique is None else lines[:technique] + lines[loop:]


@pairs
def test_no_line_is_moved_and_none_respaced(before, after):
    moved, respaced = noise(without_technique(before), without_technique(after))
    assert not moved, "moved:\n" + "\n".join(moved)
    assert not respaced, "respaced:\n" + "\n".join(respaced)


@pairs
def test_shared_flags_have_the_same_help(before, after):
    def flags(stage: str) -> dict[str, str]:
        text = stage_path(stage).read_text()
        text = re.sub(r"choices=\w+, ", "", text)  # a stage may have more choices
        return dict(re.findall(r'add_argument\(\s*"(--[\w-]+)",(.*?)\)\n', text, re.DOTALL))

    a, b = flags(before), flags(after)
    for flag in a.keys() & b.keys():
        assert a[flag] == b[flag], flag


# ---- inside the techniques ----

# The definitions of an earlier stage that a stage refines, and why they are not identical. The
# methods of a class that `tools/compare.py` lists as renamed count under their new class.
REFINED = {
    "03": {
        "Bucket.(head)": "it holds parameters and a shard too",
        "Bucket.__init__": "it holds parameters and a shard too",
        "Bucket.collect": "`copy_gradient` is on its own, because stages 2 and 3 share only that",
        "Bucket.start_reduction": "a reduce-scatter instead of an all-reduce",
        "Bucket.finish_reduction": "the average becomes the shard's gradient",
        "ZeroRedundancyOptimizer.__init__": "an optimizer, not a module; three classes of buckets",
        "ZeroRedundancyOptimizer.no_sync": "stages 2 and 3 reduce every micro-batch",
        "ZeroRedundancyOptimizer.mark_ready": "also waits for the end of backward",
        "ZeroRedundancyOptimizer.launch_ready_buckets": "at most two buckets are full",
        "ZeroRedundancyOptimizer.finish_gradient_synchronization": "`end_backward` does the rest",
    },
    "04": {
        "FlatParameter.(head)": "no bucket with full gradients to begin with",
        "FlatParameter.__init__": "two groups, two dtypes, a device for the shard, frozen units",
        "FlatParameter.start_reduction": "zero_grad may come while the reduction is in flight",
        "FlatParameter.finish_reduction": "zero_grad may come while the reduction is in flight",
        "FullyShardedDataParallel.__init__": "units, hybrid sharding, dtypes, the meta device",
        "FullyShardedDataParallel.forward": "stale unsharded parameters are freed first",
        "FullyShardedDataParallel.no_sync": "only the replicas' all-reduce is deferred",
        "FullyShardedDataParallel.before_forward": "prefetches; casts the inputs",
        "FullyShardedDataParallel.after_forward": "may leave the unit unsharded",
        "FullyShardedDataParallel.before_backward": "prefetches; reshards frozen units",
        "FullyShardedDataParallel.reshard_finished_units": "units may be frozen or nested",
        "FullyShardedDataParallel.mark_ready": "always reduces",
        "FullyShardedDataParallel.launch_ready_buckets": "also starts the replicas' all-reduce",
        "FullyShardedDataParallel.end_backward": "reshards every unit",
        "FullyShardedDataParallel.finish_gradient_synchronization": "also waits for replicas",
        "FullyShardedDataParallel.training_state": "every parameter is sharded",
    },
    "06": {"clip_grad_norm_": "sums the squares over the stages; nothing is replicated"},
    "07": {"clip_grad_norm_": "sums the squares over two axes of the mesh"},
}


def differing(comparison: Comparison) -> dict[str, str]:
    """The definitions of a technique that are identical to none of their earlier versions, each
    with the version that it is compared with. The head of a renamed class may differ."""
    found, inside = {}, False
    for definition in comparison.definitions:
        name, base = definition.block.name, definition.base
        if definition.block.kind == "banner":
            inside = (inside or "# The technique" in name) and BANNER not in name
        for leaf in definition.leaves if inside else []:
            is_renamed_head = leaf.block.kind == "head" and base.name != name
            if leaf.status in ("changed", "rewritten") and not is_renamed_head:
                found[leaf.block.name] = f"{leaf.base.name} in {leaf.base_stage}"
    return found


@pytest.mark.parametrize("stage", stages()[1:])
def test_a_definition_of_two_stages_is_identical_or_listed_as_refined(stage):
    found, listed = differing(compare_stages(f"{int(stage) - 1:02}", stage)), REFINED.get(stage, {})
    unlisted = {name: base for name, base in found.items() if name not in listed}
    assert not unlisted, f"not identical to an earlier stage, nor in REFINED: {unlisted}"
    outdated = [name for name in listed if name not in found]
    assert not outdated, f"in REFINED, but identical to an earlier stage, or gone: {outdated}"


def test_a_changed_shared_definition_is_found():
    banner = "# {0}\n# The technique\n# {0}\n\n\n".format("-" * 96)
    loop = "# {0}\n# The training loop\n# {0}\n\n\ndef main():\n    {1}\n"
    text = "class A:\n    x = 1\n\n    def f(self):\n        return 1  # why\n\n\n"
    first = split_stage("01_first", banner + text + loop.format("-" * 96, "first()"))
    for change, names in (("why", []), ("why not", ["A.f"]), ("why\n        # not", ["A.f"])):
        changed = text.replace("why", change)
        second = split_stage("02_second", banner + changed + loop.format("-" * 96, "second()"))
        assert list(differing(compare_texts(first, second))) == names
        earlier = split_stage("00_zeroth", banner + changed)
        assert not differing(compare_texts(first, second, [earlier]))
    assert all(reason for reasons in REFINED.values() for reason in reasons.values())


def test_moved_and_respaced_lines_are_found():
    lines = ["import one_module", "import other_module", "x = compute(1)  # why", "all_done = 1"]
    swapped = [lines[1], lines[0], *lines[2:]]
    assert noise(lines, swapped) == ([lines[0]], []) or noise(lines, swapped) == ([lines[1]], [])
    for other in ("x = compute( 1 )", "x = compute(1)  # another word"):
        assert noise(lines, [*lines[:2], other, lines[3]]) == ([], [other])
    wrapped = [*lines[:2], "with a_new_block:", "    x = compute(1)  # why", lines[3]]
    assert noise(lines, wrapped) == ([], [])
    assert noise(lines, [*lines, "a_new_line = 3"]) == ([], [])
    removed, added = hunks(lines, wrapped)[0]
    assert removed == [lines[2]] and added == wrapped[2:4]


def test_every_stage_is_compared():
    assert {a for a, _ in PAIRS} | {b for _, b in PAIRS} >= set(
        stages() if len(stages()) > 1 else []
    )
    assert len(PAIRS) <= len(list(combinations(stages(), 2)))
