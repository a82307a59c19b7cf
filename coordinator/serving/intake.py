"""The path of a request from its message to the pool, the same for every service that generates."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from coordinator.prompts.prompt_reader import PromptReader
from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.requests.generation import Generation
from coordinator.requests.validation import Limits, check_request_id, parse_request, with_prompt
from coordinator.serving.coordinator import Coordinator
from coordinator.tracing.traces import Asked, RequestTrace
from specpool.protocol.errors import InvalidArgumentError, ServiceError, UnavailableError
from specpool.rpc.observability import logs
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.server import Server
from specpool.rpc.server.unread import UnreadStream
from specpool.v1 import generation_pb2 as pb

GiveUp: TypeAlias = Callable[[ServiceError], None]
"""Ends the call of a stream that is not read."""


class Intake:
    """Takes in the requests of all services, which share its bounds and each client's request ids."""

    def __init__(self, coordinator: Coordinator, server: Server) -> None:
        self._coordinator, self._server = coordinator, server
        settings = coordinator.settings
        self._slots = TokenizerPool(max_waiting=settings.usable_window + settings.queue_size)

    @asynccontextmanager
    async def generation(
        self, request: pb.GenerateRequest, context: Any, stream: bool = False
    ) -> AsyncIterator[tuple[Generation, GiveUp]]:
        """The generation that answers a call, and how to give up a stream that is not read. It ends with the context.

        InvalidArgumentError, AlreadyExistsError, QueueFullError, UnavailableError.
        """
        with self._coordinator.traces.request(partial(_asked, request, context, stream)) as trace:
            async with await self._begin(request, client_of(context)) as generation:
                trace.follow(generation)
                yield generation, partial(_give_up, trace, UnreadStream(context))

    async def _begin(self, request: pb.GenerateRequest, client: str) -> AbstractAsyncContextManager[Generation]:
        """Checks the request of a client and reads its prompt; enter the result to generate."""
        if self._server.stopping:
            raise UnavailableError("the server is shutting down")
        arrived = time.monotonic()
        coordinator = self._coordinator
        limits = Limits(
            coordinator.settings,
            coordinator.max_model_len,
            coordinator.target.vocab_size,
            coordinator.pool.max_num_seqs,
        )
        prompt = PromptReader(coordinator.tokenizer, limits.max_model_len, limits.vocab_size)
        parsed = replace(parse_request(request, coordinator.tokenizer.eos_token_ids, limits), client=client)
        logs.bind_request(parsed.request_id)
        prompt.check(request)
        coordinator.check_queue(parsed)
        prompt_ids = await prompt.read(request, self._slots, before=lambda: coordinator.check_queue(parsed))
        return coordinator.generate(with_prompt(parsed, prompt_ids, request.sampling_params, limits), arrived)

    def abort(self, request_id: str, client: str) -> None:
        """Ends a request in flight of the same client. InvalidArgumentError, NotFoundError."""
        if not request_id:
            raise InvalidArgumentError("request_id", "must not be empty")
        check_request_id(request_id)
        self._coordinator.abort(client, request_id)


def _asked(request: pb.GenerateRequest, context: Any, stream: bool) -> Asked:
    """What the trace of a request needs to know of its call."""
    is_chat = request.WhichOneof("input") == "chat"
    texts = [("user", request.text)] if request.text else []
    return Asked(
        operation="chat" if is_chat else "text_completion",
        stream=stream,
        metadata=context.invocation_metadata() or (),
        messages=lambda: [(message.role, message.content) for message in request.chat.messages] if is_chat else texts,
    )


def _give_up(trace: RequestTrace, stream: UnreadStream, error: ServiceError) -> None:
    """Ends a stream that is not read; its handler will only see that it was cancelled."""
    trace.failed(error)
    stream.end(error)
