"""Paths: whether one exists, can be written, or is taken already."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_writable(path: Path) -> None:
    """Raise OSError if no file can be written at `path`, whose folder is made here."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def exists(path: str | os.PathLike) -> bool:
    """Whether the path is there. Raises OSError if that cannot be told, as Path.exists did until
    Python 3.13: a file that cannot be read now must not count as none."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def numbered(path: Path) -> Iterator[Path]:
    """The path, and the same with -2, -3, ... appended: for one that may be taken."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
