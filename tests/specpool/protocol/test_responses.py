"""Responses of workers that do not fit their request are rejected."""

import math
from typing import Any

import pytest

from specpool.protocol.features import FeatureSpec, WantedFeatures
from specpool.protocol.prefixes import MAX_EVICTED_PAGES
from specpool.protocol.responses import (
    InvalidResponseError,
    drops_features,
    read_evicted_pages,
    read_proposals,
    read_verdicts,
    read_worker_info,
)
from specpool.protocol.rounds import Branch, ItemStatus, ProposeItem, VerifyItem
from specpool.v1 import common_pb2, draft_worker_pb2, target_worker_pb2

OK, MISS = common_pb2.ITEM_STATUS_OK, common_pb2.ITEM_STATUS_CACHE_MISS
VOCAB = 100


def verdict(**changes: Any) -> Any:
    """Return a valid result for `ITEM`, with changes."""
    fields = {"sequence_id": 1, "status": OK, "token_ids": [7, 8, 9], "cached_length": 13} | changes
    return target_worker_pb2.VerifyResult(**fields)


TWO_RANKS = [{"device": "cuda:0"}, {"device": "cuda:1"}]
ITEM = VerifyItem(1, 10, (5,), draft_token_ids=(7, 8, 4))


def read(*results: Any, items: Any = (ITEM,), round_id: int = 3) -> Any:
    return read_verdicts(target_worker_pb2.VerifyResponse(round_id=round_id, results=results), 3, items, VOCAB)


def test_valid_verdicts_are_read() -> None:
    (valid,) = read(verdict())
    assert (valid.status, valid.token_ids, valid.num_cached_tokens) == (ItemStatus.OK, (7, 8, 9), 13)
    (bonus,) = read(verdict(token_ids=[7, 8, 4, 4], cached_length=14))
    assert bonus.token_ids == (7, 8, 4, 4)
    (missed,) = read(verdict(status=MISS))
    assert (missed.status, missed.token_ids) == (ItemStatus.CACHE_MISS, ())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sequence_id": 2}, "sequences of the round"),
        ({"status": 0}, "status"),
        ({"token_ids": [], "cached_length": 11}, "0 tokens gained"),
        ({"token_ids": [7, 8, 4, 4, 4]}, "5 tokens gained"),
        ({"token_ids": [7, 6, 9]}, "differ from the draft"),
        ({"token_ids": [7, 8, VOCAB]}, "vocabulary"),
        ({"token_ids": [7, 8, 2**31]}, "vocabulary"),
        ({"cached_length": 12}, "12 positions cached instead of 13"),
        ({"prefix_length": 1}, "invalid prefix_length 1"),
    ],
)
def test_impossible_verdicts_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidResponseError, match=reason):
        read(verdict(**changes))


@pytest.mark.parametrize(("expected", "found", "valid"), [(0, 0, 1), (0, 3, 1), (2, 3, 1), (2, 1, 0), (2, 4, 0)])
def test_a_cached_prefix_is_at_least_the_expected_one_and_leaves_a_token(expected: int, found: int, valid: int) -> None:
    item = VerifyItem(1, 0, (1, 2, 3, 4), expected_prefix_length=expected)
    result = verdict(token_ids=[7], cached_length=4, prefix_length=found)
    if valid:
        assert read(result, items=(item,))[0].prefix_length == found
    else:
        with pytest.raises(InvalidResponseError, match=f"invalid prefix_length {found}, expected at least 2"):
            read(result, items=(item,))


def test_evicted_pages_are_read() -> None:
    def read_evicted(*digests: bytes) -> list[bytes]:
        return read_evicted_pages(target_worker_pb2.VerifyResponse(evicted_pages=digests))

    assert read_evicted(b"a" * 16, b"b" * 16) == [b"a" * 16, b"b" * 16]
    for digests in ([b"a"], [b"a" * 16] * (MAX_EVICTED_PAGES + 1)):
        with pytest.raises(InvalidResponseError, match="page"):
            read_evicted(*digests)


def test_features_of_a_cached_prefix_are_missing() -> None:
    features = WantedFeatures(FeatureSpec((1,), 4), 3)
    item = VerifyItem(1, 0, (1, 2, 3, 4), want_features=True)
    for found, rows in ((0, 3), (1, 3), (3, 1)):
        states = bytes(rows * features.spec.row_bytes)
        result = verdict(token_ids=[7], cached_length=4, prefix_length=found, features=states)
        response = target_worker_pb2.VerifyResponse(round_id=3, results=[result])
        (read,) = read_verdicts(response, 3, (item,), VOCAB, features)
        assert read.features == states


def test_nobody_waits_for_the_features_of_a_sequence_that_has_ended() -> None:
    features = WantedFeatures(FeatureSpec((1,), 4), 3)
    ended = VerifyItem(1, 0, (), want_features=True)
    states = bytes(features.spec.row_bytes)
    response = target_worker_pb2.VerifyResponse(round_id=3, results=[verdict(features=states)])
    assert not drops_features(response, read_verdicts(response, 3, (ended,), VOCAB, features))


def test_a_verdict_may_end_early_with_an_accepted_draft_token() -> None:
    """The mask of the next token was late."""
    (found,) = read(verdict(token_ids=[7, 8], cached_length=12))
    assert (found.token_ids, found.num_cached_tokens) == ((7, 8), 12)


def test_verdicts_must_match_the_round_in_order() -> None:
    other = VerifyItem(2, 10, (5,), draft_token_ids=(7, 8, 4))
    assert len(read(verdict(), verdict(sequence_id=2), items=(ITEM, other))) == 2
    for results in ([], [verdict()], [verdict(sequence_id=2), verdict()], [verdict()] * 2, [verdict()] * 3):
        with pytest.raises(InvalidResponseError, match="sequences of the round"):
            read(*results, items=(ITEM, other))
    with pytest.raises(InvalidResponseError, match="round 2 instead of 3"):
        read(verdict(), round_id=2)


def test_prompt_chunks_gain_no_token() -> None:
    chunk = VerifyItem(1, 10, (5, 6), prefill_only=True)
    assert read(verdict(token_ids=[], cached_length=12), items=[chunk])[0].token_ids == ()
    with pytest.raises(InvalidResponseError, match="prompt chunk"):
        read(verdict(token_ids=[7], cached_length=12), items=[chunk])


@pytest.mark.parametrize(
    "logprobs",
    [
        [],
        [{"logprob": -1.0, "top_token_ids": [1, 2], "top_logprobs": [-1.0, -2.0]}] * 2,
        [{"logprob": -1.0, "top_token_ids": [1, 2], "top_logprobs": [-1.0]}],
        [{"logprob": -1.0, "top_token_ids": [1], "top_logprobs": [-1.0]}],
        [{"logprob": math.nan, "top_token_ids": [1, 2], "top_logprobs": [-1.0, -2.0]}],
        [{"logprob": -1.0, "top_token_ids": [1, 2], "top_logprobs": [-1.0, math.nan]}],
        [{"logprob": -1.0, "top_token_ids": [1, VOCAB], "top_logprobs": [-1.0, -2.0]}],
        [{"logprob": 1.0, "top_token_ids": [1, 2], "top_logprobs": [-1.0, -2.0]}],
    ],
)
def test_impossible_logprobs_are_rejected(logprobs: list[dict[str, Any]]) -> None:
    item = VerifyItem(1, 10, (5,), logprobs=2)
    good = [common_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=[1, 2], top_logprobs=[-1.0, -2.0])]
    (checked,) = read(verdict(token_ids=[7], cached_length=11, logprobs=good), items=[item])
    (found,) = checked.logprobs
    assert (found.logprob, [*found.top_token_ids], [*found.top_logprobs]) == (-1.0, [1, 2], [-1.0, -2.0])
    bad = [common_pb2.TokenLogprobs(**one) for one in logprobs]
    with pytest.raises(InvalidResponseError):
        read(verdict(token_ids=[7], cached_length=11, logprobs=bad), items=[item])


def propose(**changes: Any) -> Any:
    fields = {"sequence_id": 1, "status": OK, "draft_token_ids": [7, 8], "cached_length": 12} | changes
    response = draft_worker_pb2.ProposeResponse(round_id=3, results=[draft_worker_pb2.ProposeResult(**fields)])
    return read_proposals(response, 3, [ProposeItem(1, 10, (5,), num_draft_tokens=2, min_chance=0.1)])


def test_valid_proposals_are_read() -> None:
    (valid,) = propose(confidences=[0.5, 1.0001])
    assert (valid.draft_token_ids, valid.confidences) == ((7, 8), (0.5, 1.0))
    assert propose(draft_token_ids=[], cached_length=11)[0].draft_token_ids == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"confidences": [0.5, math.nan]},
        {"confidences": [math.inf, 0.5]},
        {"confidences": [0.5, -0.1]},
        {"confidences": [0.5, 2.0]},
        {"confidences": [0.5]},
        {"draft_token_ids": [7, 8, 9], "cached_length": 13},
        {"cached_length": 13},
        {"cached_length": 0},
        {"status": 7},
        {"sequence_id": 9},
    ],
)
def test_impossible_proposals_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidResponseError):
        propose(**changes)


def branches(*changes: dict[str, Any]) -> Any:
    item = ProposeItem(1, 10, (5, 6), num_draft_tokens=2, min_chance=0.1, num_branches=2, num_unverified=1)
    fields = {"num_accepted": 1, "token_id": 4, "draft_token_ids": [7, 8], "confidences": [0.5, 0.5]}
    result = draft_worker_pb2.ProposeResult(
        sequence_id=1,
        status=OK,
        cached_length=12,
        branches=[common_pb2.Branch(**fields | one) for one in changes],
    )
    response = draft_worker_pb2.ProposeResponse(round_id=3, results=[result])
    return read_proposals(response, 3, [item])[0].branches


def test_valid_branches_are_read() -> None:
    first, second = branches({}, {"num_accepted": 0, "draft_token_ids": [], "confidences": []})
    assert first == Branch(1, 4, (7, 8), (0.5, 0.5))
    assert second == Branch(0, 4)
    assert branches() == ()


@pytest.mark.parametrize(
    "changes",
    [
        [{}, {}, {}],
        [{"num_accepted": 2}],
        [{"draft_token_ids": [7, 8, 9], "confidences": []}],
        [{"confidences": [0.5]}],
        [{"confidences": [0.5, math.nan]}],
    ],
)
def test_impossible_branches_are_rejected(changes: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidResponseError):
        branches(*changes)


def description(model: dict[str, Any], load: dict[str, Any], **others: Any) -> common_pb2.GetWorkerInfoResponse:
    model, load = {"vocab_size": 10, "max_model_len": 10, **model}, {"slots_total": 4, **load}
    fields = {"model": common_pb2.ModelInfo(**model), "load": common_pb2.WorkerLoad(**load), "instance_id": "1"}
    return common_pb2.GetWorkerInfoResponse(**fields | others)


def test_impossible_step_costs_are_dropped() -> None:
    costs = common_pb2.StepCosts(
        rows=[0, 1, 2, 4, 8, 16], seconds=[1.0, math.nan, math.inf, -1.0, 0.0, 0.5], seconds_per_cached=math.nan
    )
    info = read_worker_info(description({}, {}, costs=costs))
    assert (info.step_seconds, info.seconds_per_cached) == ({16: 0.5}, 0.0)


def test_processes_without_an_id_are_rejected() -> None:
    read_worker_info(description({}, {}))
    with pytest.raises(InvalidResponseError, match="instance_id"):
        read_worker_info(description({}, {}, instance_id=""))


@pytest.mark.parametrize(
    ("model", "load"),
    [
        ({"vocab_size": 0}, {}),
        ({"vocab_size": 2**31}, {}),
        ({"max_model_len": 0}, {}),
        ({"equivalence": 99}, {}),
        ({"notes": ["n" * 2**15] * 3}, {}),
        ({"max_model_len": 2**32 - 1}, {}),
        ({}, {"slots_total": 0}),
        ({}, {"slots_total": 2**32 - 1}),
        ({}, {"ranks": TWO_RANKS}),
        ({"tensor_parallel": 0}, {"ranks": TWO_RANKS}),
        ({"tensor_parallel": 1}, {"ranks": TWO_RANKS[:1]}),
        ({"tensor_parallel": 1, "tensor_parallel_sums": "whole"}, {}),
        ({"tensor_parallel": 2, "tensor_parallel_sums": "whole"}, {}),
        ({"tensor_parallel": 3, "tensor_parallel_sums": "whole"}, {"ranks": TWO_RANKS}),
        ({"tensor_parallel": 2**32 - 1, "tensor_parallel_sums": "whole"}, {"ranks": TWO_RANKS}),
        ({"tensor_parallel": 2}, {"ranks": TWO_RANKS}),
        ({"tensor_parallel": 2, "tensor_parallel_sums": "backwards"}, {"ranks": TWO_RANKS}),
    ],
)
def test_impossible_descriptions_are_rejected(model: dict[str, Any], load: dict[str, Any]) -> None:
    with pytest.raises(InvalidResponseError):
        read_worker_info(description(model, load))
