"""A bare server with methods of several kinds, to test what every server does."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from serving import PATIENCE_SECONDS

from specpool.protocol.errors import InvalidArgumentError
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.server import Server

MESSAGE_BYTES = 2**20


class Parsed:
    """A parsed request."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload


class Calls(grpc.GenericRpcHandler):
    """Methods `One` and `Stream`, which respond once `open` is set, and `Refuse` and `Fail`, which fail.

    `One` and `Stream` return the start of the request. The error of `Refuse` has the text of the request.
    """

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0
        self.requests: list[weakref.ref[Parsed]] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.removeprefix("/calls/")
        if method == "Stream":
            return grpc.unary_stream_rpc_method_handler(self.stream, request_deserializer=Parsed)
        behaviour = {"One": self.one, "Refuse": self.refuse, "Fail": self.fail}.get(method)
        if behaviour is None:
            return None
        return grpc.unary_unary_rpc_method_handler(behaviour, request_deserializer=Parsed)

    async def one(self, request: Parsed, context: Any) -> bytes:
        self.begun += 1
        await self.open.wait()
        return request.payload

    async def stream(self, request: Parsed, context: Any) -> AsyncIterator[bytes]:
        yield await self.one(request, context)

    async def refuse(self, request: Parsed, context: Any) -> bytes:
        self.requests.append(weakref.ref(request))
        raise InvalidArgumentError("field", request.payload.decode())

    async def fail(self, request: Parsed, context: Any) -> bytes:
        self.requests.append(weakref.ref(request))
        raise KeyError("told to fail") from ValueError()


@asynccontextmanager
async def calls_server(**settings: Any) -> AsyncIterator[tuple[Server, Calls, str]]:
    """Run a server that serves `Calls`; yield both and the address."""
    server, calls = Server(ServerSettings(**{"drain_seconds": 0, **settings}), MESSAGE_BYTES), Calls()
    server.add("calls", lambda handler, added_to: added_to.add_generic_rpc_handlers((handler,)), calls)
    port = await server.start()
    server.set_serving(True)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield server, calls, f"127.0.0.1:{port}"
    finally:
        server.stop(drain=False)
        await server.wait_stopped()
