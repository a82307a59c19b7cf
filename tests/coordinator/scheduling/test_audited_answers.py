"""Answers to audit: the plain request that replays them, their comparison, and the limits of the backlog."""

from dataclasses import replace

import pytest

from coordinator.scheduling.audits import AUDIT_CLIENT, Answer, Backlog, Difference, first_difference
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from specpool.drafting.plans import DraftMethod
from specpool.protocol.sampling import SamplingParams

SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, seed=7, logit_bias=((3, 1.5),), grammar='{"regex": "a+"}')
REQUEST = GenerationRequest(
    "r1",
    (1, 2, 3),
    50,
    frozenset({9}),
    num_speculative_tokens=8,
    sampling=SAMPLING,
    stop=("end",),
    logprobs=5,
    constraint="sampling_params.regex",
    adaptive=True,
    method=DraftMethod.BEST,
    prediction=(4, 5),
    priority=-3,
    cache_salt="salt",
    client="ipv4:10.0.0.1",
)


def finished(token_ids: list[int], reason: FinishReason | None = FinishReason.STOP, prompt: int = 3) -> Sequence:
    sequence = Sequence(1, replace(REQUEST, prompt_ids=(1,) * prompt))
    sequence.token_ids += token_ids
    sequence.finish = Finish(reason) if reason is not None else None
    return sequence


def answer_of(tokens: int, name: str = "") -> Answer:
    answer = Answer.of(finished([5] * tokens, prompt=0))
    assert answer is not None
    return replace(answer, request=replace(answer.request, request_id=name, sampling=SamplingParams()))


def test_a_replay_decodes_plainly_and_keeps_all_that_decides_the_tokens() -> None:
    answer = Answer.of(finished([4, 5, 9]))
    assert answer is not None
    assert answer.replay == replace(
        REQUEST,
        request_id="audit of r1",
        prompt_ids=(1, 1, 1),
        prediction=(),
        max_tokens=3,
        num_speculative_tokens=0,
        adaptive=False,
        logprobs=2,
        priority=0,
        cache_salt="",
        client=AUDIT_CLIENT,
        is_background=True,
    )
    assert answer.max_length == 6


@pytest.mark.parametrize("reason", [None, FinishReason.ABORT])
def test_cut_answers_are_not_audited(reason: FinishReason | None) -> None:
    assert Answer.of(finished([4], reason)) is None


@pytest.mark.parametrize(
    ("tokens", "plain", "difference"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 7, 3], Difference(1, 2, 7)),
        ([1, 2], [1], Difference(1, 2, None)),
        ([1], [1, 2], Difference(1, None, 2)),
    ],
)
def test_the_first_difference(tokens: list[int], plain: list[int], difference: Difference | None) -> None:
    assert first_difference(tokens, plain) == difference


def test_a_full_backlog_drops_the_oldest_answers() -> None:
    backlog = Backlog(max_answers=3, max_bytes=4 * 100)
    assert [backlog.add(answer_of(10, name)) for name in "abcd"] == [0, 0, 0, 1]
    assert backlog.add(answer_of(85, "e")) == 2
    assert [backlog.pop().request.request_id for _ in range(len(backlog))] == ["d", "e"]
    assert backlog.add(answer_of(100)) == 0
    assert backlog.clear() == 1
    assert len(backlog) == 0


def test_an_answer_larger_than_the_backlog_is_dropped_alone() -> None:
    backlog = Backlog(max_answers=3, max_bytes=4 * 100)
    assert backlog.add(answer_of(10, "small")) == 0
    assert backlog.add(answer_of(101, "large")) == 1
    assert backlog.first.request.request_id == "small"
