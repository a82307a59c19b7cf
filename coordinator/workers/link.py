"""A link to a worker: connection, state, health probes and call errors."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.workers.bounds import ResponseSizes, read_slowly
from coordinator.workers.interface import Cause, MismatchError, WorkerRefusedError, WorkerUnreachableError
from coordinator.workers.releases import Releases
from coordinator.workers.states import Backoff, LinkState, Recent, StateLog
from coordinator.workers.streams import RoundCalls, is_cancelled
from specpool.drafting.costs import UNKNOWN_DRAFT, StepTimes, Timed
from specpool.protocol.codec import release_request
from specpool.protocol.responses import InvalidResponseError, decoded, read_worker_info
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.security.channel import Connector
from specpool.rpc.status import ANSWERED
from specpool.v1 import common_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 5.0
# Time for calls in progress to finish on a connection that is replaced after a certificate change.
LAST_CALLS_SECONDS = 60.0
# Maximum length of a worker's own text in logs and errors.
MAX_TEXT_CHARACTERS = 500

RENEWED = "certificates have changed"
"""Reason while a link reconnects to a worker that is still there."""
_REPLACED = "the connection was replaced"

# The worker or the connection is gone. The same call may succeed later.
_LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class WorkerLink:
    """Base class of the links to both workers. `keep_connected` runs beside the calls and maintains `state`."""

    role: str
    """What the log calls the worker."""
    _unknown_times: Mapping[int, float]
    """Default seconds by rows, for a worker without measurements."""

    def __init__(self, connector: Connector, coordinator_id: str, timeout_seconds: float) -> None:
        """`timeout_seconds`: timeout of a round."""
        self.address = connector.address
        self.state = LinkState.CONNECTING
        self.reason = "not connected yet"
        self.info: WorkerInfo | None = None
        """The worker's last description. None until the worker has been ready."""
        self.hosts_and_devices: frozenset[tuple[str, str]] = frozenset()
        """(host, device) pairs, several for a sharded model. Workers on the same device compete for it."""
        self.step_times = StepTimes(self._unknown_times)
        """Step times of the worker, reset after each reconnect."""
        self.draft_step_times = StepTimes(UNKNOWN_DRAFT)
        """Step times of the draft that the worker carries."""
        self.on_change: Callable[[], None] | None = None
        self._connector = connector
        self._coordinator_id = coordinator_id
        self._timeout = timeout_seconds
        self._states = StateLog(f"{self.role} worker at {self.address}")
        self._ready = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._backoff = self._make_backoff()
        self._backoff_seconds = 0.0
        self._releases = Releases(self._send_release)
        self._closing: set[asyncio.Task[None]] = set()
        self._load = Recent(self._query_load, is_reused=False)
        self._sizes = ResponseSizes()
        self._connect()

    def _connect(self) -> None:
        self._channel = self._connector.open()
        bounded = self._sizes.bounded(self._channel)
        self._health = health_pb2_grpc.HealthStub(bounded)
        self._stub: Any = self._make_stub(bounded)
        self._rounds = self._make_rounds()

    def _reconnect(self, grace_seconds: float | None) -> None:
        """Replace the channel. Calls in progress on the old one have `grace_seconds` to finish."""
        old = self._channel
        self._connect()
        closing = asyncio.create_task(old.close(grace_seconds))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        raise NotImplementedError

    def _make_rounds(self) -> RoundCalls:
        raise NotImplementedError

    def _make_backoff(self) -> Backoff:
        raise NotImplementedError

    async def _checked(self, info: WorkerInfo) -> WorkerInfo:
        """Check a worker's description, and return it with any additions.

        Raises MismatchError if the worker must not be used, and WorkerRefusedError if it cannot serve rounds now.
        """
        raise NotImplementedError

    def _replaced(self, info: WorkerInfo) -> None:
        """Handle a new process, whose description has been checked."""

    @property
    def instance_id(self) -> str:
        """Id of the last described process. Empty until the worker has been ready."""
        return self.info.instance_id if self.info is not None else ""

    @property
    def grammar_refusal(self) -> str | None:
        """Why the worker does not follow grammars; None if it does."""
        if self.info is not None and self.info.supports_grammars:
            return None
        return f"the {self.role} worker at {self.address} needs llguidance: install the extra `constraints` there"

    @property
    def is_ready(self) -> bool:
        return self.state is LinkState.READY

    async def wait_ready(self) -> None:
        await self._ready.wait()

    async def keep_connected(self) -> None:
        """Probe the worker forever. After a restart its model is checked before it is used again."""
        while True:
            if self.state is LinkState.BACKOFF:
                await asyncio.sleep(self._backoff_seconds)
            self._probe_now.clear()
            await self._probe()
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._probe_now.wait()

    async def load(self) -> common_pb2.GetWorkerInfoResponse | None:
        """Query the load of the worker and of the draft that it carries. None if it does not respond.

        Concurrent callers share one query.
        """
        return await self._load.get()

    async def _query_load(self) -> common_pb2.GetWorkerInfoResponse | None:
        request = common_pb2.GetWorkerInfoRequest()
        try:
            return cast(
                common_pb2.GetWorkerInfoResponse | None,
                await self._stub.GetWorkerInfo(request, timeout=PROBE_TIMEOUT_SECONDS),
            )
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError):  # the link may be closed
            return None

    async def release(self, sequence_ids: Iterable[int]) -> bool:
        """Free sequences, including those of failed releases. Return False if the worker cannot do it now.

        The link retries failed releases when the worker is ready again.
        """
        self._releases.add(sequence_ids)
        return await self._releases.send()

    def release_soon(self, sequence_ids: Iterable[int]) -> None:
        """Free sequences in the background, as soon as the worker is ready."""
        self._releases.add(sequence_ids)
        self._releases.send_soon()

    @property
    def is_releasing(self) -> bool:
        """Whether a background release is being sent."""
        return self._releases.are_being_sent

    async def _send_release(self, sequence_ids: list[int] | None) -> bool:
        if not self.is_ready:  # otherwise a hanging worker would block every caller
            return False
        request = release_request(self._coordinator_id, sequence_ids)
        try:
            response = await self._returned(self._stub.Release(request, timeout=self._timeout))
            self._check_instance(self._decoded(response))
        except (WorkerUnreachableError, WorkerRefusedError):
            return False
        return True

    async def close(self) -> None:
        self._releases.cancel()
        self._rounds.close()
        await asyncio.gather(self._channel.close(None), *self._closing)

    async def _round(
        self, request: Any, max_bytes: Callable[[], int], timeout_seconds: float | None = None
    ) -> tuple[Any, float]:
        """Return the response, and the seconds that `RoundCalls` counts. `max_bytes` returns the maximum response size.

        The caller reports success to the backoff once the response is valid. Raises WorkerUnreachableError,
        WorkerRefusedError.
        """
        if not self.is_ready:  # the worker now at this address has not been checked
            raise WorkerUnreachableError(self.reason, Cause.NOT_SENT)
        with self._releases.in_round(item.sequence_id for item in request.items), self._sizes.in_round(max_bytes):
            response, seconds = await self._returned(self._rounds(request, timeout_seconds))
        return self._decoded(response), seconds

    def _check_instance(self, response: Any) -> None:
        """Raise WorkerUnreachableError unless the process whose description was checked sent the response."""
        if response is not None and response.instance_id != self.instance_id:  # None: undecodable
            reason = f"instance {shortened(response.instance_id) or 'none'} responded instead of {self.instance_id}"
            raise self._lost(reason, Cause.NOT_SENT)

    async def _returned(self, call: Awaitable[T]) -> T:
        """Return what the call returns. Raises WorkerUnreachableError, WorkerRefusedError."""
        channel = self._channel
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if channel is not self._channel:
                raise WorkerUnreachableError(_REPLACED, Cause.LOST) from None
            raise self._error(error) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            if channel is not self._channel:
                raise WorkerUnreachableError(_REPLACED, Cause.LOST) from None
            raise self._lost(_REPLACED, Cause.LOST) from None

    def _decoded(self, response: Any) -> Any:
        """Return the response of a successful call. Raises WorkerUnreachableError."""
        if response is None:
            raise self._lost("the response is too large, or not a message of the expected type", Cause.FAILED)
        return response

    def _error(self, error: grpc.aio.AioRpcError) -> Exception:
        """Classify a status. Only statuses set by the worker's handlers say anything about the request."""
        code, reason = error.code(), status_text(error)
        answered = ANSWERED in (error.trailing_metadata() or ())
        if code in _LOST:
            return self._lost(reason, Cause.LOST)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and answered:
            return self._lost(reason, Cause.NOT_SENT)  # the worker is overloaded
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED and answered:
            log.error("worker at %s refused a call: %s", self.address, reason)
            return WorkerRefusedError(reason)
        return self._lost(reason, Cause.FAILED)

    def _lost(self, reason: str, cause: Cause) -> WorkerUnreachableError:
        """Record a failed call and back off. Return the error to raise."""
        if self.is_ready:  # otherwise another call has recorded it
            self._back_off(reason)
        return WorkerUnreachableError(reason, cause)

    def _back_off(self, reason: str) -> None:
        self._backoff_seconds = self._backoff.failed(time.monotonic())
        self._set_state(LinkState.BACKOFF if self._backoff_seconds else LinkState.CONNECTING, reason)
        self._probe_now.set()

    async def _probe(self) -> None:
        """Check the worker's health, and read its description after a reconnect. Invalid responses do not raise."""
        try:
            if self._connector.is_outdated:
                self._rounds.close()
                self._reconnect(LAST_CALLS_SECONDS)
                self._set_state(LinkState.CONNECTING, RENEWED)
            await self._check_health()
        except MismatchError as error:
            self._refuse(error)
        except grpc.aio.AioRpcError as error:
            if self.state is not LinkState.FAILED:  # keep the reason of a worker that has exited
                self._set_state(LinkState.CONNECTING, status_text(error))
            self._rounds.abort()  # a worker that fails a probe will not answer a round
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # the connection may be a black hole
                self._reconnect(None)
        except WorkerRefusedError as error:
            self._back_off(str(error))
        except InvalidResponseError as error:
            self._back_off(f"invalid description: {error}")
        except Exception as error:
            log.exception("cannot use the worker at %s", self.address)
            self._back_off(f"unusable description: {shortened(str(error))}")

    async def _check_health(self) -> None:
        if not await self._is_serving() and not (await self._follow_startup() and await self._is_serving()):
            return
        if not self.is_ready:
            await self._read_description()
        if self.is_ready and self._releases.are_due:
            await self._releases.send()

    async def _is_serving(self) -> bool:
        health = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        return bool(decoded(health, "health").status == health_pb2.HealthCheckResponse.SERVING)

    async def _serves_already(self) -> bool:
        """Return whether the worker serves although its startup stream is still open.

        An unreachable worker counts as not serving: it may be exiting, and the stream may still report why.
        """
        try:
            return await self._is_serving()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False

    async def _follow_startup(self) -> bool:
        """Follow the phases of the worker's startup. A hanging or draining worker reports none.

        Return whether the worker may serve now, because its startup has ended or its health check says so.
        """
        startup: common_pb2.WatchStartupResponse | None = None
        watch = self._stub.WatchStartup(common_pb2.WatchStartupRequest())
        async with aclosing(read_slowly(watch, PROBE_SECONDS)) as responses:
            async for response in responses:
                if response is not ...:
                    startup = decoded(response, "startup")
                    state = LinkState.FAILED if startup.failure else LinkState.LOADING
                    self._set_state(state, shortened(startup.failure or startup.phase))
                elif await self._serves_already():
                    return True
        if startup is None:
            self._set_state(LinkState.CONNECTING, "the worker is up but not serving yet")
        return startup is not None and not startup.failure

    async def _read_description(self) -> None:
        """Read the worker's description and set the link ready."""
        self._rounds.open()
        request = common_pb2.GetWorkerInfoRequest()
        response = await self._stub.GetWorkerInfo(request, timeout=PROBE_TIMEOUT_SECONDS)
        info = await self._checked(read_worker_info(decoded(response, "description")))
        is_new = info.instance_id != self.instance_id
        if self.info is not None and is_new:
            await self._release_all(info.instance_id)
        self.info, self.step_times = info, _step_times(info, self._unknown_times)
        if info.draft is not None:
            self.draft_step_times = _step_times(info.draft, UNKNOWN_DRAFT)
        host, devices = self.address.rpartition(":")[0], [info.device, *(rank.device for rank in info.ranks)]
        # Without the GPU's name, as in "cuda:0 (NVIDIA H200)".
        self.hosts_and_devices = frozenset((host, device.partition(" ")[0]) for device in devices)
        if is_new:
            self._replaced(info)
        self._set_state(LinkState.READY, "")

    async def _release_all(self, instance_id: str) -> None:
        """Free the sequences that a process has kept from an earlier connection. A new process has none."""
        response = await self._stub.Release(release_request(self._coordinator_id, None), timeout=self._timeout)
        # Another process may have answered. The described one then still needs the releases.
        if decoded(response, "release").instance_id == instance_id:
            self._releases.forget()

    def _refuse(self, error: MismatchError) -> None:
        self._set_state(LinkState.REFUSED, str(error))

    def _set_state(self, state: LinkState, reason: str, level: int | None = None) -> None:
        """Enter a state. `level`: level of its line in the log, instead of the usual one."""
        self._states.show(state, reason, level)
        changed = (state, reason) != (self.state, self.reason)
        self.state, self.reason = state, reason
        if state is LinkState.READY:
            self._ready.set()
        else:
            self._ready.clear()
            self._rounds.close()  # a draining worker waits for open streams
        if changed and self.on_change is not None:
            self.on_change()


def _step_times(info: WorkerInfo, unknown: Mapping[int, float]) -> StepTimes:
    """Return the step times that a worker measured. `unknown`: seconds by rows to use without measurements."""
    if len(info.step_seconds) < 2:
        return StepTimes(unknown, max_rows=info.max_rows)
    return StepTimes(info.step_seconds, info.step_cached, info.seconds_per_cached, info.max_rows)


def timed(elapsed: float, response: Any) -> Timed:
    """Return the durations of a call. The worker's own durations are clamped to `elapsed` seconds."""
    forward = min(response.forward_ns / 1e9, elapsed)
    return Timed(elapsed, forward, min(response.realign_ns / 1e9, elapsed - forward))


def status_text(error: grpc.aio.AioRpcError) -> str:
    """Format a status for logs and errors."""
    return f"{error.code().name}: {shortened(error.details())}"


def shortened(text: str | None) -> str:
    """Normalize and truncate a worker's text for logs and errors."""
    words = " ".join((text or "").split())
    return words if len(words) <= MAX_TEXT_CHARACTERS else f"{words[:MAX_TEXT_CHARACTERS]}..."
