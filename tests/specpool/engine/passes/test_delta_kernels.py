"""The kernels of recurrent layers, in Triton's interpreter: close to float64, and batch-invariant after rejections."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch.nn.functional import normalize, silu, softplus

from specpool.engine.cache.checkpoints import Checkpoints, Segment
from specpool.engine.cache.recurrent import RecurrentArena
from specpool.engine.cache.spans import Span
from specpool.engine.config.recurrent_sizes import RecurrentSizes
from specpool.engine.passes.gpu.delta_net import run_segments
from specpool.engine.passes.gpu.short_conv import convolve_gated

pytest.importorskip("triton")

CPU = torch.device("cpu")
KEY_HEADS, SLOTS, PAGE, ROWS, LENGTH, DRAFTS = 1, 2, 4, 8, 18, 3
# The interpreter does not support bfloat16.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2}


@dataclass
class DeltaNet:
    """A random layer, and the GEMM's partial sums for all positions of all sequences."""

    sizes: RecurrentSizes
    partials: torch.Tensor  # [splits, slots, positions, features]
    taps: torch.Tensor
    rates: torch.Tensor
    biases: torch.Tensor

    @classmethod
    def random(cls, key_size: int, value_size: int, dtype: torch.dtype, splits: int) -> "DeltaNet":
        torch.manual_seed(0)
        heads = 2 * KEY_HEADS
        inputs = 2 * KEY_HEADS * key_size + heads * value_size
        sizes = RecurrentSizes(1, (heads, key_size, value_size), inputs, taps=4, gates=2 * heads)
        partials = torch.randn(splits, SLOTS, LENGTH, inputs + heads * value_size + 2 * heads)
        rates, biases = -torch.rand(heads), torch.randn(heads)
        return cls(sizes, partials.to(dtype if splits == 1 else torch.float32), torch.randn(4, inputs), rates, biases)

    def run(self, partials: torch.Tensor, arena: RecurrentArena, segments: torch.Tensor) -> torch.Tensor:
        return run_segments(partials, arena, 0, segments, self.taps, self.rates, self.biases)

    def reference(self, slot: int, dtype: torch.dtype) -> torch.Tensor:
        """The results for all positions of a sequence in float64, [positions, heads, value size]."""
        heads, key_size, value_size = self.sizes.state
        rows = self.partials[:, slot].sum(0)
        inputs, _, b, a = rows.split([self.sizes.inputs, heads * value_size, heads, heads], -1)
        padded = torch.cat([torch.zeros(3, self.sizes.inputs), inputs.to(dtype)]).double()
        convolved = silu(sum(padded[tap : tap + LENGTH] * self.taps[tap].double() for tap in range(4)))
        parts = convolved.split([KEY_HEADS * key_size, KEY_HEADS * key_size, heads * value_size], -1)
        query, key, value = (
            part.unflatten(-1, (-1, size)) for part, size in zip(parts, (key_size, key_size, value_size), strict=True)
        )
        query, key = (normalize(each, dim=-1).repeat_interleave(2, 1) for each in (query, key))
        decay, beta = (self.rates * softplus(a + self.biases)).exp().double(), b.sigmoid().double()
        state, results = torch.zeros(heads, key_size, value_size).double(), []
        for at in range(LENGTH):
            state = state * decay[at, :, None, None]
            delta = (value[at] - (state * key[at, ..., None]).sum(1)) * beta[at, :, None]
            state = state + key[at, ..., None] * delta[:, None]
            results.append((state * query[at, ..., None]).sum(1) * key_size**-0.5)
        return torch.stack(results)


@dataclass
class ShortConv:
    """A random gated short convolution, like `DeltaNet`."""

    sizes: RecurrentSizes
    partials: torch.Tensor
    bias: torch.Tensor | None
    taps: torch.Tensor
    taps_bias: torch.Tensor | None

    @classmethod
    def random(cls, inputs: int, taps: int, is_biased: bool, dtype: torch.dtype, splits: int) -> "ShortConv":
        torch.manual_seed(0)
        sizes = RecurrentSizes(1, (0, 0, 0), inputs, taps, gates=0)
        partials = torch.randn(splits, SLOTS, LENGTH, 3 * inputs).to(dtype if splits == 1 else torch.float32)
        biases = (torch.randn(3 * inputs).to(dtype), torch.randn(inputs)) if is_biased else (None, None)
        return cls(sizes, partials, biases[0], torch.randn(taps, inputs), biases[1])

    def run(self, partials: torch.Tensor, arena: RecurrentArena, segments: torch.Tensor) -> torch.Tensor:
        return convolve_gated(partials, self.bias, arena, 0, segments, self.taps, self.taps_bias)

    def reference(self, slot: int, dtype: torch.dtype) -> torch.Tensor:
        """The results for all positions of a sequence in float64, [positions, inputs]."""
        rows, taps = self.partials[:, slot].sum(0, dtype=torch.float64), len(self.taps)
        before, after, x = (rows if self.bias is None else rows + self.bias).chunk(3, -1)
        padded = torch.cat([torch.zeros(taps - 1, self.sizes.inputs), (before * x).to(dtype)]).double()
        convolved = sum(padded[tap : tap + LENGTH] * self.taps[tap].double() for tap in range(taps))
        return after * (convolved if self.taps_bias is None else convolved + self.taps_bias)


class Runner:
    """Runs spans with checkpoints of their own."""

    def __init__(self, layer: DeltaNet | ShortConv, dtype: torch.dtype) -> None:
        self.layer = layer
        self.checkpoints = Checkpoints(SLOTS, 3 * SLOTS, PAGE, ROWS)
        self.arena = RecurrentArena(layer.sizes, 3 * SLOTS, SLOTS, ROWS, dtype, CPU)
        for tensor in (self.arena.states, self.arena.edges, self.arena.inputs, self.arena.gates):
            tensor.fill_(torch.nan)  # nothing is read before it is written

    def run(self, spans: Sequence[Span], padding: int = 0) -> list[torch.Tensor]:
        """The results of each span. `padding`: additional segments without rows."""
        for span in spans:
            self.checkpoints.truncate(span.slot, span.start)
        firsts = accumulate((len(span.token_ids) for span in spans), initial=0)
        segments = [self.checkpoints.segment(span, first) for span, first in zip(spans, firsts, strict=False)]
        segments += [Segment(*[0] * len(Segment._fields))] * padding
        partials = torch.cat([self.layer.partials[:, span.slot, span.start : span.end] for span in spans], 1)
        results = self.layer.run(partials, self.arena, torch.tensor(segments))
        return [*results.split([len(span.token_ids) for span in spans])]


def rounds(chance: random.Random) -> Iterator[list[Span]]:
    """Prompts in chunks, then verifications that keep some of their draft tokens, until all sequences are complete.

    Some spans, as of a draft model, only have draft tokens.
    """
    lengths = [0] * SLOTS
    while min(lengths) < LENGTH:
        spans = []
        for slot in chance.sample(range(SLOTS), chance.randint(1, SLOTS)):
            is_prompt, room = lengths[slot] <= 9, LENGTH - lengths[slot]
            committed = min(room, chance.randint(1, 9) if is_prompt else chance.randint(0, 1))
            drafts = min(room - committed, chance.randint(0, DRAFTS) if lengths[slot] else 0)
            if committed + drafts:
                num_logits = chance.randint(0, 1) if is_prompt and not drafts else 1
                token_ids = [0] * (committed + drafts)
                spans.append(Span(slot, lengths[slot], token_ids, num_logits, num_tentative=drafts))
        if spans:
            yield spans
            if chance.random() < 0.3:
                yield spans  # a repeated round
        for span in spans:
            lengths[span.slot] = span.end - chance.randint(0, span.num_tentative)


@pytest.mark.parametrize(
    ("key_size", "value_size", "dtype", "splits"),
    [
        pytest.param(6, 20, torch.float32, 2, id="two blocks of columns", marks=pytest.mark.slow),
        pytest.param(8, 5, torch.float16, 1, id="a padded block"),
    ],
)
def test_rows_have_the_bits_of_one_row_at_a_time(
    key_size: int, value_size: int, dtype: torch.dtype, splits: int
) -> None:
    assert_rows_have_the_bits_of_one_row_at_a_time(DeltaNet.random(key_size, value_size, dtype, splits), dtype)


@pytest.mark.parametrize(
    ("inputs", "taps", "is_biased", "dtype", "splits"),
    [
        pytest.param(130, 3, False, torch.float32, 2, id="two blocks of features", marks=pytest.mark.slow),
        pytest.param(20, 4, True, torch.float16, 1, id="biased"),
    ],
)
def test_short_convolutions_have_the_bits_of_one_row_at_a_time(
    inputs: int, taps: int, is_biased: bool, dtype: torch.dtype, splits: int
) -> None:
    layer = ShortConv.random(inputs, taps, is_biased, dtype, splits)
    assert_rows_have_the_bits_of_one_row_at_a_time(layer, dtype)


def assert_rows_have_the_bits_of_one_row_at_a_time(layer: DeltaNet | ShortConv, dtype: torch.dtype) -> None:
    alone = Runner(layer, dtype)
    rows = [torch.stack(alone.run([Span(slot, at, [0], 1) for slot in range(SLOTS)])) for at in range(LENGTH)]
    expected = torch.cat(rows, 1)  # [slots, positions, ...]
    for slot in range(SLOTS):
        tolerance, reference = TOLERANCES[dtype], layer.reference(slot, dtype)
        torch.testing.assert_close(expected[slot].double(), reference, atol=tolerance, rtol=tolerance)
    together, compared = Runner(layer, dtype), 0
    for spans in rounds(random.Random(layer.sizes.inputs)):
        for span, results in zip(spans, together.run(spans, padding=2), strict=True):
            assert torch.equal(results, expected[span.slot, span.start : span.end])
            compared += len(results)
    assert compared > SLOTS * LENGTH


def test_segments_without_rows_touch_nothing() -> None:
    layer = DeltaNet.random(8, 16, torch.float32, 1)
    runner = Runner(layer, torch.float32)
    tensors = (runner.arena.states, runner.arena.edges, runner.arena.inputs, runner.arena.gates)
    before = [tensor.fill_(1.0).clone() for tensor in tensors]
    segments = torch.zeros(4, len(Segment._fields), dtype=torch.int64)
    layer.run(layer.partials[:, 0], runner.arena, segments)
    assert all(map(torch.equal, tensors, before))


def test_small_time_steps_are_not_rounded_off() -> None:
    layer = DeltaNet.random(8, 16, torch.float32, 1)
    heads = len(layer.rates)
    runner, steps = Runner(layer, torch.float32), torch.linspace(-25.0, 5.0, ROWS)
    layer.biases.zero_()
    layer.partials[0, 0, :ROWS, -heads:] = steps[:, None]
    runner.run([Span(0, 0, [0] * ROWS, 0, num_tentative=ROWS)])
    expected = layer.rates.double() * softplus(steps.double())[:, None]
    found = runner.arena.gates[0, 0, :, :heads].double()
    torch.testing.assert_close(found, expected, atol=0.0, rtol=1e-6)
