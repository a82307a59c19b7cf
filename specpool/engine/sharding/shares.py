"""How a model's weights are sharded among ranks.

GEMMs are sharded by outputs: queries, keys and values by KV heads, gate and up by features, the output head by tokens.
With partial sums ("parts"), o_proj and down_proj are sharded by inputs instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from transformers import PreTrainedConfig

Sums = Literal["whole", "parts"]
"""How the terms of an output are summed. "whole": one rank sums all terms in the order of one device, so any number
of ranks gives the same bits. "parts": each rank sums its own terms, and partial sums are added in rank order. This
takes half the collectives, but the bits depend on the number of ranks."""

Dimension = Literal["attended", "hidden", "intermediate", "tokens"]
"""Features of the attention output, the hidden state and the intermediate state; rows of embedding and output head."""

RESIDUAL_GEMMS: Mapping[str, Dimension] = {"o_proj": "attended", "down_proj": "intermediate"}
"""GEMMs whose results are added to the hidden states, and their input dimension."""
# Shares of features are multiples of the vector length of the compiled pass.
UNIT = 16


@dataclass(frozen=True)
class Shares:
    """Sizes of the contiguous shares of a dimension in rank order; the first is the largest."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def firsts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes[:-1]))

    def of(self, rank: int) -> range:
        first = self.firsts[rank]
        return range(first, first + self.sizes[rank])

    def times(self, factor: int) -> "Shares":
        """Scale the shares to a dimension with `factor` indexes for each index of this one."""
        return Shares(tuple(size * factor for size in self.sizes))


def split_evenly(total: int, ranks: int, unit: int = 1) -> Shares:
    """Split `total` indexes evenly in multiples of `unit`; the last share takes the incomplete unit."""
    units = -(-total // unit)
    ends = [min(total, unit * -(-units * (rank + 1) // ranks)) for rank in range(ranks)]
    return Shares(tuple(end - begin for begin, end in zip((0, *ends[:-1]), ends, strict=True)))


@dataclass(frozen=True)
class Sharding:
    """The shares of all dimensions of a model."""

    sums: Sums
    kv_heads: Shares
    shares: Mapping[Dimension, Shares]

    @property
    def ranks(self) -> int:
        return len(self.kv_heads.sizes)


def shard(config: PreTrainedConfig, ranks: int, sums: Sums) -> Sharding:
    """Shard a model among ranks. Raises ValueError if a dimension is too small."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if ranks > kv_heads:
        raise ValueError(f"--tensor-parallel {ranks} is more than the {kv_heads} KV heads")
    head_shares = split_evenly(kv_heads, ranks)
    shares: dict[Dimension, Shares] = {
        "attended": head_shares.times(heads // kv_heads * head_dim_of(config)),
        "hidden": split_evenly(config.hidden_size, ranks, UNIT),
        "intermediate": split_evenly(config.intermediate_size, ranks, UNIT),
        "tokens": split_evenly(config.vocab_size, ranks, UNIT),
    }
    for dimension, share in shares.items():
        if not all(share.sizes):
            raise ValueError(
                f"--tensor-parallel {ranks} is too much for {share.total} {dimension} features in multiples of {UNIT}"
            )
    return Sharding(sums, head_shares, shares)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Return the size of a head in the cache. With latent attention, it is the larger of the key and value sizes."""
    sizes: Any = config
    if getattr(config, "qk_nope_head_dim", None):
        return int(max(sizes.qk_nope_head_dim + sizes.qk_rope_head_dim, sizes.v_head_dim))
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True)
class Share:
    sharding: Sharding
    rank: int


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a weight: ranges of one of its dimensions."""

    dimension: int
    ranges: tuple[range, ...]


def piece_of(name: str, config: PreTrainedConfig, share: Share) -> Piece | None:
    """Return a rank's piece of a weight or bias by its transformers name; None: every rank has all of it."""
    sharding, rank = share.sharding, share.rank
    module, attribute = name.split(".")[-2:]
    shares, keys = sharding.shares, sharding.kv_heads.times(head_dim_of(config))
    rows = {
        "q_proj": shares["attended"],
        "k_proj": keys,
        "v_proj": keys,
        "gate_proj": shares["intermediate"],
        "up_proj": shares["intermediate"],
        "embed_tokens": shares["tokens"],
        "lm_head": shares["tokens"],
    }
    if module in rows:
        return Piece(0, (rows[module].of(rank),))
    if module == "gate_up_proj":  # gate rows, then up rows
        gate, total = shares["intermediate"].of(rank), shares["intermediate"].total
        return Piece(0, (gate, range(gate.start + total, gate.stop + total)))
    if module not in RESIDUAL_GEMMS:
        return None
    if sharding.sums == "whole":
        return Piece(0, (shares["hidden"].of(rank),))
    return Piece(1, (shares[RESIDUAL_GEMMS[module]].of(rank),)) if attribute == "weight" else None
