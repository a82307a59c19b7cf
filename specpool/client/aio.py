"""The client for asyncio. Cancelling a task aborts its request."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, Unpack

import grpc

from specpool.client.connections import AsyncConnected, AsyncStub
from specpool.client.constraints import Model, check_model, parsed
from specpool.client.failures import async_failure
from specpool.client.requests import GenerateOptions, Prompt, make_request
from specpool.client.retries import POLL_SECONDS, ProgressCallback, Readiness, Replay, Retries
from specpool.errors import RequestError
from specpool.v1 import generation_pb2 as pb


class AsyncClient(AsyncConnected):
    """Client of a coordinator, for use as a context manager.

    Calls raise a `RequestError` of `specpool.errors` if the server refuses them or remains unavailable.
    """

    @property
    def stub(self) -> AsyncStub:
        """The stub, for custom calls. Get it for each call, because TLS files may change."""
        # No `_end_call`: the channel must stay open until the client is closed.
        stub: AsyncStub = self._begin_call().stub
        return stub

    @asynccontextmanager
    async def _stub(self) -> AsyncIterator[AsyncStub]:
        """The stub for one call within the context. RequestError."""
        connection = self._begin_call()
        try:
            yield connection.stub
        except grpc.RpcError as error:
            raise await async_failure(error, self._connector) from error
        finally:
            for channel in self._end_call(connection):
                await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._close():
            await channel.close()

    async def wait_ready(self, timeout_seconds: float = 60.0, on_progress: ProgressCallback | None = None) -> None:
        """Wait until the server can generate, for as long as it says that its model is loading.

        `timeout_seconds`: maximum time without such a sign of life. `on_progress`: called with each new phase, such as
        "loading weights". NotReadyError: the server cannot start, or was not ready in time. If it never answers, the
        error of the last call is raised.
        """
        readiness = Readiness(timeout_seconds, on_progress)
        while True:
            try:
                async with self._stub() as stub:
                    info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=readiness.answer_seconds)
                if readiness.is_ready(info):
                    return
            except RequestError as error:
                readiness.unanswered(error)
            await asyncio.sleep(POLL_SECONDS)

    async def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[GenerateOptions]
    ) -> pb.GenerateResponse:
        """Return the whole answer. A timeout aborts the request."""
        request, retries = make_request(prompt, **options), Retries(self._retry_seconds, timeout_seconds)
        while True:
            try:
                async with self._stub() as stub:
                    return await stub.Generate(request, timeout=retries.remaining)
            except RequestError as error:
                pause = self._pause(retries, error)
            await asyncio.sleep(pause)

    async def parse(
        self,
        prompt: Prompt,
        model: type[Model],
        *,
        timeout_seconds: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Model:
        """Return an answer constrained by a pydantic model, as an instance of that model.

        TypeError if `model` is not such a class. ValueError if the answer is incomplete, such as when cut off by
        `max_tokens`, or would include reasoning.
        """
        check_model(model, options)
        options["json_schema"] = model
        return parsed(await self.generate(prompt, timeout_seconds=timeout_seconds, **options), model)

    async def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Stream the answer in chunks; the last message is `complete`.

        Closing the iterator aborts the request. If the stream breaks, repeat the request and continue where it broke;
        DivergedError if the tokens differ.
        """
        request, retries = make_request(prompt, **options), Retries(self._retry_seconds, timeout_seconds)
        # One id for all attempts, so that `abort` finds the request.
        request.request_id = request.request_id or uuid.uuid4().hex
        replay = Replay()
        while True:
            replay.begin()
            try:
                async with self._stub() as stub:
                    call = stub.GenerateStream(request, timeout=retries.remaining)
                    try:
                        async for message in call:
                            if (fresh := replay.fresh(message)) is not None:
                                retries.progress()
                                yield fresh
                        return
                    finally:
                        call.cancel()
            except RequestError as error:
                pause = self._pause(retries, error)
            await asyncio.sleep(pause)

    async def abort(self, request_id: str) -> None:
        """End a request in flight; its caller gets the tokens generated so far."""
        async with self._stub() as stub:
            await stub.Abort(pb.AbortRequest(request_id=request_id))

    async def model_info(self) -> pb.GetModelInfoResponse:
        """Models and limits of the server."""
        async with self._stub() as stub:
            return await stub.GetModelInfo(pb.GetModelInfoRequest())

    async def server_info(self) -> pb.GetServerInfoResponse:
        """Load, workers and counters of the server."""
        async with self._stub() as stub:
            return await stub.GetServerInfo(pb.GetServerInfoRequest())
