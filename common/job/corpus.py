"""Corpora as memory-mapped tokens.

A corpus is prepared once, into `data/` beside this package (or $DATA_ROOT): one process writes it,
and processes that start meanwhile wait. Afterwards nothing touches the network or tokenizes again,
and all ranks of a node share the mapped pages.
"""

import contextlib
import fcntl
import gzip
import hashlib
import io
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.distributed import print0, replacing

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
    make = None if must_exist else lambda: _tokenize(read_words(name))
    contents, digest = load_prepared(name, _folder_name(name), FILES, make)
    if small := [s for s, content in zip(SPLITS, contents[:-1], strict=True) if len(content) < 8]:
        fail(f"--data {name}: too few tokens in {small[0]}.txt: fewer than 2")
    tokens = (torch.frombuffer(content, dtype=torch.int32) for content in contents[:-1])
    vocab = bytes(contents[-1]).decode().split("\n")[:-1]
    return Corpus(name, *tokens, vocab=vocab, digest=digest)


def load_prepared(
    name: str, folder: str, files: Sequence[str], make: Callable[[], list] | None
) -> tuple[list, str]:
    """Map the files of a prepared folder, and return their digest. name: of `--data`.

    If the folder is not complete, `make` returns what to write to each file. Fails with status 2 if
    that is impossible.
    """
    root = os.environ.get("DATA_ROOT") or Path(__file__).resolve().parents[2] / "data"
    prepared = Path(os.path.expanduser(root), folder)
    again = f"remove {prepared}, and it is prepared again"
    try:
        if not exists(prepared / "digest.txt"):
            _prepare(prepared, files, make)
        contents = [_mapped(prepared / file) for file in files]
        recorded = (prepared / "digest.txt").read_text()
    except ValueError as error:  # here, where the lock is free again: the other ranks wait for it
        fail(f"--data {name} {error}")
    except FileNotFoundError as error:
        fail(f"--data {name}: {error}: {again}")
    except OSError as error:  # it may be intact: another user's
        fail(f"--data {name}: {error}: set DATA_ROOT to another folder")
    digest = _digest(contents)
    if not recorded.startswith(digest):
        fail(f"--data {name}: {prepared} has changed since it was prepared: {again}")
    return contents, digest


def _mapped(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        # a private copy, which is never made: PyTorch warns of memory that is read-only
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _digest(contents: Iterable) -> str:
    each = [hashlib.sha256(content).digest() for content in contents]
    return hashlib.sha256(b"".join(each)).hexdigest()[:12]


# ---- preparation ----


def _folder_name(name: str) -> str:
    """The folder of a prepared corpus, from a hash of what it is prepared from."""
    if name == "wikitext2":
        return name
    folder = Path(name).resolve()
    texts = [SAMPLE] if name == "sample" else [folder / f"{split}.txt" for split in SPLITS]
    try:
        digest = _digest(map(_mapped, texts))
    except OSError as error:
        known = "a folder with train.txt, valid.txt and test.txt, or wikitext2, or sample"
        fail(f"--data {name}: {error}: pass {known}")
    return f"{re.sub('[^A-Za-z0-9.-]', '_', folder.name)[:60]}-{digest}"


def _prepare(prepared: Path, files: Sequence[str], make: Callable[[], list] | None) -> None:
    """Fill a prepared folder, once: processes that start meanwhile wait for its lock."""
    if make is None:
        how = "run `make data` where there is internet"
        other = "--data sample, or --data DIR with train.txt, valid.txt and test.txt"
        raise ValueError(f"is not prepared: {how}, or {other}")
    prepared.mkdir(parents=True, exist_ok=True)
    with open(prepared / "lock", "w") as lock:
        with contextlib.suppress(OSError):  # without locks all processes write the same
            fcntl.flock(lock, fcntl.LOCK_EX)
        if exists(prepared / "digest.txt"):
            return  # another process prepared it while this one waited
        contents = make()
        # the digest is the last: with it the folder is complete
        texts = zip((*files, "digest.txt"), (*contents, _digest(contents).encode()), strict=True)
        for name, text in texts:
            with replacing(prepared / name) as file:
                file.write(text)


def read_words(name: str) -> dict[str, list[str]]:
    """The words of each split, `<eos>` at each line's end."""
    if name == "wikitext2":
        texts = _wikitext2()
    elif name == "sample":  # the Python 3.11 language reference; its words are separated by spaces
        texts = gzip.decompress(SAMPLE.read_bytes()).decode().split("\f")
    else:
        texts = [_text_of(Path(name, f"{split}.txt")) for split in SPLITS]
    splits = zip(SPLITS, map(io.StringIO, texts), strict=True)
    return {s: [word for line in lines for word in (*line.split(), EOS)] for s, lines in splits}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"cannot be read: {path}, line {line}, is not UTF-8: {error}") from None


def _wikitext2() -> list[str]:
    """WikiText-2 (Merity et al., 2016), word level, from the Hugging Face Hub or its cache."""
    try:
        from datasets import load_dataset

        rows = load_dataset("Salesforce/wikitext", "wikitext-2-v1", revision=REVISION)
    except Exception as error:
        raise ValueError(f"cannot be fetched, is there internet? {error!r}") from None
    splits = [rows[split]["text"] for split in ("train", "validation", "test")]
    texts = ["".join(" ".join(["", *line.split(), "\n"]) for line in lines) for lines in splits]
    found = [hashlib.sha1(x.encode(), usedforsecurity=False).hexdigest()[:12] for x in texts]
    if found != PUBLISHED:
        raise ValueError("is not the text that was published: empty the cache of `datasets`")
    return texts


def _tokenize(words: dict[str, list[str]]) -> list:
    """Tokens of each split, and the vocabulary: `train`'s words by frequency; others are <unk>."""
    seen = Counter(words["train"])
    if any(word not in seen for s in ("valid", "test") for word in words[s]):
        seen.setdefault(UNKNOWN, 0)
    vocab = sorted(seen, key=lambda word: (-seen[word], word))
    number = {word: i for i, word in enumerate(vocab)}
    numbers = ([number.get(word, number.get(UNKNOWN)) for word in words[s]] for s in SPLITS)
    tokens = [torch.tensor(each, dtype=torch.int32).numpy() for each in numbers]
    return [*tokens, "".join(f"{word}\n" for word in vocab).encode()]


if __name__ == "__main__":  # `make data`
    corpus = load_corpus("wikitext2", download=True)
    counts = " / ".join(f"{len(getattr(corpus, split)):,}" for split in SPLITS)
    print0(f"WikiText-2 is prepared: {counts} tokens, vocabulary {len(corpus.vocab):,}")
