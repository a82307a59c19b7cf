"""The intake of requests, which all services share."""

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from coordinator.prompts.prompt_reader import PromptReader
from coordinator.requests.generation import Generation, Sample
from coordinator.requests.in_flight import COMPLETED
from coordinator.requests.traces import Call, RequestTrace, prompt_attributes
from coordinator.requests.validation import Limits, check_request_id, read_request
from coordinator.serving.coordinator import Coordinator
from specpool.protocol.errors import InvalidArgumentError, ServiceError, UnavailableError
from specpool.rpc.observability.otlp_metrics import RequestMeter
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.calls import UnreadStream
from specpool.rpc.server.server import Server
from specpool.v1 import generation_pb2 as pb

Fail: TypeAlias = Callable[[ServiceError], None]
"""Fails the call of an unread stream."""


class Intake:
    """Accepts the requests of all services, which share limits and request ids."""

    def __init__(self, coordinator: Coordinator, server: Server, meter: RequestMeter | None = None) -> None:
        """`meter`: records the latencies of finished samples."""
        self._coordinator, self._server, self._meter = coordinator, server, meter

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
                try:
                    yield generation, partial(_fail, trace, UnreadStream(context))
                finally:
                    if self._meter is not None:
                        self._record(self._meter, _operation(message), generation.samples)

    def _record(self, meter: RequestMeter, operation: str, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if (finish := sample.sequence.finish) is not None and finish.reason in COMPLETED:
                first_token_s = sample.timings.time_to_first_token_s
                meter.ended(operation, self._coordinator.served_model_name, first_token_s, sample.seconds_per_token)

    def abort(self, request_id: str, client: str) -> None:
        """End a request in flight of the same client. Raises InvalidArgumentError, NotFoundError."""
        if not request_id:
            raise InvalidArgumentError("request_id", "must not be empty")
        check_request_id(request_id)
        self._coordinator.abort(client, request_id)


def _operation(message: pb.GenerateRequest) -> str:
    """Return the operation name in OpenTelemetry's GenAI conventions."""
    return "chat" if message.HasField("chat") else "text_completion"


def _describe(message: pb.GenerateRequest, context: Any, stream: bool) -> Call:
    return Call(
        operation=_operation(message),
        stream=stream,
        metadata=context.invocation_metadata() or (),
        prompt=partial(prompt_attributes, message),
    )


def _fail(trace: RequestTrace, stream: UnreadStream, error: ServiceError) -> None:
    """Fail an unread stream. Its handler sees only a cancellation."""
    trace.failed(error)
    stream.end(error)
