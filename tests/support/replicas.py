"""A coordinator with several fake targets of one model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

from serving import RecordingTarget, Serving, check_tokens, make_request, serving, stream

from specpool.testing import FakeTarget
from specpool.v1 import generation_pb2 as pb

PASS_SECONDS = 0.002


def slow_target(**knobs: Any) -> RecordingTarget:
    return RecordingTarget(pass_seconds=lambda _: PASS_SECONDS, **knobs)


@asynccontextmanager
async def replicas(*others: FakeTarget, first: FakeTarget | None = None, **settings: Any) -> AsyncIterator[Serving]:
    """A coordinator with further targets. Their addresses follow that of `first`."""
    first = first if first is not None else slow_target()
    listening = [await other.start() for other in others]
    start = first.start

    async def start_and_list(*arguments: Any) -> str:
        return ",".join([await start(*arguments), *listening])

    try:
        with mock.patch.object(first, "start", start_and_list):
            async with serving(first, **settings) as served:
                served.target_address = served.target_address.partition(",")[0]
                await served.until(lambda info: all(t.state in ("ready", "refused") for t in info.targets))
                first.start = start  # type: ignore[method-assign]
                yield served
    finally:
        for other in others:
            await other.stop()


@asynccontextmanager
async def with_standby(
    standby: FakeTarget, first: FakeTarget | None = None, ready: bool = True, **settings: Any
) -> AsyncIterator[tuple[Serving, str]]:
    """A coordinator with a target and a standby. Yield the service and the standby's address."""
    address = await standby.start()
    try:
        async with serving(first or slow_target(), target_standby_address=address, **settings) as served:
            if ready:
                await served.until(lambda info: info.standby.state == "ready")
            yield served, address
    finally:
        await standby.stop()


def long_requests(count: int, tokens: int = 200) -> list[pb.GenerateRequest]:
    """Requests, every other one with sampling."""
    sampled = {"temperature": 1.0, "seed": 5}
    return [make_request([i, 2, 3], tokens, ignore_eos=True, **(sampled if i % 2 else {})) for i in range(count)]


async def stream_all(served: Serving, requests: list[pb.GenerateRequest], act: Callable[[], Any] | None = None) -> None:
    """Stream requests, and call `act` in the middle. All answers must be right."""
    streams = [asyncio.ensure_future(stream(served, request)) for request in requests]
    if act is not None:
        enough = (await served.info()).counters.completion_tokens + 30 * len(requests)
        await served.until(lambda info: info.counters.completion_tokens > enough)
        await act()
    for request, (_, answer) in zip(requests, await asyncio.gather(*streams), strict=True):
        check_tokens(served.target, request, answer)
