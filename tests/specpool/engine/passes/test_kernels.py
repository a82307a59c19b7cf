"""The GPU's kernels by Triton's interpreter: near what float64 gives, and rows with the same bits beside any others."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu.attention import attend_extents, rows_per_tile, splits_for
from specpool.engine.passes.gpu.gemm import Product, parts_of
from specpool.engine.passes.gpu.rows import Addend, activate, add_and_norm, rotate_and_cache
from specpool.engine.passes.rotary import rotate

pytest.importorskip("triton")

CPU = torch.device("cpu")
# The interpreter knows no bfloat16.
DTYPES = (torch.float32, torch.float16)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-2}
# Smaller than the real ones, since the interpreter is slow.
SPLIT, BLOCK = 64, 16
ENDS = (0, 15, 16, SPLIT - 1, SPLIT, 2 * SPLIT + 1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", SPLIT)
    monkeypatch.setattr(attention, "BLOCK", BLOCK)
    torch.manual_seed(0)


def assert_near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), expected.double(), atol=tolerance, rtol=tolerance)


# --- Attention


class Cache:
    """Sequences in a cache, and queries for all their positions."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.origins = [7 + 50 * i for i in range(len(ENDS))]
        self.keys, self.values = torch.randn(2, kv_heads, self.origins[-1] + ENDS[-1] + 1, dim).to(dtype)
        self.query = torch.randn(len(ENDS), ENDS[-1] + 1, heads, dim).to(dtype)

    def attend(self, tiles: Sequence[tuple[int, range]], longest: int) -> torch.Tensor:
        """The results of tiles, each given by its sequence and the positions of its rows."""
        rows = [(sequence, position) for sequence, positions in tiles for position in positions]
        sizes = [len(positions) for _, positions in tiles]
        begins = torch.tensor([sum(sizes[:index]) for index in range(len(sizes))])
        query = torch.stack([self.query[sequence, position] for sequence, position in rows])
        own = torch.tensor([position for _, position in rows])
        columns = torch.tensor([self.origins[sequence] + position for sequence, position in rows])
        scaling, splits = query.shape[-1] ** -0.5, splits_for(longest)
        return attend_extents(query, self.keys, self.values, begins, torch.tensor(sizes), own, columns, scaling, splits)

    def expected(self, sequence: int, position: int) -> torch.Tensor:
        """What float64 gives."""
        query, origin = self.query[sequence, position, :, None].double(), self.origins[sequence]
        extent = slice(origin, origin + position + 1)
        k, v = (
            cache[:, extent].repeat_interleave(len(query) // len(cache), 0).double()
            for cache in (self.keys, self.values)
        )
        return scaled_dot_product_attention(query, k, v)[:, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 80), (34, 2, 32), (1, 1, 256)])
@pytest.mark.parametrize("busy", [attention.BUSY, 1], ids=["a program for each split", "one for all splits"])
def test_rows_attend_alone_with_the_same_bits_as_in_a_batch(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(heads, kv_heads, dim, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "BUSY", busy)
        together = cache.attend([(i, range(end, end + 1)) for i, end in enumerate(ENDS)], ENDS[-1] + 1)
    for sequence, end in enumerate(ENDS):
        assert_near(together[sequence], cache.expected(sequence, end), dtype)
        alone = cache.attend([(sequence, range(end, end + 1))], end + 1)
        assert torch.equal(alone[0], together[sequence])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_tile_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    cache, most = Cache(3, 1, 32, dtype), rows_per_tile(dtype, 3)
    assert most >= 5
    for end in (most, SPLIT + 2):  # of the latter, some rows see a split that others do not
        tile = range(end - most + 1, end + 1)
        together = cache.attend([(2, tile), (0, range(1))], end + 1)
        for row in (0, most // 2, most - 3, most - 1):
            alone = cache.attend([(2, range(tile[row], tile[row] + 1))], tile[row] + 1)
            assert torch.equal(alone[0], together[row])


def test_numbers_that_a_row_does_not_see_do_it_no_harm() -> None:
    cache = Cache(2, 1, 16, torch.float32)
    expected = cache.attend([(0, range(5, 6))], 6)
    cache.keys[:, cache.origins[0] + 6 :] = cache.values[:, cache.origins[0] + 6 :] = torch.nan
    assert torch.equal(cache.attend([(0, range(5, 6))], 6), expected)


def test_few_numbers_of_splits_cover_all_lengths() -> None:
    lengths = [1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 1, 8 * SPLIT]
    assert [splits_for(length) for length in lengths] == [1, 1, 2, 2, 4, 8]


# --- Products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (96, 64), (130, 100), (70, 1024)])
def test_rows_of_a_product_have_the_bits_that_they_have_alone(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    product = Product((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype))
    x = torch.randn(300, inputs).to(dtype)
    assert_near(product(x).double().sum(0), x.double() @ product.weight.double().T, dtype)
    # The interpreter multiplies tiles of other sizes in another order, so only equal ones are compared.
    for most, fewer in ((16, (1, 5, 15)), (32, (17, 30))):
        together = product(x[-most:])
        for count in fewer:
            assert torch.equal(product(x[-count:]), together[:, -count:])


def test_a_product_is_divided_by_its_shape_alone() -> None:
    assert parts_of(4096, 4096) == parts_of(4096, 12_288) == 2  # Qwen3-8B's narrow products
    assert parts_of(24_576, 4096) == parts_of(151_936, 4096) == 1
    assert parts_of(1024, 3072) == 8  # Qwen3-0.6B's
    assert parts_of(64, 100) == 1
    assert Product(torch.zeros(64, 1024), divided=False)(torch.zeros(3, 1024)).shape == (1, 3, 64)


# --- Between the products


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biased and normed"])
def test_a_product_is_added_and_normed(dtype: torch.dtype, size: int, parts: int, has_more: bool) -> None:
    hidden, weight = torch.randn(5, size).to(dtype), torch.rand(size).to(dtype)
    products = torch.randn(parts, 5, size).to(dtype if parts == 1 else torch.float32)
    bias, norm = (torch.randn(2, size).to(dtype)) if has_more else (None, None)
    added = products.double().sum(0)
    if bias is not None and norm is not None:
        added = rms_norm(added + bias.double(), norm.double(), 1e-6)
    expected = hidden.double() + added
    before, alone = hidden.clone(), hidden[3:4].clone()
    normed = add_and_norm(hidden, Addend(products, bias, norm), weight, 1e-6)
    assert_near(hidden, expected, dtype)
    assert_near(normed, rms_norm(expected, weight.double(), 1e-6), dtype)
    its = add_and_norm(alone, Addend(products[:, 3:4].contiguous(), bias, norm), weight, 1e-6)
    assert torch.equal(its[0], normed[3])
    assert torch.equal(alone[0], hidden[3])
    assert_near(add_and_norm(before, None, weight, 1e-6), rms_norm(before.double(), weight.double(), 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("has_more", [False, True], ids=["", "biased and normed"])
@pytest.mark.parametrize("dim", [16, 80])
def test_queries_and_keys_are_rotated_and_keys_and_values_cached(
    dtype: torch.dtype, parts: int, has_more: bool, dim: int
) -> None:
    heads, kv_heads, rows = 4, 2, 3
    width = (heads + 2 * kv_heads) * dim
    products = torch.randn(parts, rows, width).to(dtype if parts == 1 else torch.float32)
    bias = torch.randn(width).to(dtype) if has_more else None
    norms = torch.rand(heads + kv_heads, dim).to(dtype) if has_more else None
    angles = torch.randn(40, dim // 2)
    rotary = torch.cat([angles.cos()] * 2, -1).to(dtype), torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    positions, columns = torch.tensor([39, 0, 7]), torch.tensor([2, 9, -1])
    arena = KVArena(2, kv_heads, 10, dim, dtype, CPU)
    query = rotate_and_cache(products, bias, norms, rotary, arena, 1, positions, columns, heads, 1e-6)

    each = (products.double().sum(0) + (0 if bias is None else bias.double())).view(rows, -1, dim)
    query_key, value = each.split([heads + kv_heads, kv_heads], 1)
    if norms is not None:
        query_key = rms_norm(query_key, norms.double(), 1e-6)
    rotated = rotate(query_key, *(table.double()[positions, None] for table in rotary))
    assert_near(query, rotated[:, :heads], dtype)
    for row, column in ((0, 2), (1, 9)):
        assert_near(arena.keys[1][:, column], rotated[row, heads:], dtype)
        assert_near(arena.values[1][:, column], value[row], dtype)
    untouched = [column for column in range(10) if column not in (2, 9)]
    assert not arena.keys[1][:, untouched].any()
    assert not arena.keys[0].any()


@pytest.mark.filterwarnings("ignore:overflow")
def test_what_overflows_is_cached_as_zero() -> None:
    dim = 16
    products = torch.full((1, 1, 3 * dim), 1e30)
    arena = KVArena(1, 1, 1, dim, torch.float16, CPU)
    tables = torch.ones(1, dim, dtype=torch.float16), torch.zeros(1, dim, dtype=torch.float16)
    first = torch.zeros(1, dtype=torch.long)
    query = rotate_and_cache(products, None, None, tables, arena, 0, first, first, 1, 1e-6)
    assert torch.isinf(query).all()
    assert not arena.keys[0].any()
    assert not arena.values[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [96, 1500])
def test_the_gate_is_activated(dtype: torch.dtype, parts: int, size: int) -> None:
    products = torch.randn(parts, 3, 2 * size).to(dtype if parts == 1 else torch.float32)
    bias = torch.randn(2 * size).to(dtype) if parts == 2 else None
    gate, up = (products.double().sum(0) + (0 if bias is None else bias.double())).chunk(2, -1)
    activated = activate(products, bias, dtype)
    assert_near(activated, silu(gate) * up, dtype)
    assert torch.equal(activate(products[:, 1:2].contiguous(), bias, dtype)[0], activated[1])
