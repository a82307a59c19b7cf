"""Sampling kernels choose the same tokens as the CPU sampler, in any batch. Runs in Triton's interpreter."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import make_logits
from tiny_models import load_engine, random_tokens, save_model
from tiny_pair import tiny_config

from specpool.engine.cache.spans import Span
from specpool.engine.numerics import triton_elementary
from specpool.engine.numerics.noise import gumbel, noise_keys
from specpool.engine.sampling import kernel as sampling_kernel
from specpool.engine.sampling import sampler as sampling
from specpool.engine.sampling.kernel import has_kernels, sample_rows
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.engine.sampling.sampler import (
    choose_batch,
    choose_token,
    choose_tokens,
    largest_on_host,
    reduce_and_copy,
)
from specpool.protocol.errors import WorkerFailedError
from specpool.protocol.rounds import VerifyItem, VerifyRound
from specpool.protocol.sampling import SamplingParams
from target_worker.verifier import Verifier

triton = pytest.importorskip("triton")
tl = triton.language

SIZES = [1, 7, 16, 33, 150]


@pytest.fixture(autouse=True, scope="module")
def small_programs() -> Iterator[None]:
    """Shrink the programs, so that small vocabularies take several steps."""
    with mock.patch.multiple(sampling_kernel, SEARCH_BLOCK=32, PART=64, BLOCK=16):
        yield


rows = st.tuples(
    st.integers(0, 10_000),
    st.sampled_from([0.01, 1.0, 1.0, 4.0]),  # spread
    st.sampled_from(["as drawn", "ties", "zeros", "masked", "all masked"]),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-50, 1e-6, 0.3, 1.0, 1.0, 1.7, 100.0]),
        top_k=st.sampled_from([-1, 0, 0, 1, 3, 20, 40, 999]),
        top_p=st.sampled_from([1.0, 1.0, 0.999999999, 0.99, 0.9, 0.5, 0.1, 1e-9, 0.0]),
        min_p=st.sampled_from([0.0, 0.0, 1e-30, 0.05, 0.5, 1.0]),
        seed=st.integers(0, 2**64 - 1),
    ),
    st.integers(1, 2**31),
)


def make_row(seed: int, size: int, spread: float, kind: str) -> torch.Tensor:
    row = make_logits(seed, size, spread)
    if kind == "ties":
        row = row.round()
    elif kind == "zeros":
        row = (row * 0).copysign(row)
    elif kind == "masked":
        row[seed % 2 :: 2] = -math.inf
    elif kind == "all masked":
        row[:] = -math.inf
    return row


@settings(max_examples=5)
@given(drawn=st.lists(rows, min_size=1, max_size=3), size=st.sampled_from(SIZES), half=st.booleans())
def test_kernel_chooses_the_same_tokens_as_cpu(
    drawn: list[tuple[int, float, str, SamplingParams, int]], size: int, half: bool
) -> None:
    dtype = torch.float16 if half else torch.float32  # the interpreter does not support bfloat16
    logits = torch.stack([make_row(seed, size, spread, kind).to(dtype) for seed, spread, kind, _, _ in drawn])
    rules = [(params, length) for *_, params, length in drawn]
    expected = [choose_token(row, params, range(length)) for row, (params, length) in zip(logits, rules, strict=True)]
    assert sample_rows(logits, rules) == (expected, [bool(row.max().isfinite()) for row in logits])


@pytest.mark.parametrize("spread", [pytest.param(0.01, marks=pytest.mark.slow), 3.0])
def test_limits_are_exact_with_and_without_scratch_copies(spread: float) -> None:
    """Nearly flat rows keep more logits than the scratch memory holds."""
    limits = [{"top_k": 30}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}]
    params = [SamplingParams(temperature=1.0, seed=seed, **limit) for seed, limit in enumerate(limits)]
    logits = torch.stack([make_logits(seed, 150, spread) for seed in range(3)])
    expected = [choose_token(row, rule, range(3)) for row, rule in zip(logits, params, strict=True)]
    assert sample_rows(logits, [(rule, 3) for rule in params])[0] == expected


def test_choices_do_not_depend_on_the_batch() -> None:
    limits = [None, {}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]
    logits = torch.stack([make_logits(seed, 70) for seed in range(5)])
    rules = [(None if limit is None else SamplingParams(1.0, seed=9, **limit), 4) for limit in limits]
    together, _ = sample_rows(logits, rules)
    assert [sample_rows(logits[i : i + 1], rules[i : i + 1])[0][0] for i in range(5)] == together
    assert sample_rows(logits.flip(0), rules[::-1])[0] == together[::-1]
    assert together[0] == int(logits[0].argmax())
    assert sample_rows(logits[:0], []) == ([], [])


# --- Non-finite logits


PARAMS = [None, SamplingParams(1.0), SamplingParams(0.7, top_k=9, top_p=0.9, min_p=0.01)]
SPOILED = pytest.mark.parametrize("value", [math.nan, math.inf])


@pytest.mark.parametrize("place", [0, 149])
@pytest.mark.parametrize("params", PARAMS)
def test_one_non_finite_logit_makes_its_row_non_finite(params: SamplingParams | None, place: int) -> None:
    logits = torch.stack([make_logits(seed, 150) for seed in range(4)])
    expected, _ = sample_rows(logits[:1], [(params, 1)])
    logits[1:, place] = torch.tensor([math.nan, -math.nan, math.inf])
    tokens, finite = sample_rows(logits, [(params, 1)] * 4)
    assert finite == [True, False, False, False]
    assert tokens[0] == expected[0]
    assert all(0 <= token < 150 for token in tokens)


@pytest.mark.parametrize("params", PARAMS)
def test_rows_of_minus_infinity_are_not_finite(params: SamplingParams | None) -> None:
    logits = torch.full((2, 150), -math.inf)
    logits[1, 140] = -1e30
    assert sample_rows(logits, [(params, 1)] * 2) == ([0, 140], [False, True])


@SPOILED
def test_masks_do_not_hide_non_finite_logits(value: float) -> None:
    logits = torch.stack([make_logits(seed, 150) for seed in range(2)])
    logits[0, 7] = value
    changed = logits.clone()
    changed[:, 7] = -math.inf
    rules = [(SamplingParams(1.0), 1)] * 2
    tokens, finite = sample_rows(logits, rules, changed)
    assert finite == [False, True]
    assert tokens[1] == sample_rows(changed, rules)[0][1]


def test_a_fully_masked_row_is_finite() -> None:
    logits = make_logits(0, 150)[None]
    logits[0, :80] = -math.inf
    for params in PARAMS:
        assert sample_rows(logits, [(params, 1)], torch.full_like(logits, -math.inf)) == ([0], [True])


@SPOILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_rows_are_equal_on_gpu_and_cpu(dtype: torch.dtype, value: float) -> None:
    logits = torch.stack([make_logits(seed, 150).round() for seed in range(5)]).to(dtype)
    logits[1, 140], logits[2], logits[3, :149] = value, -math.inf, -math.inf
    tokens, finite = reduce_and_copy(logits)
    assert tokens.tolist() == logits.argmax(-1).tolist() == largest_on_host(logits)[0].tolist()
    assert finite == largest_on_host(logits)[1] == [True, False, False, True, True]
    assert reduce_and_copy(logits[:0])[1] == []


@triton.jit
def store_noise(noise, first, second, BLOCK: tl.constexpr):
    token_ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise + token_ids, triton_elementary.gumbel(token_ids, first, second))


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_kernel_noise_matches_cpu_bit_for_bit(seed: int) -> None:
    size = 1 << 17
    noise = torch.empty(size)
    store_noise[(2,)](noise, *noise_keys(seed, 12), BLOCK=size // 2)
    assert torch.equal(noise, gumbel(seed, 12, torch.arange(size, dtype=torch.int32)))


def rows_of(sequences: Sequence[tuple[SamplingParams | None, list[int], int]]) -> list[SequenceRows]:
    return [
        SequenceRows(None if params is None else SequenceRules(params), token_ids, count)
        for params, token_ids, count in sequences
    ]


def test_a_batch_gets_the_choices_of_single_sequences() -> None:
    """Sequences with no, one and several rows, with and without penalties."""
    logits = torch.stack([make_logits(seed, 40) for seed in range(6)])
    before = logits.clone()
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": ((3, 5.0),)}
    sequences = [
        (SamplingParams(1.0, seed=4, prompt_length=2, **penalties), [7, 3, 9, 9, 1], 3),
        (SamplingParams(1.0, seed=5), [1, 2, 3], 0),
        (None, [5, 5], 1),
        (SamplingParams(0.0, min_tokens=9, stop_token_ids=(int(logits[4].argmax()),)), [8], 1),
        (SamplingParams(0.7, top_p=0.9, seed=6), [2, 4], 1),
    ]
    expected = []
    for own, rows in zip(logits.split([s[2] for s in sequences]), rows_of(sequences), strict=True):
        expected.append(own.argmax(-1).tolist() if rows.rules is None else list(choose_tokens(own, rows)))
        assert len(expected[-1]) == rows.count
    assert choose_batch(logits, rows_of(sequences)) == (expected, [True] * 6)
    assert torch.equal(logits, before)


# --- Choosing between kernels and row-by-row sampling


CPU = torch.device("cpu")


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampling, "has_kernels", lambda _: True)
    sampling.kernel_is_exact.cache_clear()
    yield
    sampling.kernel_is_exact.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_on_cpu")
def test_exact_kernels_are_used() -> None:
    assert sampling.kernel_is_exact(CPU, torch.float16, 50)
    with mock.patch.object(sampling, "has_kernels", has_kernels):
        sampling.kernel_is_exact.cache_clear()
        assert not sampling.kernel_is_exact(CPU, torch.float16, 50), "a CPU samples row by row"


@pytest.mark.slow
def test_a_worker_with_kernels_gives_the_same_verdicts(tmp_path: Path) -> None:
    folder, prompt = save_model(tmp_path, tiny_config()), tuple(random_tokens(12))
    rules = [None, SamplingParams(1.0, seed=3), SamplingParams(0.8, top_p=0.9, repetition_penalty=1.3, seed=4)]
    items = [VerifyItem(i, 0, prompt, sampling=rule, draft_token_ids=(5,) * i) for i, rule in enumerate(rules)]
    engine = load_engine(folder)
    expected = Verifier(engine).verify([VerifyRound("a", 1, items)])
    with (
        mock.patch("specpool.engine.sampling.batch.compiled_is_exact", return_value=False),
        mock.patch("specpool.engine.sampling.batch.kernel_is_exact", return_value=True),
        mock.patch("specpool.engine.sampling.batch.choose_batch", wraps=choose_batch) as together,
    ):
        assert Verifier(engine).verify([VerifyRound("b", 1, items)]) == expected
    together.assert_called_once()
    assert all(verdict.token_ids for verdict in expected[0])


@pytest.mark.parametrize("params", [None, SamplingParams(1.0, seed=3), SamplingParams(1.0, repetition_penalty=1.3)])
def test_a_worker_with_kernels_fails_non_finite_rounds(params: SamplingParams | None, tmp_path: Path) -> None:
    folder, prompt = save_model(tmp_path, tiny_config()), tuple(random_tokens(12))
    items = [VerifyItem(7, 0, prompt, sampling=params), VerifyItem(8, 0, prompt, sampling=params)]
    engine = load_engine(folder)
    forward = engine.forward

    def spoiled(spans: Sequence[Span]) -> torch.Tensor:
        logits = forward(spans).clone()
        logits[1, 20] = math.nan
        return logits

    with (
        mock.patch.object(engine, "forward", spoiled),
        mock.patch("specpool.engine.sampling.batch.compiled_is_exact", return_value=False),
        mock.patch("specpool.engine.sampling.batch.kernel_is_exact", return_value=True),
        mock.patch("specpool.engine.sampling.batch.largest_on_host", reduce_and_copy),
        pytest.raises(WorkerFailedError, match="sequence 8: the model's logits are not finite"),
    ):
        Verifier(engine).verify([VerifyRound("a", 1, items)])


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(
    "fault", [{"side_effect": RuntimeError("no compiler")}, {"return_value": ([0] * 8, [True] * 8)}]
)
def test_kernels_that_fail_or_differ_are_not_used(fault: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(sampling, "sample_rows", **fault):
        assert not sampling.kernel_is_exact(CPU, torch.float32, 50)
    assert "sampling row by row" in caplog.text
