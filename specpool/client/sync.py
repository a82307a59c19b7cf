"""The client for programs without asyncio; it may be used from several threads."""

import time
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Self, Unpack

import grpc

from rpc.channel import open_blocking_channel
from specpool.client.requests import GenerateOptions, Prompt, make_request
from specpool.client.retries import Replay, Retries
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc


class Client:
    """A client of a coordinator, and a context manager.

    Calls raise `grpc.RpcError` if the server refuses them or stays unavailable.
    """

    def __init__(self, address: str, retry_seconds: float = 30.0) -> None:
        """`address`: "host:port" of a coordinator. `retry_seconds`: how long to retry while it is unavailable, or
        has too much to do; 0: never."""
        self._channel = open_blocking_channel(address)
        self._closed = False
        self._retry_seconds = retry_seconds
        self.stub: generation_pb2_grpc.GenerationServiceStub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[GenerateOptions]
    ) -> pb.GenerateResponse:
        """Returns the whole answer. The timeout frees the request on the server."""
        request, retries = make_request(prompt, **options), Retries(self._retry_seconds, timeout_seconds)
        while True:
            try:
                return self.stub.Generate(request, timeout=retries.remaining)
            except grpc.RpcError as error:
                pause = self._pause(retries, error)
            time.sleep(pause)

    def stream(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[pb.GenerateStreamResponse]:
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
                for message in call:
                    if (fresh := replay.fresh(message)) is not None:
                        retries.progress()
                        yield fresh
                return
            except grpc.RpcError as error:
                pause = self._pause(retries, error)
            finally:
                call.cancel()
            time.sleep(pause)

    def _pause(self, retries: Retries, error: grpc.RpcError) -> float:
        if self._closed:  # by another thread, which cancels the call
            raise error
        return retries.pause(error)

    def abort(self, request_id: str) -> None:
        """Ends a request in flight; its caller gets what was generated so far."""
        self.stub.Abort(pb.AbortRequest(request_id=request_id))

    def model_info(self) -> pb.GetModelInfoResponse:
        """Returns the models and limits of the server."""
        return self.stub.GetModelInfo(pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        """Returns the load, workers and counters of the server."""
        return self.stub.GetServerInfo(pb.GetServerInfoRequest())
