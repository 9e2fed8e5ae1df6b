"""Corpora as memory-mapped tokens, and batches that depend on (seed, step) alone.

A corpus is prepared once into `data/` beside this package (or $DATA_ROOT): one process works
aside and renames, whoever comes meanwhile waits or takes what is there. After that nothing
touches the network or tokenises again, and all ranks of a node share the mapped pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlparse

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from common.distributed import print0, refuse
from common.model import IGNORED
from common.random import generator_of, sample_keys

SPLITS = ("train", "valid", "test")
EOS, UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True)
class Corpus:
    """`train`, `valid`, `test`: int32 tokens, 1-D, memory-mapped. `vocab[t]` is token t's word.

    digest: a hash of them all, equal for the same text wherever it was prepared.
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    vocab: list[str]
    digest: str


def load_corpus(name: str) -> Corpus:
    """`wikitext2`, `sample`, or a folder with train.txt, valid.txt and test.txt.

    Refuses (status 2) where there is nothing prepared and no way to prepare it.
    """
    prepared = _data_root() / _folder_name(name)
    if not (prepared / "vocab.txt").exists():
        _prepare(name, prepared)
    tokens = {}
    for split in SPLITS:
        path = prepared / f"{split}.int32"
        size = path.stat().st_size // 4
        if size < 2:
            refuse(f"--data {name}: too few tokens in {split}: {size}, at least 2 are needed")
        tokens[split] = torch.from_file(str(path), shared=False, size=size, dtype=torch.int32)
    vocab = (prepared / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    file = prepared / "digest.txt"  # missing where an older version prepared the corpus
    digest = file.read_text() if file.exists() else _digest(prepared)
    return Corpus(**tokens, vocab=vocab, digest=digest)


# ---- preparing ----


def _data_root() -> Path:
    return Path(os.environ.get("DATA_ROOT") or Path(__file__).resolve().parents[1] / "data")


def _folder_name(name: str) -> str:
    """Where a corpus is prepared; a folder that changed, or moved, is another corpus."""
    if name == "wikitext2":
        return "wikitext2"
    if name == "sample":
        return f"sample-{hashlib.sha256(repr(_sample_topics()).encode()).hexdigest()[:12]}"
    folder = Path(name)
    missing = [s for s in SPLITS if not (folder / f"{s}.txt").is_file()]
    if missing:
        refuse(
            f"--data {name}: no {missing[0]}.txt there; give a folder with train.txt, valid.txt "
            "and test.txt, or wikitext2, or sample"
        )
    files = [folder.resolve() / f"{s}.txt" for s in SPLITS]
    identity = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return f"{folder.resolve().name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:12]}"


def _prepare(name: str, prepared: Path) -> None:
    try:
        prepared.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(prepared.with_suffix(".lock")):
            if (prepared / "vocab.txt").exists():
                return  # another process has done it while this one waited
            words = _read_words(name)
            aside = Path(tempfile.mkdtemp(dir=prepared.parent, prefix=f".{prepared.name}."))
            try:
                _write(words, aside)
                (aside / "digest.txt").write_text(_digest(aside))
                aside.chmod(0o755)
                aside.rename(prepared)
            except OSError:
                if not (prepared / "vocab.txt").exists():
                    raise
                # a process on another node, where locks do not reach, was first
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        refuse(f"--data {name}: cannot prepare it in {prepared.parent}: {error}; set DATA_ROOT")
    except ValueError as error:  # here, because the other ranks wait for the lock
        refuse(f"--data {name} {error}")


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock file. Where the file system has no locks the rename alone keeps us safe."""
    with open(path, "w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield


def _read_words(name: str) -> dict[str, list[str]]:
    """The words of each split, `<eos>` at each line's end."""
    if name == "sample":
        return _sample_words()
    if name == "wikitext2":
        lines = _wikitext2_lines()
    else:
        lines = {s: _lines_of(Path(name) / f"{s}.txt") for s in SPLITS}
    return {s: [w for line in lines[s] for w in (*line.split(), EOS)] for s in SPLITS}


def _lines_of(path: Path) -> io.StringIO:
    try:
        return io.StringIO(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        value = error.object[error.start]
        wrong = f"byte {error.start:,} is 0x{value:02x} ({error.reason})"
        raise ValueError(f"cannot be read: {path} is not UTF-8, {wrong}") from None


def _wikitext2_lines() -> dict[str, list[str]]:
    """WikiText-2 (Merity et al., 2016), word level, from the Hugging Face Hub or its cache."""
    if not _hub_in_reach():
        os.environ["HF_HUB_OFFLINE"] = "1"  # take the cache, and do not retry for half a minute
    try:
        from datasets import load_dataset

        print0("preparing WikiText-2 ...")
        rows = load_dataset("Salesforce/wikitext", "wikitext-2-v1")
    except Exception as error:
        raise ValueError(
            f"is not prepared and cannot be fetched ({type(error).__name__}): run `make data` on "
            "a machine with internet, or pass --data sample, or --data DIR with train.txt, "
            "valid.txt and test.txt"
        ) from None
    return {s: rows["validation" if s == "valid" else s]["text"] for s in SPLITS}


def _hub_in_reach() -> bool:
    if os.environ.get("HF_HUB_OFFLINE") == "1" or os.environ.get("HF_DATASETS_OFFLINE") == "1":
        return False
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    address = proxy or os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    hub = urlparse(address if "//" in address else f"//{address}")
    try:
        port = hub.port or (443 if hub.scheme == "https" else 80)
        socket.create_connection((hub.hostname, port), timeout=5).close()
    except OSError:
        return False
    return True


def _sample_topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return topics


def _sample_words() -> dict[str, list[str]]:
    """The Python language reference that every CPython carries (`help("if")`), by topic.

    Of six topics one goes to `valid` and one to `test`, less the lines that `train` has too, for
    the topics quote one another. Words and signs are tokens; a word seen once in `train` is
    `<unk>`, as in WikiText.
    """
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    for i, (_, text) in enumerate(sorted(_sample_topics().items())):
        split = {2: "valid", 5: "test"}.get(i % 6, "train")
        lines[split] += [line.strip() for line in text.splitlines() if line.strip()]
    known = set(lines["train"])
    for split in ("valid", "test"):
        lines[split] = [line for line in lines[split] if line not in known]
    token = re.compile(r"\w+|([^\w\s])\1*")  # a rule of dashes is one sign
    words = {
        s: [w for line in lines[s] for w in (*(m[0] for m in token.finditer(line)), EOS)]
        for s in SPLITS
    }
    seen = Counter(words["train"])
    return {s: [w if seen[w] > 1 else UNKNOWN for w in words[s]] for s in SPLITS}


def _write(words: dict[str, list[str]], folder: Path) -> None:
    """The vocabulary is that of `train`, most frequent first; what else occurs is `<unk>`."""
    seen = Counter(words["train"])
    if any(word not in seen for s in ("valid", "test") for word in words[s]):
        seen.setdefault(UNKNOWN, 0)
    vocab = sorted(seen, key=lambda word: (-seen[word], word))
    number = {word: i for i, word in enumerate(vocab)}
    for split in SPLITS:
        numbers = [number.get(word, number.get(UNKNOWN)) for word in words[split]]
        torch.tensor(numbers, dtype=torch.int32).numpy().tofile(folder / f"{split}.int32")
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocab), encoding="utf-8")


def _digest(folder: Path) -> str:
    """A hash of a prepared corpus."""
    digests = []
    for name in (*(f"{split}.int32" for split in SPLITS), "vocab.txt"):
        with open(folder / name, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return hashlib.sha256(b"".join(digests)).hexdigest()[:12]


# ---- batches ----


def _window(tokens: Tensor, index: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [seq_len] of window `index`; past the end, token 0 and no target."""
    start = index * seq_len
    chunk = tokens[start : start + seq_len + 1].long()
    inputs = torch.zeros(seq_len, dtype=torch.int64)
    targets = torch.full((seq_len,), IGNORED)
    predicted = max(0, len(chunk) - 1)
    inputs[:predicted], targets[:predicted] = chunk[:-1], chunk[1:]
    return inputs, targets


@lru_cache(maxsize=1)  # drawing it takes seconds for 100 million windows
def _order_of_epoch(seed: int, epoch: int, n_windows: int) -> Tensor:
    """A permutation of all windows [n_windows]."""
    order = torch.randperm(n_windows, generator=generator_of("epoch", seed, epoch))
    return order.to(torch.int32) if n_windows < 2**31 else order


def global_batch(seed: int, step: int, size: int, n_windows: int) -> list[int]:
    """Window indices of step `step`'s global batch, the same on every topology.

    The epochs follow one another, each a permutation by (seed, epoch) of all windows, and the
    steps cut that row into batches: a batch may span two epochs, no window is left out.
    """
    indices, position = [], step * size
    while len(indices) < size:
        epoch, start = divmod(position, n_windows)
        order = _order_of_epoch(seed, epoch, n_windows)
        taken = order[start : start + size - len(indices)].tolist()
        indices += taken
        position += len(taken)
    return indices


class TrainBatches(IterableDataset):
    """The micro-batches of each step from `first_step` on, as one list a step."""

    def __init__(self, tokens, args, first_step, rank, size):
        self.tokens, self.args, self.first_step = tokens, args, first_step
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
        args = self.args
        n_windows = (len(self.tokens) - 1) // args.seq_len  # the last, short one is left out
        share = args.global_batch_size // self.size
        for step in range(self.first_step, args.steps):
            indices = global_batch(args.seed, step, args.global_batch_size, n_windows)
            yield [
                self._micro_batch(step, indices, start)
                for start in range(
                    self.rank * share, (self.rank + 1) * share, args.micro_batch_size
                )
            ]

    def _micro_batch(self, step, indices, start):
        places = torch.arange(start, start + self.args.micro_batch_size)
        windows = [_window(self.tokens, indices[i], self.args.seq_len) for i in places]
        inputs, targets = map(torch.stack, zip(*windows, strict=True))
        return inputs, targets, sample_keys(self.args.seed, step, places)


def train_batches(
    tokens: Tensor, args, device: torch.device, first_step: int = 0, rank: int = 0, size: int = 1
) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """For each step from `first_step` on, this rank's micro-batches of its global batch.

    rank, size: of the data-parallel group. A micro-batch is inputs, targets [micro batch, seq]
    and dropout keys [micro batch], on `device`. Refuses a corpus shorter than one window.
    """
    if len(tokens) <= args.seq_len:
        refuse(f"--data {args.data}: {len(tokens)} tokens to train on, fewer than --seq-len + 1")
    dataset = TrainBatches(tokens, args, first_step, rank, size)
    on_gpu = device.type == "cuda"
    # on a GPU one worker cuts the next step's batches while this one computes
    loader = DataLoader(dataset, batch_size=None, num_workers=int(on_gpu), pin_memory=on_gpu)
    for micro_batches in loader:
        yield [tuple(x.to(device, non_blocking=True) for x in batch) for batch in micro_batches]


class EvalBatches(IterableDataset):
    """Every window of a split once, dealt out to the ranks; each rank gets as many batches."""

    def __init__(self, tokens, seq_len, batch_size, rank, size):
        self.tokens, self.seq_len, self.batch_size = tokens, seq_len, batch_size
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n_windows = -(-(len(self.tokens) - 1) // self.seq_len)
        stride = self.batch_size * self.size
        for first in range(0, n_windows, stride):
            # windows past the end have no targets: no rank runs out of batches before another
            start = first + self.rank * self.batch_size
            indices = range(start, start + self.batch_size)
            windows = [_window(self.tokens, i, self.seq_len) for i in indices]
            yield tuple(map(torch.stack, zip(*windows, strict=True)))


def eval_batches(
    tokens: Tensor, args, device: torch.device, rank: int = 0, size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets [micro batch, seq] that cover each token of a split but the first once.

    Windows of seq_len at stride seq_len, targets shifted by one. The last is filled up with
    IGNORED targets. rank, size: of the data-parallel group; all ranks get as many batches.
    """
    dataset = EvalBatches(tokens, args.seq_len, args.micro_batch_size, rank, size)
    for inputs, targets in DataLoader(dataset, batch_size=None):
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


if __name__ == "__main__":  # `make data`
    corpus = load_corpus("wikitext2")
    counts = " / ".join(f"{len(getattr(corpus, split)):,}" for split in SPLITS)
    print0(f"WikiText-2 is prepared: {counts} tokens, vocabulary {len(corpus.vocab):,}")
