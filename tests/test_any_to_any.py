"""Resume a checkpoint of any stage on any topology in any other: the loss curve stays the same."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from harness import Pool, assert_same_curve, load_stage, stages
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.arguments import model_config
from common.checkpoint import Checkpointer, checkpoints, training_state
from common.data import load_corpus
from common.model import Transformer

pytestmark = pytest.mark.slow

RUN = "--d-model 32 --n-layers 4 --n-heads 4 --seq-len 16 --global-batch-size 12".split()
RUN += "--dropout 0.1 --log-every 1 --eval-every 20 --steps 22".split()
AFTER = 20  # steps, so that the optimizer state is far from zero
# two topologies (ranks and flags) of each stage: the first saves, the second loads
PIPELINE = "--micro-batch-size 3"
TOPOLOGIES = {
    "01": ((1, ""), (1, "--micro-batch-size 4")),
    "02": ((2, ""), (3, "")),
    "03": ((3, "--zero-stage 1"), (2, "--zero-stage 3")),
    "04": ((3, ""), (4, "--shard-size 2")),
    "05": ((2, "--sequence-parallel"), (4, "")),
    "06": ((4, f"{PIPELINE} --schedule zero-bubble"), (2, f"{PIPELINE} --schedule interleaved")),
    "07": ((4, "--pp 2 --tp 2"), (4, f"{PIPELINE} --pp 2")),
}


def test_every_stage_has_topologies_to_resume_on():
    assert sorted(TOPOLOGIES) == stages()


@pytest.fixture(scope="module")
def train(pools, corpus_dir):
    """`train("04", 1, "--resume", ...)` runs a stage on its second topology; rank 0's metrics."""

    def run(stage: str, which: int, *flags) -> list[dict]:
        ranks, own = TOPOLOGIES[stage][which]
        pool: Pool = pools(ranks, group=stage != "01")
        argv = [*RUN, *own.split(), "--data", str(corpus_dir), *map(str, flags)]
        return pool.train(stage, argv)[0]

    return run


@pytest.fixture(scope="module")
def curve(reference, corpus_dir) -> list[dict]:
    """The metrics of stage 01's uninterrupted run."""
    return reference([*RUN, "--data", str(corpus_dir)])


@pytest.fixture(scope="module")
def saved(train, curve, tmp_path_factory):
    """`saved("04")`: a checkpoint after `AFTER` steps, of a run that reproduces the curve."""
    known: dict[str, Path] = {}

    def checkpoint(stage: str) -> Path:
        if stage not in known:
            folder = tmp_path_factory.mktemp(f"run-{stage}")
            flags = ("--checkpoint-every", AFTER, "--run-dir", folder)
            assert_same_curve(train(stage, 0, *flags), curve)
            known[stage], _ = checkpoints(folder / "checkpoints")
        return known[stage]

    return checkpoint


@pytest.mark.parametrize("into", stages())
@pytest.mark.parametrize("of", stages())
def test_resume_in_any_other_stage_has_the_same_loss_curve(train, curve, saved, of, into):
    rest = train(into, 1, "--resume", saved(of))
    assert_same_curve(rest, [line for line in curve if line["step"] >= AFTER])


def plain_model(corpus_dir: Path):
    args = load_stage("01").parse_args([*RUN, "--data", str(corpus_dir)])
    corpus = load_corpus(args.data)
    return Transformer(model_config(args, corpus.vocab)), corpus, args


@pytest.mark.parametrize("of", stages())
def test_dcp_to_torch_converts_a_checkpoint_and_the_plain_model_has_the_same_loss(
    curve, saved, corpus_dir, tmp_path, of
):
    dcp_to_torch_save(saved(of), tmp_path / "plain.pt")
    tensors = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert tensors["step"].item() == AFTER
    moments = [t for name, t in tensors.items() if name.startswith("optim.exp_avg_sq.")]
    model, corpus, args = plain_model(corpus_dir)
    assert len(moments) == len(list(model.parameters())) and all(m.any() for m in moments)
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    model.load_state_dict(weights)
    loss = load_stage("01").evaluate(model, corpus.valid, args, torch.device("cpu"))
    assert abs(loss - curve[AFTER - 1]["val_loss"]) < 1e-5


@pytest.mark.parametrize("of", stages())
def test_checkpoint_with_any_missing_file_is_an_error(saved, corpus_dir, tmp_path, capsys, of):
    model, _, args = plain_model(corpus_dir)
    optimizer = torch.optim.AdamW(model.parameters())
    state = training_state(model, optimizer)
    files = sorted(saved(of).glob("*.distcp"))
    assert len(files) == TOPOLOGIES[of][0][0]  # every rank writes a file
    shutil.copytree(saved(of), tmp_path / "copy")
    for file in files:
        (tmp_path / "copy" / file.name).unlink()
        with pytest.raises(SystemExit):
            Checkpointer(tmp_path).load(str(tmp_path / "copy"), state, optimizer)
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and file.name in said
        shutil.copy(file, tmp_path / "copy")
    assert Checkpointer(tmp_path).load(str(tmp_path / "copy"), state, optimizer) == AFTER


def test_these_checkpoints_include_uneven_and_empty_shards(saved):
    uneven = empty = False
    for stage in stages():
        metadata = pickle.loads((saved(stage) / ".metadata").read_bytes())
        ranks = {info.relative_path for info in metadata.storage_data.values()}
        for name, entry in metadata.state_dict_metadata.items():
            sizes = [chunk.sizes.numel() for chunk in entry.chunks]
            owners = {i.relative_path for k, i in metadata.storage_data.items() if k.fqn == name}
            uneven |= len(set(sizes)) > 1
            empty |= 1 < len(owners) < len(ranks)
    assert uneven and empty
