"""GEMM with weights of any kind matches float32 GEMM bit for bit."""

import shutil
from ctypes import CDLL

import pytest
import torch
from gemms import INPUTS, NEVER, Gemm, random_rows, random_weight

from specpool.engine.passes.native.decoder import compile_decoder
from specpool.engine.passes.native.panels import BFLOAT16, FLOAT32, KIND_NUMBERS, PANEL, Segment, segments_of
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor

# Less than one panel; and several panels, the last one partial.
OUTPUTS = (5, 7 * PANEL + 13)
ROWS = range(1, 41)

pytestmark = [
    pytest.mark.cpus,
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
each_kind = pytest.mark.parametrize("kind", KIND_NUMBERS)


@pytest.fixture(scope="module")
def library() -> CDLL:
    """Compiled for all kinds."""
    compiled = compile_decoder(16, 2, KIND_NUMBERS)
    assert compiled is not None
    return compiled


def in_float32(weight: Weight) -> list[Segment]:
    """The panels of the same weight in float32."""
    return [Segment(FLOAT32, as_tensor(weight))]


@each_kind
def test_panels_hold_the_dequantized_weights(library: CDLL, kind: str) -> None:
    for outputs in OUTPUTS:
        weight = random_weight(kind, outputs)
        segments = segments_of([weight])
        assert {segment.kind for segment in segments} == {kind}
        assert torch.equal(Gemm(library, segments).embed(torch.arange(outputs)), as_tensor(weight))


@each_kind
def test_gemm_matches_float32_bit_for_bit(library: CDLL, kind: str) -> None:
    """For every number of rows, widened in registers or into the cache, with and without a bias."""
    for outputs in OUTPUTS:
        weight, x, bias = random_weight(kind, outputs), random_rows(ROWS[-1]), torch.randn(outputs)
        segments, reference = segments_of([weight]), Gemm(library, in_float32(weight))
        expected = torch.cat([reference(x[i : i + 1]) for i in range(len(x))])
        assert torch.isfinite(expected).all()
        in_registers, in_cache = Gemm(library, segments), Gemm(library, segments, widened_from=1)
        for rows in ROWS:
            assert torch.equal(in_registers(x[-rows:]), expected[-rows:])
            assert torch.equal(in_cache(x[-rows:]), expected[-rows:])
        biased = Gemm(library, in_float32(weight), bias)(x)
        for widened_from in (1, NEVER):
            assert torch.equal(Gemm(library, segments, bias, widened_from)(x), biased)


def test_gemm_is_close_to_float64(library: CDLL) -> None:
    weight, bias, x = random_weight("Q4_K", 70), torch.randn(70), torch.randn(3, INPUTS)
    expected = x.double() @ as_tensor(weight).double().T + bias
    result = Gemm(library, segments_of([weight]), bias)(x).double()
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("widened_from", [1, 3, NEVER])
def test_one_linear_layer_can_mix_kinds(library: CDLL, widened_from: int) -> None:
    """A panel that spans several weights is float32, and thread and row counts change no bit."""
    kinds = (("Q4_K", 70), ("Q6_K", 20), ("Q8_0", 5), (FLOAT32, 2), ("INT8", 130), (BFLOAT16, 64), ("Q5_1", 40))
    parts = [random_weight(kind, outputs) for kind, outputs in kinds]
    weight, bias = torch.cat([as_tensor(part) for part in parts]), torch.randn(331)
    segments = segments_of(parts)
    assert [(segment.kind, segment.weight.shape[0]) for segment in segments] == [
        ("Q4_K", 64), (FLOAT32, 32), (FLOAT32, 32), ("INT8", 96),
        (FLOAT32, 32), (BFLOAT16, 32), (FLOAT32, 32), ("Q5_1", 11),
    ]  # fmt: skip
    gemm, reference = Gemm(library, segments, bias, widened_from), Gemm(library, in_float32(weight), bias)
    x = random_rows(40)
    for threads in (1, 2, 3):
        for rows in (1, 2, 3, 4, 9, 40):
            assert torch.equal(gemm(x[:rows], threads), reference(x[:rows]))
    assert torch.equal(gemm.embed(torch.arange(331)), weight)


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_thread_counts_change_no_bit(library: CDLL, kind: str) -> None:
    weight, x = random_weight(kind, 11 * PANEL), random_rows(3)
    gemm = Gemm(library, segments_of([weight]))
    for rows in (1, 2, 3):
        alone = gemm(x[:rows])
        assert all(torch.equal(gemm(x[:rows], threads), alone) for threads in (2, 3, 4, 7, 13))


@pytest.mark.parametrize("inputs", [48, 80])
def test_quantized_weights_with_a_partial_part_become_float32(inputs: int) -> None:
    weight = random_weight("INT8", 40, inputs)
    assert isinstance(weight, Quantized)
    segments = segments_of([weight])
    assert {segment.kind for segment in segments} == {FLOAT32}
    assert torch.equal(torch.cat([as_tensor(segment.weight) for segment in segments]), weight.dequantized())


def test_panels_written_by_several_threads_are_the_same(library: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight("Q4_1", 5 * PANEL + 1), random_rows(1)
    expected = Gemm(library, segments_of([weight]))(x)
    monkeypatch.setattr("specpool.engine.weights.quantized.SLICE_WEIGHTS", 2 * PANEL * INPUTS)
    assert torch.equal(Gemm(library, segments_of([weight]))(x), expected)
