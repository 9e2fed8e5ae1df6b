"""The stages by their numbers, "01", "02", ...: the name of a stage's folder is no identifier, so
`import` cannot load its script."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]


def stages() -> list[str]:
    """The numbers of the stages."""
    return sorted(path.parent.name[:2] for path in REPO.glob("[0-9][0-9]_*/train.py"))


def stage_path(number: str) -> Path:
    (path,) = REPO.glob(f"{number}_*/train.py")
    return path


@cache
def load_stage(number: str) -> ModuleType:
    """`train.py` of a stage as a module."""
    name = f"stage_{number}"
    spec = importlib.util.spec_from_file_location(name, stage_path(number))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
