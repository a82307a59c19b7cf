"""How long clients wait for a server that starts, and what they show meanwhile."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import grpc
import pytest
from loading_workers import LoadingTarget
from serving import PATIENCE_SECONDS, free_address, serving

from specpool.client import AsyncClient, Client, NotReadyError
from specpool.client.failures import failure
from specpool.client.retries import ANSWER_SECONDS, Readiness
from specpool.errors import RequestError
from specpool.rpc.security.channel import Connector
from specpool.v1 import generation_pb2 as pb


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=100.0)


def state(name: str, reason: str = "") -> pb.GetServerInfoResponse:
    return pb.GetServerInfoResponse(target=pb.WorkerState(state=name, reason=reason))


def rpc_error(code: grpc.StatusCode) -> RequestError:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "details")
    return failure(error, Connector("unix:unused"))


def test_patience_begins_anew_while_the_server_is_loading(clock: SimpleNamespace) -> None:
    shown: list[str] = []
    readiness = Readiness(10, shown.append, lambda: clock.now)
    readiness.unanswered(rpc_error(grpc.StatusCode.UNAVAILABLE))
    clock.now += 9
    assert not readiness.is_ready(state("connecting", "UNAVAILABLE: refused"))
    for phase in ("loading weights", "loading weights", "testing"):
        clock.now += 9
        assert not readiness.is_ready(state("loading", phase))
    clock.now += 9
    assert not readiness.is_ready(state("a state of a later version"))
    assert shown == ["no answer", "waiting for the target worker", "loading weights", "testing",
                     "waiting for the target worker"]  # fmt: skip
    clock.now += 2
    with pytest.raises(NotReadyError, match="the target worker is connecting: UNAVAILABLE: refused"):
        readiness.is_ready(state("connecting", "UNAVAILABLE: refused"))
    assert readiness.is_ready(state("ready"))


def test_the_last_error_is_raised_if_a_server_does_not_answer(clock: SimpleNamespace) -> None:
    readiness = Readiness(10, None, lambda: clock.now)
    clock.now += 9
    assert readiness.answer_seconds == pytest.approx(1)
    readiness.unanswered(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED))
    assert not readiness.is_ready(state("loading"))
    assert readiness.answer_seconds == ANSWER_SECONDS
    clock.now += 11
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        readiness.unanswered(rpc_error(grpc.StatusCode.UNAVAILABLE))


@pytest.mark.parametrize("name", ["failed", "refused"])
def test_a_server_that_cannot_start_is_not_waited_for(name: str) -> None:
    with pytest.raises(NotReadyError, match="the target worker cannot start: no such file"):
        Readiness(10, None).is_ready(state(name, "no such file"))


async def wait_async(address: str, on_progress: Callable[[str], None]) -> None:
    async with AsyncClient(address) as client:
        await client.wait_ready(PATIENCE_SECONDS, on_progress)
        assert (await client.generate([1, 2], max_tokens=3)).token_ids


async def wait_blocking(address: str, on_progress: Callable[[str], None]) -> None:
    def wait() -> None:
        with Client(address) as client:
            client.wait_ready(PATIENCE_SECONDS, on_progress)
            assert client.generate([1, 2], max_tokens=3).token_ids

    await asyncio.to_thread(wait)


@pytest.mark.parametrize("wait", [wait_async, wait_blocking])
async def test_clients_wait_through_a_whole_startup(wait: Callable[..., object]) -> None:
    address, target, shown = free_address(), LoadingTarget(), list[str]()
    waiting = asyncio.ensure_future(wait(address, shown.append))  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not shown:  # noqa: ASYNC110 - a callback of another thread
            await asyncio.sleep(0.01)
        async with serving(target, with_draft=False, with_target=False, port=int(address.split(":")[1])) as served:
            await target.start(served.target_address)
            target.report("loading weights")
            while shown[-1] != "loading weights":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await target.loaded()
            await waiting
    assert shown[0] == "no answer"
