"""The Python clients: every option reaches the server, and what broke off goes on without saying anything twice."""

import asyncio
import math
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import RecordingTarget, Serving, expected_tokens, make_request, serving

from coordinator.server import CoordinatorServer
from specpool import client as library
from specpool.client import AsyncClient, Client, DivergedError, GenerateOptions
from specpool.client.retries import Replay, Retries
from specpool.protocol.errors import QueueFullError
from specpool.rpc.status import retry_delay, status_of
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

PROMPT = [5, 6, 7]
OTHER_OPTIONS = {"num_speculative_tokens", "draft_method", "request_id", "priority", "cache_salt"}
"""Options that are not sampling parameters."""


# --- Requests


def test_every_field_of_the_protocol_is_an_option() -> None:
    sampling = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert set(GenerateOptions.__annotations__) == sampling | OTHER_OPTIONS
    others = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields if field.containing_oneof is None}
    speculative = {"num_speculative_tokens", "draft_method"}
    assert others == OTHER_OPTIONS - speculative | {"sampling_params", "speculative"}


def test_options_become_fields_of_the_request() -> None:
    options: GenerateOptions = {
        "max_tokens": 5, "min_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 4, "min_p": 0.125,
        "repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": -0.25, "logit_bias": {3: 1.5},
        "stop": ["x", "y"], "stop_token_ids": [9], "ignore_eos": True, "seed": 11, "logprobs": 2, "n": 3,
        "num_speculative_tokens": 0, "draft_method": "ngram", "request_id": "r", "priority": -1,
        "cache_salt": "s",
    }  # fmt: skip
    request = library.make_request("hello", **options)
    assert (request.text, request.request_id, request.speculative.num_speculative_tokens) == ("hello", "r", 0)
    assert (request.priority, request.cache_salt) == (-1, "s")
    assert request.speculative.method == pb.DRAFT_METHOD_NGRAM
    params = request.sampling_params
    for name in set(options) - OTHER_OPTIONS:
        value = getattr(params, name)
        assert (dict(value) if name == "logit_bias" else list(value) if name.startswith("stop") else value) == (
            options[name]  # type: ignore[literal-required]
        )


def test_what_is_not_given_is_left_to_the_server() -> None:
    request = library.make_request("hello", max_tokens=None, temperature=None)
    assert request == pb.GenerateRequest(
        text="hello", sampling_params=pb.SamplingParams(), speculative=pb.SpeculativeParams()
    )


def test_prompts_are_text_chat_or_token_ids() -> None:
    assert library.make_request([1, 2]).tokenized.input_ids == [1, 2]
    (message,) = library.make_request([{"role": "user", "content": "hi"}]).chat.messages
    assert (message.role, message.content) == ("user", "hi")


def test_a_seed_is_drawn_where_tokens_depend_on_one_and_only_there() -> None:
    drawn = {library.make_request("a", temperature=1.0).sampling_params.seed for _ in range(9)}
    assert len(drawn) == 9
    assert not library.make_request("a", temperature=0.0).sampling_params.HasField("seed")
    assert library.make_request("a", temperature=1.0, seed=0).sampling_params.seed == 0


def test_one_stop_string_is_one_stop_string() -> None:
    assert library.make_request("a", stop="END").sampling_params.stop == ["END"]


@pytest.mark.parametrize(
    "prompt", [b"bytes", [{"role": "user"}], [{"content": "a"}], [{"role": "user", "content": None}], [[1]]]
)
def test_what_is_no_prompt_is_an_error(prompt: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        library.make_request(prompt)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        library.make_request("a", temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", 2**31),
        ("cache_salt", 5),
        ("cache_salt", "\ud800"),
        ("request_id", 5),
        ("seed", -1),
        ("stop", 5),
        ("logit_bias", {"a": 1}),
        ("num_speculative_tokens", -1),
        ("draft_method", "magic"),
    ],
)
def test_an_option_that_no_field_can_hold_is_named(option: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{option}\b"):
        library.make_request("a", **{option: value})


# --- Both clients, before a real coordinator


class Blocking:
    """The blocking client behind the interface of the other one, so that the same tests run on both."""

    def __init__(self, address: str, retry_seconds: float = 30.0) -> None:
        self._client = Client(address, retry_seconds)

    async def __aenter__(self) -> "Blocking":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *args, **options: asyncio.to_thread(method, *args, **options)

    async def stream(self, prompt: Any, **options: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        messages = self._client.stream(prompt, **options)
        try:
            while (message := await asyncio.to_thread(next, messages, None)) is not None:
                yield message
        finally:
            await asyncio.to_thread(messages.close)  # type: ignore[attr-defined]


CLIENTS = pytest.mark.parametrize("make_client", [AsyncClient, Blocking])


@CLIENTS
async def test_generates_streams_and_asks(make_client: Any) -> None:
    async with serving() as served, make_client(served.address) as client:
        expected = expected_tokens(served.target, make_request(PROMPT, 24))
        assert list((await client.generate(PROMPT, max_tokens=24)).token_ids) == expected
        messages = [message async for message in client.stream(PROMPT, max_tokens=24)]
        assert [token for message in messages for token in message.chunk.token_ids] == expected
        assert list(messages[-1].complete.token_ids) == expected
        assert (await client.model_info()).max_model_len == 4096
        assert (await client.server_info()).counters.requests == 2
        with pytest.raises(grpc.RpcError) as caught:
            await client.abort("nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@CLIENTS
async def test_leaving_a_stream_frees_the_request(make_client: Any) -> None:
    async with serving() as served, make_client(served.address) as client:
        messages = client.stream(PROMPT, max_tokens=4000)
        await anext(messages)
        await messages.aclose()
        await served.until_idle()


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_a_deadline_counts_for_all_attempts_together(make_client: Any, call: str) -> None:
    target = RecordingTarget()
    target.open.clear()
    async with serving(target) as served, make_client(served.address) as client:
        with pytest.raises(grpc.RpcError) as caught:
            await all_of(client, call, timeout_seconds=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        target.open.set()


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_an_error_that_is_no_absence_is_raised_at_once(make_client: Any, call: str) -> None:
    async with serving() as served, make_client(served.address) as client:
        with pytest.raises(grpc.RpcError) as caught:
            await all_of(client, call, temperature=-1.0)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_patience_with_a_server_that_is_not_there_ends(make_client: Any, call: str) -> None:
    async with make_client("127.0.0.1:1", retry_seconds=0.3) as client:
        with pytest.raises(grpc.RpcError) as caught:
            await all_of(client, call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def all_of(client: Any, call: str, **options: Any) -> list[int]:
    """Token ids of an answer, whole or streamed."""
    if call == "generate":
        return list((await client.generate(PROMPT, **options)).token_ids)
    return [token async for message in client.stream(PROMPT, **options) for token in message.chunk.token_ids]


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
async def test_a_timeout_that_is_none_is_an_error(make_client: Any, call: str, seconds: float) -> None:
    async with make_client("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="timeout_seconds must be above 0"):
            await all_of(client, call, timeout_seconds=seconds)


@CLIENTS
async def test_a_timeout_without_end_is_no_deadline(make_client: Any) -> None:
    async with serving() as served, make_client(served.address) as client:
        assert len(await all_of(client, "generate", timeout_seconds=math.inf, max_tokens=5)) == 5


@asynccontextmanager
async def restarting(served: Serving, after_calls: int) -> AsyncIterator[None]:
    """Ends the coordinator without a drain once the target was called so often, and starts another at its address."""

    async def restart() -> None:
        while served.target.calls < after_calls:  # noqa: ASYNC110 - a fake has no event for it
            await asyncio.sleep(0.001)
        served.process.server.stop(drain=False)
        await served.process.wait_stopped()
        port = int(served.address.rpartition(":")[2])
        settings = served.process.coordinator.settings.model_copy(update={"port": port})
        served.process = CoordinatorServer(settings)
        await served.process.start()

    task = asyncio.create_task(restart())
    try:
        yield
        await task
    finally:
        task.cancel()


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_a_coordinator_that_restarts_in_mid_answer_repeats_nothing(make_client: Any, call: str) -> None:
    async with serving() as served, make_client(served.address) as client:
        expected = expected_tokens(served.target, make_request(PROMPT, 300))
        async with restarting(served, after_calls=20):
            assert await all_of(client, call, max_tokens=300, request_id="mine") == expected
        assert served.target.calls > 25


# --- A server that breaks streams off wherever it likes


class Breaking(generation_pb2_grpc.GenerationServiceServicer):
    """Streams the same tokens in chunks of random size, and fails at the given ones."""

    def __init__(self, tokens: dict[int, list[int]], breaks: list[int], seed: int = 0) -> None:
        self.tokens, self.breaks = tokens, breaks
        self.chance = random.Random(seed)
        self.seeds: set[int] = set()
        self.request_ids: set[str] = set()
        self.calls = 0
        self.refusals: dict[int, grpc.StatusCode] = {}
        """How calls end that are not answered at all, by number."""

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        self.seeds.add(request.sampling_params.seed)
        self.request_ids.add(request.request_id)
        if self.calls in self.refusals:
            await context.abort(self.refusals[self.calls], "told to refuse")
        left = self.breaks.pop(0) if self.breaks else None
        for message in stream_of(self.tokens, self.chance):
            if left == 0:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "told to break")
            left = None if left is None else left - 1
            yield message


def stream_of(samples: dict[int, list[int]], chance: random.Random) -> Iterator[pb.GenerateStreamResponse]:
    """Chunks of all samples, mixed, and their ends. The text of token 65 is A."""
    position = dict.fromkeys(samples, 0)
    while position:
        index = chance.choice(sorted(position))
        tokens = samples[index]
        taken = tokens[position[index] : position[index] + chance.randint(1, 4)]
        if not taken:
            del position[index]
            yield pb.GenerateStreamResponse(complete=pb.GenerateResponse(index=index, token_ids=tokens))
            continue
        position[index] += len(taken)
        text = "".join(map(chr, taken))
        logprobs = [{"logprob": -token} for token in taken]
        chunk = pb.GenerateChunk(index=index, token_ids=taken, text=text, logprobs=logprobs)
        yield pb.GenerateStreamResponse(chunk=chunk)


@asynccontextmanager
async def breaking(servicer: Breaking) -> AsyncIterator[str]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@CLIENTS
async def test_a_stream_goes_on_where_it_broke_with_the_same_seed(make_client: Any) -> None:
    samples = {0: list(range(65, 90)), 1: list(range(40, 60))}
    servicer = Breaking(samples, breaks=[0, 3, 1, 9])
    async with breaking(servicer) as address, make_client(address) as client:
        messages = [message async for message in client.stream("a", temperature=1.0, n=2)]
    check_whole(samples, messages)
    assert len(servicer.seeds) == len(servicer.request_ids) == 1
    assert servicer.request_ids != {""}


@CLIENTS
@pytest.mark.parametrize("code", [grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_stream_that_was_cut_off_waits_until_it_is_let_in_again(
    make_client: Any, code: grpc.StatusCode
) -> None:
    samples = {0: list(range(65, 90))}
    servicer = Breaking(samples, breaks=[3])
    servicer.refusals = {2: code, 3: code}
    async with breaking(servicer) as address, make_client(address) as client:
        check_whole(samples, [message async for message in client.stream("a")])
    servicer.refusals = {5: code}
    async with breaking(servicer) as address, make_client(address) as client:
        with pytest.raises(grpc.RpcError) as caught:
            [message async for message in client.stream("a")]
    assert caught.value.code() is code


@CLIENTS
async def test_a_request_that_always_breaks_at_the_same_place_is_given_up(make_client: Any) -> None:
    """What is repeated is no progress."""
    servicer = Breaking({0: [65]}, breaks=[1] * 1000)
    async with breaking(servicer) as address, make_client(address, retry_seconds=0.5) as client:
        with pytest.raises(grpc.RpcError) as caught:
            [message async for message in client.stream("a")]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert servicer.calls > 1


def test_pauses_grow_until_there_is_progress_and_end_with_patience_or_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specpool.client.retries.time.monotonic", lambda: now)
    monkeypatch.setattr("random.uniform", max)
    now, error = 100.0, Unavailable()
    retries = Retries(patience=10.0, timeout=30.0)
    pauses = []
    for _ in range(6):
        pauses.append(retries.pause(error))
        now += pauses[-1]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    now = 109.5
    with pytest.raises(Unavailable):
        retries.pause(error)
    retries.progress()
    assert retries.pause(error) == 0.1
    retries.progress()
    now = 129.95
    assert retries.remaining == pytest.approx(0.05)
    with pytest.raises(Unavailable):
        retries.pause(error)


class Unavailable(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


def exhausted(seconds: float | None) -> grpc.aio.AioRpcError:
    """A refusal, with the delay that the server asks for."""
    error = QueueFullError("full", seconds or 0.0)
    code, text, metadata = status_of(error)
    trailing = grpc.aio.Metadata(*(metadata if seconds is not None else ()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, text)


def test_one_that_is_told_to_wait_waits_at_least_as_long_and_not_with_all_others() -> None:
    pauses = [Retries(patience=60.0, timeout=None).pause(exhausted(2.5)) for _ in range(20)]
    assert all(2.5 <= pause < 5 for pause in pauses)
    assert len(set(pauses)) > 10


@pytest.mark.parametrize(("patience", "delay"), [(60.0, None), (2.0, 2.5), (0.0, 0.0)])
def test_a_refusal_is_final_without_a_delay_or_beyond_patience(patience: float, delay: float | None) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        Retries(patience, timeout=None).pause(exhausted(delay))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_details_that_are_none_are_no_delay() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff"))
    assert retry_delay(grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing)) is None


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_a_full_queue_is_waited_for(make_client: Any, call: str) -> None:
    target = RecordingTarget()
    with mock.patch("coordinator.requests.in_flight.FIRST_RETRY", 0.1):
        async with serving(target, queue_size=1, max_num_seqs=1) as served, make_client(served.address) as client:
            target.open.clear()
            others = asyncio.gather(*(served.expect(make_request(max_tokens=3)) for _ in range(2)))
            await served.until(lambda info: (info.running, info.queued) == (1, 1))
            async with make_client(served.address, retry_seconds=0) as impatient:
                with pytest.raises(grpc.RpcError) as caught:
                    await all_of(impatient, call)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            answer = asyncio.create_task(all_of(client, call, max_tokens=5))
            await asyncio.sleep(0.3)
            target.open.set()
            await others
            assert await answer == expected_tokens(target, make_request(PROMPT, 5))


@CLIENTS
async def test_a_call_that_the_server_cancels_is_tried_again(make_client: Any) -> None:
    samples = {0: list(range(65, 90))}
    servicer = Breaking(samples, breaks=[])
    servicer.refusals = {1: grpc.StatusCode.CANCELLED, 2: grpc.StatusCode.CANCELLED}
    async with breaking(servicer) as address, make_client(address) as client:
        check_whole(samples, [message async for message in client.stream("a")])
    assert servicer.calls == 3


def test_a_client_that_is_closed_tries_nothing_again() -> None:
    async def serve() -> grpc.StatusCode:
        target = RecordingTarget()
        async with serving(target) as served:
            target.open.clear()
            client = Client(served.address)
            answer = asyncio.create_task(asyncio.to_thread(client.generate, PROMPT))
            await served.until(lambda info: info.running == 1)
            await asyncio.to_thread(client.__exit__, None, None, None)
            with pytest.raises(grpc.RpcError) as caught:
                await answer
            target.open.set()
            return caught.value.code()

    assert asyncio.run(serve()) is grpc.StatusCode.CANCELLED


def test_one_that_was_aborted_before_it_came_as_far_again_has_ended() -> None:
    replay = Replay()
    replay.begin()
    replay.fresh(pb.GenerateStreamResponse(chunk=pb.GenerateChunk(token_ids=[1, 2, 3], text="abc")))
    replay.begin()
    end = pb.GenerateResponse(token_ids=[1, 2], finish_reason="abort")
    assert replay.fresh(pb.GenerateStreamResponse(complete=end)) is not None
    for other in (
        pb.GenerateResponse(token_ids=[1, 7], finish_reason="abort"),
        pb.GenerateResponse(token_ids=[1, 2], finish_reason="stop"),
    ):
        replay = Replay()
        replay.begin()
        replay.fresh(pb.GenerateStreamResponse(chunk=pb.GenerateChunk(token_ids=[1, 2, 3], text="abc")))
        with pytest.raises(DivergedError):
            replay.fresh(pb.GenerateStreamResponse(complete=other))


@CLIENTS
async def test_other_tokens_than_before_are_an_error_and_not_an_answer(make_client: Any) -> None:
    servicer = Breaking({0: [65] * 20}, breaks=[5])
    async with breaking(servicer) as address, make_client(address) as client:
        messages = client.stream("a")
        await anext(messages)
        servicer.tokens = {0: [66] * 20}
        with pytest.raises(DivergedError):
            async for _ in messages:
                pass


def check_whole(samples: dict[int, list[int]], messages: list[pb.GenerateStreamResponse]) -> None:
    for index, tokens in samples.items():
        chunks = [m.chunk for m in messages if m.HasField("chunk") and m.chunk.index == index]
        assert [token for chunk in chunks for token in chunk.token_ids] == tokens
        assert "".join(chunk.text for chunk in chunks) == "".join(map(chr, tokens))
        assert [-found.logprob for chunk in chunks for found in chunk.logprobs] == tokens
        ends = [m.complete for m in messages if m.HasField("complete") and m.complete.index == index]
        assert [list(end.token_ids) for end in ends] == [tokens]


@given(
    samples=st.dictionaries(st.integers(0, 3), st.lists(st.integers(40, 99), max_size=20), min_size=1),
    breaks=st.lists(st.integers(0, 12), max_size=5),
    seed=st.integers(0, 99),
)
def test_whatever_breaks_every_token_comes_once(samples: dict[int, list[int]], breaks: list[int], seed: int) -> None:
    chance, replay = random.Random(seed), Replay()
    got = []
    for count in [*breaks, None]:
        replay.begin()
        for i, message in enumerate(stream_of(samples, chance)):
            if i == count:
                break
            if (fresh := replay.fresh(message)) is not None:
                got.append(fresh)
    check_whole(samples, got)


def test_threads_may_share_a_client() -> None:
    samples = {0: list(range(65, 90))}
    got: list[list[pb.GenerateStreamResponse]] = []

    async def serve() -> None:
        async with breaking(Breaking(samples, breaks=[2, 2])) as address:
            with Client(address) as client:
                threads = [threading.Thread(target=lambda: got.append(list(client.stream("a")))) for _ in range(4)]
                for thread in threads:
                    thread.start()
                await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))

    asyncio.run(serve())
    assert len(got) == 4
    for messages in got:
        check_whole(samples, messages)
