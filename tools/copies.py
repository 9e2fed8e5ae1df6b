"""Write the files beside `train.py` that a stage takes unchanged from earlier ones: `make copies`.

`copies` in a stage's `stage.toml` names them. Each is what section "Copy" of its origin's README
takes from that stage's script, below a line that says so. Change the origin, then run this.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools.stages import REPO, beside, stage_file, stage_path, stages

RULE = "# " + "-" * 96 + "\n"


def what_to_take(stage: str) -> str:
    """The first paragraph of the README's section "Copy"."""
    readme = stage_path(stage).with_name("README.md").read_text("utf-8")
    return readme.partition("\n## Copy\n")[2].partition("```")[0]


def technique(stage: str) -> str:
    """The file that this paragraph describes: the imports and the technique section."""
    text = stage_path(stage).read_text("utf-8")
    imports = text[text.index("from __future__") : text.index("# isort: split")]
    _, *sections = re.split(rf"(?m)^{RULE}(?=# )", text)  # each begins with its title
    (section,) = [each for each in sections if each.startswith("# The technique")]
    code = re.sub(r"(?m)^sys\.path.*\n", "", imports) + RULE + section.rstrip() + "\n"
    if found := re.search(r"without `(\w+)`", what_to_take(stage)):
        code = re.sub(rf"(?ms)^def {found[1]}\(.*?(?=^\S(?!->))", "", code)
    return without_unused_imports(code)


def without_unused_imports(code: str) -> str:
    """Without the lines that import one name which the code does not use."""
    tree, lines = ast.parse(code), code.splitlines(keepends=True)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body[::-1]:
        if isinstance(node, ast.Import | ast.ImportFrom) and len(node.names) == 1:
            name = node.names[0].asname or node.names[0].name
            if name not in used and name != "annotations":
                del lines[node.lineno - 1]
    return re.sub(r"\n{3,}(?=import )", "\n\n", "".join(lines))


def expected(stage: str) -> dict[Path, str]:
    """The files beside a stage's script, with the text that they must have."""
    found = {}
    for path, origin in zip(beside(stage), stage_file(stage).copies.values(), strict=True):
        folder = stage_path(origin).parent.name
        said = f'`make copies` takes this from {folder}/train.py, by section "Copy" of its README'
        found[path] = f"# {said}.\n{technique(origin)}"
    return found


def main() -> None:
    for stage in stages():
        for path, text in expected(stage).items():
            is_new = not path.exists() or path.read_text("utf-8") != text
            path.write_text(text, "utf-8")
            print(f"{path.relative_to(REPO)}: {'written' if is_new else 'as before'}")


if __name__ == "__main__":
    main()
