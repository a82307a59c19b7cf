"""Rounds of sequences with grammars: the same tokens with every draft, forced tokens, and failures."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from worker_service import DRAFT, OK, TARGET, Role, Worker, propose, serving, verify

from specpool.engine.run.engine import Engine
from specpool.engine.sampling.grammars import Grammars
from specpool.testing import EOS_TOKEN_ID, byte_tokenizer
from specpool.v1 import common_pb2
from specpool.v1 import draft_worker_pb2 as draft_pb
from specpool.v1 import target_worker_pb2 as pb

PROMPT = [5, 6, 7, 8]
TOKENIZER = byte_tokenizer()
OBJECT = r"""
start: "{\"name\":\"" NAME "\",\"ages\":[" AGE ("," AGE)* "]}"
NAME: /[a-z]{2,9}/
AGE: /[1-9][0-9]?/
"""
TEXTS = 'start: "red" | "grey goose"'
GRAMMAR_FAILED, GRAMMAR_NOT_READY = common_pb2.ITEM_STATUS_GRAMMAR_FAILED, common_pb2.ITEM_STATUS_GRAMMAR_NOT_READY


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for grammars, however busy the machine is."""
    monkeypatch.setattr("specpool.engine.run.sequences.GRAMMAR_SECONDS", 60.0)


def sampled(grammar: str = OBJECT, temperature: float = 0.0) -> common_pb2.Sampling:
    return common_pb2.Sampling(grammar=grammar, prompt_length=len(PROMPT), temperature=temperature, seed=7)


def first(sampling: common_pb2.Sampling, token_ids: Sequence[int] = (), **fields: Any) -> pb.VerifyItem:
    """The first contact with a sequence that has generated these tokens."""
    return pb.VerifyItem(sequence_id=1, token_ids=[*PROMPT, *token_ids], sampling=sampling, **fields)


def text_of(token_ids: Sequence[int]) -> str:
    text: str = TOKENIZER.decode([token for token in token_ids if token != EOS_TOKEN_ID])
    return text


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


async def plain(target: Worker, sampling: common_pb2.Sampling, count: int = 40, logprobs: int | None = None) -> Any:
    """The results of plain decoding, one token each, up to the end of the text or `count` tokens."""
    results = await target.round(first(sampling, logprobs=logprobs))
    while results[-1].token_ids[0] != EOS_TOKEN_ID and len(results) < count:
        length = len(PROMPT) + len(results) - 1
        item = verify(1, length, results[-1].token_ids)
        if logprobs is not None:
            item.logprobs = logprobs
        results += await target.round(item)
    await target.release(1)
    return results


def tokens_in(results: Sequence[Any]) -> list[int]:
    return [token for result in results for token in result.token_ids]


@pytest.mark.parametrize(("temperature", "logprobs"), [(0.0, None), (1.5, 3)])
async def test_drafts_do_not_change_the_tokens(target: Worker, temperature: float, logprobs: int | None) -> None:
    """Drafts are right, wrong and illegal. Log-probabilities have the same bits."""
    sampling = sampled(temperature=temperature)
    expected = await plain(target, sampling, logprobs=logprobs)
    truth = tokens_in(expected)
    assert text_of(truth).startswith('{"name":"')
    for k in range(1, 9):
        results = await target.round(first(sampling, logprobs=logprobs, draft_token_ids=truth[:k]))
        while (done := len(tokens_in(results))) < len(truth):
            drafts = [*truth[done : done + k - 1], *ids_of("~" if done % 2 else "3")][: len(truth) - done - 1]
            item = verify(1, len(PROMPT) + done - 1, truth[done - 1 : done], drafts)
            if logprobs is not None:
                item.logprobs = logprobs
            results += await target.round(item)
        assert tokens_in(results) == truth
        if logprobs is not None:
            assert [entry for result in results for entry in result.logprobs] == [
                entry for result in expected for entry in result.logprobs
            ]
        await target.release(1)


async def test_the_worker_appends_what_the_grammar_forces(target: Worker) -> None:
    truth = tokens_in(await plain(target, sampled()))
    begin = ids_of('{"name":"')
    (result,) = await target.round(first(sampled(), max_draft_tokens=16), round_id=(number := next(target.rounds)))
    assert list(result.token_ids) == truth[: len(begin) + 1]
    assert result.num_forced_tokens == len(begin)
    assert result.cached_length == len(PROMPT) + len(begin)
    again = await target.round(first(sampled(), max_draft_tokens=16), round_id=number)
    assert again == [result]
    (result,) = await target.round(first(sampled(), max_draft_tokens=5, draft_token_ids=begin[:2]))
    assert (result.num_forced_tokens, list(result.token_ids)) == (3, truth[:6])
    (result,) = await target.round(first(sampled(), max_draft_tokens=2, draft_token_ids=begin[:3]))
    assert (result.num_forced_tokens, list(result.token_ids)) == (0, truth[:4])
    (result,) = await target.round(first(sampled(), max_draft_tokens=9, draft_token_ids=ids_of("x")))
    assert (result.num_forced_tokens, list(result.token_ids)) == (0, truth[:1])
    (result,) = await target.round(first(sampled()))
    assert (result.num_forced_tokens, list(result.token_ids)) == (0, truth[:1])


async def test_a_repeated_pass_appends_the_same_tokens(target: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = await target.round(first(sampled(), max_draft_tokens=16), round_id=100)
    assert expected.num_forced_tokens
    failures, forward = [torch.cuda.OutOfMemoryError("CUDA out of memory.")], target.engine.forward

    def forward_once_memory_is_free(spans: Any) -> Any:
        if failures:
            raise failures.pop()
        return forward(spans)

    monkeypatch.setattr(target.engine, "forward", forward_once_memory_is_free)
    monkeypatch.setattr(target.engine, "shrink_passes", lambda: True)
    assert await target.round(first(sampled(), max_draft_tokens=16), round_id=100) == [expected]
    assert not failures


async def test_a_round_sent_ahead_continues_after_forced_tokens(target: Worker) -> None:
    truth = tokens_in(await plain(target, sampled()))
    await target.round(first(sampled(), max_draft_tokens=6), round_id=200)
    item = pb.VerifyItem(sequence_id=1, after_round_id=200, max_draft_tokens=6)
    (result,) = await target.round(item, round_id=201)
    assert list(result.token_ids) == truth[7 : 7 + len(result.token_ids)]
    assert result.num_forced_tokens == 2


async def test_a_lost_cache_is_rebuilt_with_its_grammar(target: Worker) -> None:
    truth = tokens_in(await plain(target, sampled()))
    for length in range(0, len(truth), 5):
        (result,) = await target.round(first(sampled(), truth[:length]))
        assert list(result.token_ids) == truth[length : length + 1]
        await target.release(1)


async def test_branches_of_the_draft_worker_are_legal(draft: Worker) -> None:
    item = draft_pb.ProposeItem(
        sequence_id=1, token_ids=[*PROMPT, *ids_of('{"name":"ab')], sampling=sampled(), num_draft_tokens=4,
        num_branches=3, num_unverified=1,
    )  # fmt: skip
    (result,) = await draft.round(item)
    assert result.branches
    for branch in result.branches:
        text = '{"name":"a' + "b" * branch.num_accepted + text_of([branch.token_id, *branch.draft_token_ids])
        assert matches_prefix(draft.engine, text), text


async def test_drafts_are_legal_and_forced_tokens_take_no_pass(draft: Worker) -> None:
    for k in (1, 4, 9, 14):
        before = draft.engine.passes
        item = propose(1, 0, PROMPT, k)
        item.sampling.CopyFrom(sampled())
        (result,) = await draft.round(item)
        forced = min(k, len('{"name":"'))
        assert len(result.draft_token_ids) == k
        assert matches_prefix(draft.engine, text_of(result.draft_token_ids))
        assert draft.engine.passes - before == 1 + max(0, k - forced - 1)
        assert result.cached_length == len(PROMPT) + k - 1 == draft.cached(1)
        await draft.release(1)


def matches_prefix(engine: Engine, text: str) -> bool:
    grammars = Grammars(engine.loaded.tokenizer, engine.vocab_size, 2**26)
    assert not grammars.error_of(OBJECT)
    sequence = grammars.start(OBJECT, 0)
    (mask,) = sequence.masks(ids_of(text), 1)
    return mask is not None


async def test_a_grammar_that_does_not_compile_fails_alone(worker: Worker) -> None:
    item, other = worker.item(1, 0, PROMPT), worker.item(2, 0, PROMPT)
    item.sampling.CopyFrom(sampled("start: missing"))
    result, fine = await worker.round(item, other)
    assert fine.status == OK
    if worker.role is DRAFT:  # the draft only helps
        assert result.status == OK
    else:
        assert result.status == GRAMMAR_FAILED
        assert "missing" in result.error


async def test_a_text_that_the_grammar_does_not_allow_fails_alone(target: Worker) -> None:
    result, fine = await target.round(first(sampled(), ids_of("x")), verify(2, 0, PROMPT))
    assert (result.status, fine.status) == (GRAMMAR_FAILED, OK)
    assert "does not match" in result.error
    assert fine.token_ids


async def test_nobody_waits_for_a_slow_grammar(target: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.engine.run.sequences.GRAMMAR_SECONDS", 0.0)
    alternatives = " | ".join(f'"{number}" /[a-z]{{1,9}}{number}x/' for number in range(500))
    item = first(sampled(f"start: {alternatives}"))
    result, fine = await target.round(item, verify(2, 0, PROMPT))
    assert (result.status, fine.status) == (GRAMMAR_NOT_READY, OK)
    while result.status == GRAMMAR_NOT_READY:
        (result,) = await target.round(item)
    assert result.status == OK


MANY_STATES = r"start: /(.|\n)*[!-~](.|\n){12}z1/"
"""The lexer has one state for every pattern of printable ASCII characters in the last characters."""


@pytest.mark.parametrize("max_states", [60, 32_000])
async def test_grammar_limits_end_requests_at_the_same_token_as_plain_decoding(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, max_states: int
) -> None:
    """Drafts and earlier requests with the same grammar do not count against a request's limit."""
    monkeypatch.setattr("specpool.engine.sampling.grammars.SMALL_LEXER_STATES", 40)
    monkeypatch.setattr("specpool.protocol.grammars.MAX_LEXER_STATES", max_states)
    outcomes = []
    async with serving(TARGET, engines[TARGET.name]) as target:
        for k in (0, 12, 1):
            results = await target.round(first(sampled(MANY_STATES, temperature=1.5)))
            while results[-1].status == OK and len(token_ids := tokens_in(results)) < 90:
                drafts = ids_of("aeiou" * 3)[:k]
                results += await target.round(verify(1, len(PROMPT) + len(token_ids) - 1, token_ids[-1:], drafts))
            outcomes.append((tokens_in(results)[:90], results[-1].status, results[-1].error))
            await target.release(1)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0][1] == (GRAMMAR_FAILED if max_states == 60 else OK)


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize("role", [TARGET, DRAFT], ids=["target", "draft"])
async def test_workers_say_whether_they_have_grammars(
    role: Role, is_installed: bool, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed:
        monkeypatch.setattr("specpool.environment.extras._is_installed", lambda module: module != "llguidance")
    async with serving(role, engines[role.name]) as worker:
        assert (await worker.info()).load.supports_grammars == is_installed
        item = worker.item(1, 0, PROMPT)
        item.sampling.CopyFrom(sampled(TEXTS))
        (result,) = await worker.round(item)
        assert result.status == (OK if is_installed or role is DRAFT else GRAMMAR_FAILED)
        assert is_installed or role is DRAFT or "llguidance" in result.error
