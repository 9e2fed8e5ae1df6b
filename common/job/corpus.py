"""Corpora as memory-mapped tokens.

A corpus is prepared once, into `data/` beside this package (or $DATA_ROOT): one process writes to a
temporary folder and renames it; processes that start meanwhile wait. Afterwards nothing touches the
network or tokenizes again, and all ranks of a node share the mapped pages.
"""

import contextlib
import fcntl
import gzip
import hashlib
import io
import mmap
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.distributed import print0, sync

from common.job.launch import fail
from common.job.paths import exists

SPLITS = ("train", "valid", "test")
FILES = (*(f"{split}.int32" for split in SPLITS), "vocab.txt")  # of a prepared corpus
EOS, UNKNOWN = "<eos>", "<unk>"
SAMPLE = Path(__file__).with_name("sample.txt.gz")
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"  # of Salesforce/wikitext on the Hub
PUBLISHED = ["863f29c46ef9", "0418625c8b4d", "c7b8ce0aa086"]  # SHA-1 of wiki.train.tokens, ...


@dataclass(frozen=True)
class Corpus:
    """`train`, `valid`, `test`: int32 tokens, 1-D, memory-mapped. `vocab[t]` is token t's word.

    digest: a hash of them all. The same text has the same digest wherever it was prepared.
    """

    name: str
    train: Tensor
    valid: Tensor
    test: Tensor
    vocab: list[str]
    digest: str


def load_corpus(name: str, download: bool = False) -> Corpus:
    """Load `wikitext2`, `sample`, or a folder with train.txt, valid.txt and test.txt.

    Fails with status 2 if the corpus is not prepared and cannot be.
    """
    must_exist = name == "wikitext2" and not download
    write = None if must_exist else lambda folder: _write(read_words(name), folder)
    contents, digest = load_prepared(name, _folder_name(name), FILES, write)
    if small := [file for file, content in zip(FILES, contents, strict=True) if len(content) < 8]:
        fail(f"--data {name}: too few tokens in {small[0]}: fewer than 2")
    tokens = (torch.frombuffer(content, dtype=torch.int32) for content in contents[:-1])
    vocab = bytes(contents[-1]).decode().split("\n")[:-1]
    return Corpus(name, *tokens, vocab=vocab, digest=digest)


def load_prepared(
    name: str, folder: str, files: Sequence[str], write: Callable[[Path], None] | None
) -> tuple[list, str]:
    """Map the files of a prepared folder, and return their digest. name: of `--data`.

    If the folder is not there, `write` fills a new one. Fails with status 2 if that is impossible.
    """
    prepared = _path_of(folder)
    again = f"remove {prepared}, and it is prepared again"
    try:
        prepare(name, folder, files, write)
        contents = [_mapped(prepared / file) for file in files]
        recorded = (prepared / "digest.txt").read_text().split()
    except OSError as error:
        is_gone = isinstance(error, FileNotFoundError)  # else it may be intact: another user's
        fail(f"--data {name}: {error}: {again if is_gone else 'set DATA_ROOT to another folder'}")
    except ValueError as error:  # here, where the lock is free again: the other ranks wait for it
        fail(str(error))
    found = _digests(contents)
    if found != recorded:
        pairs = zip(files, found[1:], recorded[1:], strict=False)
        wrong = next((file for file, ours, theirs in pairs if ours != theirs), "digest.txt")
        fail(f"--data {name}: {prepared / wrong} has changed since it was prepared: {again}")
    return contents, recorded[0]


def _path_of(folder: str) -> Path:
    root = os.environ.get("DATA_ROOT") or Path(__file__).resolve().parents[2] / "data"
    return Path(os.path.expanduser(root), folder)


def _mapped(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        # a private copy, which is never made: PyTorch warns of memory that is read-only
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _digests(contents: list) -> list[str]:
    """The digest of a corpus, and one of each of its FILES."""
    each = [hashlib.sha256(content) for content in contents]
    whole = hashlib.sha256(b"".join(x.digest() for x in each)).hexdigest()[:12]
    return [whole, *(x.hexdigest() for x in each)]


# ---- preparation ----


def _folder_name(name: str) -> str:
    """The folder of a prepared corpus, from a hash of what it is prepared from."""
    if name == "wikitext2":
        return name
    folder = Path(name).resolve()
    texts = [SAMPLE] if name == "sample" else [folder / f"{split}.txt" for split in SPLITS]
    content = hashlib.sha256()
    try:
        for path in texts:
            with open(path, "rb") as file:
                content.update(hashlib.file_digest(file, "sha256").digest())
    except (FileNotFoundError, NotADirectoryError):
        known = "a folder with train.txt, valid.txt and test.txt, or wikitext2, or sample"
        fail(f"--data {name}: there is no {path}; give {known}")
    except OSError as error:
        fail(f"--data {name} cannot be read: {error}")
    return f"{re.sub('[^A-Za-z0-9.-]', '_', folder.name)[:60]}-{content.hexdigest()[:12]}"


def prepare(name: str, folder: str, files: Sequence[str], write: Callable | None) -> None:
    """Fill a prepared folder, unless it is there. ValueError, with a line for `fail`, if that is
    impossible."""
    prepared = _path_of(folder)
    if exists(prepared / "digest.txt"):
        return
    if write is None:
        how = "run `make data` where there is internet"
        other = "--data sample, or --data DIR with train.txt, valid.txt and test.txt"
        raise ValueError(f"--data {name} is not prepared: {how}, or {other}")
    try:
        prepared.parent.mkdir(parents=True, exist_ok=True)
        with open(prepared.with_name(f"{prepared.name}.lock"), "w") as lock:
            with contextlib.suppress(OSError):  # without locks the atomic rename alone protects us
                fcntl.flock(lock, fcntl.LOCK_EX)
            if exists(prepared / "digest.txt"):
                return  # another process prepared it while this one waited
            with tempfile.TemporaryDirectory(
                dir=prepared.parent, prefix=".", ignore_cleanup_errors=True
            ) as temporary:
                aside = Path(temporary, prepared.name)
                aside.mkdir()
                write(aside)
                digests = _digests([(aside / file).read_bytes() for file in files])
                (aside / "digest.txt").write_text("\n".join(digests))
                for path in (*aside.iterdir(), aside):
                    sync(path)
                try:
                    aside.rename(prepared)
                    sync(prepared.parent)
                except OSError:
                    if not exists(prepared / "digest.txt"):
                        raise
                    # a process on another node, which does not see the lock, was first
    except OSError as error:
        where = f"{prepared.parent}: {error}; set DATA_ROOT"
        raise ValueError(f"--data {name}: cannot prepare it in {where}") from None
    except ValueError as error:
        raise ValueError(f"--data {name} {error}") from None


def read_words(name: str) -> dict[str, list[str]]:
    """The words of each split, `<eos>` at each line's end."""
    if name == "wikitext2":
        lines = _wikitext2_lines()
    elif name == "sample":  # the Python 3.11 language reference; its words are separated by spaces
        texts = gzip.decompress(SAMPLE.read_bytes()).decode().split("\f")
        lines = dict(zip(SPLITS, map(io.StringIO, texts), strict=True))
    else:
        lines = _lines_of_folder(Path(name))
    return {s: [word for line in lines[s] for word in (*line.split(), EOS)] for s in SPLITS}


def _lines_of_folder(folder: Path) -> dict[str, io.StringIO]:
    lines = {}
    try:
        for path in (folder / f"{split}.txt" for split in SPLITS):
            lines[path.stem] = io.StringIO(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"cannot be read: {path}, line {line}, is not UTF-8: {error}") from None
    return lines


def _wikitext2_lines() -> dict[str, list[str]]:
    """WikiText-2 (Merity et al., 2016), word level, from the Hugging Face Hub or its cache."""
    try:
        from datasets import load_dataset

        rows = load_dataset("Salesforce/wikitext", "wikitext-2-v1", revision=REVISION)
    except Exception as error:
        raise ValueError(f"cannot be fetched, is there internet? {error!r}") from None
    lines = {s: rows["validation" if s == "valid" else s]["text"] for s in SPLITS}
    files = ["".join(" ".join(["", *x.split(), "\n"]) for x in lines[s]).encode() for s in SPLITS]
    if [hashlib.sha1(x, usedforsecurity=False).hexdigest()[:12] for x in files] != PUBLISHED:
        raise ValueError("is not the text that was published: empty the cache of `datasets`")
    return lines


def _write(words: dict[str, list[str]], folder: Path) -> None:
    """Write tokens and vocabulary: the words of `train` by frequency; others are <unk>."""
    seen = Counter(words["train"])
    if any(word not in seen for s in ("valid", "test") for word in words[s]):
        seen.setdefault(UNKNOWN, 0)
    vocab = sorted(seen, key=lambda word: (-seen[word], word))
    number = {word: i for i, word in enumerate(vocab)}
    for split in SPLITS:
        numbers = [number.get(word, number.get(UNKNOWN)) for word in words[split]]
        (folder / f"{split}.int32").write_bytes(torch.tensor(numbers, dtype=torch.int32).numpy())
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocab), encoding="utf-8")


if __name__ == "__main__":  # `make data`
    corpus = load_corpus("wikitext2", download=True)
    counts = " / ".join(f"{len(getattr(corpus, split)):,}" for split in SPLITS)
    print0(f"WikiText-2 is prepared: {counts} tokens, vocabulary {len(corpus.vocab):,}")
