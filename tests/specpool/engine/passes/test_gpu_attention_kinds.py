"""Windows, sinks and soft caps of the attention kernel, interpreted: close to float64, and batch-invariant."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import ENDS, LIMITS, Cache, assert_near

from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu.attention import rows_per_tile
from specpool.engine.passes.kinds import AttentionKind

pytest.importorskip("triton")

HEADS, KV_HEADS = 6, 2
# Sequences of five splits, so windows reuse places of partial results.
SPLIT, BLOCK = 32, 16
LENGTH = ENDS[-1] + 1
WINDOWS = [1, 5, BLOCK, BLOCK + 1, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + BLOCK, LENGTH, 2**20]


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT", SPLIT)
        patch.setattr(attention, "BLOCK", BLOCK)
        yield


@pytest.fixture(scope="module")
def cache() -> Cache:
    torch.manual_seed(0)
    return Cache(HEADS, KV_HEADS, 16, torch.float32, page_size=16)


def kind_of(window: int | None, has_sinks: bool, softcap: float | None) -> AttentionKind:
    return AttentionKind(window, torch.linspace(-2, 3, HEADS) if has_sinks else None, softcap)


kinds = st.builds(kind_of, st.none() | st.sampled_from(WINDOWS), st.booleans(), st.sampled_from([None, 1.5]))


@pytest.mark.parametrize("kind", [kind_of(None, True, None), kind_of(None, False, 1.5), kind_of(BLOCK, True, 1.5)])
def test_attention_of_a_kind_is_near_float64(cache: Cache, kind: AttentionKind) -> None:
    ends = (0, BLOCK, SPLIT + 1, LENGTH - 1)
    attended = cache.attend([(1, range(end, end + 1)) for end in ends], LENGTH, kind)
    for row, end in zip(attended, ends, strict=True):
        assert_near(row, cache.expected(1, end, kind), torch.float32)


@given(kind=kinds, data=st.data())
@settings(max_examples=40, deadline=None)
def test_rows_of_any_kind_keep_their_bits_in_any_tile(cache: Cache, kind: AttentionKind, data: st.DataObject) -> None:
    height = rows_per_tile(torch.float32, HEADS // KV_HEADS)
    end = data.draw(st.integers(0, LENGTH - 1))
    first = max(0, end + 1 - data.draw(st.integers(1, height)))
    last = min(LENGTH - 1, first + height - 1)
    limits = data.draw(st.sampled_from([*LIMITS.values()]))
    alone = cache.attend([(0, range(end, end + 1))], end + 1, kind)
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(attention, name, limit)
        tiles = [(1, range(1)), (0, range(first, last + 1)), (0, range(0))]
        together = cache.attend(tiles, data.draw(st.sampled_from([last + 1, 16 * SPLIT])), kind)
    assert torch.equal(together[1 + end - first], alone[0])
    assert_near(alone[0], cache.expected(0, end, kind), torch.float32)


def test_positions_before_the_window_are_not_read(cache: Cache) -> None:
    """Their pages may be free."""
    end, window = 2 * SPLIT, SPLIT // 2
    kind, unseen = AttentionKind(window), cache.columns(2, (end + 1 - window) // BLOCK * BLOCK)
    expected = cache.attend([(2, range(end, end + 1))], end + 1, kind)
    cache.arena.keys[0][:, unseen] = cache.arena.values[0][:, unseen] = torch.nan
    assert torch.equal(cache.attend([(2, range(end, end + 1))], end + 1, kind), expected)


def test_partial_results_fit_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile with a window of 4,096 positions sees at most 18 splits of 256."""
    monkeypatch.setattr(attention, "BUSY_PROGRAMS", 512)  # as on a GPU
    monkeypatch.setattr(attention, "SPLIT", 256)
    assert [attention.visible_splits(32, window) for window in (1, 2, 257, 258, 4096, 2**20)] == [2, 3, 3, 4, 18, 32]
    length = 2**17
    sizes = [attention.scratch_bytes(8, length, 32, 8, 128, 16, window) for window in (4096, None)]
    assert sizes[0] == sizes[1] * 18 / 512
    lengths = [attention.captured_length(256, 63, length, 32, 8, 128, window) for window in (4096, None)]
    assert lengths == [length, 64 * 256]
