"""A link to a worker: its connection and state, and the errors in which calls end."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.drafting.costs import StepTimes
from coordinator.scheduling.counters import Timed
from coordinator.workers.backoff import Breaker
from coordinator.workers.errors import Cause, MismatchError, WorkerRefusedError, WorkerUnreachableError
from coordinator.workers.releases import Releases
from coordinator.workers.streams import RoundCalls, was_cancelled
from specpool.protocol.answers import MisfitError, check_worker_info, decoded, read_step_costs
from specpool.protocol.codec import release_request
from specpool.protocol.worker_info import StepCosts
from specpool.rpc.security.channel import Connector
from specpool.rpc.status import ANSWERED
from specpool.v1 import common_pb2

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 5.0
# Time that calls under way get to finish on a connection that is replaced by one with newer certificates.
LAST_CALLS_SECONDS = 60.0
# Characters of a worker's own words that are passed on.
MOST_CHARACTERS = 500

# The worker or the way to it is gone; the same call may succeed later.
_LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


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
        """`timeout_seconds`: for a round."""
        self.address = connector.address
        self.state = LinkState.CONNECTING
        self.reason = "not connected yet"
        self.info: common_pb2.ModelInfo | None = None
        self.instance_id = ""
        """The worker's process as it described itself last; empty if it does not say."""
        self.load_at_start = common_pb2.WorkerLoad()
        self.hosts_and_devices: frozenset[tuple[str, str]] = frozenset()
        """Workers with a host and device in common share what they compute with. A divided model has several."""
        self.step_times = StepTimes(self._unknown_times)
        """Step times of the worker, measured anew whenever it was away."""
        self.on_change: Callable[[], None] | None = None
        self._connector = connector
        self._coordinator_id = coordinator_id
        self._timeout = timeout_seconds
        self._ready = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._breaker = self._make_breaker()
        self._rest_seconds = 0.0
        self._releases = Releases(self._send_release)
        self._closing: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[common_pb2.WorkerLoad | None] | None = None
        self._connect()

    def _connect(self) -> None:
        """Opens a channel."""
        self._channel = self._connector.open()
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._stub: Any = self._make_stub(self._channel)
        self._rounds = self._make_rounds()

    def _reconnect(self, grace_seconds: float | None) -> None:
        """Replaces the channel by a new one. Calls under way on the old one have `grace_seconds` to finish."""
        old = self._channel
        self._connect()
        closing = asyncio.create_task(old.close(grace_seconds))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        raise NotImplementedError

    def _make_rounds(self) -> RoundCalls:
        raise NotImplementedError

    def _make_breaker(self) -> Breaker:
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

    async def wait_ready(self) -> None:
        """Waits until the worker can be called."""
        await self._ready.wait()

    async def keep_connected(self) -> None:
        """Probes the worker for ever. After a restart, which a probe or the end of a stream of rounds reveals, its
        model is checked before it is used again."""
        while True:
            if self.state is LinkState.RESTING:
                await asyncio.sleep(self._rest_seconds)
            self._probe_now.clear()
            await self._probe()
            try:
                await asyncio.wait_for(self._probe_now.wait(), PROBE_SECONDS)
            except TimeoutError:
                continue

    async def load(self) -> common_pb2.WorkerLoad | None:
        """The load of the worker now; None if it does not answer. However many callers ask, the worker is asked only
        once at a time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_load())
        return await asyncio.shield(self._asking)

    async def _ask_load(self) -> common_pb2.WorkerLoad | None:
        try:
            response = await self._stub.GetWorkerInfo(common_pb2.GetWorkerInfoRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return None
        return None if response is None else response.load

    async def release(self, sequence_ids: Iterable[int]) -> bool:
        """Frees sequences, with those of earlier calls that failed. False if the worker cannot do it now; try again, or
        leave it to the link, which tries again as soon as the worker is ready."""
        self._note_leavers(sequence_ids)
        return await self._releases.send()

    def release_soon(self, sequence_ids: Iterable[int]) -> None:
        """Frees sequences in the background, as soon as the worker can do it."""
        self._note_leavers(sequence_ids)
        self._releases.send_soon()

    @property
    def is_releasing(self) -> bool:
        """Whether the worker has yet to answer `release_soon`; False also if it must be ready first."""
        return self._releases.are_being_sent

    def _note_leavers(self, sequence_ids: Iterable[int]) -> None:
        if self.info is not None and self.state is not LinkState.REFUSED:  # else it was never sent any
            self._releases.add(sequence_ids)

    async def _send_release(self, sequence_ids: list[int]) -> bool:
        if not self.is_ready:  # a worker that hangs would make every caller wait
            return False
        request = release_request(self._coordinator_id, sequence_ids)
        try:
            await self._answer(self._stub.Release(request, timeout=self._timeout))
        except (WorkerUnreachableError, WorkerRefusedError):
            return False
        return True

    async def close(self) -> None:
        """Closes the connection."""
        self._releases.cancel()
        self._rounds.close()
        await asyncio.gather(self._channel.close(None), *self._closing)

    async def _round(self, request: Any, timeout_seconds: float | None = None) -> tuple[Any, float]:
        """The response to a round and the seconds it took. WorkerUnreachableError, WorkerRefusedError."""
        if not self.is_ready:  # lost since the round began: what answers at this address now has not been checked
            raise WorkerUnreachableError(self.reason, Cause.NOT_SENT)
        return await self._answer(self._rounds(request, timeout_seconds))

    async def _answer(self, call: Awaitable[Any]) -> tuple[Any, float]:
        """The response and the seconds it took. WorkerUnreachableError, WorkerRefusedError."""
        began = time.perf_counter()
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            raise self._lost("the connection was replaced", Cause.LOST) from None
        if response is None:
            raise self._lost("its answer is no message of the expected type", Cause.FAILED)
        self._breaker.worked()
        return response, time.perf_counter() - began

    def _error(self, error: grpc.aio.AioRpcError) -> Exception:
        """What a status means. Only a status that one of the worker's own handlers set says anything about the
        request."""
        code, reason = error.code(), status_text(error)
        answered = ANSWERED in (error.trailing_metadata() or ())
        if code in _LOST:
            return self._lost(reason, Cause.LOST)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and answered:
            return self._lost(reason, Cause.NOT_SENT)  # it has too much to do for any round
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED and answered:
            log.error("worker at %s refused a call: %s", self.address, reason)
            return WorkerRefusedError(reason)
        return self._lost(reason, Cause.FAILED)

    def _lost(self, reason: str, cause: Cause) -> WorkerUnreachableError:
        """Notes a failed call, after which the link may rest, longer each time. Returns the error to raise."""
        if self.is_ready:  # else another call has noted it
            self._rest(reason)
        return WorkerUnreachableError(reason, cause)

    def _rest(self, reason: str) -> None:
        first, second = self._rests()
        self._rest_seconds = self._breaker.failed(time.monotonic(), first, second)
        self._set_state(LinkState.RESTING if self._rest_seconds else LinkState.CONNECTING, reason)
        self._probe_now.set()

    def _rests(self) -> tuple[float, float]:
        """Seconds of rest after the first failure and after the second; later ones double."""
        raise NotImplementedError

    async def _probe(self) -> None:
        """Checks whether the worker serves, and reads its description if it was away. Whatever it answers, the link
        goes on."""
        try:
            if self._connector.is_outdated:
                self._rounds.close()
                self._reconnect(LAST_CALLS_SECONDS)
                self._set_state(LinkState.CONNECTING, "certificates or tokens have changed")
            await self._look()
        except MismatchError as error:
            self._refuse(error)
        except grpc.aio.AioRpcError as error:
            self._set_state(LinkState.CONNECTING, status_text(error))
            self._rounds.cut()  # what does not answer a probe will not answer a round
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # nor will a connection that swallows all
                self._reconnect(None)
        except MisfitError as error:
            self._rest(f"it describes itself wrongly: {error}")
        except Exception as error:
            log.exception("the worker at %s cannot be used", self.address)
            self._rest(f"its description cannot be used: {shortened(str(error))}")

    async def _look(self) -> None:
        health = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        if decoded(health, "health").status != health_pb2.HealthCheckResponse.SERVING:
            self._set_state(LinkState.CONNECTING, "the worker is up but not serving yet")
        elif not self.is_ready:
            await self._describe()
        if self.is_ready and self._releases.are_due:
            await self._releases.send()

    async def _describe(self) -> None:
        """Takes in what the worker says of itself, and makes the link ready."""
        self._rounds.open()
        request = common_pb2.GetWorkerInfoRequest()
        response = await self._stub.GetWorkerInfo(request, timeout=PROBE_TIMEOUT_SECONDS)
        check_worker_info(decoded(response, "description"))
        await self._check(response.model)
        self.step_times = self._believed(read_step_costs(response))
        self.info, self.load_at_start, self.instance_id = response.model, response.load, response.instance_id
        self.hosts_and_devices = self._places(response)
        self._set_state(LinkState.READY, "")

    def _places(self, response: common_pb2.GetWorkerInfoResponse) -> frozenset[tuple[str, str]]:
        """Hosts and devices, without the names of GPUs, as in "cuda:0 (NVIDIA H200)"."""
        host, _, _ = self.address.rpartition(":")
        devices = [response.model.device, *(rank.device for rank in response.load.ranks)]
        return frozenset((host, device.partition(" ")[0]) for device in devices)

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
    """The times of a call that took `elapsed` seconds in all, from what the worker's response says, as far as that is
    possible."""
    forward = min(response.forward_ns / 1e9, elapsed)
    return Timed(elapsed, forward, min(response.realign_ns / 1e9, elapsed - forward))


def status_text(error: grpc.aio.AioRpcError) -> str:
    """A status for logs and errors."""
    return f"{error.code().name}: {shortened(error.details())}"


def shortened(text: str | None) -> str:
    """A worker's own words, for logs and errors."""
    words = " ".join((text or "").split())
    return words if len(words) <= MOST_CHARACTERS else f"{words[:MOST_CHARACTERS]}..."
