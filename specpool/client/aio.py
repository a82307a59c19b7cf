"""The client for asyncio."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, Unpack

import grpc

from rpc.channel import open_channel
from specpool.client.requests import GenerateOptions, Prompt, make_request
from specpool.client.retries import Replay, Retries
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc


class AsyncClient:
    """A client of a coordinator, and an async context manager.

    Calls raise `grpc.RpcError` if the server refuses them or stays unavailable.
    """

    def __init__(self, address: str, retry_seconds: float = 30.0) -> None:
        """`address`: "host:port" of a coordinator. `retry_seconds`: how long to retry while it is unavailable, or
        has too much to do; 0: never."""
        self._channel = open_channel(address)
        self._retry_seconds = retry_seconds
        self.stub: generation_pb2_grpc.GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(
            self._channel
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[GenerateOptions]
    ) -> pb.GenerateResponse:
        """Returns the whole answer. Cancelling the task, or the timeout, frees the request on the server."""
        request, retries = make_request(prompt, **options), Retries(self._retry_seconds, timeout_seconds)
        while True:
            try:
                return await self.stub.Generate(request, timeout=retries.remaining)
            except grpc.aio.AioRpcError as error:
                pause = retries.pause(error)
            await asyncio.sleep(pause)

    async def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Streams the answer in pieces; the last message is `complete`.

        Closing the iterator frees the request on the server. A stream that breaks off is requested again and goes on
        where it broke off; DivergedError if it cannot.
        """
        request, retries = make_request(prompt, **options), Retries(self._retry_seconds, timeout_seconds)
        # The same in all attempts, so that `abort` finds it.
        request.request_id = request.request_id or uuid.uuid4().hex
        replay = Replay()
        while True:
            replay.begin()
            call = self.stub.GenerateStream(request, timeout=retries.remaining)
            try:
                async for message in call:
                    if (fresh := replay.fresh(message)) is not None:
                        retries.progress()
                        yield fresh
                return
            except grpc.aio.AioRpcError as error:
                pause = retries.pause(error)
            finally:
                call.cancel()
            await asyncio.sleep(pause)

    async def abort(self, request_id: str) -> None:
        """Ends a request in flight; its caller gets what was generated so far."""
        await self.stub.Abort(pb.AbortRequest(request_id=request_id))

    async def model_info(self) -> pb.GetModelInfoResponse:
        """Returns the models and limits of the server."""
        return await self.stub.GetModelInfo(pb.GetModelInfoRequest())

    async def server_info(self) -> pb.GetServerInfoResponse:
        """Returns the load, workers and counters of the server."""
        return await self.stub.GetServerInfo(pb.GetServerInfoRequest())
