"""Accepts the calls of a gRPC server in place of grpc.aio's own loop.

That loop decodes the path of every call, and ends the whole server if a path is not UTF-8. It also accepts one
call at a time, with much work for each, so that dead and refused calls delay all others.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeAlias, cast

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

from specpool.rpc.server.guard import Connection, ConnectionGuard

Options: TypeAlias = Sequence[tuple[str, Any]]

UNKNOWN_METHOD = "/"
"""Name of every call to a method that no service has."""
# Calls of a method that may be accepted at once.
ACCEPTED_AT_ONCE = 8
_NEEDED = ("_MethodResolver", "_ServicerContext", "_handle_rpc", "_schedule_rpc_coro")


def open_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options, guard: ConnectionGuard
) -> grpc.aio.Server:
    """Return a server for services that register their methods, as all generated stubs do."""
    is_known = hasattr(cygrpc.AioServer, "_make_request_call_future") and all(hasattr(cygrpc, n) for n in _NEEDED)
    if not is_known:  # this version of grpcio accepts calls in another way
        return grpc.aio.server(interceptors=interceptors, options=options)
    return cast(grpc.aio.Server, _Server(interceptors, options, guard))


class _Server(_server.Server):
    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options, guard: ConnectionGuard
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = _AioServer(self._loop, None, (), interceptors, tuple(options), None)
        self._server.accept_with(tuple(interceptors), guard)


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]  # no stubs
    def accept_with(self, interceptors: tuple[grpc.aio.ServerInterceptor, ...], guard: ConnectionGuard) -> None:
        self._accepting = interceptors, guard
        self._handlers: dict[str, Any] = {}
        self._running: set[asyncio.Task[None]] = set()

    def add_registered_method_handlers(self, handlers: dict[str, Any]) -> None:
        self._handlers |= handlers
        super().add_registered_method_handlers(handlers)

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """Return a future that has no result until the server stops, and accept calls until then.

        `method`: the registered method; None for calls of all other methods.
        """
        return asyncio.gather(*(self._accept(method) for _ in range(ACCEPTED_AT_ONCE)))

    async def _accept(self, method: bytes | None) -> None:
        loop, (interceptors, guard) = asyncio.get_running_loop(), self._accepting
        resolver = cygrpc._MethodResolver([], self._handlers)
        name = UNKNOWN_METHOD if method is None else method.decode()
        while True:
            call = await (self._request_call() if method is None else self._request_registered_call(method))
            connection = guard.connection_of(cygrpc._ServicerContext(call, None, None, loop).peer())
            if connection.ending:
                continue  # without a reference, gRPC cancels the call
            handling = cygrpc._handle_rpc(name, resolver, interceptors, call, loop, False)
            guarded = _guarded(guard, connection, handling)
            task = loop.create_task(cygrpc._schedule_rpc_coro(guarded, call, loop, name))
            self._running.add(task)  # the loop holds only weak references
            task.add_done_callback(self._running.discard)


async def _guarded(guard: ConnectionGuard, connection: Connection, handling: Coroutine[Any, Any, None]) -> None:
    """Run a call. It is reset if the client cancels it, or can no longer be sent an answer."""
    if connection.ending:  # since the call was accepted
        handling.close()
        return
    with guard.call(connection) as reset:
        try:
            await handling
        except (asyncio.CancelledError, cygrpc.ExecuteBatchError):
            reset()
            raise
