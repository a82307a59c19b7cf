"""Shards cover every weight exactly once and evenly; too small dimensions are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import small_config

from specpool.engine.sharding.shares import Share, Sums, piece_of, shard, split_evenly

WEIGHTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 64))
def test_shares_are_even_and_cover_every_index_once(total: int, ranks: int, unit: int) -> None:
    shares = split_evenly(total, ranks, unit)
    assert [index for rank in range(ranks) for index in shares.of(rank)] == list(range(total))
    assert max(shares.sizes) - min(shares.sizes) < 2 * unit
    assert all(first % unit == 0 for first in shares.firsts[: -(-total // unit)])


@pytest.mark.parametrize("sums", ["whole", "parts"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_pieces_cover_a_weight(name: str, sums: Sums) -> None:
    config = small_config("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=80)
    sharding = shard(config, 2, sums)
    pieces = [piece_of(f"model.layers.0.x.{name}.weight", config, Share(sharding, rank)) for rank in range(2)]
    sizes = {"k_proj": 48, "v_proj": 48, "gate_proj": 80, "up_proj": 80}
    inputs = {"o_proj": 96, "down_proj": 80}
    by_inputs = sums == "parts" and name in inputs
    size = inputs[name] if by_inputs else sizes.get(name, 96)
    assert [index for piece in pieces if piece for part in piece.ranges for index in part] == list(range(size))
    assert {piece.dimension for piece in pieces if piece} == {int(by_inputs)}


def test_fused_gate_and_up_are_sharded_and_norms_replicated() -> None:
    config = small_config("glm4")
    share = Share(shard(config, 2, "whole"), 1)
    piece = piece_of("model.layers.0.mlp.gate_up_proj.weight", config, share)
    assert piece is not None
    assert piece.ranges == (range(48, 96), range(144, 192))
    assert piece_of("model.layers.0.input_layernorm.weight", config, share) is None


def test_too_small_dimensions_are_refused() -> None:
    few = small_config("llama", num_attention_heads=8, num_key_value_heads=8, hidden_size=64)
    with pytest.raises(ValueError, match="--tensor-parallel 8 is too much for 64 hidden features in multiples of 16"):
        shard(few, 8, "whole")
