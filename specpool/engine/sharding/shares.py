"""How the weights of a model are divided among ranks, the processes that run it together. Pure.

Every product is divided by its outputs: queries, keys and values by KV heads, gate and up by features, the output head
by tokens. What adds to the hidden states (the output of attention, and down) is divided by outputs too, or, where sums
are in `parts`, by inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from transformers import PreTrainedConfig

Sums = Literal["whole", "parts"]
"""How the terms of an output are summed. `whole`: by one rank, in the order that they have on one device, so that the
bits are the same for every number of ranks. `parts`: each rank sums the terms that it has, and these sums are added in
the order of the ranks: half as many collectives, but the bits depend on the number of ranks."""

Dimension = Literal["attended", "hidden", "intermediate", "tokens"]
"""Features of attention's result, of the hidden states and of the intermediate ones, and rows of the embedding and of
the output head."""

ADDED: Mapping[str, Dimension] = {"o_proj": "attended", "down_proj": "intermediate"}
"""The products that are added to the hidden states, and their inputs."""
# Shares of features are multiples of this, the length of a vector in the compiled pass.
UNIT = 16


@dataclass(frozen=True)
class Shares:
    """The sizes of contiguous parts of a dimension, in the order of the ranks; the first is the largest."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Size of the whole dimension."""
        return sum(self.sizes)

    @property
    def firsts(self) -> tuple[int, ...]:
        """Index at which each part begins."""
        return (0, *accumulate(self.sizes[:-1]))

    def of(self, rank: int) -> range:
        """The indexes of a rank's part."""
        first = self.firsts[rank]
        return range(first, first + self.sizes[rank])

    def times(self, factor: int) -> "Shares":
        """Shares of a dimension that has `factor` indexes for each index of this one."""
        return Shares(tuple(size * factor for size in self.sizes))


def deal(total: int, ranks: int, unit: int = 1) -> Shares:
    """Deals `total` indexes in multiples of `unit` as evenly as possible; the last part takes an incomplete unit."""
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
        """Number of ranks."""
        return len(self.kv_heads.sizes)


def shard(config: PreTrainedConfig, ranks: int, sums: Sums) -> Sharding:
    """Divides a model among ranks. ValueError names what cannot be divided, and its number."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if ranks > kv_heads:
        raise ValueError(f"tensor_parallel {ranks} is more than its {kv_heads} KV heads")
    of_heads = deal(kv_heads, ranks)
    shares: dict[Dimension, Shares] = {
        "attended": of_heads.times(heads // kv_heads * head_dim_of(config)),
        "hidden": deal(config.hidden_size, ranks, UNIT),
        "intermediate": deal(config.intermediate_size, ranks, UNIT),
        "tokens": deal(config.vocab_size, ranks, UNIT),
    }
    for dimension, its in shares.items():
        if not all(its.sizes):
            raise ValueError(
                f"tensor_parallel {ranks} is too much for its {its.total} {dimension} features in multiples of {UNIT}"
            )
    return Sharding(sums, of_heads, shares)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Features of a head."""
    found: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return found


@dataclass(frozen=True)
class Share:
    """What one rank has of a model."""

    sharding: Sharding
    rank: int


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a weight: these indexes of one of its dimensions."""

    dimension: int
    ranges: tuple[range, ...]


def piece_of(name: str, config: PreTrainedConfig, share: Share) -> Piece | None:
    """A rank's piece of the weight or bias of this name in a model of the library; None: the rank has all of it."""
    sharding, rank = share.sharding, share.rank
    module, kind = name.split(".")[-2:]
    by_outputs, keys = sharding.shares, sharding.kv_heads.times(head_dim_of(config))
    rows = {
        "q_proj": by_outputs["attended"],
        "k_proj": keys,
        "v_proj": keys,
        "gate_proj": by_outputs["intermediate"],
        "up_proj": by_outputs["intermediate"],
        "embed_tokens": by_outputs["tokens"],
        "lm_head": by_outputs["tokens"],
    }
    if module in rows:
        return Piece(0, (rows[module].of(rank),))
    if module == "gate_up_proj":  # the rows of gate above those of up
        gate, total = by_outputs["intermediate"].of(rank), by_outputs["intermediate"].total
        return Piece(0, (gate, range(gate.start + total, gate.stop + total)))
    if module not in ADDED:
        return None
    if sharding.sums == "whole":
        return Piece(0, (by_outputs["hidden"].of(rank),))
    return Piece(1, (sharding.shares[ADDED[module]].of(rank),)) if kind == "weight" else None
