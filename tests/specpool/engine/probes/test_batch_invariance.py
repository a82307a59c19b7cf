"""Probes choose tiles that make a model batch-invariant, and the self-test proves it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import load_engine, rows_that_differ
from torch import nn

from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes import attention
from specpool.engine.passes.modules import PrepackedLinear, can_prepack, prepack_linears
from specpool.engine.probes import batch_invariance
from specpool.engine.probes.batch_invariance import ATTENTION_TILE_SHAPES, ONE_SHAPE, ROW_TILE_SHAPES, choose_tiles
from specpool.engine.startup.self_test import self_test

CPU = torch.device("cpu")
Pair = tuple[Path, Path]
pytestmark = [pytest.mark.cpus, pytest.mark.thorough]
needs_onednn = pytest.mark.skipif(not can_prepack(torch.float32, CPU), reason="oneDNN is not available")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# --- Row tiles


@given(st.integers(1, 600), st.sampled_from(ROW_TILE_SHAPES))
def test_rows_are_padded_to_the_next_multiple(count: int, grid: tuple[int, int]) -> None:
    rows = Tiles(*grid).rows(count)
    assert rows >= max(count, grid[0])
    assert rows % grid[1] == 0
    assert rows < count + grid[1] or rows == grid[0]


def matmul(x: torch.Tensor, weight: torch.Tensor, backwards: bool) -> torch.Tensor:
    """A batch-invariant GEMM that adds terms in order, or in the opposite order."""
    total = torch.zeros(len(x), len(weight))
    for i in reversed(range(x.shape[1])) if backwards else range(x.shape[1]):
        total += x[:, i : i + 1].float() * weight[:, i].float()
    return total.to(x.dtype)


def choose_row_tiles(
    patch: pytest.MonkeyPatch, differs: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32
) -> Tiles | None:
    """Choose tiles for layers that add terms backwards in the rows where `differs` [rows] is true."""

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        ordered, backwards = (matmul(x, self.weight, backwards) for backwards in (False, True))
        return torch.where(differs(x)[:, None], backwards, ordered)

    patch.setattr(nn.Linear, "forward", forward)
    return choose_tiles(nn.Sequential(nn.Linear(13, 6, bias=False), nn.Linear(24, 5)).to(dtype), attention=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        (lambda rows: False, (1, 1)),
        (lambda rows: rows == 1, (2, 1)),
        (lambda rows: rows < 5, (8, 1)),
        (lambda rows: rows % 8 != 0, (8, 8)),
        (lambda rows: rows % 32 != 0, (32, 32)),
        (lambda rows: rows == 96, (64, 64)),
        (lambda rows: rows % 64 != 0, (64, 64)),
        (lambda rows: rows == 512, ONE_SHAPE),
        (lambda rows: rows != 64, ONE_SHAPE),
        (lambda rows: rows % 64 != 0 or rows == 192, ONE_SHAPE),
        (lambda rows: rows % 64 != 0 or rows > 64, ONE_SHAPE),
    ],
)
def test_tiles_avoid_row_counts_that_change_the_order_of_sums(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    differs: Callable[[int], bool],
    expected: tuple[int, int] | Tiles,
) -> None:
    """Also in half precision, where most results are the same in either order."""
    tiles = choose_row_tiles(monkeypatch, lambda x: torch.tensor(differs(len(x))).expand(len(x)), dtype)
    if isinstance(expected, tuple):
        expected = Tiles(*expected, max_rows=batch_invariance.ROW_COUNTS[-1])
    assert tiles == expected


@pytest.mark.parametrize(
    "depends",
    [
        lambda index: index % 3 == 2,
        lambda index: index % 2 == 1,
        lambda index: index % 8 == 7,
        lambda index: index % 64 == 40,
        lambda index: index >= 5,
    ],
)
def test_index_dependent_rows_are_detected(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    depends: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert choose_row_tiles(monkeypatch, lambda x: depends(torch.arange(len(x)))) is None
    assert "Linear with 13 inputs and 6 outputs" in caplog.text


@pytest.mark.parametrize(
    "depends",
    [
        lambda x: x.abs().sum(1).roll(1) > x.abs().sum(1),
        lambda x: (x.abs().sum().int() % 2 == 0).expand(len(x)),
    ],
    ids=["row before", "sum of all rows"],
)
def test_batch_dependent_rows_are_detected(
    monkeypatch: pytest.MonkeyPatch, depends: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert choose_row_tiles(monkeypatch, depends) is None


def test_subclasses_of_linear_are_left_to_the_self_test() -> None:
    class Router(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return super().forward(x), x

    choose_tiles(nn.Sequential(Router(8, 8)), attention=(1, 1, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96, 64), (320, 96)])
def test_every_row_count_agrees_on_the_chosen_tiles(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """With this machine's kernels, and other numbers than the probe's."""
    model = nn.Sequential(nn.Linear(*shape, bias=False, dtype=dtype), nn.LayerNorm(1, dtype=dtype))
    if can_prepack(dtype, CPU):
        prepack_linears(model)
    tiles = choose_tiles(model, attention=(1, 4, 16))
    if tiles is None or tiles.max_rows == ONE_SHAPE.max_rows:
        pytest.skip("this machine has no batch-invariant tiles")
    assert (tiles.min_rows, tiles.row_multiple) in ROW_TILE_SHAPES
    assert (tiles.query, tiles.kv) in ATTENTION_TILE_SHAPES
    x = torch.randn(320, shape[0]).to(dtype)
    with torch.inference_mode():
        reference = model[0](x)
        for count in (count for count in range(1, 320) if tiles.rows(count) == count):
            start = 7 * count % (320 - count + 1)
            assert torch.equal(model[0](x[start : start + count]), reference[start : start + count]), count


# --- Attention tiles


def flip_attention(patch: pytest.MonkeyPatch, flips: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Make attention add terms backwards in calls where `flips(q, k)` is true."""
    real = batch_invariance.scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        if flips(q, k):
            k, v, attn_mask = k.flip(2), v.flip(2), attn_mask.flip(-1)
        return real(q, k, v, attn_mask=attn_mask)

    patch.setattr(batch_invariance, "scaled_dot_product_attention", attend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_avoid_lengths_that_change_attention(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    flip_attention(monkeypatch, lambda q, k: bool(k.shape[2] % 512))
    tiles = choose_tiles(nn.Sequential(nn.Linear(8, 8)).to(dtype), attention=(2, 2, 16))
    assert tiles is not None
    assert tiles.kv % 512 == 0


def test_batch_dependent_attention_is_detected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flip_attention(monkeypatch, lambda q, k: q.shape[0] > 2)
    assert choose_tiles(nn.Sequential(nn.Linear(8, 8)), attention=(2, 3, 16)) is None
    assert "2 KV heads, 3 query heads each, head size 16" in caplog.text


# --- Engines


def test_an_engine_without_batch_invariant_gemm_is_numeric(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine skips the self-test and the cost of tiles."""
    monkeypatch.setattr(batch_invariance, "_rows_agree", lambda *_: False)
    monkeypatch.setattr(batch_invariance, "_one_shape_agrees", lambda *_: False)
    numeric = load_engine(tiny_pair[0], native=False)
    assert not numeric.bitwise
    assert numeric.tiles == Tiles()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("no batch-invariant shape found" in message for message in warnings)


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_engine_can_run_all_passes_in_one_shape(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """As on a GPU, where libraries choose a kernel for every row count."""
    monkeypatch.setattr(batch_invariance, "_rows_agree", lambda *_: False)
    uniform = load_engine(tiny_pair[0], fused=fused, native=False)
    shapes = set()
    head = uniform.forward_pass.head if fused else uniform.loaded.model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, x: shapes.add(x[0].shape[-2]))
    assert rows_that_differ(uniform) == 0
    assert shapes - {0} == {64}
    assert uniform.bitwise


def test_the_self_test_detects_batch_dependence(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real = attention.scaled_dot_product_attention

    def attend(q: torch.Tensor, *arguments: torch.Tensor, **features: object) -> torch.Tensor:
        return real(q, *arguments, **features) * (1 + 1e-6 * (q.shape[0] > 1))

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend)
    assert not load_engine(tiny_pair[0], native=False).bitwise


def test_the_self_test_detects_dependence_on_pages(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(tiny_pair[0], native=False)
    real = engine.layout.arena.write

    def write(layer: int, columns: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        is_even = columns // engine.layout.arena.page_size % 2 == 0
        real(layer, columns, key, value * (1 + 1e-6 * is_even)[:, None, None])

    monkeypatch.setattr(engine.layout.arena, "write", write)
    assert not self_test(engine)


def test_an_engine_that_need_not_be_exact_is_not_tested(tiny_pair: Pair) -> None:
    draft = load_engine(tiny_pair[1], exact=False)
    assert draft.tiles == Tiles()
    assert not draft.bitwise


@pytest.mark.parametrize(("max_sequences", "max_model_len"), [(1, 16), (1, 300), (2, 32), (3, 16), (8, 300)])
def test_the_self_test_fits_any_size_of_engine(tiny_pair: Pair, max_sequences: int, max_model_len: int) -> None:
    small = load_engine(tiny_pair[0], max_sequences=max_sequences, max_model_len=max_model_len)
    assert small.bitwise
    assert small.slots.in_use == 0


# --- Prepacked layers


@needs_onednn
@settings(max_examples=20)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.booleans())
def test_a_prepacked_layer_computes_the_same(inputs: int, outputs: int, rows: int, bias: bool) -> None:
    linear = nn.Linear(inputs, outputs, bias)
    x = torch.randn(1, rows, inputs)
    with torch.inference_mode():
        torch.testing.assert_close(PrepackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-4)


@needs_onednn
def test_only_linear_layers_on_a_cpu_are_prepacked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), nn.Bilinear(2, 2, 2))
    prepack_linears(model)
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]
    assert kinds == [PrepackedLinear, nn.LayerNorm, PrepackedLinear, nn.Bilinear]
    assert not can_prepack(torch.float32, torch.device("cuda"))
    assert not can_prepack(torch.float64, CPU)
