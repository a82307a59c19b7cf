"""Branches: continuations of several outcomes of a verification, drafted over one sequence's cache."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tiny_models import load_engine
from worker_service import DRAFT, OK, Worker, failure, propose, serving, tokens_of, violated_fields

from draft_worker.branches import MAX_SAMPLED_ROWS
from draft_worker.proposer import Proposer
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import MAX_ITEM_BRANCHES, MAX_ITEM_UNVERIFIED
from specpool.v1 import common_pb2, draft_worker_pb2

PROMPT, UNVERIFIED = [5, 6, 7, 8], [9, 10]


def ahead(
    sequence_id: int = 1, unverified: list[int] = UNVERIFIED, k: int = 3, branches: int = 6, **fields: Any
) -> Any:
    """Append the prompt and tokens that are being verified, and draft branches."""
    return draft_worker_pb2.ProposeItem(
        sequence_id=sequence_id,
        token_ids=PROMPT + unverified,
        num_draft_tokens=k,
        num_branches=branches,
        num_unverified=len(unverified),
        **fields,
    )


def context_of(branch: Any, unverified: list[int] = UNVERIFIED) -> list[int]:
    return [*PROMPT, *unverified[: branch.num_accepted], branch.token_id]


@pytest.mark.parametrize("unverified", [[], UNVERIFIED])
async def test_branches_are_drafted_like_sequences_of_their_own(draft: Worker, unverified: list[int]) -> None:
    (result,) = await draft.round(ahead(unverified=unverified))
    assert (result.status, result.cached_length) == (OK, len(PROMPT + unverified))
    outcomes = [(branch.num_accepted, branch.token_id) for branch in result.branches]
    assert len(outcomes) == len(set(outcomes)) == (6 if unverified else 5)
    for branch in result.branches:
        assert list(branch.draft_token_ids) == draft.continuation(context_of(branch, unverified), 3)
        assert branch.token_id not in unverified[branch.num_accepted : branch.num_accepted + 1]
    after_all = [branch.token_id for branch in result.branches if branch.num_accepted == len(unverified)]
    assert after_all[:1] == draft.continuation(PROMPT + unverified, 1)[: len(after_all)]


async def test_the_sequence_goes_on_after_any_outcome(draft: Worker) -> None:
    await draft.round(ahead())
    (result,) = await draft.round(propose(1, len(PROMPT), [11, 12], 2))
    assert tokens_of(result) == draft.continuation([*PROMPT, 11, 12], 2)


async def test_sampled_branches_apply_the_rules_and_noise_of_their_sequence(draft: Worker) -> None:
    sampling = common_pb2.Sampling(temperature=1.5, seed=3, repetition_penalty=1.4, prompt_length=len(PROMPT))
    (result,) = await draft.round(ahead(sampling=sampling))
    assert len(result.branches) > 1
    for branch in result.branches:
        item = propose(2, 0, context_of(branch), 3)
        item.sampling.CopyFrom(sampling)
        (alone,) = await draft.round(item)
        assert tokens_of(alone) == list(branch.draft_token_ids)
        await draft.release(2)


async def test_a_repeated_round_gets_the_same_branches(draft: Worker) -> None:
    first = await draft.round(ahead(), round_id=7)
    assert await draft.round(ahead(), round_id=7) == first


async def test_branches_and_drafts_share_a_round(draft: Worker) -> None:
    results = await draft.round(propose(2, 0, PROMPT, 3), ahead(), propose(3, 0, PROMPT, 0))
    assert [len(result.branches) for result in results] == [0, 6, 0]
    assert tokens_of(results[0]) == draft.continuation(PROMPT, 3)


async def test_a_sequence_without_spare_positions_gets_fewer_branches(engines: dict[str, Engine]) -> None:
    async with serving(DRAFT, engines[DRAFT.name]) as draft:
        room = engines[DRAFT.name].max_model_len - len(UNVERIFIED) - 8
        (result,) = await draft.round(
            draft_worker_pb2.ProposeItem(
                sequence_id=1, token_ids=[5] * room + UNVERIFIED, num_draft_tokens=3, num_branches=6, num_unverified=2
            )
        )
        assert len(result.branches) == 2


async def test_a_branch_ends_before_logits_that_are_not_finite(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(DRAFT, engines[DRAFT.name]) as draft:
        choose, calls = Proposer.choose_rows, []

        def spoiled(proposer: Proposer, spans: Any, rows: Any, confidences: bool = False) -> Any:
            calls.append(len(spans))
            choices = choose(proposer, spans, rows, confidences)
            return [replace(choices[0], confidences=[math.nan]), *choices[1:]] if len(calls) == 2 else choices

        monkeypatch.setattr(Proposer, "choose_rows", spoiled)
        monkeypatch.setattr(Engine, "can_draft", lambda *_: False)
        (result,) = await draft.round(ahead(min_chance=0.01))
        assert [len(branch.draft_token_ids) for branch in result.branches] == [1, 3, 3, 3, 3, 3]
        assert calls == [6, 6, 5]


async def test_few_sampled_rows_are_ranked_in_a_round(draft: Worker) -> None:
    sampling = common_pb2.Sampling(temperature=1.0, seed=3, prompt_length=1)
    unverified = list(range(20, 20 + MAX_SAMPLED_ROWS // 2))
    results = await draft.round(*(ahead(number, unverified, sampling=sampling) for number in (1, 2)))
    assert [result.status for result in results] == [OK, OK]
    assert [len(result.branches) for result in results] == [6, 0]


async def test_an_engine_that_cannot_share_a_cache_continues_full_acceptance(tiny_pair: tuple[Path, Path]) -> None:
    engine = load_engine(tiny_pair[1], exact=False, kv_layout="padded")
    async with serving(DRAFT, engine) as draft:
        assert (await draft.info()).load.max_branches == 1
        (result,) = await draft.round(ahead())
        (branch,) = result.branches
        assert branch.num_accepted == len(UNVERIFIED)
        assert list(branch.draft_token_ids) == draft.continuation(context_of(branch), 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_branches": MAX_ITEM_BRANCHES + 1}, "items[0].num_branches"),
        ({"num_branches": 2**32 - 1}, "items[0].num_branches"),
        ({"num_draft_tokens": 0}, "items[0].num_draft_tokens"),
        ({"num_branches": 0}, "items[0].num_unverified"),
        ({"num_unverified": 6}, "items[0].num_unverified"),
        ({"num_unverified": MAX_ITEM_UNVERIFIED + 1}, "items[0].num_unverified"),
        ({"num_unverified": 2**32 - 1}, "items[0].num_unverified"),
    ],
)
async def test_impossible_branches_are_refused(draft: Worker, changes: dict[str, int], field: str) -> None:
    item = ahead()
    for name, value in changes.items():
        setattr(item, name, value)
    error = await failure(draft.round(item))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == [field]
