"""Rounds with limits on reasoning generate the same tokens with any draft, and after lost caches."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from worker_service import Worker, failure, propose, tokens_of, verify

from specpool.testing import EOS_TOKEN_ID, byte_tokenizer
from specpool.v1 import common_pb2
from specpool.v1 import target_worker_pb2 as pb

PROMPT, COUNT = [5, 6, 7, 8], 32
TEXT = 'start: "{\\"name\\":\\"" /[a-z]{2,9}/ "\\"}"'
MAXIMA = [None, 0, 1, 7]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for grammars, however busy the machine is."""
    monkeypatch.setattr("specpool.engine.run.sequences.GRAMMAR_SECONDS", 60.0)


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


BEGIN, END = ids_of("<t>"), ids_of("</t>")


def sampling(maximum: int | None, temperature: float, grammar: str = "", **reasoning: Any) -> common_pb2.Sampling:
    fields = {"begin": BEGIN, "end": END, "grammar_after": bool(grammar), "starts_inside": True, **reasoning}
    limits = common_pb2.Reasoning(max_tokens=maximum, **fields)
    return common_pb2.Sampling(
        reasoning=limits, grammar=grammar, prompt_length=len(PROMPT), temperature=temperature, seed=7
    )


def first(params: common_pb2.Sampling, token_ids: Sequence[int] = (), **fields: Any) -> pb.VerifyItem:
    """Return the first item for a sequence with these generated tokens."""
    return pb.VerifyItem(sequence_id=1, token_ids=[*PROMPT, *token_ids], sampling=params, **fields)


async def generate(target: Worker, params: common_pb2.Sampling, drafts: Sequence[int] = (), k: int = 0) -> list[int]:
    """The first `COUNT` tokens, or fewer if the text ends. `drafts`: tokens to draft; a fifth is replaced."""
    pick, token_ids = random.Random(k), list[int]()
    while len(token_ids) < COUNT and EOS_TOKEN_ID not in token_ids:
        draft = [token if pick.random() < 0.8 else pick.choice(BEGIN + END) for token in drafts[len(token_ids) :][:k]]
        fields = {"draft_token_ids": draft, "max_draft_tokens": pick.choice([0, k, 2 * k])}
        if token_ids:
            item = verify(1, len(PROMPT) + len(token_ids) - 1, token_ids[-1:])
            item.MergeFrom(pb.VerifyItem(**fields))
        else:
            item = first(params, **fields)
        (result,) = await target.round(item)
        token_ids += result.token_ids
    await target.release(1)
    end = token_ids.index(EOS_TOKEN_ID) + 1 if EOS_TOKEN_ID in token_ids else COUNT
    return token_ids[: min(end, COUNT)]


async def likely_tags(target: Worker, temperature: float) -> dict[str, Any]:
    """Tags that the model generates unprompted."""
    text = await generate(target, common_pb2.Sampling(temperature=temperature, seed=7, prompt_length=len(PROMPT)))
    return {"begin": text[:2], "end": text[9:11], "starts_inside": False}


@pytest.mark.parametrize("grammar", ["", TEXT], ids=["free", "grammar"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("generates_tags", [False, True])
async def test_drafts_and_lost_caches_do_not_change_the_tokens(
    target: Worker, grammar: str, temperature: float, generates_tags: bool
) -> None:
    tags = await likely_tags(target, temperature) if generates_tags else {}
    for maximum in MAXIMA:
        params = sampling(maximum, temperature, grammar, **tags)
        truth = await generate(target, params)
        if maximum is not None and not generates_tags:
            assert truth[maximum : maximum + len(END)] == END
        for k in (1, 3, 8):
            assert await generate(target, params, truth, k) == truth
        for length in range(1, len(truth), 3):
            (result,) = await target.round(first(params, truth[:length]))
            assert result.token_ids[0] == truth[length]
            await target.release(1)


async def test_the_grammar_follows_the_block(target: Worker) -> None:
    truth = await generate(target, sampling(3, 0.0, TEXT))
    assert truth[3:16] == ids_of('</t>{"name":"')


async def test_the_worker_appends_the_end_tag(target: Worker) -> None:
    params = sampling(2, 0.0)
    truth = await generate(target, params)
    (result,) = await target.round(first(params, max_draft_tokens=9, draft_token_ids=truth[:2]))
    assert (list(result.token_ids), result.num_forced_tokens) == (truth[:7], len(END))
    (result,) = await target.round(first(params, max_draft_tokens=3, draft_token_ids=truth[:2]))
    assert (list(result.token_ids), result.num_forced_tokens) == (truth[:4], 1)


@pytest.mark.parametrize("num_branches", [0, 2])
async def test_drafts_follow_the_limits(draft: Worker, num_branches: int) -> None:
    item = propose(1, 0, [*PROMPT, *ids_of("ab")], 8)
    item.sampling.CopyFrom(sampling(2, 0.0, TEXT))
    item.num_branches = num_branches
    (result,) = await draft.round(item)
    expected = [*END, *ids_of('{"name":"')][:8]
    if num_branches:
        best = result.branches[0]
        assert [best.token_id, *best.draft_token_ids][:8] == expected
    else:
        assert list(result.draft_token_ids) == expected


async def test_invalid_limits_are_refused(worker: Worker) -> None:
    for tags in ({"begin": []}, {"end": []}, {"leading": range(65)}):
        item = worker.item(1, 0, PROMPT)
        item.sampling.CopyFrom(sampling(1, 0.0, **tags))
        error = await failure(worker.round(item))
        assert f"items[0].sampling.reasoning.{next(iter(tags))}" in (error.details() or "")


@pytest.mark.parametrize("grammar", ["", TEXT], ids=["free", "grammar"])
async def test_limits_with_tags_outside_the_vocabulary_are_ignored(worker: Worker, grammar: str) -> None:
    item = worker.item(1, 0, PROMPT)
    item.sampling.CopyFrom(sampling(0, 0.0, grammar, end=[10**6]))
    plain = worker.item(2, 0, PROMPT)
    result, expected = await worker.round(item, plain)
    assert tokens_of(result) == tokens_of(expected) != []
