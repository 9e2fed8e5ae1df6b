"""Counter-based dropout: the same mask on any rank, with good statistical properties."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.counter_rng import CounterDropout, generator_of, sample_keys, seed_of
from common.model import Transformer, TransformerConfig


def keys_of(step: int = 0, samples: int = 8, seed: int = 1) -> Tensor:
    return sample_keys(seed, step, torch.arange(samples))


def kept(site: int = 0, keys: Tensor | None = None, shape=(64, 128)):
    """The dropout mask as 0 and 1: [batch, seq, features]."""
    keys = keys_of() if keys is None else keys
    return (CounterDropout(0.5, site)(torch.ones(len(keys), *shape), keys) > 0).float()


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_rate_and_scaling(p):
    x = torch.full((16, 64, 128), 3.0)
    y = CounterDropout(p, site=3)(x, keys_of(samples=16))
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 3.0 / (1 - p)))
    per_sample = (y == 0).double().flatten(1).mean(1)
    assert (per_sample - p).abs().max() < 5 * (p * (1 - p) / (64 * 128)) ** 0.5


def test_dropout_masks_are_independent_across_sites_samples_steps_seeds_positions_and_features():
    a = kept()  # 65,536 samples: a standard deviation of 1/256
    shifted = kept(shape=(65, 129))
    others = {f"site {s}": kept(site=s) for s in (1, 2, 3, 8, 255)}
    others |= {f"step {s}": kept(keys=keys_of(step=s)) for s in (1, 2, 1000)}
    others |= {f"seed {s}": kept(keys=keys_of(seed=s)) for s in (0, 2, 1338)}
    others |= {f"sample +{n}": a.roll(n, 0) for n in (1, 2, 4)}
    others |= {"next position": shifted[:, 1:, :-1], "next feature": shifted[:, :-1, 1:]}
    others |= {"next of both": shifted[:, 1:, 1:]}
    # position and feature exchanged
    others |= {"position as feature": kept(shape=(128, 64)).transpose(1, 2)}
    for name, b in others.items():
        assert abs(correlation(a, b)) < 5 / 256, name


def test_no_dropout_in_evaluation_without_keys_or_at_rate_zero():
    x = torch.ones(8, 4, 4)
    assert CounterDropout(0.5, 0)(x, None) is x
    assert CounterDropout(0.0, 0)(x, keys_of()) is x
    assert CounterDropout(0.5, 0).eval()(x, keys_of()) is x
    assert not torch.equal(CounterDropout(0.5, 0)(x, keys_of()), x)


def test_dropout_follows_the_embedding_attention_and_mlp_at_sites_of_their_own():
    config = TransformerConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=2, dropout=0.5)
    model = Transformer(config)
    dropouts = {n: m for n, m in model.named_modules() if isinstance(m, CounterDropout)}
    assert set(dropouts) == {
        "embed.dropout",
        *(f"layers.{i}.{after}_dropout" for i in (0, 1) for after in ("attn", "mlp")),
    }
    assert len({dropout.site for dropout in dropouts.values()}) == 5
    shares = []
    for dropout in dropouts.values():
        dropout.register_forward_hook(lambda m, i, y: shares.append((y == 0).float().mean()))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model(torch.randint(50, (8, 16)), keys=keys_of())
    assert len(shares) == 5 and all(0.4 < share < 0.6 for share in shares)


def test_seeds_differ_by_name_and_never_change():
    assert len({seed_of("a", 1), seed_of("a", 2), seed_of("b", 1), seed_of("a", "1")}) == 4
    assert 0 <= seed_of("dropout", 0, 0) < 2**63
    # another stream would change the masks and batches of a run that is resumed
    assert seed_of("init", 1337, "embed.tokens.weight") == 3749379711100740266
    order = torch.randint(1000, (3,), generator=generator_of("epoch", 1337, 0))
    assert order.tolist() == [392, 424, 303]
    assert keys_of(step=3, samples=2, seed=1337).tolist() == [1609393984, -306508946]


@pytest.mark.parametrize("p", [-0.1, 1.0, math.nan])
def test_a_probability_that_keeps_nothing_is_an_error(p):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        CounterDropout(p, site=0)
