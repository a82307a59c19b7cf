"""The draft loop's choice of tokens, on interpreted kernels, against torch."""

import math

import pytest
import torch

pytest.importorskip("triton")

from specpool.engine.passes.gpu import choice
from specpool.engine.passes.gpu.choice import REMAINING, SIZES, choose
from specpool.engine.passes.packing import INPUT_IDS, POSITIONS, SLOTS
from specpool.engine.sampling.head import Head


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PART", 16)


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


def test_numbers_move_on_to_the_next_step() -> None:
    numbers = torch.zeros(REMAINING + 1, 3, dtype=torch.int64)
    numbers[POSITIONS], numbers[SLOTS] = torch.tensor([10, 20, 0]), torch.tensor([3, 0, -1])
    numbers[REMAINING], numbers[SIZES] = torch.tensor([2, 1, 0]), torch.tensor([1, 1, 0])
    logits = torch.eye(3, 40)
    choose(logits, Head(40), numbers)
    assert numbers[INPUT_IDS].tolist() == [0, 1, 2]
    assert numbers[POSITIONS].tolist() == [11, 20, 0]
    assert numbers[SLOTS].tolist() == [3, -1, -1]
    assert numbers[SIZES].tolist() == [1, 0, 0]
    assert numbers[REMAINING].tolist() == [1, 0, -1]
