"""Rounds of constrained sequences: equal tokens with and without drafts, and grammars that the target cannot follow."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from serving import RecordingTarget, make_request, serving, violated_fields

from coordinator.rounds import failures
from coordinator.rounds.running import RETRY_SECONDS
from specpool.v1 import generation_pb2 as pb

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"first_answer": {"enum": ["yes", "no"]}, "second_answer": {"enum": ["left", "right", 1]}},
        "required": ["first_answer", "second_answer"],
        "additionalProperties": False,
    }
)


def constrained(seed: int, k: int | None = None, max_tokens: int = 120, **params: Any) -> pb.GenerateRequest:
    return make_request([1, 2, seed], max_tokens, k, **{"json_schema": SCHEMA, **params})


def grammar_of(target: RecordingTarget) -> str:
    grammars = [item.sampling.grammar for request in target.requests for item in request.items]
    return next(filter(None, grammars))


def check(target: RecordingTarget, request: pb.GenerateRequest, response: pb.GenerateResponse) -> None:
    prompt, count = list(request.tokenized.input_ids), request.sampling_params.max_tokens
    assert list(response.token_ids) == target.continuation(prompt, count, grammar_of(target))
    assert response.finish_reason in ("stop", "length")
    if response.finish_reason == "stop":
        assert json.loads(response.text)["first_answer"] in ("yes", "no")


@pytest.mark.parametrize("settings", [{}, {"draft_method": "best"}, {"overlap": "on"}, {"with_draft": False}], ids=str)
async def test_drafts_change_no_tokens(settings: dict[str, Any]) -> None:
    async with serving(RecordingTarget(), **settings) as served:
        requests = [constrained(seed, k) for seed, k in enumerate([0, 1, 2, 3, 4, None])]
        plain = [make_request([9, seed], 60) for seed in range(2)]
        responses = await asyncio.gather(*map(served.stub.Generate, requests), *map(served.expect, plain))
        for request, response in zip(requests, responses, strict=False):
            check(served.target, request, response)
        info = await served.until_idle()
        assert info.counters.drafts["grammar"].draft_tokens > 0
        assert info.counters.drafts["grammar"].draft_tokens == info.counters.drafts["grammar"].accepted_draft_tokens
        first = responses[0].speculative_decoding
        assert first.num_draft_tokens == 0
        assert responses[4].speculative_decoding.num_accepted_draft_tokens > 0


async def test_lost_caches_and_failed_rounds_change_no_tokens() -> None:
    async with serving(RecordingTarget(slots=4)) as served:
        served.target.forget_every = 7
        served.draft.forget_every = 11
        served.target.fail_next = [StatusCode.INTERNAL]
        requests = [constrained(seed) for seed in range(8)]
        for request, response in zip(requests, await asyncio.gather(*map(served.stub.Generate, requests)), strict=True):
            check(served.target, request, response)
        await served.until_idle()


async def test_sequences_reserve_room_for_forced_tokens() -> None:
    """The fake target asserts that each item, with all forced tokens, fits in the reserved positions."""
    async with serving(RecordingTarget(kv_positions=256), num_speculative_tokens=8) as served:
        requests = [constrained(seed) for seed in range(8)]
        for request, response in zip(requests, await asyncio.gather(*map(served.stub.Generate, requests)), strict=True):
            check(served.target, request, response)
        await served.until_idle()


# --- Grammars that the target cannot follow


class DeadEnd(RecordingTarget):
    """Fails each grammar after some tokens."""

    def choose_legal(self, context: Sequence[int], grammar: str, prompt_length: int) -> int:
        if grammar and len(context) >= prompt_length + 10:
            raise ValueError("ParserTooComplex\nstep limit exceeded")
        return super().choose_legal(context, grammar, prompt_length)


async def test_a_grammar_that_fails_fails_only_its_request() -> None:
    async with serving(DeadEnd()) as served:
        others = asyncio.gather(*(served.expect(make_request([seed], 60)) for seed in range(3)))
        for params in ({}, {"n": 3, "temperature": 1.0}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await served.stub.Generate(constrained(1, **params))
            assert refused.value.code() is StatusCode.INVALID_ARGUMENT
            assert violated_fields(refused.value) == ["sampling_params.json_schema"]
            assert "tokens: ParserTooComplex step limit exceeded" in refused.value.details()
        await others
        await served.until_idle()


async def test_rounds_go_on_while_a_grammar_is_compiled() -> None:
    async with serving(RecordingTarget()) as served:
        served.target.rounds_to_compile = 5
        requests = [constrained(1), constrained(2, 0)]
        others = [make_request([seed], 60) for seed in range(2)]
        responses = await asyncio.gather(*map(served.stub.Generate, requests), *map(served.expect, others))
        for request, response in zip(requests, responses, strict=False):
            check(served.target, request, response)
        await served.until_idle()


async def test_a_grammar_that_is_never_ready_fails_without_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_GRAMMAR_WAITS", 8)
    async with serving(RecordingTarget()) as served:
        served.target.rounds_to_compile = 1000
        began = asyncio.get_running_loop().time()
        with pytest.raises(grpc.aio.AioRpcError, match="has not been ready for it in 8 rounds") as refused:
            await served.stub.Generate(constrained(1))
        assert refused.value.code() is StatusCode.UNAVAILABLE
        assert asyncio.get_running_loop().time() - began > 2 * RETRY_SECONDS  # up to three rounds pause at a time
        await served.until_idle()


async def test_a_target_that_lost_llguidance_gets_no_constrained_sequences() -> None:
    async with serving(RecordingTarget(pass_seconds=lambda rows: 0.02), wait_for_draft=False) as served:
        request = constrained(1, 0)
        begun = [served.stub.Generate(each) for each in (request, make_request([1], 60))]
        await served.until(lambda info: info.counters.completion_tokens > 4)
        await served.target.stop()
        served.target.supports_grammars = False
        await served.target.start(served.target_address)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await begun[0]
        assert refused.value.code() is StatusCode.UNIMPLEMENTED
        assert refused.value.details().startswith("sampling_params.json_schema: the target worker at ")
        assert list((await begun[1]).token_ids) == served.target.continuation([1], 60)
        with pytest.raises(grpc.aio.AioRpcError, match="needs llguidance"):
            await served.stub.Generate(request)
        await served.until_idle()
