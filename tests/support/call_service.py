"""A bare server with methods of several kinds, to test what every server does."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from serving import PATIENCE_SECONDS

from specpool.protocol.errors import InvalidArgumentError, QueueFullError
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.calls import Rates
from specpool.rpc.server.server import Server

MESSAGE_BYTES = 2**20


class Parsed:
    """A parsed request."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload


class Calls:
    """Methods `One`, `Stream` and `Large`, which respond once `open` is set, and methods that fail.

    `One` and `Stream` return the request, `Large` as many bytes as it says. The error of `Refuse` has the text of the
    request, `Full` has no room, and `Fail` has a bug.
    """

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0
        self.requests: list[weakref.ref[Parsed]] = []

    def methods(self) -> dict[str, Any]:
        """Return the handler of each method."""
        behaviours = {"One": self.one, "Large": self.large, "Refuse": self.refuse, "Fail": self.fail, "Full": self.full}
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(behaviour, request_deserializer=Parsed)
            for name, behaviour in behaviours.items()
        }
        methods["Stream"] = grpc.unary_stream_rpc_method_handler(self.stream, request_deserializer=Parsed)
        return methods

    async def one(self, request: Parsed, context: Any) -> bytes:
        self.begun += 1
        await self.open.wait()
        return request.payload

    async def stream(self, request: Parsed, context: Any) -> AsyncIterator[bytes]:
        yield await self.one(request, context)

    async def large(self, request: Parsed, context: Any) -> bytes:
        return bytes(int(await self.one(request, context)))

    async def refuse(self, request: Parsed, context: Any) -> bytes:
        self.requests.append(weakref.ref(request))
        raise InvalidArgumentError("field", request.payload.decode())

    async def full(self, request: Parsed, context: Any) -> bytes:
        raise QueueFullError("the queue is full", 1.0)

    async def fail(self, request: Parsed, context: Any) -> bytes:
        self.requests.append(weakref.ref(request))
        raise KeyError("told to fail") from ValueError()


def register(calls: Any, server: Any) -> None:
    server.add_registered_method_handlers("calls", calls.methods())


@asynccontextmanager
async def calls_server(rates: Rates | None = None, **settings: Any) -> AsyncIterator[tuple[Server, Calls, str]]:
    """Run a server that serves `Calls`; yield both and the address."""
    server, calls = Server(ServerSettings(**{"drain_seconds": 0, **settings}), MESSAGE_BYTES, rates), Calls()
    server.add("calls", register, calls)
    port = await server.start()
    server.set_serving(True)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield server, calls, f"127.0.0.1:{port}"
    finally:
        server.stop(drain=False)
        await server.wait_stopped()
