"""Messages about carried drafts: encoding, limits and checks."""

import math
from dataclasses import replace
from typing import Any

import pytest

from specpool.protocol.codec import (
    MAX_ITEM_DRAFT_TOKENS,
    read_chances,
    read_step_cost,
    read_verify_items,
    verify_request,
    verify_response,
    worker_info_response,
)
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.responses import (
    InvalidResponseError,
    max_verify_bytes,
    read_draft_rows,
    read_verdicts,
    read_worker_info,
)
from specpool.protocol.rounds import ItemStatus, OwnDraft, OwnDraftItem, RoundLimits, Verdict, VerifyItem
from specpool.protocol.worker_info import WorkerInfo
from specpool.v1 import common_pb2, target_worker_pb2

LIMITS = RoundLimits(vocab_size=100, max_model_len=1000, carries_draft=True)
OWN = OwnDraftItem(3, 4, 50, 0.25, 0.5)
ITEM = VerifyItem(1, 10, (5,), own_draft=OWN)
DRAFT = OwnDraft(1, ItemStatus.OK, (7, 8, 4, 6), 11, (0.5, 1.0, 0.25, 0.125), num_verified=3)
VERDICT = Verdict(1, ItemStatus.OK, (7, 8, 9), 13, own_draft=DRAFT)


@pytest.mark.parametrize("own", [OWN, OwnDraftItem(), OwnDraftItem(next_chance=0.0), None])
@pytest.mark.parametrize("item", [ITEM, VerifyItem(1, 0, (), after_round_id=2), VerifyItem(1, 0, (5,))])
def test_items_reach_the_worker(item: VerifyItem, own: OwnDraftItem | None) -> None:
    item = replace(item, own_draft=own)
    request = verify_request("a", 3, [item], hints=([0.25, 0.5], 0.125))
    assert read_verify_items(request, LIMITS) == [item]
    hints = read_chances(request), read_step_cost(request)
    assert hints == (([0.25, 0.5], 0.125) if own is not None else ([], 0.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_verified", MAX_ITEM_DRAFT_TOKENS + 1),
        ("max_verified", 2**32 - 1),
        ("num_draft_tokens", MAX_ITEM_DRAFT_TOKENS + 1),
        ("min_chance", 1.5),
        ("min_chance", math.nan),
        ("next_chance", -0.5),
        ("next_chance", math.inf),
    ],
)
def test_a_refusal_names_the_field(field: str, value: Any) -> None:
    request = verify_request("a", 3, [ITEM])
    setattr(request.items[0].own_draft, field, value)
    with pytest.raises(InvalidArgumentError) as refusal:
        read_verify_items(request, LIMITS)
    assert refusal.value.field == f"items[0].own_draft.{field}"


def test_workers_without_a_draft_refuse_items_for_one() -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        read_verify_items(verify_request("a", 3, [ITEM]), replace(LIMITS, carries_draft=False))
    assert refusal.value.field == "items[0].own_draft"


def test_own_drafts_count_as_logits() -> None:
    request = verify_request("a", 3, [ITEM])
    assert read_verify_items(request, replace(LIMITS, max_logits=4))
    with pytest.raises(InvalidArgumentError, match="4 positions"):
        read_verify_items(request, replace(LIMITS, max_logits=3))


@pytest.mark.parametrize(
    "draft",
    [
        DRAFT,
        replace(DRAFT, confidences=()),
        replace(DRAFT, status=ItemStatus.NO_SLOT, num_cached_tokens=0),
        replace(DRAFT, status=ItemStatus.CACHE_MISS, num_cached_tokens=0),
    ],
)
def test_results_reach_the_coordinator(draft: OwnDraft) -> None:
    verdict = replace(VERDICT, own_draft=draft)
    response = verify_response(3, [verdict], {"draft_ns": 5}, "w", draft_rows=[2, 1])
    assert read_verdicts(response, 3, [ITEM], 100) == [verdict]
    assert (response.draft_ns, read_draft_rows(response)) == (5, [2, 1])
    assert draft.verified_ids == (7, 8, 4)


def test_a_worker_without_a_draft_reports_none() -> None:
    response = verify_response(3, [replace(VERDICT, token_ids=(9,), num_cached_tokens=11, own_draft=None)], {}, "w")
    (read,) = read_verdicts(response, 3, [ITEM], 100)
    assert read.own_draft == OwnDraft(1, ItemStatus.CACHE_MISS)


def test_results_for_items_without_an_own_draft_are_ignored() -> None:
    item = VerifyItem(1, 10, (5,), draft_token_ids=(7, 8))
    (read,) = read_verdicts(verify_response(3, [VERDICT], {}, "w"), 3, [item], 100)
    assert read.own_draft is None


def test_the_item_s_draft_tokens_count_if_no_own_draft_is_verified() -> None:
    item = replace(ITEM, draft_token_ids=(7, 8))
    verdict = replace(VERDICT, own_draft=replace(DRAFT, draft_token_ids=(1, 2, 3, 4), num_verified=0))
    assert read_verdicts(verify_response(3, [verdict], {}, "w"), 3, [item], 100) == [verdict]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft_token_ids": (7,) * (MAX_ITEM_DRAFT_TOKENS + 1), "confidences": ()}, "1025 draft tokens"),
        ({"num_verified": 4}, "4 own draft tokens verified; the limit is 3"),
        ({"draft_token_ids": (7, 8), "confidences": ()}, "3 own draft tokens verified; the limit is 2"),
        ({"draft_token_ids": (7, 8, 4, 100)}, "an own draft token is outside the vocabulary"),
        ({"confidences": (0.5,)}, "a draft token has no confidence"),
        ({"confidences": (0.5, 0.5, 0.5, math.nan)}, "a confidence is not a probability"),
        ({"confidences": (0.5, 0.5, 0.5, 2.0)}, "a confidence is not a probability"),
        ({"draft_token_ids": (7, 6, 4, 6)}, "the accepted tokens differ from the draft tokens"),
        ({"num_verified": 1}, "3 tokens gained from 1 draft tokens"),
    ],
)
def test_impossible_results_are_rejected(changes: dict[str, Any], reason: str) -> None:
    response = verify_response(3, [replace(VERDICT, own_draft=replace(DRAFT, **changes))], {}, "w")
    with pytest.raises(InvalidResponseError, match=reason):
        read_verdicts(response, 3, [ITEM], 100)


@pytest.mark.parametrize("rows", [[1, 0], [1] * (MAX_ITEM_DRAFT_TOKENS + 1)])
def test_impossible_passes_are_rejected(rows: list[int]) -> None:
    with pytest.raises(InvalidResponseError, match="draft_rows of the carried draft are invalid"):
        read_draft_rows(target_worker_pb2.VerifyResponse(draft_rows=rows))


def test_the_longest_own_draft_fits_the_size_limit() -> None:
    draft = replace(DRAFT, draft_token_ids=(2**31,) * MAX_ITEM_DRAFT_TOKENS, confidences=(0.3,) * MAX_ITEM_DRAFT_TOKENS)
    items, verdicts = [ITEM] * 64, [replace(VERDICT, own_draft=draft)] * 64
    assert verify_response(3, verdicts, {}, "w").ByteSize() <= max_verify_bytes(items, None)


def described(**fields: Any) -> WorkerInfo:
    return WorkerInfo(vocab_size=100, max_model_len=10, slots_total=4, instance_id="w", **fields)


def test_a_worker_s_description_includes_its_draft() -> None:
    info = described(model="target", draft=described(model="draft", step_seconds={1: 0.5}))
    assert read_worker_info(worker_info_response(info)) == info
    response = worker_info_response(replace(info, draft=replace(info.draft, instance_id="")))  # type: ignore[type-var]
    assert response.draft.instance_id == "w", "one process"


def test_impossible_drafts_are_rejected() -> None:
    nested = worker_info_response(described(draft=described(draft=described())))
    with pytest.raises(InvalidResponseError, match="a carried draft cannot carry a draft"):
        read_worker_info(nested)
    empty = worker_info_response(described())
    empty.draft.CopyFrom(common_pb2.GetWorkerInfoResponse(instance_id="w"))
    with pytest.raises(InvalidResponseError, match="vocab_size"):
        read_worker_info(empty)
