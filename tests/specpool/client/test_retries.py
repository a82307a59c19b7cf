"""Retries of both clients: a broken stream continues, and every token is delivered once."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_client import CLIENTS

from specpool.client import Client, DivergedError
from specpool.client.retries import Replay, Retries
from specpool.errors import CertificateError, ProtocolError, RequestError, ResourceExhaustedError, UnavailableError
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

SAMPLES = {0: list(range(65, 90)), 1: list(range(40, 60))}
UNAVAILABLE, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED
EXISTS, EXHAUSTED = grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED


# --- Delays


def test_backoff_grows_until_progress_patience_or_deadline() -> None:
    now, error = 100.0, UnavailableError("gone", UNAVAILABLE)
    retries = Retries(10.0, 30.0, lambda: now, max)
    pauses = []
    for _ in range(6):
        pauses.append(retries.pause(error))
        now += pauses[-1]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    now = 109.5
    with pytest.raises(UnavailableError):
        retries.pause(error)
    retries.progress()
    assert retries.pause(error) == 0.1
    retries.progress()
    now = 129.95
    assert retries.remaining == pytest.approx(0.05)
    with pytest.raises(UnavailableError):
        retries.pause(error)


def exhausted(seconds: float | None) -> ResourceExhaustedError:
    """A RESOURCE_EXHAUSTED error with this retry delay."""
    error = ResourceExhaustedError("full", EXHAUSTED)
    error.retry_after = seconds
    return error


def test_retry_delays_are_minimums_with_jitter() -> None:
    pauses = [Retries(patience=60.0, timeout=None).pause(exhausted(2.5)) for _ in range(20)]
    assert all(2.5 <= pause < 5 for pause in pauses)
    assert len(set(pauses)) > 10


@pytest.mark.parametrize(("patience", "delay"), [(60.0, None), (2.0, 2.5), (0.0, 0.0)])
def test_exhausted_errors_are_final_without_delay_or_beyond_patience(patience: float, delay: float | None) -> None:
    with pytest.raises(ResourceExhaustedError):
        Retries(patience, timeout=None).pause(exhausted(delay))


@pytest.mark.parametrize("kind", [ProtocolError, CertificateError])
def test_permanent_faults_of_a_connection_are_not_retried(kind: type[RequestError]) -> None:
    with pytest.raises(kind):
        Retries(patience=60.0, timeout=None).pause(kind("cannot connect", UNAVAILABLE))


# --- Streams


def stream_of(samples: dict[int, list[int]], rng: random.Random) -> Iterator[pb.GenerateStreamResponse]:
    """Yield interleaved chunks of all samples, then the end of each. The text of token 65 is A."""
    position = dict.fromkeys(samples, 0)
    while position:
        index = rng.choice(sorted(position))
        tokens = samples[index]
        taken = tokens[position[index] : position[index] + rng.randint(1, 4)]
        if not taken:
            del position[index]
            yield pb.GenerateStreamResponse(
                complete=pb.GenerateResponse(index=index, token_ids=tokens), starts_in_reasoning=True
            )
            continue
        position[index] += len(taken)
        text = "".join(map(chr, taken))
        logprobs = [{"logprob": -token} for token in taken]
        chunk = pb.GenerateChunk(index=index, token_ids=taken, text=text, logprobs=logprobs)
        yield pb.GenerateStreamResponse(chunk=chunk, starts_in_reasoning=True)


def check_complete(samples: dict[int, list[int]], messages: list[pb.GenerateStreamResponse]) -> None:
    for index, tokens in samples.items():
        chunks = [m.chunk for m in messages if m.HasField("chunk") and m.chunk.index == index]
        assert [token for chunk in chunks for token in chunk.token_ids] == tokens
        assert "".join(chunk.text for chunk in chunks) == "".join(map(chr, tokens))
        assert [-logprob.logprob for chunk in chunks for logprob in chunk.logprobs] == tokens
        ends = [m.complete for m in messages if m.HasField("complete") and m.complete.index == index]
        assert [list(end.token_ids) for end in ends] == [tokens]


@given(
    samples=st.dictionaries(st.integers(0, 3), st.lists(st.integers(40, 99), max_size=20), min_size=1),
    breaks=st.lists(st.integers(0, 12), max_size=5),
    seed=st.integers(0, 99),
)
def test_every_token_is_delivered_once(samples: dict[int, list[int]], breaks: list[int], seed: int) -> None:
    rng, replay = random.Random(seed), Replay()
    delivered_messages = []
    for count in [*breaks, None]:
        replay.begin()
        for i, message in enumerate(stream_of(samples, rng)):
            if i == count:
                break
            if (fresh := replay.fresh(message)) is not None:
                delivered_messages.append(fresh)
    check_complete(samples, delivered_messages)
    assert all(message.starts_in_reasoning for message in delivered_messages)


def replay_of(*messages: pb.GenerateStreamResponse) -> Replay:
    """A replay at the start of a repeated stream, after these messages."""
    replay = Replay()
    replay.begin()
    for message in messages:
        replay.fresh(message)
    replay.begin()
    return replay


def test_a_repeated_request_may_be_aborted_earlier() -> None:
    delivered = pb.GenerateStreamResponse(chunk=pb.GenerateChunk(token_ids=[1, 2, 3], text="abc"))
    for tokens, reason, diverged in (([1, 2], "abort", False), ([1, 7], "abort", True), ([1, 2], "stop", True)):
        end = pb.GenerateStreamResponse(complete=pb.GenerateResponse(token_ids=tokens, finish_reason=reason))
        if diverged:
            with pytest.raises(DivergedError):
                replay_of(delivered).fresh(end)
        else:
            assert replay_of(delivered).fresh(end) is not None


class Breaking(generation_pb2_grpc.GenerationServiceServicer):
    """Streams the same samples in random chunks, breaks streams after these numbers of chunks, and refuses calls."""

    def __init__(self, *breaks: int, samples: Any = SAMPLES, refusals: Any = None) -> None:
        """`refusals`: status by number of the call, from 1."""
        self.samples, self.breaks, self.refusals = samples, list(breaks), refusals or {}
        self.rng = random.Random(0)
        self.requests: list[pb.GenerateRequest] = []

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        if (status := self.refusals.get(len(self.requests))) is not None:
            await context.abort(status, "told to refuse")
        limit = self.breaks.pop(0) if self.breaks else None
        for count, message in enumerate(stream_of(self.samples, self.rng)):
            if count == limit:
                await context.abort(UNAVAILABLE, "told to break")
            yield message


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
@pytest.mark.parametrize(
    ("breaks", "refusals"),
    [
        ([0, 3, 1, 9], {}),
        ([3], {2: EXISTS, 3: EXISTS}),
        ([3], {2: EXHAUSTED, 3: EXHAUSTED}),
        ([], {1: CANCELLED, 2: CANCELLED}),
    ],
)
async def test_a_broken_stream_continues(make_client: Any, breaks: list[int], refusals: Any) -> None:
    servicer = Breaking(*breaks, refusals=refusals)
    async with breaking(servicer) as address, make_client(address) as client:
        check_complete(SAMPLES, [message async for message in client.stream("a", temperature=1.0, n=2)])
    assert len(servicer.requests) == 1 + len(breaks) + len(refusals)
    assert len({request.sampling_params.seed for request in servicer.requests}) == 1
    (request_id,) = {request.request_id for request in servicer.requests}
    assert request_id


@CLIENTS
@pytest.mark.parametrize(
    ("breaks", "refusals", "code"),
    [([], {1: EXISTS}, EXISTS), ([], {1: EXHAUSTED}, EXHAUSTED), ([1] * 1000, {}, UNAVAILABLE)],
)
async def test_a_stream_without_progress_fails(
    make_client: Any, breaks: list[int], refusals: Any, code: grpc.StatusCode
) -> None:
    servicer = Breaking(*breaks, samples={0: [65]}, refusals=refusals)
    async with breaking(servicer) as address, make_client(address, retry_seconds=0.5) as client:
        with pytest.raises(grpc.RpcError) as caught:
            [message async for message in client.stream("a")]
    assert caught.value.code() is code
    assert (len(servicer.requests) > 1) is bool(breaks)


@CLIENTS
async def test_different_tokens_raise_diverged_error(make_client: Any) -> None:
    servicer = Breaking(5, samples={0: [65] * 20})
    async with breaking(servicer) as address, make_client(address) as client:
        messages = client.stream("a")
        await anext(messages)
        servicer.samples = {0: [66] * 20}
        with pytest.raises(DivergedError):
            async for _ in messages:
                pass


async def test_threads_can_share_a_client() -> None:
    async with breaking(Breaking(2, 2)) as address:
        with Client(address) as client:
            answers = [asyncio.to_thread(lambda: list(client.stream("a"))) for _ in range(4)]
            for messages in await asyncio.gather(*answers):
                check_complete(SAMPLES, messages)
