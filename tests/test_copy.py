"""The READMEs' section "Copy": what it lists, in a folder alone, trains another model.

The files beside a script are such copies, too.

The first paragraph of a section says what to take, its first block trains a model, and its second
one saves and loads the state, which every rank loses in between. The same block runs once more. A
third one, if there is one, saves the full weights, which a plain model loads.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import pytest
import torch
from processes import free_port
from torch import nn

from common.weight_files import write_tensors

from tools import copies
from tools.pool import fork_server
from tools.stages import REPO, beside, load_file, needs_model, stage_file, stage_path, stages

COPIED = stages()[1:]

# The README's lines get batches: of two parts, if there are several ranks, or without an argument
# the full ones. Sequences are 12 tokens long.
BEFORE = """
import os
import torch

class Statistics(torch.nn.BatchNorm1d):  # changes its buffers, not what it gets
    def __init__(self):
        super().__init__(1, affine=False)

    def forward(self, x):
        super().forward(x.reshape(-1, 1))
        return x

def batches(part=None):
    n = 1 if part is None else min(2, int(os.environ.get("WORLD_SIZE", 1)))
    for step in range(5):
        torch.manual_seed(step)
        x, y = torch.randn(2, 4, 12, WIDTH)
        yield x.chunk(n)[part or 0], 30 * y.chunk(n)[part or 0]  # so that gradients are clipped
"""
PATH = """
path = f"state-{dist.get_rank()}.pt"
"""
LOSE = """
buffers = [buffer.clone() for buffer in model.buffers()]
offloaded = [file.mapped() for file in getattr(locals().get("optimizer"), "files", [])]
lost = locals().get("params") or offloaded or model.parameters()
for tensor in [*lost, *model.buffers()]:
    tensor.data.zero_()
for value in [v for v in locals().values() if hasattr(v, "param_groups")]:
    for state in getattr(value, "optimizer", value).state.values():
        for moment in state.values():
            if torch.is_tensor(moment):
                moment.zero_()
"""
FOUND = """
assert buffers[-1] == 5 * (2 if "pipeline" in locals() else 1)
assert all(map(torch.equal, buffers, model.buffers()))
"""
# at the end every rank saves the model's output; of a sequence of which it has a part, its part
AFTER = """
with torch.no_grad():
    x = torch.linspace(-1, 1, 12 * WIDTH).view(1, 12, WIDTH)
    if "ring" in locals():
        x = local_tokens(x, ring.positions, 12)
    if "pipeline" in locals():
        for number in range(pipeline.n_stages):
            if number in pipeline.stages:
                x = pipeline.stages[number].part(x)
            dist.broadcast(x, group=pipeline.to_lower, group_src=number % pipeline.p)
    else:
        x = model(x)
own = ring.positions if "ring" in locals() else [range(12)]
torch.save([x, [i for chunk in own for i in chunk]], f"output-{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@dataclass
class Section:
    """A stage's section "Copy"."""

    stage: str

    def __post_init__(self):
        readme = stage_path(self.stage).with_name("README.md").read_text()
        assert "\n## Copy\n" in readme, f"{self.stage}'s README has no section Copy"
        text = readme[readme.index("\n## Copy\n") + 1 :].split("\n## ")[0]
        self.what_to_take = copies.what_to_take(self.stage)
        blocks = re.findall(r"```python\n(.*?)```", text, re.S)
        self.example, self.saving, self.export = (blocks + [""])[:3]
        (self.file,) = re.findall(r"\bas `(\w+\.py)`", self.what_to_take)
        self.common = re.findall(r"`(common/(?:job/)?\w+\.py)`", self.what_to_take)
        ranks = re.search(r"on each of (\d+) ranks", self.what_to_take)
        self.ranks = int(ranks[1]) if ranks else 2
        self.width = int(re.search(r"Linear\((\d+)", self.example)[1])

    def files(self) -> dict[str, str]:
        """What the first paragraph describes: a file, and those beside `train.py`."""
        others = {path.name: path.read_text() for path in beside(self.stage)}
        return {self.file: copies.technique(self.stage)} | others

    def loop(self) -> str:
        return self.example[self.example.index("for x, y in ") :]

    def script(self) -> str:
        # the same initial weights on every rank, as the plain model's
        example = self.example.replace("\nunits = [", "\ntorch.manual_seed(0)\nunits = [")
        example = re.sub(r"nn\.Tanh\(\)|\*units(?!\[)", r"\g<0>, Statistics()", example)
        save, load = self.saving.split("\n\n")
        lines = example + PATH + save + LOSE + load + FOUND + self.loop() + self.export + AFTER
        # in a function: at exit, a process group that a global refers to can abort
        script = BEFORE + "def main():\n" + indent(lines, "    ") + "\nmain()\n"
        return script.replace("WIDTH", str(self.width))

    def plain_model(self) -> nn.Module:
        """The example's `units`, and what they need of the lines above them."""
        space: dict = {}
        lines = []
        for node in ast.parse(self.example).body:
            code = ast.unparse(node)
            names = "|".join(name.removesuffix(".py") for name in self.files())
            if re.match(f"from ({names}) import", code) or "init_process" in code:
                continue
            if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
                lines.append(code)
            if code.startswith("units = "):
                lines += ["torch.manual_seed(0)", code]
        exec("\n".join(lines), space)
        return nn.Sequential(*space["units"])


def plain_output(section: Section) -> torch.Tensor:
    """Plain PyTorch on the full batches."""
    model = section.plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    space: dict = {}
    exec(BEFORE.replace("WIDTH", str(section.width)), space)
    for _ in range(2):
        for x, y in space["batches"]():
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        width = section.width
        return model(torch.linspace(-1, 1, 12 * width).view(1, 12, width))


def run_copy(folder: Path, rank: int, ranks: int, port: int) -> None:
    """Run the script in this process, which has imported torch, with nothing of this repository."""
    os.chdir(folder)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {name: str(value) for name, value in where.items()}
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path) != REPO)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("common", "tools")]:
        del sys.modules[name]
    inspect._filesbymodname.clear()  # it knows a file of `common`, which is a folder only here
    runpy.run_path("run.py", run_name="__main__")


def outputs(folder: Path, ranks: int) -> list:
    """Run the script on so many ranks; what each has saved."""
    port, process = free_port(), fork_server().Process
    started = [process(target=run_copy, args=(folder, r, ranks, port)) for r in range(ranks)]
    for each in started:
        each.start()
    for each in started:
        each.join(300)
    assert [each.exitcode for each in started] == [0] * ranks
    return [torch.load(folder / f"output-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(params=COPIED)
def section(request) -> Section:
    return Section(request.param)


@pytest.mark.slow
def test_a_copied_technique_trains_another_model(tmp_path, section, monkeypatch):
    """As the plain model; a stage that computes something else, as the same lines on one rank."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name, text in section.files().items():
        (tmp_path / name).write_text(text)
    for name in section.common:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    (tmp_path / "run.py").write_text(section.script())
    if needs_model(section.stage):  # its example reads them from this folder
        (tmp_path / "pretrained").mkdir()
        weights = section.plain_model().state_dict()
        write_tensors(tmp_path / "pretrained/model.safetensors", weights)
    found = outputs(tmp_path, section.ranks)
    trains_all = needs_model(section.stage) and "adapters" not in section.example
    if stage_file(section.stage).reference == section.stage and not trains_all:
        ((expected, _),) = outputs(tmp_path, 1)
    else:
        expected = plain_output(section)
    atol = stage_file(section.stage).tolerance.get("loss", 1e-5)
    for output, positions in found:
        torch.testing.assert_close(output, expected[:, positions], rtol=0, atol=atol)
    if section.export:
        plain = section.plain_model()
        plain.load_state_dict(torch.load(tmp_path / "weights.pt"))
        x = torch.linspace(-1, 1, 12 * section.width).view(1, 12, section.width)
        torch.testing.assert_close(plain(x), found[0][0], rtol=0, atol=1e-6)


def test_the_section_lists_what_the_copy_imports(tmp_path, section):
    """No file more or less, and no name in the copy that its imports do not define."""
    files = section.files()
    assert {*files} == {*re.findall(r"`(?!train)(\w+\.py)`", section.what_to_take)}
    needed, queue = set(), [*files.values(), section.example]
    while queue:
        for name in re.findall(r"^from (common\.[\w.]+) import", queue.pop(), re.M):
            file = name.replace(".", "/") + ".py"
            if file not in needed:
                needed.add(file)
                queue.append((REPO / file).read_text())
    assert needed == set(section.common)
    (tmp_path / section.file).write_text(files[section.file])
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--select", "F821"]
    done = subprocess.run([*ruff, section.file], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- the files beside a script ----


@pytest.mark.parametrize("stage", stages())
def test_the_files_beside_a_script_are_those_of_the_sections_copy(stage):
    for path, text in copies.expected(stage).items():
        origin = Section(stage_file(stage).copies[path.name])
        assert path.name == origin.file
        assert path.read_text().partition("\n")[2] == copies.technique(origin.stage), "make copies"
        assert path.read_text() == text, "make copies"


def test_each_script_gets_the_files_of_its_own_folder(tmp_path):
    """Also if another one has a file of the same name; and no folder stays on the path."""
    names = {name.removesuffix(".py") for x in stages() for name in stage_file(x).copies}
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        lines = ["import sys", "from pathlib import Path"]
        lines += ["sys.path.insert(0, str(Path(__file__).resolve().parent))"]
        for name in names:
            (folder / f"{name}.py").write_text(f"origin = {folder.name!r}\n")
            lines += [f"from {name} import origin as {name}"]
        (folder / "train.py").write_text("\n".join(lines))
    before = sys.path[:]
    for folder in (tmp_path / "a", tmp_path / "b"):
        module = load_file(folder / "train.py", f"script_{folder.name}")
        assert {getattr(module, name) for name in names} == {folder.name}
        assert sys.path == before


def test_the_readme_has_a_line_for_every_stage():
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)/README\.md\)", (REPO / "README.md").read_text(), re.M)
    assert rows == [(name, name) for name in (stage_path(stage).parent.name for stage in stages())]
