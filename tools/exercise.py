"""Write a technique yourself: the stage's script with blanks, in exercises/NN_name/train.py.

    python -m tools.exercise 02

The definitions that `exercise` in the stage's `stage.toml` names keep their signatures, docstrings
and checks. Fill them in that order; `make check-02` checks what is there, with the stage's own code
in the blanks that are left. Git ignores the folder, so `git clean -fdX` deletes it.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import shutil

from common.job.launch import fail
from tools.stages import REPO, beside, stage_file, stage_path, stages


def bodies(source: str) -> dict[str, slice]:
    """The lines to write of every function and method: what follows its docstring and checks."""
    found, module = {}, ast.parse(source)
    for owner in [module, *(node for node in module.body if isinstance(node, ast.ClassDef))]:
        prefix = "" if owner is module else f"{owner.name}."
        for function in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            start = function.body[0].lineno - 1
            for statement in itertools.takewhile(is_of_a_check, function.body):
                if not isinstance(statement, ast.Assign):  # stays only if a check follows
                    start = statement.end_lineno
            found[prefix + function.name] = slice(start, function.end_lineno)
    return found


def is_of_a_check(statement: ast.stmt) -> bool:
    """Whether it is a docstring, an assignment, or an `if` whose block raises."""
    if isinstance(statement, ast.If):
        return isinstance(statement.body[-1], ast.Raise) and not statement.orelse
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or isinstance(statement, ast.Assign)


def with_bodies(source: str, new: dict[str, list[str]]) -> tuple[str, list[int]]:
    """`source` with new lines for these bodies, and of each of its lines the number in `source`."""
    lines, places = source.splitlines(), bodies(source)
    numbers = list(range(1, len(lines) + 1))
    for name in sorted(new, key=lambda name: places[name].start, reverse=True):
        lines[places[name]] = new[name]
        numbers[places[name]] = [places[name].stop] * len(new[name])
    return "\n".join(lines) + "\n", numbers


def with_blanks(number: str) -> str:
    """The script of a stage, with a line that raises in place of each body to write."""
    names, blanks = stage_file(number).exercise, {}
    for i, name in enumerate(names, 1):
        what = f'"exercise {i} of {len(names)}: {name}"'
        blanks[name] = [" " * (4 + 4 * name.count(".")) + f"raise NotImplementedError({what})"]
    return with_bodies(stage_path(number).read_text("utf-8"), blanks)[0]


def blanks_of(source: str) -> list[str]:
    """The definitions that are still to be written, in the order of the exercise."""
    found = re.findall(r'NotImplementedError\("exercise (\d+) of \d+: (.*)"\)', source)
    return [name for _, name in sorted((int(number), name) for number, name in found)]


def filled(source: str, number: str) -> tuple[str, list[int]]:
    """A script whose blanks have the stage's own bodies, and the numbers of its lines."""
    own = stage_path(number).read_text("utf-8")
    lines, places = own.splitlines(), bodies(own)
    return with_bodies(source, {name: lines[places[name]] for name in blanks_of(source)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=stages())
    args = parser.parse_args()
    names = stage_file(args.stage).exercise
    if not names:
        fail(f"stage {args.stage} has no exercise")
    path = REPO / "exercises" / stage_path(args.stage).parent.name / "train.py"
    shown = path.relative_to(REPO)
    if path.exists():
        fail(f"{shown} exists: move it away to begin again")
    path.parent.mkdir(parents=True, exist_ok=True)
    common = REPO / "exercises/common"
    if not common.is_symlink():
        common.symlink_to("../common")
    path.write_text(with_blanks(args.stage), "utf-8")
    for other in beside(args.stage):
        shutil.copy(other, path.parent)
    print(f"{shown}: write, in this order,")
    print("\n".join(f"  {i:2}  {name}" for i, name in enumerate(names, 1)))
    print(f"then: make check-{args.stage}, after each of them if you like")


if __name__ == "__main__":
    main()
