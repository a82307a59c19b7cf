"""A link to a worker: its connection state, and the errors that calls end in."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.counters import Timed
from coordinator.drafting.costs import StepTimes
from coordinator.workers.streams import RoundCalls
from protocol.codec import read_step_costs, release_request
from protocol.worker_info import StepCosts
from rpc.channel import Connector
from specpool.v1 import common_pb2

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 5.0
LONGEST_REST_SECONDS = 30.0

# The worker or the way to it is gone or too slow; the same call may succeed later.
_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


class WorkerUnreachableError(Exception):
    """A worker does not answer, or not in time."""


class WorkerRefusedError(Exception):
    """A worker answered with an error: the same call would most likely fail again."""


class MismatchError(Exception):
    """A worker runs a model that does not fit the one that this coordinator already uses."""


class LinkState(StrEnum):
    """States of a link, as the public API names them."""

    CONNECTING = "connecting"
    READY = "ready"
    RESTING = "resting"
    REFUSED = "refused"


class WorkerLink:
    """Base of the links to both workers. `keep_connected` runs for ever beside the calls and maintains `state`."""

    _unknown_times: Mapping[int, float]
    """Seconds by rows, believed of a worker that has not measured itself."""

    def __init__(self, connector: Connector, coordinator_id: str, timeout_seconds: float) -> None:
        self.address = connector.address
        self.state = LinkState.CONNECTING
        self.reason = "not connected yet"
        self.info: common_pb2.ModelInfo | None = None
        self.load_at_start = common_pb2.WorkerLoad()
        self.step_times = StepTimes(self._unknown_times)
        """Step times of the worker, measured anew whenever it was away."""
        self.on_change: Callable[[], None] | None = None
        self._coordinator_id = coordinator_id
        self._timeout = timeout_seconds
        self._channel = connector.open()
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._stub: Any = self._make_stub(self._channel)
        self._rounds = self._make_rounds()
        self._ready = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._rest_seconds = 0.0
        self._to_release: set[int] = set()
        self._releasing: asyncio.Task[None] | None = None

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        raise NotImplementedError

    def _make_rounds(self) -> RoundCalls:
        raise NotImplementedError

    async def _check(self, info: common_pb2.ModelInfo) -> None:
        """Raises MismatchError if the worker must not be used."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Token ids are below this. Only after the worker was ready."""
        assert self.info is not None
        return self.info.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most positions of a sequence. Only after the worker was ready."""
        assert self.info is not None
        return self.info.max_model_len

    @property
    def is_ready(self) -> bool:
        """Whether calls are likely to succeed."""
        return self.state is LinkState.READY

    @property
    def host_and_device(self) -> str:
        """Workers with the same host and device share what they compute with."""
        host, _, _ = self.address.rpartition(":")
        return f"{host} {self.info.device if self.info is not None else ''}"

    async def wait_ready(self) -> None:
        """Waits until the worker can be called."""
        await self._ready.wait()

    async def keep_connected(self) -> None:
        """Probes the worker for ever. After a restart, which a probe or the end of a stream of rounds reveals, its
        model is checked before it is used again."""
        while True:
            if self.state is LinkState.RESTING:
                await asyncio.sleep(self._rest_seconds)
            await self._probe()
            self._probe_now.clear()
            try:
                await asyncio.wait_for(self._probe_now.wait(), PROBE_SECONDS)
            except TimeoutError:
                continue

    async def load(self) -> common_pb2.WorkerLoad | None:
        """The load of the worker now; None if it does not answer."""
        try:
            response = await self._stub.GetWorkerInfo(common_pb2.GetWorkerInfoRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        load: common_pb2.WorkerLoad = response.load
        return load

    async def release(self, sequence_ids: Iterable[int]) -> bool:
        """Frees sequences, with those of earlier calls that failed. False if the worker cannot do it now; try again, or
        leave it to the link, which tries again as soon as the worker is ready."""
        self._must_release(sequence_ids)
        return await self._release()

    def release_soon(self, sequence_ids: Iterable[int]) -> None:
        """Frees sequences in the background, as soon as the worker can do it."""
        self._must_release(sequence_ids)
        if not self.is_releasing:
            self._releasing = asyncio.create_task(self._release_all())

    @property
    def is_releasing(self) -> bool:
        """Whether the worker has yet to answer `release_soon`; False also if it must be ready first."""
        return self._releasing is not None and not self._releasing.done()

    def _must_release(self, sequence_ids: Iterable[int]) -> None:
        if self.info is not None and self.state is not LinkState.REFUSED:  # else it was never sent any
            self._to_release.update(sequence_ids)

    async def _release_all(self) -> None:
        while self._to_release and await self._release():
            pass

    async def _release(self) -> bool:
        if not self.is_ready:  # a worker that hangs would make every caller wait
            return False
        released = sorted(self._to_release)
        request = release_request(self._coordinator_id, released)
        try:
            await self._answer(self._stub.Release(request, timeout=self._timeout))
        except (WorkerUnreachableError, WorkerRefusedError):
            return False
        self._to_release.difference_update(released)
        return True

    async def close(self) -> None:
        """Closes the connection."""
        if self._releasing is not None:
            self._releasing.cancel()
        self._rounds.close()
        await self._channel.close(None)

    async def _round(self, request: Any) -> tuple[Any, float]:
        """The response to a round and the seconds it took. WorkerUnreachableError, WorkerRefusedError."""
        if not self.is_ready:  # lost since the round began: what answers at this address now has not been checked
            raise WorkerUnreachableError(self.reason)
        return await self._answer(self._rounds(request))

    async def _answer(self, call: Awaitable[Any]) -> tuple[Any, float]:
        """The response and the seconds it took. WorkerUnreachableError, WorkerRefusedError."""
        began = time.perf_counter()
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            if error.code() not in _UNREACHABLE:
                log.error("worker at %s refused a call: %s", self.address, reason)
                raise WorkerRefusedError(reason) from None
            self._lost(error.code(), reason)
            raise WorkerUnreachableError(reason) from None
        return response, time.perf_counter() - began

    def _lost(self, code: grpc.StatusCode, reason: str) -> None:
        self._set_state(LinkState.CONNECTING, reason)
        self._probe_now.set()

    async def _probe(self) -> None:
        try:
            health = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_SECONDS)
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                self._set_state(LinkState.CONNECTING, "the worker is up but not serving yet")
            elif not self.is_ready:
                self._rounds.open()
                request = common_pb2.GetWorkerInfoRequest()
                response = await self._stub.GetWorkerInfo(request, timeout=PROBE_TIMEOUT_SECONDS)
                await self._check(response.model)
                self.info, self.load_at_start = response.model, response.load
                self.step_times = self._believed(read_step_costs(response))
                self._set_state(LinkState.READY, "")
            if self._to_release and self.is_ready and not self.is_releasing:
                await self._release()
        except MismatchError as error:
            self._refuse(error)
        except grpc.aio.AioRpcError as error:
            self._set_state(LinkState.CONNECTING, f"{error.code().name}: {error.details()}")

    def _believed(self, costs: StepCosts) -> StepTimes:
        """Step times as the worker has measured them, as far as it has."""
        if len(costs.step_seconds) < 2:
            return StepTimes(self._unknown_times, max_rows=costs.max_rows)
        return StepTimes(costs.step_seconds, costs.step_cached, costs.seconds_per_cached, costs.max_rows)

    def _refuse(self, error: MismatchError) -> None:
        self._set_state(LinkState.REFUSED, str(error))

    def _set_state(self, state: LinkState, reason: str) -> None:
        if (state, reason) != (self.state, self.reason):
            level = logging.INFO if state is LinkState.READY else logging.WARNING
            because = f": {reason}" if reason else ""
            log.log(level, "%s at %s is %s%s", type(self).__name__, self.address, state, because)
        changed = state is not self.state
        self.state, self.reason = state, reason
        if state is LinkState.READY:
            self._ready.set()
        else:
            self._ready.clear()
            self._rounds.close()  # a worker that drains waits for open streams
        if changed and self.on_change is not None:
            self.on_change()


def timed(elapsed: float, response: Any) -> Timed:
    """The times of a call that took `elapsed` seconds in all, from what the worker's response says."""
    return Timed(elapsed, response.forward_ns / 1e9, response.realign_ns / 1e9)
