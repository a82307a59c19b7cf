"""Request intake, shared by all services: validates a request, tokenizes its prompt and submits it."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from coordinator.prompts.prompt_reader import PromptReader
from coordinator.requests.generation import Generation
from coordinator.requests.validation import Limits, check_request_id, read_request
from coordinator.serving.coordinator import Coordinator
from coordinator.tracing.prompts import prompt_attributes
from coordinator.tracing.traces import Call, RequestTrace
from specpool.protocol.errors import InvalidArgumentError, ServiceError, UnavailableError
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.server import Server
from specpool.rpc.server.unread import UnreadStream
from specpool.v1 import generation_pb2 as pb

Fail: TypeAlias = Callable[[ServiceError], None]
"""Fails the call of an unread stream."""


class Intake:
    """Accepts the requests of all services, which share limits and request ids."""

    def __init__(self, coordinator: Coordinator, server: Server) -> None:
        self._coordinator, self._server = coordinator, server

    @asynccontextmanager
    async def generation(
        self, message: pb.GenerateRequest, context: Any, stream: bool = False
    ) -> AsyncIterator[tuple[Generation, Fail]]:
        """Context manager that yields the generation for a call, and a function that fails the call.

        Raises InvalidArgumentError, AlreadyExistsError, QueueFullError, UnavailableError, UnimplementedError.
        """
        coordinator = self._coordinator
        with coordinator.traces.request(partial(_describe, message, context, stream)) as trace:
            if self._server.stopping:
                raise UnavailableError("the server is shutting down")
            arrived = time.monotonic()
            tokenizer, model = coordinator.tokenizer, coordinator.model
            assert model is not None
            prompts = PromptReader(tokenizer, coordinator.max_model_len, model.vocab_size)
            limits = Limits(
                coordinator.settings,
                prompts,
                coordinator.lanes.max_num_seqs,
                coordinator.constraints,
                coordinator.grammar_refusal,
            )
            request = await read_request(
                message, client_of(context), limits, coordinator.tokenizers, coordinator.check_queue
            )
            async with coordinator.generate(request, arrived) as generation:
                coordinator.traces.follow(trace, generation)
                yield generation, partial(_fail, trace, UnreadStream(context))

    def abort(self, request_id: str, client: str) -> None:
        """End a request in flight of the same client. Raises InvalidArgumentError, NotFoundError."""
        if not request_id:
            raise InvalidArgumentError("request_id", "must not be empty")
        check_request_id(request_id)
        self._coordinator.abort(client, request_id)


def _describe(message: pb.GenerateRequest, context: Any, stream: bool) -> Call:
    return Call(
        operation="chat" if message.HasField("chat") else "text_completion",
        stream=stream,
        metadata=context.invocation_metadata() or (),
        prompt=partial(prompt_attributes, message),
    )


def _fail(trace: RequestTrace, stream: UnreadStream, error: ServiceError) -> None:
    """Fail an unread stream. Its handler only sees a cancellation."""
    trace.failed(error)
    stream.end(error)
