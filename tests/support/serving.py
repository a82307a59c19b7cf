"""A coordinator with fakes of both workers, in this process and over real sockets."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from local_prompts import local_pool

from coordinator.config.settings import CoordinatorSettings
from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.server import CoordinatorServer
from coordinator.workers.draft_link import DraftLink
from specpool.rpc.ports import free_port
from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import draft_worker_pb2, generation_pb2_grpc, target_worker_pb2
from specpool.v1 import generation_pb2 as pb

PATIENCE_SECONDS = 60
# Default deadline of every call: a test fails rather than hangs.
DEADLINES = json.dumps({"methodConfig": [{"name": [{}], "timeout": f"{PATIENCE_SECONDS}s"}]})
# Settings that make draft lengths independent of the clock, and rounds of chance.
DEFAULTS = {"port": 0, "drain_seconds": 5.0, "num_speculative_tokens": 4, "draft_method": "model", "audit_share": 0.0}


async def info_with_loads(ask: Callable[[], Awaitable[pb.GetServerInfoResponse]]) -> pb.GetServerInfoResponse:
    """Return the state of a server once both workers report a load."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            info = await ask()
            if info.target.HasField("load") and info.draft.HasField("load"):
                return info
            await asyncio.sleep(0.05)


class RecordingTarget(FakeTarget):
    """Target that records requests and blocks them while `open` is clear."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.requests: list[target_worker_pb2.VerifyRequest] = []
        self.held: list[int] = []
        """Cached sequences after each round."""
        self.open = asyncio.Event()
        self.open.set()

    async def Verify(self, request: target_worker_pb2.VerifyRequest, context: Any) -> target_worker_pb2.VerifyResponse:
        self.requests.append(request)
        await self.open.wait()
        response = await super().Verify(request, context)
        self.held.append(len(self.caches))
        return response


class RecordingDraft(FakeDraft):
    """Draft that records requests, delays answers and fails the first `failing_releases` releases."""

    def __init__(self, target: FakeTarget, delay: float = 0.0, **knobs: Any) -> None:
        super().__init__(target, **knobs)
        self.requests: list[draft_worker_pb2.ProposeRequest] = []
        self.delay = delay
        self.releases = 0
        self.failing_releases = 0

    async def Propose(self, request: draft_worker_pb2.ProposeRequest, context: Any) -> draft_worker_pb2.ProposeResponse:
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        return await super().Propose(request, context)

    async def Release(self, request: Any, context: Any) -> Any:
        self.releases += 1
        await asyncio.sleep(self.delay)
        if self.releases <= self.failing_releases:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "told to fail")
        return await super().Release(request, context)


@dataclass
class Serving:
    """A running coordinator, its workers, and a client."""

    process: CoordinatorServer
    channel: grpc.aio.Channel
    address: str
    target: FakeTarget
    target_address: str
    draft: FakeDraft | None
    draft_address: str | None
    """Addresses of all draft workers, separated by commas."""
    others: Sequence[FakeDraft] = ()
    """Further draft workers."""

    def __post_init__(self) -> None:
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    @property
    def draft_link(self) -> DraftLink:
        """The link to the first draft worker."""
        assert self.process.coordinator.lanes.first.draft is not None
        return self.process.coordinator.lanes.first.draft.links[0]

    async def info(self) -> pb.GetServerInfoResponse:
        return await self.stub.GetServerInfo(pb.GetServerInfoRequest())

    async def status(self, service: str = "") -> int:
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=service))).status

    async def until(self, condition: Callable[[pb.GetServerInfoResponse], Any]) -> pb.GetServerInfoResponse:
        """Wait until the server's state meets a condition; return the state."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(info := await self.info()):  # noqa: ASYNC110 - the state is read over a connection
                await asyncio.sleep(0.01)
            return info

    async def until_ready(self, wait_for_draft: bool = True) -> None:
        def is_ready(info: pb.GetServerInfoResponse) -> bool:
            drafts = info.draft_workers if wait_for_draft else []
            return all(worker.state == "ready" for worker in (info.target, *drafts))

        await self.until(is_ready)

    async def until_idle(self) -> pb.GetServerInfoResponse:
        """Wait until nothing is running or queued and no worker holds a slot."""

        def is_idle(info: pb.GetServerInfoResponse) -> bool:
            taken = sum(worker.load.slots_in_use for worker in (info.target, *info.draft_workers))
            workers = (self.target, *([self.draft] if self.draft is not None else []), *self.others)
            carried = [self.target.draft] if self.target.draft is not None else []
            caches = sum(len(worker.caches) for worker in (*workers, *carried))
            return info.running == info.queued == taken == caches == 0

        return await self.until(is_idle)

    async def expect(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """Generate and compare the tokens with plain decoding."""
        response = await self.stub.Generate(request)
        check_tokens(self.target, request, response)
        return response


@asynccontextmanager
async def serving(
    target: FakeTarget | None = None,
    draft: FakeDraft | None = None,
    with_draft: bool = True,
    with_target: bool = True,
    wait_for_draft: bool = True,
    probe_seconds: float = 0.05,
    others: Sequence[FakeDraft] = (),
    further_draft_addresses: Sequence[str] = (),
    labels: Sequence[str] = (),
    new_pool: Callable[[int], TokenizerPool] = local_pool,
    **settings: Any,
) -> AsyncIterator[Serving]:
    """Run everything and wait until it serves. Without `with_target`, the target does not answer yet.

    `others`: further draft workers to start. `further_draft_addresses`: draft workers that the caller runs. `labels`:
    draft names, one per started worker. `new_pool`: `TokenizerPool` starts real prompt processes.
    """
    target = target if target is not None else RecordingTarget()
    if draft is None and with_draft:
        draft = RecordingDraft(target)
    target_address = await target.start() if with_target else free_address()
    drafts = [*([draft] if draft is not None else []), *others]
    addresses = [await each.start() for each in drafts]
    named = [f"{label}={address}" for label, address in zip(labels, addresses, strict=True)] if labels else addresses
    draft_address = ",".join([*named, *further_draft_addresses]) or None
    with mock.patch("coordinator.workers.link.PROBE_SECONDS", probe_seconds):
        process = CoordinatorServer(
            CoordinatorSettings(
                **{**DEFAULTS, **settings},
                target_address=target_address,
                draft_address=draft_address,
            ),
            new_pool,
        )
        address = f"127.0.0.1:{await process.start()}"
        async with grpc.aio.insecure_channel(address, options=[("grpc.service_config", DEADLINES)]) as channel:
            served = Serving(process, channel, address, target, target_address, draft, draft_address, others)
            try:
                if with_target:
                    await served.until_ready(wait_for_draft)
                yield served
            finally:
                served.process.server.stop()  # tests may replace the process
                try:
                    await served.process.wait_stopped()
                finally:
                    for worker in (target, *drafts):
                        await worker.stop()


def free_address() -> str:
    """Return an address without a listener."""
    return f"127.0.0.1:{free_port()}"


def make_request(
    prompt: Iterable[int] = (1, 2, 3),
    max_tokens: int = 24,
    k: int | None = None,
    request_id: str = "",
    method: Any = None,
    prediction: str | Iterable[int] | pb.Prediction | None = None,
    **params: Any,
) -> pb.GenerateRequest:
    if isinstance(prediction, str):
        prediction = pb.Prediction(text=prediction)
    elif prediction is not None and not isinstance(prediction, pb.Prediction):
        prediction = pb.Prediction(tokenized=pb.TokenizedInput(input_ids=prediction))
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, **params),
        speculative=pb.SpeculativeParams(num_speculative_tokens=k, method=method, prediction=prediction),
    )


def random_request(chance: random.Random, max_prompt: int = 80, max_tokens: int = 40) -> pb.GenerateRequest:
    """Return a request with a random prompt, length and k."""
    prompt = [chance.randrange(256) for _ in range(chance.randint(1, max_prompt))]
    return make_request(prompt, chance.randint(1, max_tokens), chance.choice([None, *range(9)]))


def expected_tokens(target: FakeTarget, request: pb.GenerateRequest) -> list[int]:
    params = request.sampling_params
    tokens = list(request.tokenized.input_ids)
    start = len(tokens)
    stops = {*params.stop_token_ids, *([] if params.ignore_eos else [256])}
    while len(tokens) < start + params.max_tokens:
        tokens.append(target.choose(tokens))
        if tokens[-1] in stops:
            break
    return tokens[start:]


def check_tokens(target: FakeTarget, request: pb.GenerateRequest, response: pb.GenerateResponse) -> None:
    """Assert that the answer equals plain decoding."""
    expected = expected_tokens(target, request)
    assert list(response.token_ids) == expected
    assert response.usage.prompt_tokens == len(request.tokenized.input_ids)
    assert response.usage.completion_tokens == len(expected)


async def stream(served: Serving, request: pb.GenerateRequest) -> tuple[list[pb.GenerateChunk], pb.GenerateResponse]:
    """Return all chunks and the final result; assert that it equals the joined chunks."""
    messages = [message async for message in served.stub.GenerateStream(request)]
    kinds = [message.WhichOneof("response") for message in messages]
    assert kinds == ["chunk"] * (len(messages) - 1) + ["complete"]
    chunks, complete = [message.chunk for message in messages[:-1]], messages[-1].complete
    assert {message.request_id for message in messages} == {complete.request_id}
    assert [token for chunk in chunks for token in chunk.token_ids] == list(complete.token_ids)
    assert "".join(chunk.text for chunk in chunks) == complete.text
    return chunks, complete


async def refusal(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """Return the error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def violated_fields(error: grpc.aio.AioRpcError) -> list[str]:
    """Return the fields that an error's google.rpc.BadRequest names."""
    bad_request = detail_of(error, error_details_pb2.BadRequest)
    return [violation.field for violation in bad_request.field_violations]


def detail_of(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    """Return the message of this type from an error's google.rpc details."""
    (payload,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    status = status_pb2.Status.FromString(payload)
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    detail = kind()
    assert [packed.Unpack(detail) for packed in status.details].count(True) == 1
    return detail
