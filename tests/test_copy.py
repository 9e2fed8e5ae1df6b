"""The READMEs' section "Copy": a technique and two files, in a folder alone, train an MLP.

Then every rank saves, loses and loads its state, by the section's second block.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stages import REPO, stage_path
from torch import nn

# the README's lines get batches, and at the end every rank saves its model's full output
BEFORE = """
import sys
import torch

def batches(rank):
    for step in range(5):
        torch.manual_seed(100 * step + rank)
        yield torch.randn(6, 8), torch.randn(6, 8)
"""
PATH = """
path = f"state-{dist.get_rank()}.pt"
"""
LOSE = """
for p in params:
    p.data.zero_()
"""
AFTER = """
with torch.no_grad():
    torch.save(model(torch.ones(1, 8)), f"output-{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


def technique_of(stage: str) -> str:
    """The imports down to `# isort: split`, and the technique's section."""
    text = (REPO / stage_path(stage)).read_text()
    rule = "# " + "-" * 96 + "\n"
    banner = text.index(rule + "# The technique")
    imports = text[text.index("from __future__") : text.index("# isort: split")]
    return imports + text[banner : text.index(rule + "# The training loop")]


def plain_output(clip: float, lr: float, with_muon: bool) -> torch.Tensor:
    """Plain PyTorch on the batches of both ranks. with_muon: for the matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    matrices = [p for p in model.parameters() if p.dim() == 2 and with_muon]
    others = [p for p in model.parameters() if p not in set(matrices)]
    optimizers = [torch.optim.AdamW(others, lr=lr)]
    if with_muon:
        optimizers += [torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")]
    space: dict = {}
    exec(BEFORE, space)
    for parts in zip(*(space["batches"](rank) for rank in range(2)), strict=True):
        for x, y in parts:
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return model(torch.ones(1, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "file"),
    [("02", "ddp.py"), ("03", "zero.py"), ("04", "fsdp.py"), ("11", "muon.py")],
)
def test_a_copied_technique_trains_another_model(tmp_path, stage, file):
    readme = ((REPO / stage_path(stage)).parent / "README.md").read_text()
    section = readme[readme.index("## Copy") :]
    example, *saving = re.findall(r"```python\n(.*?)```", section, re.S)
    assert file in section
    (tmp_path / file).write_text(technique_of(stage))
    for name in re.findall(r"`(common/\w+\.py)`", section[: section.index("```")]):
        (tmp_path / "common").mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    # the same initial weights on every rank, as the plain model's
    example = example.replace("units = [", "torch.manual_seed(0)\nunits = [")
    if saving:
        save, load = saving[0].split("\n\n")
        example += PATH + save + LOSE + load
    (tmp_path / "run.py").write_text(BEFORE + example + AFTER)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "run.py"],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = plain_output(clip=1.0, lr=0.01, with_muon=stage == "11")
    off = 2e-4 if stage == "11" else 1e-5  # Muon computes in bfloat16
    for rank in range(2):
        output = torch.load(Path(tmp_path) / f"output-{rank}.pt")
        torch.testing.assert_close(output, expected, rtol=0, atol=off)
