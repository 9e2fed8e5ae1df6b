"""Corpora as memory-mapped tokens, and batches that depend on (seed, step) only.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from common.atomic_files import exists, sync
from common.counter_rng import generator_of, sample_keys
from common.distributed import fail, print0
from common.loss import IGNORED

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


@dataclass(frozen=True)
class Batching:
    """How tokens become batches. Sizes are samples: per step over all ranks, and per forward."""

    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    seed: int = 0


def load_corpus(name: str, download: bool = False) -> Corpus:
    """Load `wikitext2`, `sample`, or a folder with train.txt, valid.txt and test.txt.

    Fails with status 2 if the corpus is not prepared and cannot be.
    """

    def write(folder: Path) -> None:
        _write(read_words(name), folder)

    must_exist = name == "wikitext2" and not download
    contents, digest = load_prepared(name, _folder_name(name), FILES, None if must_exist else write)
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
    root = os.environ.get("DATA_ROOT") or Path(__file__).resolve().parents[1] / "data"
    prepared = Path(os.path.expanduser(root), folder)
    again = f"remove {prepared}, and it is prepared again"
    try:
        if not exists(prepared / "digest.txt"):
            _prepare(name, prepared, files, write)
        contents = [_mapped(prepared / file) for file in files]
        recorded = (prepared / "digest.txt").read_text().split()
    except OSError as error:
        is_gone = isinstance(error, FileNotFoundError)  # else it may be intact: another user's
        fail(f"--data {name}: {error}: {again if is_gone else 'set DATA_ROOT to another folder'}")
    found = _digests(contents)
    if found != recorded:
        pairs = zip(files, found[1:], recorded[1:], strict=False)
        wrong = next((file for file, ours, theirs in pairs if ours != theirs), "digest.txt")
        fail(f"--data {name}: {prepared / wrong} has changed since it was prepared: {again}")
    return contents, recorded[0]


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


def _prepare(name: str, prepared: Path, files: Sequence[str], write: Callable | None) -> None:
    if write is None:
        other = "--data sample, or --data DIR with train.txt, valid.txt and test.txt"
        fail(f"--data {name} is not prepared: run `make data` where there is internet, or {other}")
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
        fail(f"--data {name}: cannot prepare it in {prepared.parent}: {error}; set DATA_ROOT")
    except ValueError as error:  # here, where the lock is free again: the other ranks wait for it
        fail(f"--data {name} {error}")


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


# ---- batches ----


def _windows(tokens: Tensor, indices: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [len(indices), seq_len], int64. Past the end: token 0 and IGNORED."""
    places = indices[:, None] * seq_len + torch.arange(seq_len + 1, device=tokens.device)
    windows = tokens[places.clamp(max=len(tokens) - 1)].long()
    past = places[:, 1:] >= len(tokens)  # a target
    return windows[:, :-1].masked_fill(past, 0), windows[:, 1:].masked_fill(past, IGNORED)


@lru_cache(maxsize=1)  # drawing it takes seconds for 100 million windows
def _order_of_epoch(seed: int, epoch: int, n_windows: int) -> Tensor:
    """A permutation of all windows [n_windows]."""
    order = torch.randperm(n_windows, generator=generator_of("epoch", seed, epoch))
    return order.to(torch.int32) if n_windows < 2**31 else order


def global_batch(seed: int, step: int, size: int, n_windows: int) -> list[int]:
    """Window indices of step `step`'s global batch, the same on every topology.

    Each epoch is a permutation of all windows, from (seed, epoch). Batches are consecutive parts
    of the concatenated epochs: a batch may span two epochs, and no window is left out.
    """
    indices, position = [], step * size
    while len(indices) < size:
        epoch, start = divmod(position, n_windows)
        order = _order_of_epoch(seed, epoch, n_windows)
        taken = order[start : start + size - len(indices)].tolist()
        indices += taken
        position += len(taken)
    return indices


def _micro_batches(tokens: Tensor, batching: Batching, rank: int, size: int, step: int) -> list:
    """This rank's part of step `step`'s global batch: inputs, targets and keys of micro-batches."""
    n_windows = (len(tokens) - 1) // batching.seq_len  # without the last, shorter one
    indices = global_batch(batching.seed, step, batching.global_batch_size, n_windows)
    share = batching.global_batch_size // size
    first, end = rank * share, (rank + 1) * share
    inputs, targets = _windows(tokens, torch.tensor(indices[first:end]), batching.seq_len)
    keys = sample_keys(batching.seed, step, torch.arange(first, end))
    parts = (x.split(batching.micro_batch_size) for x in (inputs, targets, keys))
    return list(zip(*parts, strict=True))


def train_batches(
    tokens: Tensor, batching: Batching, device: torch.device, first_step=0, rank=0, size=1
) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """For each step from `first_step` on, yield this rank's micro-batches of its global batch.

    rank, size: of the data-parallel group. A micro-batch is inputs, targets [micro batch, seq]
    and dropout keys [micro batch], on `device`. Fails if the corpus is shorter than one window.
    """
    if len(tokens) <= batching.seq_len:
        n = f"{len(tokens)} tokens to train on"
        fail(f"{n}, fewer than --seq-len + 1: pass another --data or a smaller --seq-len")
    loader = DataLoader(
        range(first_step, 2**31),  # without end
        collate_fn=partial(_micro_batches, tokens, batching, rank, size),
        batch_size=None,  # each step is an item of its own
        num_workers=int(device.type == "cuda"),  # it prepares the next steps during this one
        # setpgid(0, 0): torchrun sends SIGTERM to a rank's process group, and the worker must live
        worker_init_fn=partial(os.setpgid, 0),
        pin_memory=device.type == "cuda",
    )
    for micro_batches in loader:
        yield [tuple(x.to(device, non_blocking=True) for x in batch) for batch in micro_batches]


def eval_batches(
    tokens: Tensor, batching: Batching, device: torch.device, rank: int = 0, size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets [micro batch, seq] that predict each token but the first once.

    rank, size: of the data-parallel group. All ranks get the same number of batches, the last ones
    filled up with windows past the end, whose targets are IGNORED. The split, 4 bytes per token, is
    copied to `device` once: the host would wait for a GPU at each batch that it copies.
    """
    tokens = tokens.to(device, non_blocking=True)
    n_windows, n = -(-(len(tokens) - 1) // batching.seq_len), batching.micro_batch_size
    for first in range(rank * n, n_windows + rank * n, n * size):
        indices = torch.arange(first, first + n, device=device)
        yield _windows(tokens, indices, batching.seq_len)


if __name__ == "__main__":  # `make data`
    corpus = load_corpus("wikitext2", download=True)
    counts = " / ".join(f"{len(getattr(corpus, split)):,}" for split in SPLITS)
    print0(f"WikiText-2 is prepared: {counts} tokens, vocabulary {len(corpus.vocab):,}")
