"""Both sides of an RPC, with the semantics of `grpc.aio`."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc.aio import EOF, AioRpcError, Metadata

from specpool.protocol.errors import ServiceError
from specpool.rpc.status import ANSWERED, status_of

if TYPE_CHECKING:
    from simulator.network import Channel, Connection


@dataclass(frozen=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailing: tuple[Any, ...] = ()
    is_local: bool = False
    """Whether the client cancelled the call."""


class ClientCall:
    """A call as the client sees it."""

    def __init__(self, channel: "Channel", path: str, serialize: Any, parse: Any) -> None:
        self.last_arrival = 0.0
        self._channel, self._path, self._serialize, self._parse = channel, path, serialize, parse
        self._loop = channel.network.loop
        self._status: asyncio.Future[Status] = self._loop.create_future()
        self._responses: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._connection: Connection | None = None
        self._server: ServerCall | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None

    def begin(self, request: Any, timeout: float | None) -> None:
        """Start the call, with its only request unless that is None."""
        if timeout is not None:
            expired = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._timer = self._loop.call_later(timeout, self._end, expired)
        self._opening = self._loop.create_task(self._open(request))

    async def _open(self, request: Any) -> None:
        connection = await self._channel.connected()
        if isinstance(connection, Status):
            return self.finish(connection)
        if self.done():
            return None
        self._connection, self._server = connection, connection.open(self, self._path)
        if request is not None:
            self._send(request)
            connection.deliver(self, self._server.half_close)
        return None

    def _send(self, request: Any) -> None:
        assert self._connection is not None
        assert self._server is not None
        payload = self._serialize(request)
        self._channel.network.record(self._path, payload)
        server = self._server
        self._connection.deliver(self, lambda: server.receive(payload))

    def receive(self, payload: bytes) -> None:
        """Take a response from the wire."""
        if not self.done():
            self._responses.append(payload)
            self._changed.set()

    def finish(self, status: Status) -> None:
        """Record how the call ended."""
        if self.done():
            return
        self._status.set_result(status)
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.discard(self)

    def _end(self, status: Status) -> None:
        """End the call on both sides."""
        if self.done():
            return
        self.finish(status)
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None and self._server is not None:
            self._connection.deliver(self, self._server.cancel)

    def done(self) -> bool:
        return self._status.done()

    def cancel(self) -> bool:
        """End the call, unless it has ended."""
        was_done = self.done()
        self._end(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", is_local=True))
        return not was_done

    async def wait(self) -> Status:
        return await asyncio.shield(self._status)

    async def code(self) -> grpc.StatusCode:
        return (await self.wait()).code

    async def details(self) -> str:
        return (await self.wait()).details

    async def _next(self) -> Any:
        """The next response. EOF: there are no more. None: undecodable. Raises the status of a failed call."""
        try:
            while not self._responses and not self.done():
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not self._responses or self._status_now.is_local:
            self._raise_for_status()
            return EOF
        payload = self._responses.popleft()
        try:
            return self._parse(payload)
        except Exception:  # protobuf's errors have several classes
            return None

    @property
    def _status_now(self) -> Status:
        return self._status.result() if self.done() else Status()

    def _raise_for_status(self) -> None:
        status = self._status_now
        if status.is_local:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            raise AioRpcError(status.code, Metadata(), Metadata(*status.trailing), status.details)


class UnaryCall(ClientCall):
    """A call with one response."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def _response(self) -> Any:
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_for_status()
        return await self._next()


class StreamCall(ClientCall):
    """A call with many responses, and perhaps many requests."""

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._connection is None and self._opening is not None:
            try:
                await asyncio.wait([self._opening])
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self.done():
            self._raise_for_status()
            raise asyncio.InvalidStateError("RPC already finished.")
        self._send(request)

    async def read(self) -> Any:
        return await self._next()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self._next()) is not EOF:
            yield response


class Context:
    """The part of `grpc.aio.ServicerContext` that the workers use."""

    def peer(self) -> str:
        return "ipv4:192.0.2.1:40000"

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> NoReturn:
        raise AbortedError(Status(code, details, tuple(trailing)))


class AbortedError(Exception):
    """A handler has ended its call with a status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.details)
        self.status = status


class ServerCall:
    """A call as the server sees it."""

    def __init__(self, connection: "Connection", path: str, handler: Any, client: ClientCall) -> None:
        self.last_arrival = 0.0
        self._connection, self._path, self._handler, self._client = connection, path, handler, client
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False

    def receive(self, payload: bytes) -> None:
        """Take a request from the wire."""
        if self._task is None and not self._is_cancelled:
            self._task = self._connection.network.loop.create_task(self._serve())
        self._requests.put_nowait(payload)

    def half_close(self) -> None:
        """Learn that there are no more requests."""
        self._requests.put_nowait(None)

    def cancel(self) -> None:
        """Learn that the client has gone."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        try:
            status = await self._answer()
        except AbortedError as error:
            status = error.status
        except ServiceError as error:
            code, text, trailing = status_of(error)
            status = Status(code, text, (*trailing, ANSWERED))
        except Exception as error:
            self._connection.network.on_error(self._path, error)
            status = Status(grpc.StatusCode.INTERNAL, "internal error", (ANSWERED,))
        finally:
            self._connection.served.pop(self, None)
        client = self._client
        self._connection.deliver(self, lambda: client.finish(status))

    async def _answer(self) -> Status:
        handler, context = self._handler, Context()
        if handler is None:
            return Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        requests = self._read(handler.request_deserializer)
        request = requests if handler.request_streaming else await anext(requests)
        if not handler.response_streaming:
            self._send(await handler.unary_unary(request, context))
            return Status()
        answer = handler.stream_stream or handler.unary_stream
        async with aclosing(answer(request, context)) as responses:
            async for response in responses:
                self._send(response)
        return Status()

    async def _read(self, parse: Any) -> AsyncIterator[Any]:
        while (payload := await self._requests.get()) is not None:
            yield parse(payload)

    def _send(self, response: Any) -> None:
        payload = response if isinstance(response, bytes) else self._handler.response_serializer(response)
        self._connection.network.record(self._path, payload)
        client = self._client
        self._connection.deliver(self, lambda: client.receive(payload))
