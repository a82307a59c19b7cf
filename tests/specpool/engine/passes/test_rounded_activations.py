"""GEMMs with activations rounded to 8 bits follow their definition, with the same bits on every processor."""

import shutil
from ctypes import CDLL
from unittest import mock

import pytest
import torch
from gemms import Gemm, random_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import each_imitated

from specpool.engine.native import compiler
from specpool.engine.passes.native.decoder import compile_decoder
from specpool.engine.passes.native.panels import FLOAT32, KIND_NUMBERS, PANEL, PART, segments_of
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized, as_tensor

OUTPUTS = 3 * PANEL + 5

pytestmark = [
    pytest.mark.cpus,
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
each_kind = pytest.mark.parametrize("kind", QUANTIZATION_TYPES)


def compiled() -> CDLL:
    """Compile all kinds, however busy the machine is."""
    with mock.patch.object(compiler, "COMPILE_SECONDS", 600.0):
        library = compile_decoder(16, 2, {FLOAT32, *KIND_NUMBERS}, rounded=True)
    assert library is not None
    return library


@pytest.fixture(scope="module")
def library() -> CDLL:
    return compiled()


def some_rows(count: int, inputs: int = 512) -> torch.Tensor:
    """Rows of many magnitudes, a part of zeros, and a part too small to round."""
    rows = torch.randn(count, inputs) * torch.exp2(torch.randint(-6, 7, (count, inputs)))
    rows[0, :PART], rows[0, PART : 2 * PART] = 0.0, 1e-23
    return rows


def extreme_weight(kind: str) -> Quantized:
    """A random weight with the extreme codes of its kind in some rows."""
    weight = random_weight(kind, OUTPUTS)
    assert isinstance(weight, Quantized)
    if kind == "INT8":
        weight.data[:4, 4:], weight.data[4:8, 4:] = 128, 127
    if kind == "Q8_0":
        weight.data.unflatten(1, (-1, 34))[:4, :, 2:] = 128
    return weight


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, parts, PART] and scales [rows, parts, 1] of the parts of rows."""
    parts = rows.unflatten(1, (-1, PART))
    largest = parts.abs().amax(2, keepdim=True)
    is_zero = largest <= torch.tensor(1e-20)
    codes = (parts * torch.where(is_zero, 0.0, 127 / largest)).round()
    return codes, torch.where(is_zero, 0.0, largest / 127)


def defined_gemm(rows: torch.Tensor, weight: Quantized, bias: torch.Tensor) -> torch.Tensor:
    """Add the terms of each part in order, in float32."""
    fields = weight.fields()
    scale, offset = fields.scale.float(), None if fields.offset is None else fields.offset.float()
    if fields.scale_factors is not None:
        scale = (scale[..., None] * fields.scale_factors.float()).flatten(1)
    if offset is not None and fields.offset_factors is not None:
        offset = -(offset[..., None] * fields.offset_factors.float()).flatten(1)
    runs = rows.shape[1] // 16 if weight.qtype.name == "Q6_K" else rows.shape[1] // PART  # of inputs that share a scale
    scale = scale.expand(len(scale), runs)
    codes, scales = rounded(rows)
    per_run = codes.flatten(1).unflatten(1, (runs, -1)).double()
    weights = (fields.codes.double() - weight.qtype.zero_point).unflatten(1, (runs, -1))
    totals, sums = bias.repeat(len(rows), 1), codes.sum(2)
    for run in range(runs):
        part = run * codes.shape[1] // runs
        dots = (per_run[:, run] @ weights[:, run].T).float()
        totals = totals + dots * (scale[:, run] * scales[:, part])
        if offset is not None:
            totals = totals + offset[:, run] * (scales[:, part, 0] * sums[:, part])[:, None]
    return totals


@each_kind
def test_results_follow_the_definition_bit_for_bit(library: CDLL, kind: str) -> None:
    """For every number of rows and threads."""
    weight, rows, bias = extreme_weight(kind), some_rows(40), torch.randn(OUTPUTS)
    gemm, expected = Gemm(library, segments_of([weight]), bias), defined_gemm(rows, weight, bias)
    for count in (*range(1, 18), 40):
        assert torch.equal(gemm(rows[-count:].clone()), expected[-count:])
    assert all(torch.equal(gemm(rows, threads), expected) for threads in (2, 3, 7))


@each_imitated
def test_every_processor_gives_the_same_bits(library: CDLL, processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODER_CFLAGS", f"-march={processor}")
    other = compiled()
    for kind in QUANTIZATION_TYPES:
        segments, rows = segments_of([extreme_weight(kind)]), some_rows(11)
        assert torch.equal(Gemm(other, segments)(rows), Gemm(library, segments)(rows)), kind


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "INT8"])
def test_non_finite_inputs_give_nan(library: CDLL, kind: str, number: float) -> None:
    weight, rows = random_weight(kind, OUTPUTS), some_rows(3)
    expected = Gemm(library, segments_of([weight]))(rows)
    rows[1, 77] = number
    result = Gemm(library, segments_of([weight]))(rows)
    assert result[1].isnan().all()
    assert torch.equal(result[::2], expected[::2])


def test_dense_panels_keep_their_activations(library: CDLL) -> None:
    """In a layer of quantized weights, a panel that spans two types is dense."""
    parts = [random_weight("Q4_1", 40), random_weight("Q8_0", 56)]
    segments, rows = segments_of(parts), some_rows(5)
    assert [segment.kind for segment in segments] == ["Q4_1", FLOAT32, "Q8_0"]
    dense = torch.cat([as_tensor(part) for part in parts])[32:64]
    torch.testing.assert_close(Gemm(library, segments)(rows)[:, 32:64], rows @ dense.T, rtol=1e-4, atol=1e-3)


@settings(max_examples=50)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=PART, max_size=PART), st.sampled_from([1.0, 1e-10, 1e20]))
def test_rounding_is_at_most_half_a_step(library: CDLL, numbers: list[float], size: float) -> None:
    """Measured with a weight that selects single inputs."""
    codes = torch.zeros(PART, PART, dtype=torch.int8).fill_diagonal_(1)
    ones = torch.ones(PART, 1).view(torch.uint8)
    identity = Quantized(QUANTIZATION_TYPES["INT8"], torch.cat([ones, codes.view(torch.uint8)], 1))
    row = torch.tensor([numbers]) * size
    error = (Gemm(library, segments_of([identity]))(row) - row).abs().max()
    assert error <= row.abs().max() / 127 * 0.5001 + 1e-20
