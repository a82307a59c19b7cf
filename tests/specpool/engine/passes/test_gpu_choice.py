"""The draft loop's choice of tokens, on interpreted kernels, against torch."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from specpool.engine.cache.checkpoints import NONE, Segment
from specpool.engine.passes.gpu import choice
from specpool.engine.passes.gpu.choice import REMAINING, SEGMENTS, SIZES, choose, no_numbers
from specpool.engine.passes.packing import INPUT_IDS, POSITIONS, SLOTS
from specpool.engine.sampling import kernel
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.kernel import CONTEXT_LENGTH, numbers_of_row
from specpool.engine.sampling.sampler import choose_token
from specpool.protocol.sampling import SamplingParams


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PART", 16)
    for name, size in {"SEARCH_BLOCK": 32, "PART": 32, "BLOCK": 16}.items():
        monkeypatch.setattr(kernel, name, size)


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_probable_token_and_its_probability(outputs: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(5, outputs) * 4).to(dtype)
    tokens, probabilities = choose(logits, Head(outputs))
    assert tokens.long().tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(probabilities, logits.double().softmax(-1).amax(-1), rtol=1e-5, atol=0)


def test_the_smallest_of_equally_probable_tokens_is_chosen() -> None:
    logits = torch.zeros(1, 60)
    logits[0, [7, 20, 21, 59]] = 3
    assert choose(logits, Head(60))[0].tolist() == [7]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary() -> None:
    logits = torch.full((3, 40), math.nan)
    logits[1] = -math.inf
    logits[2, 3] = 0
    tokens = choose(logits, Head(40))[0].tolist()
    assert all(0 <= token < 40 for token in tokens)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_impossible_tokens_fill_a_part() -> None:
    logits = torch.randn(2, 60)
    logits[0, 16:32] = logits[1, :48] = -math.inf
    tokens, probabilities = choose(logits, Head(60))
    assert tokens.long().tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(probabilities, logits.double().softmax(-1).amax(-1), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("culprit", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_no_probability(culprit: float) -> None:
    """The draft then ends."""
    logits = torch.randn(2, 60)
    logits[0, 20], logits[1] = culprit, -math.inf
    assert not choose(logits, Head(60))[1].isfinite().any()


def test_outputs_of_a_reduced_head_become_tokens() -> None:
    logits = torch.zeros(2, 3)
    logits[0, 2] = logits[1, 1] = 1
    assert choose(logits, Head(50, torch.tensor([4, 17, 30])))[0].tolist() == [30, 17]


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    params=st.lists(
        st.one_of(
            st.none(),
            st.builds(
                SamplingParams,
                temperature=st.sampled_from([0.4, 1.0, 1.7]),
                top_k=st.sampled_from([0, 1, 20, 45, 70]),
                top_p=st.sampled_from([1.0, 0.9, 0.5]),
                min_p=st.sampled_from([0.0, 0.05]),
                seed=st.integers(0, 2**64 - 1),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    length=st.integers(1, 2**31),
    outputs=st.sampled_from([None, [*range(69, 29, -1)], [*range(10, 70)]]),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sampled_steps_choose_the_tokens_of_the_sampler(
    params: list[SamplingParams | None], length: int, outputs: list[int] | None, ties: bool, seed: int
) -> None:
    """Greedy and sampled rows mix, and a head may have outputs for some tokens only."""
    head = Head(80, None if outputs is None else torch.tensor(outputs))
    generator = torch.Generator().manual_seed(seed)
    rules = torch.tensor([numbers_of_row(each, length, head.outputs) for each in params], dtype=torch.int32)
    for step in range(3):
        logits = torch.randn(len(params), head.outputs, generator=generator) * 4
        if ties:
            logits = logits.round()
        tokens, probabilities = choose(logits, head, rules=rules)
        for row, each in enumerate(params):
            if each is None:
                assert tokens[row] == head.token_ids(logits[row].argmax())
                assert probabilities[row] == pytest.approx(float(logits[row].softmax(-1).max()))
            else:
                known = head.over_vocabulary(logits)[row]
                assert tokens[row] == choose_token(known, each, range(length + step))
                assert probabilities[row] == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("culprit", [math.nan, math.inf])
def test_sampled_rows_that_are_not_finite_have_no_probability(culprit: float) -> None:
    logits = torch.randn(3, 60)
    logits[0, 20], logits[1] = culprit, -math.inf
    rules = torch.tensor([numbers_of_row(SamplingParams(1.0), 5, 60)] * 3, dtype=torch.int32)
    tokens, probabilities = choose(logits, Head(60), rules=rules)
    assert probabilities.isfinite().tolist() == [False, False, True]
    assert all(0 <= token < 60 for token in tokens.tolist())


def test_numbers_move_on_to_the_next_step() -> None:
    numbers = no_numbers(3, recurs=True)
    numbers[POSITIONS], numbers[SLOTS] = torch.tensor([10, 20, 0]), torch.tensor([3, 0, -1])
    numbers[REMAINING], numbers[SIZES] = torch.tensor([2, 1, 0]), torch.tensor([1, 1, 0])
    segments = numbers[SEGMENTS:REMAINING].view(3, -1)
    segments[0] = torch.tensor(Segment(0, 1, 10, 7, 4, 6, 5, 10, 2))
    segments[1] = torch.tensor(Segment(1, 1, 20, 3, 18, 1, NONE, 0, 1))
    logits = torch.eye(3, 40)
    rules = torch.tensor([numbers_of_row(SamplingParams(1.0), 5, 40)] * 4, dtype=torch.int32)
    choose(logits, Head(40), numbers, rules)
    assert rules[:, CONTEXT_LENGTH].tolist() == [6, 6, 6, 5]
    assert numbers[INPUT_IDS].tolist() == [choose_token(row, SamplingParams(1.0), range(5)) for row in logits]
    assert numbers[POSITIONS].tolist() == [11, 20, 0]
    assert numbers[SLOTS].tolist() == [3, -1, -1]
    assert numbers[SIZES].tolist() == [1, 0, 0]
    assert numbers[REMAINING].tolist() == [1, 0, -1]
    assert segments[0].tolist() == [*Segment(0, 1, 11, 5, 10, 2, NONE, 10, 2)]  # it reads what the step has written
    assert segments[1].tolist() == [*Segment(1, 0, 18, 3, 18, 1, NONE, 0, 1)]  # without rows, replayed ones included
    assert segments[2, 1:3].tolist() == [0, 0]
