"""Checkpoints: atomic saves, resharded loads, corruption is detected, loading runs no code."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import shutil
import time
import types
from itertools import pairwise, product
from math import prod
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from common.model import Transformer, TransformerConfig, init_weights
from common.shards import Shard, shard_of_flat_slice, training_state

from common.job import checkpoint_hooks as storage
from common.job import launch
from common.job.checkpoint import Checkpointer, checkpoints
from common.job.run_folder import CURVE, SHAPE

RUN = {"arguments": dict.fromkeys((*SHAPE, *CURVE))}
STUB = types.SimpleNamespace(state={})  # no optimizer's step to set


def save_checkpoint(folder: Path | str, step: int, state: dict, keep: int = 2) -> None:
    """Save and wait."""
    checkpointer = Checkpointer(folder, RUN)
    checkpointer.save(step, state, keep)
    checkpointer.close()


def load_checkpoint(folder: Path | str, resume: str, state: dict, optimizer=STUB) -> int:
    checkpointer = Checkpointer(folder, RUN)
    try:
        return checkpointer.load(resume, state, optimizer)
    finally:
        checkpointer.close()


CONFIG = TransformerConfig(vocab_size=100, d_model=32, n_layers=2, n_heads=2, seq_len=8)


def trained(config: TransformerConfig = CONFIG, seed: int = 1, steps: int = 2):
    model = Transformer(config)
    init_weights(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        dice = torch.Generator().manual_seed(step)
        tokens = torch.randint(100, (2, 9), generator=dice)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def loaded(folder: Path, resume: str | None = None, config: TransformerConfig = CONFIG):
    """Load a checkpoint into a model with another seed; returns its state and the step."""
    model, optimizer = trained(config, seed=9, steps=0)
    state = training_state(model, optimizer)
    return state, load_checkpoint(folder, resume, state, optimizer)


def saved(folder: Path, step: int = 2, steps: int = 2, keep: int = 2) -> dict[str, Tensor]:
    state = training_state(*trained(steps=steps))
    save_checkpoint(folder, step, state, keep)
    return {name: tensor.clone() for name, tensor in state.items()}


# ---- round trip ----


def test_round_trip_of_large_small_and_non_contiguous_tensors(tmp_path):
    dice = torch.Generator().manual_seed(0)
    state = {
        "model.across": torch.randn(70, 50, generator=dice).t(),
        "model.large": torch.randn(3, 40, 50, generator=dice),
        "model.small": torch.randn(3, generator=dice),
        "model.half": torch.randn(64, 64, generator=dice).bfloat16(),
        "model.scalar": torch.tensor(2.5),
    }
    save_checkpoint(tmp_path, 1, state)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert load_checkpoint(tmp_path, None, found) == 1
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_the_way_of_a_tensor_is_as_the_module_describes_it(tmp_path, monkeypatch):
    listed = re.findall(r"^ {8,}(\w+)\.(\w+)  ", storage.__doc__, re.MULTILINE)
    called = {}  # in the order of the first calls

    def recorded(names: tuple[str, str], method):
        return lambda *args, **kwargs: called.setdefault(names) or method(*args, **kwargs)

    for owner, name in listed:
        kind = getattr(storage, owner, Shard)
        monkeypatch.setattr(kind, name, recorded((owner, name), getattr(kind, name)))
    state = {
        "model.plain": torch.ones(3),
        "model.sharded": Shard((2,), [([0], torch.ones(2))]),
    }
    save_checkpoint(tmp_path, 1, state)
    load_checkpoint(tmp_path, "auto", state)
    assert [*called] == listed and len(listed) > 10


# ---- shards ----


@pytest.mark.parametrize(
    "shape", [(), (7,), (1,), (3, 4), (1, 5), (5, 1), (4, 4), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]
)
def test_chunks_of_any_flat_shard_tile_it_exactly(shape):
    n = prod(shape)
    whole = torch.arange(n).view(shape)
    for start in range(n + 1):
        for length in range(n - start + 1):
            piece = torch.arange(start, start + length)
            shard = shard_of_flat_slice(shape, start, piece)
            covered = []
            for offset, tensor in shard.chunks.items():
                bounds = zip(offset, tensor.shape, strict=True)
                assert torch.equal(tensor, whole[tuple(slice(o, o + n) for o, n in bounds)])
                covered += tensor.flatten().tolist()
            assert sorted(covered) == piece.tolist()
            assert len(shard.chunks) <= max(1, 2 * len(shape) - 1)
            assert shard.size() == torch.Size(shape)


SHAPES = {"model.a": (7, 5), "model.b": (13,), "model.c": (4, 6), "model.d": (1, 3)}


def uneven(n: int, rank: int, size: int) -> tuple[int, int]:
    """Bounds of a rank's part of n elements: ever smaller parts, the last rank's is empty."""
    bounds = [n - round(n * (1 - r / max(1, size - 1)) ** 2) for r in range(size)] + [n]
    return (0, n) if size == 1 else (bounds[rank], bounds[rank + 1])


def cut(kind: str, fill: bool) -> dict[str, Shard | Tensor]:
    """This rank's part of every tensor, with its values or with NaN."""
    rank, size, dice = launch.rank(), launch.world_size(), torch.Generator()
    state: dict[str, Shard | Tensor] = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        dice.manual_seed(i)
        whole = torch.randn(shape, generator=dice) if fill else torch.full(shape, torch.nan)
        if kind == "flat":
            a, b = uneven(whole.numel(), rank, size)
            state[name] = shard_of_flat_slice(shape, a, whole.flatten()[a:b])
        elif kind in ("rows", "columns"):
            dim = int(kind == "columns" and len(shape) == 2)
            a, b = uneven(shape[dim], rank, size)
            offset = [a * (i == dim) for i in range(len(shape))]
            chunk = whole.narrow(dim, a, b - a).contiguous()
            state[name] = Shard(shape, [(offset, chunk)] if chunk.numel() else [])
        elif kind == "replicated" or i % size == rank:  # "pipeline": each tensor on one rank
            state[name] = whole
    return state


CUTS = ("flat", "rows", "columns", "replicated", "pipeline")


def save_cuts(folder: str) -> None:
    for step, kind in enumerate(CUTS):
        save_checkpoint(Path(folder) / kind, step, cut(kind, fill=True))


def load_cut(folder: str, kind: str, step: int) -> None:
    state = cut(kind, fill=False)
    assert load_checkpoint(folder, None, state) == step
    for name, expected in cut(kind, fill=True).items():
        ours, theirs = (getattr(x, "chunks", {0: x}) for x in (state[name], expected))
        assert all(torch.equal(ours[o], theirs[o]) for o in theirs), (folder, kind, name)


def load_cuts(folder: str, kinds: tuple[str, ...]) -> None:
    """Load every saved sharding into each of these."""
    for (step, of), into in product(enumerate(CUTS), kinds):
        load_cut(f"{folder}/{of}", into, step)


def test_resharded_load_between_any_shardings_and_numbers_of_ranks(pools, tmp_path):
    """Flat, row-wise and column-wise shards, replicas and full tensors; uneven and empty shards."""
    pools(3).run(save_cuts, str(tmp_path))
    pools(1, group=False).run(load_cuts, str(tmp_path), ("replicated",))
    pools(2).run(load_cuts, str(tmp_path), CUTS)
    pools(3).run(load_cuts, str(tmp_path), ("flat", "columns"))


# ---- commit ----


def die(*_, **__) -> None:
    os._exit(9)


def die_half_way(path, **_) -> None:
    for file in sorted(Path(path).glob("*.distcp")):
        file.unlink()
    os._exit(9)


MOMENTS = {  # the function that does not return, and the newest complete checkpoint
    "before anything is written": (storage.AtomicWriter, "write_data", die, 4),
    "while a file is written": (storage, "WriteResult", die, 4),
    "before the metadata": (storage.AtomicWriter, "finish", die, 4),
    "before the rename": (Path, "rename", die, 4),
    "after the rename": (storage, "checkpoints", die, 6),
    "while an old one is deleted": (shutil, "rmtree", die_half_way, 6),
}


def save_and_die(folder: str, moment: str) -> None:
    """Save steps 2 and 4; then die at `moment` of saving step 6."""
    state = training_state(*trained())
    save_checkpoint(folder, 2, state)
    save_checkpoint(folder, 4, state)
    owner, name, dies, _ = MOMENTS[moment]
    setattr(owner, name, dies)
    save_checkpoint(folder, 6, state)


@pytest.mark.quick_cases("while a file is written", "before the rename")
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_during_a_save_leaves_only_complete_checkpoints(pools, tmp_path, moment):
    (ended,) = pools(1, group=False).attempt(save_and_die, str(tmp_path), moment)
    assert "exit code 9" in ended.traceback, ended
    expected = training_state(*trained())
    # every folder with a checkpoint's name is complete
    assert checkpoints(tmp_path) == sorted(tmp_path.glob("step-*"))
    found, step = loaded(tmp_path)
    assert step == MOMENTS[moment][-1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for path in checkpoints(tmp_path):  # the others are complete too
        assert loaded(tmp_path / "other", str(path))[1] == int(path.name[5:])
    save_checkpoint(tmp_path, 8, expected)
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("step-")] == []


def test_resume_takes_the_newest_complete_checkpoint_and_names_a_newer_one(tmp_path, capsys):
    saved(tmp_path, step=3)
    saved(tmp_path, step=20)
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000100")
    (tmp_path / "step-00000100" / ".metadata").unlink()
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "writing-00000200")
    shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000300.bak")
    (tmp_path / "step-00000101").symlink_to(tmp_path / "gone")
    (tmp_path / "step-00000102").touch()
    assert loaded(tmp_path)[1] == 20
    said = capsys.readouterr().out
    assert all(f"step-00000{n} is corrupt: [Errno" in said for n in (100, 101, 102))
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003", "step-00000020"]


def test_keep_checkpoints_limits_how_many_are_kept(tmp_path):
    for keep in (1, 3):
        for step in range(10 * keep, 10 * keep + 5):
            saved(tmp_path, step, steps=0, keep=keep)
        steps = [int(p.name[5:]) for p in checkpoints(tmp_path)]
        assert steps == list(range(10 * keep + 5 - keep, 10 * keep + 5))
        assert len(list(tmp_path.iterdir())) == keep


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch):
    """For example one that another process reads, on NFS."""
    monkeypatch.setattr(os, "rmdir", Mock(side_effect=OSError("not empty")))
    for step in (1, 2, 3):
        saved(tmp_path, step, steps=0, keep=1)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003"]


def test_a_save_does_not_replace_a_checkpoint(tmp_path, error_of):
    state = saved(tmp_path, step=2)
    assert "cannot save" in error_of(saved, tmp_path, 2, 0, status=1)
    found, _ = loaded(tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)


# ---- choosing the checkpoint to resume from ----


def test_resume_accepts_a_checkpoint_or_a_run(tmp_path):
    run = tmp_path / "run"
    for step in (2, 4):
        saved(run / "checkpoints", step)
    other = tmp_path / "other"
    assert loaded(other, str(run / "checkpoints" / "step-00000002"))[1] == 2
    assert loaded(other, str(run))[1] == 4
    assert loaded(other)[1] == 0
    assert loaded(run / "checkpoints", str(other / "absent"))[1] == 4  # its own come first


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path, error_of):
    saved(tmp_path)
    for name in ("loop", "step-00000100"):  # nobody can read them, not even root
        (tmp_path / name).symlink_to(name)
    assert "cannot be read: [Errno 40]" in error_of(loaded, tmp_path / "loop")
    assert "cannot be read: [Errno 40]" in error_of(loaded, tmp_path, status=1)
    assert "cannot be read: [Errno 36]" in error_of(loaded, tmp_path / "other", "x" * 300)


@pytest.mark.parametrize("change", [{"d_model": 64}, {"n_layers": 3}, {"n_layers": 1}], ids=str)
def test_incompatible_checkpoint_of_another_model_is_an_error(tmp_path, error_of, change):
    saved(tmp_path)
    config = TransformerConfig(**(vars(CONFIG) | change))
    assert "does not fit this model" in error_of(loaded, tmp_path, None, config)


def flip(file: Path) -> None:
    """Flip one bit: of metadata in a tensor's name, so that they stay readable."""
    content = bytearray(file.read_bytes())
    name = content.find(b"embed.tokens")
    content[name if name > 0 else len(content) // 2] ^= 8
    file.write_bytes(content)


DAMAGE = {
    "cut short": lambda file, _: os.truncate(file, file.stat().st_size * 2 // 3),
    "emptied": lambda file, _: os.truncate(file, 0),
    "a bit flipped": lambda file, _: flip(file),
    "missing": lambda file, _: file.unlink(),
    "another checkpoint's": lambda file, other: shutil.copy(other / file.name, file),
}


@pytest.mark.quick_cases("a bit flipped-__0_0.distcp", "missing-.metadata")
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_resume_falls_back_from_a_corrupt_checkpoint_and_names_both(tmp_path, capsys, damage, name):
    good = {step: saved(tmp_path, step, steps=step, keep=3) for step in (2, 4, 6)}[4]
    before, older, newest = checkpoints(tmp_path)
    DAMAGE[damage](newest / name, before)
    if (damage, name) == ("missing", ".metadata"):  # without it the folder is no checkpoint
        newest = None
    found, step = loaded(tmp_path)
    assert step == 4 and all(torch.equal(found[n], good[n]) for n in good)
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[-1] == f"resumed from {older}, 4 steps done"
    if newest is not None:
        (line,) = lines[:-1]
        assert line.startswith(f"{newest} is corrupt: ") and line.endswith(f"back to {older.name}")
        assert name in line or "__0_0.distcp" in line  # a foreign .metadata fits no data file
        assert damage != "a bit flipped" or "the checksum differs" in line
        # it is set aside, and does not count as kept
        saved(tmp_path, step=8, steps=0)
        names = {"corrupt-step-00000006", "step-00000004", "step-00000008"}
        assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.EIO, "Input/output error"), "[Errno 5]"),
        (MemoryError(), "MemoryError()"),
        (RuntimeError("CUDA out of memory"), "CUDA out of memory"),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_interrupts_a_read_makes_no_checkpoint_corrupt(
    tmp_path, monkeypatch, error_of, error, said
):
    for step in (2, 4):
        saved(tmp_path, step)
    for owner, method in ((storage.Reader, "read"), (storage.MetadataUnpickler, "load")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, Mock(side_effect=error))
            if said is None:
                pytest.raises(KeyboardInterrupt, loaded, tmp_path)
            else:
                line = error_of(loaded, tmp_path, status=1)
                assert f"step-00000004 cannot be read: {said}" in line
        assert len(checkpoints(tmp_path)) == 2


def test_corrupt_checkpoint_of_another_run_is_left_as_it_is(tmp_path):
    for step in (2, 4):
        saved(tmp_path / "other" / "checkpoints", step)
    flip(tmp_path / "other/checkpoints/step-00000004/__0_0.distcp")
    assert loaded(tmp_path / "this", str(tmp_path / "other"))[1] == 2
    assert len(checkpoints(tmp_path / "other" / "checkpoints")) == 2


def test_resume_of_a_named_corrupt_checkpoint_or_of_the_last_one_is_an_error(tmp_path, error_of):
    for step in (2, 4):
        saved(tmp_path, step)
        flip(tmp_path / f"step-{step:08d}" / "__0_0.distcp")
    said = error_of(loaded, tmp_path / "new", str(tmp_path / "step-00000004"))
    fix = "start in a new folder with --run-dir NEW, and --resume OLDER if there is one"
    assert "checksum differs" in said and fix in said
    assert fix in error_of(loaded, tmp_path)
    for path in tmp_path.glob("*/.metadata"):
        path.unlink()  # a run does not begin again instead
    assert fix in error_of(loaded, tmp_path)
    assert ".metadata" in error_of(loaded, tmp_path / "new", str(tmp_path / "step-00000002"))


def test_all_ranks_fall_back_when_one_reads_a_corrupt_file(pools, tmp_path):
    pools(3).run(save_cuts, str(tmp_path))
    newer = shutil.copytree(tmp_path / "rows/step-00000001", tmp_path / "rows/step-00000004")
    flip(newer / "__1_0.distcp")
    ended = pools(3).attempt(load_cut, str(tmp_path / "rows"), "rows", 1)
    assert [o.traceback for o in ended] == [None] * 3
    assert ended[0].stdout.count("is corrupt") == 1 and "__1_0.distcp" in ended[0].stdout
    assert ended[1].stdout == ended[2].stdout == ""


def items_read(folder: str, kind: str) -> list[tuple[str, int]]:
    """The file and the offset of every item that this rank reads."""
    found = []

    def read(self, index, own=storage.Reader.read):
        found.append((self.storage_data[index].relative_path, self.storage_data[index].offset))
        return own(self, index)

    with patch.object(storage.Reader, "read", read):
        load_checkpoint(folder, None, cut(kind, fill=False))
    return found


def test_resharded_load_reads_only_the_needed_items_and_each_once(pools, tmp_path):
    """With the saved sharding each rank reads its own file only, else the overlapping items."""
    folder = tmp_path / "rows"
    pools(3).run(save_cuts, str(tmp_path))
    stored = metadata_of(folder).storage_data
    items = {(info.relative_path, info.offset) for info in stored.values()}
    step = stored[MetadataIndex("step", torch.Size([]))]
    for rank, read in enumerate(pools(3).run(items_read, str(folder), "rows")):
        own = {item for item in items if item[0] == f"__{rank}_0.distcp"}
        assert sorted(read) == sorted(own | {(step.relative_path, step.offset)})
    for read in pools(3).run(items_read, str(folder), "flat"):
        assert len(set(read)) == len(read) < len(items)


# ---- asynchronous saves ----


def save_while_training(folder: str) -> dict:
    """Save twice on a slow disk, with training's collectives in between and after."""
    write = storage.AtomicWriter.write_data

    def write_slowly(*args):
        time.sleep(0.5)
        return write(*args)

    checkpointer, state = Checkpointer(folder, RUN), cut("rows", fill=True)
    clock, seen = [time.perf_counter()], []
    with patch.object(storage.AtomicWriter, "write_data", write_slowly):
        for step in (2, 4):
            checkpointer.save(step, state)
            clock.append(time.perf_counter())
            for shard in state.values():  # training continues and changes the saved tensors
                for tensor in shard.chunks.values():
                    tensor.add_(1)
            for _ in range(20):
                dist.all_reduce(torch.ones(()))
            seen.append([p.name for p in checkpoints(folder)])
        blocked = checkpointer.blocked_seconds
        checkpointer.close()
        clock.append(time.perf_counter())
    return {"seconds": [b - a for a, b in pairwise(clock)], "seen": seen, "blocked": blocked}


@pytest.mark.wall_clock
@pytest.mark.slow
def test_async_save_blocks_training_for_the_copy_only(pools, tmp_path):
    for told in pools(2).run(save_while_training, str(tmp_path)):
        first, second, closing = told["seconds"]
        assert first < 0.4 < second and closing > 0.3
        assert abs(told["blocked"] - first - second) < 0.3
        assert told["seen"] == [[], ["step-00000002"]]
    for step in (2, 4):  # the values at the call of save, not the later ones
        state = cut("replicated", fill=False)
        path = str(tmp_path / f"step-{step:08d}")
        assert load_checkpoint(tmp_path / "other", path, state) == step
        expected = cut("replicated", fill=True)
        more = 0 if step == 2 else 1
        assert all(torch.equal(state[name], expected[name] + more) for name in expected)


def test_async_save_waits_for_copies_from_a_gpu(tmp_path, monkeypatch):
    calls = []

    def to(tensor, *args, original=Tensor.to, **kwargs):
        calls.append("copy")
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    state = {"model.a": torch.randn(4), "model.b": Shard((8,), [([0], torch.randn(4))])}
    storage.AtomicWriter(tmp_path, step=1, keep=1).stage(state)
    assert calls == ["copy", "copy", "synchronize"]


def fail_in_the_background(folder: str) -> None:
    checkpointer = Checkpointer(folder, RUN)
    state = cut("rows", fill=True)
    checkpointer.save(2, state)
    checkpointer.wait()
    if dist.get_rank() == 1:
        storage.AtomicWriter.write_data = full
    checkpointer.save(4, state)
    deadline = time.monotonic() + 20
    while not checkpointer.has_failed():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    checkpointer.wait()


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_save_failure_on_one_rank_ends_all_with_one_line(pools, tmp_path):
    ended = pools(2).attempt(fail_in_the_background, str(tmp_path))
    pools(2).close()  # its processes are patched
    assert [o.exit_status for o in ended] == [1, 1], ended[0].traceback
    said = "".join(o.stderr for o in ended)
    assert said.count("\n") == 1 and "No space left" in said
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000002"]


# ---- loading a checkpoint runs no code ----


class Touch:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch '{self.path}'",))


def metadata_of(folder: Path):
    with open(checkpoints(folder)[0] / ".metadata", "rb") as file:
        return pickle.load(file)


def write_metadata(folder: Path, metadata) -> None:
    content = pickle.dumps(metadata)
    content += storage.SEAL + b"%d" % storage.xxh3_64_intdigest(content)
    (checkpoints(folder)[0] / ".metadata").write_bytes(content)


@pytest.mark.parametrize("where", ["the metadata", "the files of tensors", "an entry of bytes"])
def test_malicious_pickle_is_an_error_and_does_not_run(tmp_path, error_of, where):
    folder, bait = tmp_path / "c", tmp_path / "bait"
    saved(folder)
    touch, metadata, file = Touch(bait), metadata_of(folder), folder / "step-00000002/bait.distcp"
    torch.save(touch, file)
    items = metadata.storage_data
    if where == "the metadata":
        next(iter(items.values())).relative_path = touch
    elif where == "the files of tensors":
        for info in items.values():
            info.relative_path, info.offset, info.length = file.name, 0, file.stat().st_size
            info.xxh3_64 = storage.xxh3_64_intdigest(file.read_bytes())
    else:
        metadata.state_dict_metadata[where] = BytesStorageMetadata()
        info = next(iter(items.values()))
        items[MetadataIndex(where)] = type(info)(file.name, 0, file.stat().st_size)
    write_metadata(folder, metadata)
    if where != "the files of tensors":  # an error before any item is read
        with pytest.raises(pickle.UnpicklingError, match="not loaded"):
            storage.Reader(file.parent)
    assert str(folder) in error_of(loaded, folder)
    assert not bait.exists()


@pytest.mark.parametrize(
    "module, name",
    [("builtins", "eval"), ("builtins", "getattr"), ("torch", "load"), ("torch", "os.system")],
)
def test_unpickler_of_the_metadata_finds_no_functions(module, name):
    text = f"c{module}\n{name}\n.".encode()
    with pytest.raises(pickle.UnpicklingError):
        storage.MetadataUnpickler(io.BytesIO(text)).load()


@pytest.mark.parametrize("absolute", [False, True])
def test_malicious_path_cannot_read_outside_the_checkpoint(tmp_path, error_of, absolute):
    folder = tmp_path / "c"
    saved(folder)
    (file,) = checkpoints(folder)[0].glob("*.distcp")
    shutil.copy(file, tmp_path / "outside.distcp")
    metadata = metadata_of(folder)
    outside = tmp_path / "outside.distcp" if absolute else "../../outside.distcp"
    for info in metadata.storage_data.values():
        info.relative_path = str(outside)
    write_metadata(folder, metadata)
    assert "outside of the checkpoint" in error_of(loaded, folder)
