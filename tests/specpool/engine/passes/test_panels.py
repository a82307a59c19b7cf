"""Products with weights as they are kept have the bits of the same products in float32."""

import shutil
from collections.abc import Sequence
from ctypes import CDLL, byref, c_int64, c_void_p

import pytest
import torch

from specpool.engine.passes.native.compiler import compile_decoder
from specpool.engine.passes.native.packed_weights import ALIGNMENT, Kept
from specpool.engine.passes.native.panels import BFLOAT16, FLOAT32, NUMBERS, PANEL, Segment, segments_of
from specpool.engine.passes.native.structures import Batch, Linear, Model
from specpool.engine.probes.inputs import ProbeInputs
from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES, SCALE_BYTES
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor

NEVER = 1 << 20
INPUTS = 512
# Less than a panel; several panels, as few processors take abreast, and a last one that is not full.
OUTPUTS = (5, 7 * PANEL + 13)
ROWS = range(1, 41)

pytestmark = [
    pytest.mark.cpus,
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def library() -> CDLL:
    """Compiled for all kinds."""
    found = compile_decoder(16, 2, NUMBERS)
    assert found is not None
    return found


class Product:
    """A product of the compiled pass with these panels."""

    def __init__(
        self, library: CDLL, segments: Sequence[Segment], bias: torch.Tensor | None = None, widened: int = NEVER
    ) -> None:
        self._library, self._outputs = library, sum(segment.weight.shape[0] for segment in segments)
        size = sum(segment.panels * segment.panel_bytes + ALIGNMENT for segment in segments)
        self._kept = Kept(size + 4 * (self._outputs + PANEL) + ALIGNMENT)
        self.linear: Linear = self._kept.product(segments, bias, widened)

    def __call__(self, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
        """[n, outputs] of rows [n, inputs]."""
        out = torch.full((len(x), self.linear.outputs), torch.nan)
        sizes, numbers = (c_int64(len(x)), c_int64(threads)), (c_void_p(x.data_ptr()), c_void_p(out.data_ptr()))
        self._library.multiply(byref(self.linear), *sizes, *numbers)
        return out[:, : self._outputs]

    def rows(self, chosen: torch.Tensor) -> torch.Tensor:
        """The weights [n, inputs] of some outputs, as embeddings are looked up."""
        out = torch.full((len(chosen), self.linear.inputs), torch.nan)
        model = Model(hidden=self.linear.inputs, embedding=self.linear)
        batch = Batch(rows=len(chosen), threads=1, token_ids=chosen.data_ptr())
        self._library.embed_part(byref(model), byref(batch), c_void_p(out.data_ptr()))
        return out


def random_weight(kind: str, outputs: int, inputs: int = INPUTS) -> Weight:
    """Of a kind, with scales of both signs and some below what float16 can have without losing digits."""
    numbers = ProbeInputs(torch.empty(0))
    if kind not in QUANTIZATION_TYPES:
        weight = numbers.normal(outputs, inputs)
        return weight.bfloat16().float() if kind == BFLOAT16 else weight
    weight = numbers.coded(QUANTIZATION_TYPES[kind], outputs, inputs)
    if kind == INT8.name:
        weight.data[::3, SCALE_BYTES - 1] |= 0x80
        return weight
    for at in QUANTIZATION_TYPES[kind].float16_offsets:
        blocks = weight.data.unflatten(1, (-1, QUANTIZATION_TYPES[kind].block_bytes))
        blocks[::3, :, at + 1] |= 0x80
        blocks[1::4, :, at + 1] &= 0x83
    return weight


def random_rows(count: int, inputs: int = INPUTS) -> torch.Tensor:
    """Whose products show in which order they were added."""
    return ProbeInputs(torch.empty(0)).cancelling(inputs, count).T.contiguous()


def whole(weight: Weight) -> list[Segment]:
    """The panels of the same weight in float32."""
    return [Segment(FLOAT32, as_tensor(weight))]


@pytest.mark.parametrize("kind", NUMBERS)
def test_panels_hold_the_weights_of_the_reference(library: CDLL, kind: str) -> None:
    for outputs in OUTPUTS:
        weight = random_weight(kind, outputs)
        segments = segments_of([weight])
        assert {segment.kind for segment in segments} == {kind}
        assert torch.equal(Product(library, segments).rows(torch.arange(outputs)), as_tensor(weight))


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_product_has_the_bits_of_float32(library: CDLL, kind: str) -> None:
    """For every number of rows, whether weights are widened in registers or into the cache, with and without a bias."""
    for outputs in OUTPUTS:
        weight, x, bias = random_weight(kind, outputs), random_rows(ROWS[-1]), torch.randn(outputs)
        segments, reference = segments_of([weight]), Product(library, whole(weight))
        expected = torch.cat([reference(x[i : i + 1]) for i in range(len(x))])
        assert torch.isfinite(expected).all()
        in_registers, widened = Product(library, segments), Product(library, segments, widened=1)
        for rows in ROWS:
            assert torch.equal(in_registers(x[-rows:]), expected[-rows:])
            assert torch.equal(widened(x[-rows:]), expected[-rows:])
        begun = Product(library, whole(weight), bias)(x)
        for widened_from in (1, NEVER):
            assert torch.equal(Product(library, segments, bias, widened_from)(x), begun)


def test_a_product_is_what_it_should_be(library: CDLL) -> None:
    weight, bias, x = random_weight("Q4_K", 70), torch.randn(70), torch.randn(3, INPUTS)
    expected = x.double() @ as_tensor(weight).double().T + bias
    torch.testing.assert_close(
        Product(library, segments_of([weight]), bias)(x).double(), expected, atol=1e-3, rtol=1e-5
    )


@pytest.mark.parametrize("widened", [1, 3, NEVER])
def test_parts_of_several_kinds_are_one_product(library: CDLL, widened: int) -> None:
    """A panel with outputs of several parts is in float32, and the numbers of threads and rows change no bit."""
    kinds = (("Q4_K", 70), ("Q6_K", 20), ("Q8_0", 5), (FLOAT32, 2), ("INT8", 130), (BFLOAT16, 64), ("Q5_1", 40))
    parts = [random_weight(kind, outputs) for kind, outputs in kinds]
    weight, bias = torch.cat([as_tensor(part) for part in parts]), torch.randn(331)
    segments = segments_of(parts)
    assert [(segment.kind, segment.weight.shape[0]) for segment in segments] == [
        ("Q4_K", 64), (FLOAT32, 32), (FLOAT32, 32), ("INT8", 96),
        (FLOAT32, 32), (BFLOAT16, 32), (FLOAT32, 32), ("Q5_1", 11),
    ]  # fmt: skip
    product, reference = Product(library, segments, bias, widened), Product(library, whole(weight), bias)
    x = random_rows(40)
    for threads in (1, 2, 3):
        for rows in (1, 2, 3, 4, 9, 40):
            assert torch.equal(product(x[:rows], threads), reference(x[:rows]))
    assert torch.equal(product.rows(torch.arange(331)), weight)


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_threads_share_panels_of_one_kind_and_change_no_bit(library: CDLL, kind: str) -> None:
    weight, x = random_weight(kind, 11 * PANEL), random_rows(3)
    product = Product(library, segments_of([weight]))
    for rows in (1, 2, 3):
        alone = product(x[:rows])
        assert all(torch.equal(product(x[:rows], threads), alone) for threads in (2, 3, 4, 7, 13))


@pytest.mark.parametrize("inputs", [48, 80])
def test_rows_that_are_no_whole_parts_are_kept_in_float32(inputs: int) -> None:
    weight = random_weight("INT8", 40, inputs)
    assert isinstance(weight, Quantized)
    segments = segments_of([weight])
    assert {segment.kind for segment in segments} == {FLOAT32}
    assert torch.equal(torch.cat([as_tensor(segment.weight) for segment in segments]), weight.dequantized())


def test_panels_written_in_slices_are_the_same(library: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight("Q4_1", 5 * PANEL + 1), random_rows(1)
    expected = Product(library, segments_of([weight]))(x)
    monkeypatch.setattr("specpool.engine.weights.threads.SLICE_WEIGHTS", 2 * PANEL * INPUTS)
    assert torch.equal(Product(library, segments_of([weight]))(x), expected)
