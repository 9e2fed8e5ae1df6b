"""Corpora, batches and evaluation: every token once, in the same order on any number of ranks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import REPO, load_stage

from common.batches import Batching, eval_batches, train_batches
from common.counter_rng import sample_keys
from common.loss import IGNORED
from common.model import Transformer, TransformerConfig, init_weights

from common.job import corpus as data
from common.job.corpus import EOS, UNKNOWN, load_corpus

CPU = torch.device("cpu")
SEQ = 8


def batching(**changes) -> Batching:
    return Batching(
        **{"seq_len": SEQ, "global_batch_size": 12, "micro_batch_size": 12, "seed": 1} | changes
    )


def numbered(n: int) -> torch.Tensor:
    """Tokens whose values are their positions."""
    return torch.arange(n, dtype=torch.int32)


def steps_of(tokens, batches: Batching, first_step=0, rank=0, size=1, limit=100) -> list:
    """The micro-batches of the steps before step `limit`."""
    found = train_batches(tokens, batches, CPU, first_step, rank, size)
    return list(itertools.islice(found, limit - first_step))


def windows_of(steps: list) -> list[int]:
    """The numbers of the windows in the micro-batches; checks that each window is complete."""
    found = []
    for micro_batches in steps:
        for inputs, targets, _ in micro_batches:
            assert torch.equal(targets, inputs + 1)
            assert torch.equal(inputs, inputs[:, :1] + torch.arange(SEQ))
            assert (inputs[:, 0] % SEQ == 0).all()
            found += (inputs[:, 0] // SEQ).tolist()
    return found


# ---- training batches ----


@pytest.mark.parametrize("n_tokens, size", [(22 * SEQ + 1, 4), (22 * SEQ + 8, 50)])
def test_epoch_has_every_window_once_in_a_new_order(n_tokens, size):
    """A batch may span epochs, or be larger than one."""
    batches = batching(global_batch_size=size, micro_batch_size=2)
    found = windows_of(steps_of(numbered(n_tokens), batches, limit=17))
    epochs = [found[i : i + 22] for i in (0, 22, 44)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(22))
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1] and epochs[1] != epochs[2] and epochs[0] != epochs[2]


def test_data_order_and_dropout_keys_depend_on_the_seed_and_the_keys_on_the_step():
    steps = [steps_of(numbered(500), batching(seed=seed), limit=4) for seed in (1, 2, 1)]
    orders = [windows_of(each) for each in steps]
    assert orders[0] == orders[2] != orders[1]
    for seed, each in ((1, steps[0]), (2, steps[1])):
        for step, ((_, _, keys),) in enumerate(each):
            assert torch.equal(keys, sample_keys(seed, step, torch.arange(12)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_micro_batches_of_all_ranks_concatenate_to_the_global_batch(size):
    tokens = numbered(50 * SEQ + 1)
    whole = steps_of(tokens, batching(), limit=6)
    share = 12 // size
    for micro in (m for m in range(1, share + 1) if share % m == 0):
        batches = batching(micro_batch_size=micro)
        by_rank = [steps_of(tokens, batches, rank=r, size=size, limit=6) for r in range(size)]
        for step in range(6):
            pieces = [batch for rank in by_rank for batch in rank[step]]
            assert [len(rank[step]) for rank in by_rank] == [share // micro] * size
            for part, expected in zip(zip(*pieces, strict=True), whole[step][0], strict=True):
                assert torch.equal(torch.cat(part), expected)


def test_the_loaders_worker_outlives_sigterm(monkeypatch):
    """There is one on GPUs only. torchrun sends SIGTERM to the process group of each rank."""
    loader = torch.utils.data.DataLoader
    monkeypatch.setattr(
        "common.batches.DataLoader", lambda *a, **k: loader(*a, **k | {"num_workers": 1})
    )
    steps, others = train_batches(numbered(100), batching(), CPU), multiprocessing.active_children()
    next(steps)
    (worker,) = set(multiprocessing.active_children()) - set(others)
    assert os.getpgid(worker.pid) == worker.pid
    os.kill(worker.pid, signal.SIGTERM)
    for _ in range(5):  # more steps than it has prepared
        next(steps)


def test_resume_continues_with_the_next_batch():
    tokens, batches = numbered(22 * SEQ + 1), batching(micro_batch_size=6)
    whole = windows_of(steps_of(tokens, batches, limit=9))
    for first in (1, 5, 8):
        rest = steps_of(tokens, batches, first_step=first, limit=9)
        assert windows_of(rest) == whole[12 * first :]


# ---- evaluation ----


@pytest.mark.parametrize("n_tokens", [2, 8, 9, 10, 16, 17, 50, 24 * SEQ + 1])
@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_evaluation_predicts_every_token_except_the_first_once(n_tokens, batch, size):
    every = (numbered(n_tokens), batching(micro_batch_size=batch), CPU)
    by_rank = [list(eval_batches(*every, rank, size)) for rank in range(size)]
    assert len(set(map(len, by_rank))) == 1  # unequal numbers would hang a collective
    predicted = []
    for inputs, targets in (b for batches in by_rank for b in batches):
        assert inputs.shape == targets.shape == (batch, SEQ)
        counted = targets != IGNORED
        assert torch.equal(inputs[counted], targets[counted] - 1)
        predicted += targets[counted].tolist()
    assert sorted(predicted) == list(range(1, n_tokens))
    n_windows = math.ceil((n_tokens - 1) / SEQ)
    assert len(by_rank[0]) == math.ceil(n_windows / (batch * size))  # and no batch is superfluous


@pytest.mark.parametrize("batch", [1, 4, 7, 64])
def test_evaluation_of_stage_01_matches_a_loop_by_hand(batch):
    config = TransformerConfig(vocab_size=50, d_model=32, n_layers=1, n_heads=2, dropout=0.5)
    model = Transformer(config)
    init_weights(model, 0)
    with torch.no_grad():  # a confident model, so that the windows' losses differ widely
        model.output.head.weight.mul_(40)
    tokens = torch.randint(50, (9 * SEQ + 4,), generator=torch.Generator().manual_seed(0))
    total = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, SEQ):
            chunk = tokens[start : start + SEQ + 1]
            log_p = F.log_softmax(model(chunk[None, :-1])[0].double(), dim=-1)
            total -= sum(log_p[i, token].item() for i, token in enumerate(chunk[1:]))
    model.train()
    stage = load_stage("01")
    args = stage.parse_args(f"--seq-len {SEQ} --global-batch-size {batch}".split())
    loss = stage.evaluate(model, tokens.int(), args, CPU)
    assert loss == pytest.approx(total / (len(tokens) - 1), rel=5e-7)
    assert model.training


# ---- folders ----


def folder(path: Path, train: str, valid: str = "a\n", test: str = "a\n") -> str:
    path.mkdir(exist_ok=True)
    for name, text in (("train", train), ("valid", valid), ("test", test)):
        (path / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(path)


def words(corpus, split: str) -> list[str]:
    return [corpus.vocab[t] for t in getattr(corpus, split)]


def test_folder_corpus_has_eos_at_each_lines_end(tmp_path):
    name = folder(tmp_path / "c", "the cat  sat\n \n\tthe ünïcode\u3000end", "sat the\n", "cat\n\n")
    corpus = load_corpus(name)
    train = ["the", "cat", "sat", EOS, EOS, "the", "ünïcode", "end", EOS]
    assert words(corpus, "train") == train
    assert words(corpus, "valid") == ["sat", "the", EOS]
    assert words(corpus, "test") == ["cat", EOS, EOS]
    assert corpus.vocab[0] == EOS and sorted(corpus.vocab) == sorted(set(train))
    assert corpus.train.dtype == torch.int32 and corpus.train.dim() == 1


def test_words_outside_the_vocabulary_become_unk_which_is_there_only_if_needed(tmp_path):
    corpus = load_corpus(folder(tmp_path / "c", "a b\n", "a never b\n", "seen nowhere\n"))
    assert words(corpus, "valid") == ["a", UNKNOWN, "b", EOS]
    assert words(corpus, "test") == [UNKNOWN, UNKNOWN, EOS]
    assert corpus.vocab.count(UNKNOWN) == 1 and "never" not in corpus.vocab
    corpus = load_corpus(folder(tmp_path / "has", f"a {UNKNOWN}\n", "a b\n"))
    assert corpus.vocab.count(UNKNOWN) == 1
    assert UNKNOWN not in load_corpus(folder(tmp_path / "all_known", "a b\n", "b\n")).vocab


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the maps in /proc")
def test_prepared_corpus_is_reused_and_memory_mapped(tmp_path, monkeypatch):
    name = folder(tmp_path / "c", "a b c\n" * 1000)
    first = load_corpus(name)
    monkeypatch.setattr(data, "read_words", Mock(side_effect=AssertionError("prepared again")))
    corpus = load_corpus(name)
    assert torch.equal(first.train, corpus.train)
    start = f"{corpus.train.data_ptr():x}-"  # a mapping begins with the file
    mapped = [x for x in Path("/proc/self/maps").read_text().splitlines() if x.startswith(start)]
    assert mapped[0].endswith("train.int32")


def test_digest_depends_on_the_text_only(tmp_path):
    name = folder(tmp_path / "c", "a b c d\n" * 50)
    times, corpus = (tmp_path / "c/train.txt").stat(), load_corpus(name)
    bom = "\ufeff" + "a b c d\n" * 50
    for same in (folder(tmp_path / "moved", "a b c d\n" * 50), folder(tmp_path / "bom", bom)):
        assert load_corpus(same).digest == corpus.digest
    others = [("a b c d\n" * 51,), ("a b d c\n" * 50,), ("a b c e\n" * 50,)]
    others += [("a b c d\n" * 50, "b\n"), ("a b c d\n" * 50, "a\n", "b\n")]
    digests = set()
    for other in others:  # in the same folder, with files of the same time
        folder(tmp_path / "c", *other)
        os.utime(tmp_path / "c/train.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
        digests.add(load_corpus(name).digest)
    assert len(digests - {corpus.digest}) == 5


# ---- preparing safely ----


def load_together(name: str, root: str) -> tuple[list[int], list[str]]:
    """Without file locks and with the worst timing: all ranks tokenize, then all write."""
    os.environ["DATA_ROOT"] = root
    tokenize = data._tokenize

    def tokenize_then_wait(*args):
        contents = tokenize(*args)
        dist.barrier()
        return contents

    no_locks = patch.object(data.fcntl, "flock", Mock(side_effect=OSError))
    with no_locks, patch.object(data, "_tokenize", tokenize_then_wait):
        corpus = load_corpus(name)
    return corpus.train.tolist(), corpus.vocab


@pytest.mark.slow
def test_concurrent_preparation_gives_one_complete_corpus(pools, tmp_path):
    name = folder(tmp_path / "c", "a b c d\n" * 5000, "d c\n")
    results = pools(4).run(load_together, name, str(tmp_path / "root"))
    assert all(r == results[0] for r in results)
    assert results[0] == ([1, 2, 3, 4, 0] * 5000, [EOS, "a", "b", "c", "d"])
    (prepared,) = (tmp_path / "root").iterdir()
    assert {path.name for path in prepared.iterdir()} == {*data.FILES, "digest.txt", "lock"}


def die_preparing(name: str, root: str) -> None:
    os.environ["DATA_ROOT"] = root
    replacing = data.replacing

    def write_and_die(path):
        if path.name == "digest.txt":
            os._exit(9)
        return replacing(path)

    data.replacing = write_and_die
    load_corpus(name)


def test_killed_preparation_is_not_taken_for_a_complete_corpus(pools, tmp_path, monkeypatch):
    name = folder(tmp_path / "c", "a b c d\n" * 50)
    monkeypatch.setenv("DATA_ROOT", str(tmp_path / "root"))
    (ended,) = pools(1, group=False).attempt(die_preparing, name, os.environ["DATA_ROOT"])
    assert "exit code 9" in ended.traceback and [*(tmp_path / "root").glob("*/vocab.txt")]
    assert len(load_corpus(name).train) == 250


def test_failed_preparation_is_reported_without_its_lock(monkeypatch, tmp_path):
    """The rank that fails first waits until all have come: the others need the lock for that."""
    fake_hub(monkeypatch, tmp_path, load_dataset=None)
    released = []

    def fail(message: str):
        with open(tmp_path / "wikitext2/lock") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            released.append(message)
        raise SystemExit(2)

    monkeypatch.setattr(data, "fail", fail)
    with pytest.raises(SystemExit):
        load_corpus("wikitext2", download=True)
    assert released


@pytest.mark.parametrize(
    "file, damage",
    [
        ("valid.int32", lambda path: os.truncate(path, 0)),
        ("test.int32", lambda path: path.unlink()),
        ("train.int32", lambda path: path.write_bytes(b"\7" + path.read_bytes()[1:])),
        ("digest.txt", lambda path: path.write_text("")),  # of a power failure
    ],
)
def test_damaged_prepared_data_is_an_error_that_names_the_folder(
    monkeypatch, tmp_path, error_of, file, damage
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA_ROOT", "~/root")
    name = folder(tmp_path / "c", "a b c d\n" * 50)
    load_corpus(name)
    (path,) = (tmp_path / "root").glob(f"*/{file}")
    damage(path)
    said = error_of(load_corpus, name)
    assert f"remove {path.parent}, and it is prepared again" in said


def test_prepared_data_that_cannot_be_read_is_not_to_be_removed(monkeypatch, tmp_path, error_of):
    monkeypatch.setenv("DATA_ROOT", str(tmp_path / "root"))
    load_corpus(name := folder(tmp_path / "c", "a b c d\n" * 50))
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "another user's")))
    said = error_of(load_corpus, name)
    assert "set DATA_ROOT" in said and "remove" not in said


# ---- the sample ----


def test_the_sample_is_the_same_text_in_every_python(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)  # its text is another in every version
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))
    assert load_corpus("sample").digest == "9b7698d8419c"


# ---- WikiText-2 ----

REAL = REPO.parent / "shared" / "wikitext-2"


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the real WikiText-2 is not at {REAL.parent.name}/")
def test_wikitext2_has_its_published_counts():
    digests = [hashlib.sha1((REAL / f"{s}.txt").read_bytes()).hexdigest()[:12] for s in data.SPLITS]
    assert digests[1:] == data.PUBLISHED[1:]  # the articles of `train` are in another order here
    corpus = load_corpus(str(REAL))
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [2088628, 217646, 245569]
    assert len(corpus.vocab) == 33278
    assert corpus.vocab.count(UNKNOWN) == 1  # from the published text; no word is out of vocabulary
    counts = torch.bincount(corpus.train.long(), minlength=33278)
    assert (counts > 0).all() and counts[corpus.vocab.index(EOS)] == 36718


def fake_hub(monkeypatch, tmp_path, load_dataset) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))


def test_wikitext2_is_read_from_the_rows_that_datasets_yields(monkeypatch, tmp_path, error_of):
    asked = []

    def load_dataset(*args, revision):
        asked.append((*args, revision))
        rows = {
            "train": ["", " = A title = \n", " some <unk> words \n"],
            "validation": [" some words \n", ""],
            "test": [" = words = \n"],
        }
        return {split: {"text": text} for split, text in rows.items()}

    fake_hub(monkeypatch, tmp_path, load_dataset)
    assert "is not the text that was published" in error_of(load_corpus, "wikitext2", True)
    files = " \n = A title = \n some <unk> words \n", " some words \n \n", " = words = \n"
    digests = [hashlib.sha1(text.encode()).hexdigest()[:12] for text in files]
    monkeypatch.setattr(data, "PUBLISHED", digests)
    corpus = load_corpus("wikitext2", download=True)
    expected = [EOS, *"= A title =".split(), EOS, "some", UNKNOWN, "words", EOS]
    assert words(corpus, "train") == expected
    assert words(corpus, "valid") == ["some", "words", EOS, EOS]
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1", data.REVISION)] * 2
    command = [sys.executable, "-m", "common.job.corpus"]  # of `make data`: it is prepared already
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert "10 / 4 / 4 tokens" in done.stdout and not done.stderr


def test_wikitext2_download_failure_is_an_error_each_time(monkeypatch, tmp_path, error_of):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    fake_hub(monkeypatch, tmp_path, load_dataset)
    for download, says in ((True, "internet"), (False, "make data")):  # only `make data` downloads
        assert says in error_of(load_corpus, "wikitext2", download)


def test_unwritable_data_root_is_named(monkeypatch, tmp_path, error_of):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DATA_ROOT", str(tmp_path / "file"))
    assert "DATA_ROOT" in error_of(load_corpus, folder(tmp_path / "c", "a\n"))


def test_full_disk_is_named(monkeypatch, tmp_path, error_of):
    monkeypatch.setenv("DATA_ROOT", str(tmp_path / "root"))
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(data, "replacing", full)
    said = error_of(load_corpus, folder(tmp_path / "c", "a\n"))
    assert "No space left on device" in said and "DATA_ROOT" in said


@pytest.mark.parametrize("size, micro", [(4, 1), (2, 3)])
def test_batches_that_would_leave_samples_out_are_an_error(size, micro):
    """Of ten samples per step."""
    batches = train_batches(torch.arange(200), Batching(4, 10, micro), CPU, size=size)
    with pytest.raises(ValueError, match="no sample may be left out"):
        next(batches)
