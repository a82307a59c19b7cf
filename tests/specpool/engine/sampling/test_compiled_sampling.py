"""Compiled sampling gives the tokens and log-probabilities of torch operations, bit for bit."""

import math
import platform
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import make_logits

from specpool.engine.native import compiler
from specpool.engine.numerics.noise import gumbel
from specpool.engine.sampling import batch
from specpool.engine.sampling import compiled as native
from specpool.engine.sampling.batch import Sampler
from specpool.engine.sampling.compiled import BLOCK, NativeSampler, compile_sampler
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.rows import Chosen, SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.cpus]

CPU = torch.device("cpu")
SIZES = [1, 2, 15, 40, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 77, 40 * BLOCK + 3]
Sequences = list[tuple[SamplingParams | None, list[int], int, int | None]]


@pytest.fixture(scope="module", autouse=True)
def _needs_a_compiler() -> None:
    if compile_sampler() is None:
        pytest.skip("needs a C compiler")


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sampler_of(head: Head) -> NativeSampler:
    library = compile_sampler()
    assert library is not None
    return NativeSampler(library, head)


def rows_of(sequences: Sequences) -> list[SequenceRows]:
    return [
        SequenceRows(None if params is None else SequenceRules(params), token_ids, count, num_logprobs)
        for params, token_ids, count, num_logprobs in sequences
    ]


def with_torch(head: Head, logits: torch.Tensor, sequences: Sequences) -> list[Chosen]:
    return Sampler(head, CPU, native=False)(logits, rows_of(sequences))


def assert_equal(actual: list[Chosen], expected: list[Chosen]) -> None:
    """Compare bits: NaN equals NaN. Log-probabilities of rows that are not finite do not matter."""
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    for one, other in zip(actual, expected, strict=True):
        assert one.finite == other.finite or not other.finite  # torch also checks rows after a rejected draft
        if one.finite:
            for name in ("logprobs", "top_token_ids", "top_logprobs"):
                packed = getattr(one.logprobs, name), getattr(other.logprobs, name)
                assert packed[0].tobytes() == packed[1].tobytes(), name


KINDS = ["as drawn", "ties", "zeros", "masked", "all masked", "nan", "inf", "huge", "tiny", "offset"]


def make_row(seed: int, size: int, spread: float, kind: str) -> torch.Tensor:
    row, place = make_logits(seed, size, spread), seed % size
    match kind:
        case "ties":
            row = row.round()
        case "zeros":
            row = (row * 0).copysign(row)
        case "masked":
            row[seed % 2 :: 2] = -math.inf
        case "all masked":
            row[:] = -math.inf
        case "nan":
            row[place] = math.nan
        case "inf":
            row[place::3] = math.inf
        case "huge":
            row = row * 1e37
        case "tiny":
            row = row * 1e-42
        case "offset":
            row = row + 1e6
    return row


params_of = st.one_of(
    st.none(),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-50, 1e-6, 0.3, 1.0, 1.0, 1.7, 100.0]),
        top_k=st.sampled_from([-1, 0, 0, 1, 3, 40, 300, 9999]),
        top_p=st.sampled_from([1.0, 1.0, 0.999999999, 0.999, 0.9, 0.5, 0.1, 1e-9, 0.0]),
        min_p=st.sampled_from([0.0, 0.0, 1e-30, 0.05, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 0.01, 1.3, 100.0]),
        frequency_penalty=st.sampled_from([0.0, -2.0, 0.3]),
        presence_penalty=st.sampled_from([0.0, 2.0, -0.7]),
        min_tokens=st.integers(0, 6),
        stop_token_ids=st.sampled_from([(), (0,), (0, 1)]),
        logit_bias=st.sampled_from([(), ((0, 100.0),), ((0, -100.0), (1, 0.1))]),
        seed=st.integers(0, 2**64 - 1),
        prompt_length=st.integers(0, 9),
    ),
)
drawn_sequences = st.lists(
    st.tuples(params_of, st.integers(1, 14), st.integers(0, 4), st.sampled_from([None, None, 0, 1, 5, 20])),
    min_size=1, max_size=16,
)  # fmt: skip


def known_only(params: SamplingParams | None, size: int) -> SamplingParams | None:
    """Without tokens outside the vocabulary."""
    if params is None:
        return None
    stops = tuple(token for token in params.stop_token_ids if token < size)
    return replace(params, stop_token_ids=stops, logit_bias=tuple(each for each in params.logit_bias if each[0] < size))


def draw_batch(
    drawn: list[tuple[SamplingParams | None, int, int, int | None]], size: int, spread: float, kind: str, seed: int
) -> tuple[torch.Tensor, Sequences]:
    """Random logits and sequences."""
    numbers, sequences, logits = random.Random(seed), Sequences(), [torch.empty(0, size)]
    for params, length, most_rows, num_logprobs in drawn:
        count = min(most_rows, length)
        token_ids = [numbers.randrange(size) for _ in range(length)]
        rows = [make_row(numbers.randrange(10_000), size, spread, kind)[None] for _ in range(count)]
        logits += rows
        if rows and numbers.random() < 0.7:  # a draft that is often accepted
            greedy = torch.cat(rows).argmax(-1).tolist()
            token_ids[length - count + 1 :] = greedy[: count - 1]
        top = None if num_logprobs is None else min(num_logprobs, size)
        sequences.append((known_only(params, size), token_ids, count, top))
    return torch.cat(logits), sequences


@settings(max_examples=100)
@given(
    drawn=drawn_sequences,
    size=st.sampled_from(SIZES),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
)
def test_compiled_code_matches_torch_bit_for_bit(
    drawn: list[tuple[SamplingParams | None, int, int, int | None]], size: int, spread: float, kind: str, seed: int
) -> None:
    logits, sequences = draw_batch(drawn, size, spread, kind, seed)
    before = logits.clone()
    assert_equal(sampler_of(Head(size))(logits, rows_of(sequences)), with_torch(Head(size), logits, sequences))
    assert logits.view(torch.int32).equal(before.view(torch.int32)), "the logits have changed"


@given(drawn=drawn_sequences, outputs=st.sampled_from([1, 9, BLOCK + 5]), seed=st.integers(0, 10_000))
def test_a_partial_head_gives_the_tokens_of_the_vocabulary(
    drawn: list[tuple[SamplingParams | None, int, int, int | None]], outputs: int, seed: int
) -> None:
    """Also if its outputs are in another order than the tokens."""
    head = Head(2 * outputs, torch.randperm(2 * outputs, generator=torch.Generator().manual_seed(seed))[:outputs])
    _, sequences = draw_batch(drawn, 2 * outputs, 1.0, "ties", seed)
    rows = [make_row(seed + i, outputs, 2.0, "ties")[None] for i in range(sum(count for _, _, count, _ in sequences))]
    logits = torch.cat([torch.empty(0, outputs), *rows])
    sequences = [(*rest, None if top is None else min(top, outputs)) for *rest, top in sequences]  # type: ignore[misc]
    assert_equal(sampler_of(head)(logits, rows_of(sequences)), with_torch(head, logits, sequences))


def all_rules(seed: int, size: int) -> SamplingParams:
    return SamplingParams(
        1.0, top_k=700, top_p=0.98, min_p=1e-4, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1,
        seed=seed, prompt_length=20, logit_bias=tuple((token, 1.5) for token in range(0, min(size, 3000), 3)),
    )  # fmt: skip


def large_batch(sequences: int, draft: int, size: int = 49_152) -> tuple[torch.Tensor, Sequences]:
    """Flat and peaked rows of a real vocabulary, with and without rules."""
    numbers = random.Random(0)
    rules = [
        None, all_rules(1, size), SamplingParams(1.0, seed=2), SamplingParams(5.0, top_p=0.99, seed=3),
        SamplingParams(0.7, top_k=50, seed=4), SamplingParams(1.0, top_k=20_000, top_p=0.9, seed=5),
        SamplingParams(100.0, top_p=0.5, seed=6), SamplingParams(0.0, frequency_penalty=1.0),
    ]  # fmt: skip
    drawn = [
        (rules[i % len(rules)], [numbers.randrange(size) for _ in range(300)], draft, [None, 20, 0][i % 3])
        for i in range(sequences)
    ]
    spreads = torch.linspace(0.1, 4, sequences * draft)[:, None]
    logits = torch.randn(sequences * draft, size, generator=torch.Generator().manual_seed(1)) * spreads
    return logits, drawn


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_compiled_noise_has_the_same_bits_and_a_bound(seed: int) -> None:
    library, size = compile_sampler(), 1 << 18
    assert library is not None
    exact, bounds = torch.from_numpy(native.noise(library, seed, 12, size))
    assert torch.equal(exact, gumbel(seed, 12, torch.arange(size, dtype=torch.int32)))
    assert (bounds >= exact).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("draft", [1, 4])
def test_threads_and_neighbours_change_no_bit(draft: int) -> None:
    logits, sequences = large_batch(16, draft)
    sampler, expected = sampler_of(Head(logits.shape[1])), with_torch(Head(logits.shape[1]), logits, sequences)
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        assert_equal(sampler(logits, rows_of(sequences)), expected)
    for at in range(len(sequences)):
        own = logits[at * draft : (at + 1) * draft]
        assert_equal(sampler(own, rows_of(sequences[at : at + 1])), expected[at : at + 1])


def test_padded_rows_and_bfloat16_are_read() -> None:
    logits, sequences = large_batch(8, 1, size=1000)
    sampler, expected = sampler_of(Head(1000)), with_torch(Head(1000), logits, sequences)
    padded = torch.nn.functional.pad(logits, (0, 24), value=math.inf)
    assert_equal(sampler(padded[:, :1000], rows_of(sequences)), expected)
    assert_equal(sampler(logits.T.contiguous().T, rows_of(sequences)), expected)
    half = logits.bfloat16()
    assert_equal(sampler(half, rows_of(sequences)), with_torch(Head(1000), half, sequences))


@pytest.mark.parametrize(
    "processor", ["x86-64", *(pytest.param(level, marks=pytest.mark.slow) for level in ("x86-64-v3",))]
)
def test_other_processors_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("flags of another kind of processor")
    monkeypatch.setitem(compiler.NATIVE, "x86_64", f"-march={processor}")
    compile_sampler.cache_clear()
    try:
        for size in (1000, 49_152):
            logits, sequences = large_batch(16, 2, size)
            assert_equal(sampler_of(Head(size))(logits, rows_of(sequences)), with_torch(Head(size), logits, sequences))
    finally:
        compile_sampler.cache_clear()


# --- Choosing between compiled code and torch operations


@pytest.fixture
def fresh_trial() -> Iterator[None]:
    batch.compiled_is_exact.cache_clear()
    yield
    batch.compiled_is_exact.cache_clear()


@pytest.mark.usefixtures("fresh_trial")
def test_compiled_code_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert batch.compiled_is_exact()
    for source in native.SOURCES:
        (tmp_path / source.name).write_text(source.read_text().replace("0.0870039", "0.0870038"))
    monkeypatch.setattr(native, "SOURCES", [tmp_path / source.name for source in native.SOURCES])
    batch.compiled_is_exact.cache_clear()
    compile_sampler.cache_clear()
    try:
        assert not batch.compiled_is_exact()
    finally:
        compile_sampler.cache_clear()
    assert "compiled sampling differs from torch operations" in caplog.text


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(1.0, repetition_penalty=2.0, logit_bias=((2**31 - 1, 5.0), (900, 1.0)), seed=1)
    sequences: Sequences = [(params, [3, 2**31 - 1, 70], 1, None)]
    logits = make_logits(0, 60)[None]
    inside: Sequences = [(replace(params, logit_bias=()), [3, 3, 3], 1, None)]
    assert_equal(sampler_of(Head(60))(logits, rows_of(sequences)), with_torch(Head(60), logits, inside))


@pytest.mark.usefixtures("fresh_trial")
def test_without_a_compiler_torch_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "compile_sampler", lambda: None)
    assert not batch.compiled_is_exact()
    logits, sequences = large_batch(3, 1, size=500)
    expected = sampler_of(Head(500))(logits, rows_of(sequences))
    assert_equal(Sampler(Head(500), CPU)(logits, rows_of(sequences)), expected)


def test_more_top_tokens_than_outputs_come_from_torch() -> None:
    head = Head(10, torch.tensor([7, 2]))
    sequences: Sequences = [(None, [1], 1, 4)]
    (chosen,) = Sampler(head, CPU)(torch.tensor([[0.0, 1.0]]), rows_of(sequences))
    assert chosen.token_ids == [2]
    assert chosen.logprobs.top_token_ids.tolist() == [2, 7, 0, 1]
    assert chosen.logprobs.top_logprobs.tolist()[2:] == [-math.inf] * 2
