"""Stateless randomness: every random number is a hash of names and counters.

No number depends on the rank that computes it or on earlier draws, so any rank, any pipeline stage
and any resumed run gets the same initial weight, batch and dropout mask. (Counter-based generators:
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.)
"""

import hashlib

import torch
from torch import Tensor, nn

# Two odd multipliers and three shifts of a 32-bit integer hash that Chris Wellons found by search
# ("lowbias32", 2018). Signed 32-bit multiplication wraps around as unsigned does.
_MULTIPLY = (0x7FEB352D, 0x846CA68B - (1 << 32))
_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2^32 / golden ratio: spreads consecutive counters


def seed_of(*names: object) -> int:
    """A 63-bit seed from any names and numbers."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_of(*names: object) -> torch.Generator:
    """A CPU generator seeded by names: the same stream whatever the device."""
    return torch.Generator().manual_seed(seed_of(*names))


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)  # logical, not arithmetic


def hash32(x: Tensor) -> Tensor:
    """A bijection of int32 in which each input bit flips each output bit half of the time."""
    x = (x ^ _shift(x, 16)) * _MULTIPLY[0]
    x = (x ^ _shift(x, 15)) * _MULTIPLY[1]
    return x ^ _shift(x, 16)


def fold_in(key: Tensor, counter: Tensor | int) -> Tensor:
    """Derive a new key from a key and a counter (int32, broadcast against each other)."""
    return hash32(key ^ (counter * _GOLDEN + 0x3C6EF372))


def sample_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """One int32 key per sample of step `step`'s global batch; samples: their indices in it."""
    start = torch.tensor(seed_of("dropout", seed, step) & 0x7FFFFFFF, dtype=torch.int32)
    return fold_in(start, samples.to(torch.int32))


Positions = tuple[range, ...]  # of some tokens in the full sequence, as contiguous ranges


def position_ids(positions: Positions, device: torch.device) -> Tensor:
    """The positions one by one: int64 [tokens]."""
    return torch.cat([torch.arange(p.start, p.stop, device=device) for p in positions])


class CounterDropout(nn.Module):
    """Dropout whose mask is a hash of (sample key, site, position, feature).

    site: the unique number of this dropout in the model. positions: those of the tokens that
    `forward` gets, so that a rank with a shard of a sequence drops the same elements as a rank
    with all of it; None: all tokens from 0 on.
    """

    def __init__(self, p: float, site: int):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p is {p}, not at least 0 and below 1")
        self.p, self.site = p, site
        self.positions: Positions | None = None

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """x: [batch, seq, features]; keys: int32 [batch], or None to drop nothing."""
        if not self.training or self.p == 0.0 or keys is None:
            return x
        seq, features = x.shape[-2:]
        # site and position in one counter: room for a million positions at each of 4096 sites
        counters = position_ids(self.positions or (range(seq),), x.device).to(torch.int32)
        counters += self.site << 20
        return x * keep_mask(keys, counters, features, self.p) / (1.0 - self.p)


# opaque to torch.compile: PyTorch 2.13 miscompiles a full layer's integers for AVX-512
@torch.library.custom_op("counter_rng::keep_mask", mutates_args=())
def keep_mask(keys: Tensor, counters: Tensor, features: int, p: float) -> Tensor:
    """[batch, seq, features], True with probability 1 - p. keys: [batch], counters: [seq]."""
    feature = torch.arange(features, dtype=torch.int32, device=keys.device)
    key = fold_in(keys[:, None], counters)  # [batch, seq]
    return (fold_in(key[..., None], feature) & 0x7FFFFFFF) >= round(p * 2**31)


@keep_mask.register_fake
def _(keys: Tensor, counters: Tensor, features: int, p: float) -> Tensor:
    return keys.new_empty(len(keys), len(counters), features, dtype=torch.bool)
