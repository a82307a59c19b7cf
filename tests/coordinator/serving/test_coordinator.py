"""The public API over real sockets, with fake workers."""

import asyncio
import random
from collections.abc import Sequence
from importlib.metadata import version
from itertools import product
from typing import Any

import grpc
import pytest
from serving import (
    RecordingDraft,
    RecordingTarget,
    Serving,
    check_tokens,
    expected_tokens,
    make_request,
    random_request,
    serving,
    stream,
)

from specpool.drafting.votes import LENGTHS
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE, FakeDraft, FakeTarget, byte_tokenizer
from specpool.v1 import generation_pb2 as pb


def request_with_text(target: FakeTarget, text: str, **params: Any) -> tuple[pb.GenerateRequest, list[int]]:
    """A request for a text, and the expected tokens."""
    count = params.setdefault("max_tokens", 12)
    expected = target.continuation(byte_tokenizer().encode(text).ids, count)
    return pb.GenerateRequest(text=text, sampling_params=pb.SamplingParams(**params)), expected


def check_statistics(response: pb.GenerateResponse) -> None:
    stats = response.speculative_decoding
    histogram = list(stats.acceptance_histogram)
    assert sum(histogram) == stats.num_spec_steps
    assert sum(i * rounds for i, rounds in enumerate(histogram)) == stats.num_accepted_draft_tokens
    assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert stats.num_spec_steps + stats.num_accepted_draft_tokens <= response.usage.completion_tokens
    if stats.num_spec_steps:
        assert stats.mean_acceptance_length == 1 + stats.num_accepted_draft_tokens / stats.num_spec_steps
        assert stats.draft_acceptance_rate == stats.num_accepted_draft_tokens / stats.num_draft_tokens
    else:
        assert stats.mean_acceptance_length == stats.draft_acceptance_rate == 0


async def test_tokens_match_plain_decoding_for_every_k() -> None:
    async with serving() as served:
        for request in (make_request(k=k) for k in range(9)):
            response = await served.expect(request)
            assert response.finish_reason == "length"
            assert not response.WhichOneof("matched_stop")
            _, complete = await stream(served, request)
            assert complete.token_ids == response.token_ids
            assert complete.text == response.text
            check_statistics(response)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 10, "max_batch_size": 3},
        {"max_num_seqs": 1, "max_batch_size": 1, "queue_size": 100},
        {"prefill_tokens": 5},
    ],
    ids=str,
)
async def test_tokens_do_not_depend_on_other_requests(settings: dict[str, int]) -> None:
    rng = random.Random(1)
    requests = [random_request(rng) for _ in range(30)]
    async with serving(target=RecordingTarget(eos_rate=0.02), **settings) as served:
        unary = [served.stub.Generate(request) for request in requests[:15]]
        streams = [stream(served, request) for request in requests[15:]]
        responses = await asyncio.gather(*unary, *streams)
        complete = [response if isinstance(response, pb.GenerateResponse) else response[1] for response in responses]
        for request, response in zip(requests, complete, strict=True):
            check_tokens(served.target, request, response)
            check_statistics(response)
        info = await served.until_idle()
        assert sum(info.counters.finished.values()) == info.counters.requests == 30


async def test_text_and_chat_use_the_tokenizer_of_the_target() -> None:
    async with serving() as served:
        request, expected = request_with_text(served.target, "Grüße, 世界")
        response = await served.stub.Generate(request)
        assert list(response.token_ids) == expected
        assert response.text == byte_tokenizer().decode(expected)
        assert response.usage.prompt_tokens == len("Grüße, 世界".encode())

        chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
        request = pb.GenerateRequest(chat=chat, sampling_params=pb.SamplingParams(max_tokens=5))
        prompt = byte_tokenizer().encode("user: hi\n").ids
        assert list((await served.stub.Generate(request)).token_ids) == served.target.continuation(prompt, 5)


class EuroTarget(RecordingTarget):
    """Generates only euro signs."""

    def choose(self, context: Any) -> int:
        euro = byte_tokenizer().encode("€").ids
        return euro[(euro.index(context[-1]) + 1) % 3] if context[-1] in euro else euro[0]


async def test_a_lagging_reader_gets_the_same_text() -> None:
    async with serving(target=EuroTarget(), with_draft=False) as served:
        generate = served.process.coordinator.generate
        served.process.coordinator.generate = lambda *request: Lagging(generate(*request))  # type: ignore[method-assign]
        for max_tokens in (30, 31):
            _, complete = await stream(served, make_request(max_tokens=max_tokens))
            assert complete.text == byte_tokenizer().decode(list(complete.token_ids))


class Lagging:
    """A generation whose caller starts reading after the end."""

    def __init__(self, generation: Any) -> None:
        self._generation = generation

    async def __aenter__(self) -> Any:
        entered = await self._generation.__aenter__()
        while entered.samples[0].sequence.finish is None:  # noqa: ASYNC110 - only the stream itself tells
            await asyncio.sleep(0.001)
        return entered

    async def __aexit__(self, *error: object) -> Any:
        return await self._generation.__aexit__(*error)


def prompt_that_ends(target: FakeTarget, within: int) -> list[int]:
    """A prompt whose continuation ends with an EOS token, but not immediately."""
    return next([i, j] for i in range(256) for j in range(256) if 3 < len(target.continuation([i, j], within)) < within)


async def test_the_end_of_sequence_token_stops_and_has_no_text() -> None:
    async with serving(target=RecordingTarget(eos_rate=0.1)) as served:
        prompt = prompt_that_ends(served.target, 30)
        for k in (0, 4):
            response = await served.expect(make_request(prompt, 30, k))
            assert response.finish_reason == "stop"
            assert response.token_ids[-1] == response.matched_token_id == EOS_TOKEN_ID
            assert response.text == byte_tokenizer().decode(list(response.token_ids[:-1]))
            _, complete = await stream(served, make_request(prompt, 30, k))
            assert complete.text == response.text
            ignoring = await served.expect(make_request(prompt, 30, k, ignore_eos=True))
            assert EOS_TOKEN_ID in ignoring.token_ids
            assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 30)


async def test_stop_tokens_stop_where_they_first_occur() -> None:
    async with serving() as served:
        expected = served.target.continuation([9, 9], 40)
        stop = expected[17]
        for k, ignore_eos in ((0, True), (3, False), (8, True)):
            request = make_request([9, 9], 40, k, stop_token_ids=[stop, 256], ignore_eos=ignore_eos)
            response = await served.expect(request)
            assert list(response.token_ids) == expected[: expected.index(stop) + 1]
            assert (response.finish_reason, response.matched_token_id) == ("stop", stop)
            chunks, complete = await stream(served, request)
            assert complete.text == byte_tokenizer().decode(list(complete.token_ids[:-1]))
            assert chunks[-1].token_ids[-1] == stop


async def test_max_tokens_defaults_to_the_setting_within_the_remaining_positions() -> None:
    async with serving(target=RecordingTarget(max_model_len=64), default_max_tokens=20) as served:
        for prompt_tokens, expected in [(4, 20), (50, 14), (63, 1)]:
            request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[7] * prompt_tokens))
            response = await served.stub.Generate(request)
            assert len(response.token_ids) == expected
            assert response.finish_reason == "length"


async def test_requests_can_use_all_positions_of_the_model() -> None:
    target = RecordingTarget(max_model_len=64)
    async with serving(target=target, draft=RecordingDraft(target, max_model_len=64, acceptance=1.0)) as served:
        await served.expect(make_request([5] * 10, 54, k=8))
        for request in served.target.requests:
            for item in request.items:
                assert item.base_length + len(item.token_ids) + len(item.draft_token_ids) <= 64


@pytest.mark.parametrize(("k", "policy"), [(1, "ragged"), (4, "exspec"), (7, "eqspec")])
async def test_full_acceptance_gains_k_plus_one_tokens_per_round(k: int, policy: str) -> None:
    target = RecordingTarget()
    async with serving(target=target, draft=FakeDraft(target, acceptance=1.0), policy=policy) as served:
        chunks, complete = await stream(served, make_request(max_tokens=1 + 5 * (k + 1), k=k))
        assert [len(chunk.token_ids) for chunk in chunks] == [1] + [k + 1] * 5
        stats = complete.speculative_decoding
        assert list(stats.acceptance_histogram) == [0] * k + [5]
        assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (5, 5 * k, 5 * k)
        assert stats.mean_acceptance_length == k + 1
        assert stats.draft_acceptance_rate == 1
        check_statistics(complete)


async def test_a_round_that_is_cut_counts_the_tokens_it_emitted() -> None:
    target, accepted, completed = LettersTarget(), 0, 0
    async with serving(target, FakeDraft(target, acceptance=1.0)) as served:
        for end, emitted in product(("stop_token_ids", "stop", "max_tokens"), (1, 2, 5)):
            last = 64 + emitted
            params = {"stop_token_ids": {end: [last]}, "stop": {end: [byte_tokenizer().decode([last])]}}.get(end, {})
            response = await served.stub.Generate(make_request([60], 40 if params else emitted, 4, **params))
            check_statistics(response)
            assert len(response.token_ids) == emitted
            has_drafted = emitted > 1 or end != "max_tokens"
            stats, counters = response.speculative_decoding, (await served.until_idle()).counters
            assert stats.num_spec_steps == has_drafted
            assert stats.mean_acceptance_length == emitted * has_drafted
            assert stats.num_accepted_draft_tokens == emitted - 1
            accepted, completed = accepted + emitted - 1, completed + response.usage.completion_tokens
            assert (counters.accepted_draft_tokens, counters.completion_tokens) == (accepted, completed)


class LettersTarget(FakeTarget):
    """A target that says "bcdefg..." after a prompt of one token."""

    def choose(self, context: Sequence[int]) -> int:
        return 64 + len(context)


async def test_server_info_explains_adaptive_lengths() -> None:
    async with serving(num_speculative_tokens=None, draft_method="best") as served:
        requests = [make_request([i, 1], max_tokens=60) for i in range(4)]
        await asyncio.gather(*(served.expect(request) for request in requests))
        assert not (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).HasField("num_speculative_tokens")
        info = await served.until_idle()
        counters, state = info.counters, info.speculation
        assert sum(i * times for i, times in enumerate(counters.draft_lengths)) == counters.draft_tokens
        assert sum(counters.draft_lengths) == counters.completion_tokens - counters.accepted_draft_tokens
        assert sum(drafts.draft_tokens for drafts in counters.drafts.values()) == counters.draft_tokens
        assert (
            sum(drafts.accepted_draft_tokens for drafts in counters.drafts.values()) == counters.accepted_draft_tokens
        )
        assert 0 < state.model_acceptance_rate < 1
        assert min(state.plain_tokens_per_s, state.draft_step_s, state.verify_s, state.exchange_s) > 0
        assert set(state.ngram_acceptance_rates) == set(LENGTHS)


class LoopingTarget(RecordingTarget):
    """Repeats the same few tokens."""

    def choose(self, context: Sequence[int]) -> int:
        return 65 + len(context) % 5


async def test_without_a_draft_worker_prompt_lookup_drafts() -> None:
    async with serving(LoopingTarget(), with_draft=False) as served:
        for method in (pb.DRAFT_METHOD_NGRAM, pb.DRAFT_METHOD_BEST):
            response = await served.expect(make_request(max_tokens=60, k=4, method=method))
            assert response.speculative_decoding.mean_acceptance_length > 3
            assert set((await served.info()).counters.drafts) == {"ngram"}


async def test_responses_carry_the_request_id_and_the_seed() -> None:
    async with serving() as served:
        response = await served.stub.Generate(make_request(request_id="mine", seed=0))
        assert response.request_id == "mine"
        assert response.HasField("seed")
        assert response.seed == 0
        drawn = [await served.stub.Generate(make_request()) for _ in range(2)]
        assert drawn[0].seed != drawn[1].seed
        assert len({"", "mine", drawn[0].request_id, drawn[1].request_id}) == 4


async def test_timings_add_up() -> None:
    async with serving() as served:
        timings = (await served.stub.Generate(make_request())).timings
        assert min(timings.queue_s, timings.prefill_s, timings.decode_s) > 0
        assert timings.queue_s + timings.prefill_s == pytest.approx(timings.time_to_first_token_s)
        assert timings.time_to_first_token_s + timings.decode_s == pytest.approx(timings.total_s)


async def test_a_queued_request_can_be_aborted() -> None:
    async with serving(max_num_seqs=1, with_draft=False) as served:
        served.target.open.clear()
        running = asyncio.ensure_future(served.expect(make_request()))
        await served.until(lambda info: info.running == 1)
        waiting = served.stub.Generate(make_request(request_id="waits"))
        await served.until(lambda info: info.queued == 1)
        await served.stub.Abort(pb.AbortRequest(request_id="waits"))
        response = await waiting
        assert (response.finish_reason, list(response.token_ids), response.text) == ("abort", [], "")
        timings = response.timings
        assert timings.queue_s == timings.total_s > 0
        assert timings.prefill_s == timings.decode_s == timings.time_to_first_token_s == 0
        served.target.open.set()
        await running


async def begun(served: Serving, request: pb.GenerateRequest) -> tuple[Any, pb.GenerateStreamResponse]:
    """A stream and its first message."""
    call = served.stub.GenerateStream(request)
    return call, await anext(aiter(call))


async def test_abort_returns_the_tokens_so_far() -> None:
    async with serving() as served:
        request = make_request(max_tokens=3000, k=0, request_id="long")
        call, first = await begun(served, request)
        await served.stub.Abort(pb.AbortRequest(request_id="long"))
        messages = [first, *[message async for message in call]]
        complete = messages[-1].complete
        assert complete.finish_reason == "abort"
        assert not complete.WhichOneof("matched_stop")
        assert 0 < len(complete.token_ids) < 3000
        assert list(complete.token_ids) == expected_tokens(served.target, request)[: len(complete.token_ids)]
        assert [t for message in messages[:-1] for t in message.chunk.token_ids] == list(complete.token_ids)
        assert "".join(message.chunk.text for message in messages[:-1]) == complete.text
        info = await served.until_idle()
        assert dict(info.counters.finished) == {"abort": 1}


async def test_an_aborted_request_id_can_be_reused_at_once() -> None:
    async with serving() as served:
        served.target.open.clear()
        old = asyncio.ensure_future(served.stub.Generate(make_request(request_id="again", max_tokens=50)))
        await served.until(lambda _: served.target.requests)
        await served.stub.Abort(pb.AbortRequest(request_id="again"))
        assert (await old).finish_reason == "abort"
        new = asyncio.ensure_future(served.stub.Generate(make_request([4], 3000, k=0, request_id="again")))
        await served.until(lambda info: info.queued == 1)
        served.target.open.set()
        await served.until(lambda info: info.running == 1)
        await served.stub.Abort(pb.AbortRequest(request_id="again"))
        assert (await new).finish_reason == "abort"
        await served.until_idle()


async def test_cancelled_and_expired_calls_free_their_slots() -> None:
    async with serving() as served:
        call, _ = await begun(served, make_request(max_tokens=4000, k=3))
        unary = served.stub.Generate(make_request([8], max_tokens=4000, k=3))
        await served.until(lambda info: info.running == 2 and len(served.draft.caches) == 2)
        call.cancel()
        unary.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await served.stub.Generate(make_request(max_tokens=4000, k=1), timeout=0.2)
        info = await served.until_idle()
        assert dict(info.counters.finished) == {"abort": 3}
        await served.expect(make_request())


async def test_model_info_has_models_and_limits() -> None:
    target = RecordingTarget(max_model_len=128)
    async with serving(target=target, num_speculative_tokens=3, max_num_speculative_tokens=5) as served:
        info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.target.vocab_size, info.target.tokenizer_fingerprint) == (VOCAB_SIZE, "fake")
        assert info.HasField("draft")
        assert (info.max_model_len, info.default_max_tokens) == (128, 256)
        assert (info.num_speculative_tokens, info.max_num_speculative_tokens) == (3, 5)
        assert info.has_chat_template
        assert list(info.eos_token_ids) == [EOS_TOKEN_ID]
        assert info.served_model_name == "fake"
    async with serving(served_model_name="qwen") as served:
        info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.target.model) == ("qwen", "fake")


async def test_server_info_has_counters_and_workers() -> None:
    async with serving(max_num_seqs=4, queue_size=7) as served:
        responses = await asyncio.gather(*(served.expect(make_request([i], k=2)) for i in range(5)))
        info = await served.until_idle()
        assert info.version == version("specpool")
        assert info.uptime_s > 0
        assert (info.policy, info.max_num_seqs, info.queue_size) == ("ragged", 4, 7)
        assert (info.target.address, info.draft.address) == (served.target_address, served.draft_address)
        assert (info.target.reason, info.draft.reason) == ("", "")
        assert (info.target.load.slots_total, info.draft.model.vocab_size) == (16, VOCAB_SIZE)
        counters = info.counters
        assert (counters.requests, dict(counters.finished)) == (5, {"length": 5})
        assert counters.completion_tokens == 5 * 24
        assert counters.rounds == len(served.target.requests)
        assert counters.draft_tokens == sum(r.speculative_decoding.num_draft_tokens for r in responses) > 0
        accepted = sum(r.speculative_decoding.num_accepted_draft_tokens for r in responses)
        assert counters.accepted_draft_tokens == accepted
        assert counters.cache_misses == 0
        assert set(counters.stage_seconds) == {"draft", "verify", "realign", "wire", "schedule"}
        rounds = (
            counters.grouping.same_length_rounds + counters.grouping.mixed_rounds + counters.grouping.group_sizes[0]
        )
        assert rounds == sum(counters.grouping.group_sizes) == counters.rounds
        assert counters.grouping.fallback_rounds == 0
        assert all(seconds >= 0 for seconds in counters.stage_seconds.values())


async def test_server_info_forwards_notes_and_ranks_of_workers() -> None:
    devices = ["cuda:0", "cuda:1"]
    async with serving(target=RecordingTarget(notes=["runs slowly"], rank_devices=devices)) as served:
        await served.expect(make_request())
        info = await served.until(lambda info: info.target.HasField("load"))
        assert (list(info.target.model.notes), list(info.draft.model.notes)) == (["runs slowly"], [])
        assert [rank.device for rank in info.target.load.ranks] == devices
        model = (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).target
        assert list(model.notes) == ["runs slowly"]
        assert (model.tensor_parallel, model.tensor_parallel_sums) == (2, "whole")


async def test_a_drain_finishes_running_calls_and_refuses_new_ones() -> None:
    requests = [make_request([i], 60) for i in range(3)]
    async with serving(drain_seconds=20.0) as served:
        calls = [(await begun(served, request))[0] for request in requests]
        served.target.open.clear()
        served.process.server.stop()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await served.stub.Generate(make_request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        stopping = asyncio.ensure_future(served.process.wait_stopped())
        served.target.open.set()
        for request, call in zip(requests, calls, strict=True):
            messages = [message async for message in call]
            check_tokens(served.target, request, messages[-1].complete)
        await stopping
