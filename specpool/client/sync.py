"""The blocking client. It is thread-safe. `make client` writes this file from `aio.py`."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, Unpack

import grpc

from specpool.client.connections import SyncConnected, SyncStub
from specpool.client.constraints import Model, check_model, parsed
from specpool.client.failures import failure
from specpool.client.requests import GenerateOptions, Prompt, make_request
from specpool.client.retries import POLL_SECONDS, ProgressCallback, Readiness, Replay, Retries
from specpool.errors import RequestError
from specpool.v1 import generation_pb2 as pb


class Client(SyncConnected):
    """Client of a coordinator, for use as a context manager.

    Calls raise a `RequestError` of `specpool.errors` if the server refuses them or remains unavailable.
    """

    @property
    def stub(self) -> SyncStub:
        """The stub, for custom calls. Get it for each call, because TLS files may change."""
        # No `_end_call`: the channel must stay open until the client is closed.
        stub: SyncStub = self._begin_call().stub
        return stub

    @contextmanager
    def _stub(self) -> Iterator[SyncStub]:
        """The stub for one call within the context. RequestError."""
        connection = self._begin_call()
        try:
            yield connection.stub
        except grpc.RpcError as error:
            raise failure(error, self._connector) from error
        finally:
            for channel in self._end_call(connection):
                channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._close():
            channel.close()

    def wait_ready(self, timeout_seconds: float = 60.0, on_progress: ProgressCallback | None = None) -> None:
        """Wait until the server can generate, for as long as it says that its model is loading.

        `timeout_seconds`: maximum time without such a sign of life. `on_progress`: called with each new phase, such as
        "loading weights". NotReadyError: the server cannot start, or was not ready in time. If it never answers, the
        error of the last call is raised.
        """
        readiness = Readiness(timeout_seconds, on_progress)
        while True:
            try:
                with self._stub() as stub:
                    info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=readiness.answer_seconds)
                if readiness.is_ready(info):
                    return
            except RequestError as error:
                readiness.unanswered(error)
            time.sleep(POLL_SECONDS)

    def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[GenerateOptions]
    ) -> pb.GenerateResponse:
        """Return the whole answer. A timeout aborts the request."""
        request, retries = make_request(prompt, **options), Retries(self._retry_seconds, timeout_seconds)
        while True:
            try:
                with self._stub() as stub:
                    return stub.Generate(request, timeout=retries.remaining)
            except RequestError as error:
                pause = self._pause(retries, error)
            time.sleep(pause)

    def parse(
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
        return parsed(self.generate(prompt, timeout_seconds=timeout_seconds, **options), model)

    def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[pb.GenerateStreamResponse]:
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
                with self._stub() as stub:
                    call = stub.GenerateStream(request, timeout=retries.remaining)
                    try:
                        for message in call:
                            if (fresh := replay.fresh(message)) is not None:
                                retries.progress()
                                yield fresh
                        return
                    finally:
                        call.cancel()
            except RequestError as error:
                pause = self._pause(retries, error)
            time.sleep(pause)

    def abort(self, request_id: str) -> None:
        """End a request in flight; its caller gets the tokens generated so far."""
        with self._stub() as stub:
            stub.Abort(pb.AbortRequest(request_id=request_id))

    def model_info(self) -> pb.GetModelInfoResponse:
        """Models and limits of the server."""
        with self._stub() as stub:
            return stub.GetModelInfo(pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        """Load, workers and counters of the server."""
        with self._stub() as stub:
            return stub.GetServerInfo(pb.GetServerInfoRequest())
