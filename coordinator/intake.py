"""The way of a request from its message to the pool, the same for every service that generates."""

import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from coordinator.coordinator import Coordinator
from coordinator.generation import Generation
from coordinator.prompts.reading import PromptReader
from coordinator.prompts.slots import TokenizingSlots
from coordinator.validation import Limits, check_request_id, parse_request, with_prompt
from protocol.errors import InvalidArgumentError, UnavailableError
from rpc.server import Server
from specpool.v1 import generation_pb2 as pb


class Intake:
    """Takes in the requests of all services: they share its bounds, and each client its request ids."""

    def __init__(self, coordinator: Coordinator, server: Server) -> None:
        self._coordinator, self._server = coordinator, server
        settings = coordinator.settings
        self._slots = TokenizingSlots(most_waiting=settings.usable_window + settings.queue_size)

    async def begin(self, request: pb.GenerateRequest, client: str) -> AbstractAsyncContextManager[Generation]:
        """Checks the request of a client and reads its prompt; enter the result to generate.

        InvalidArgumentError, AlreadyExistsError, QueueFullError, UnavailableError.
        """
        if self._server.stopping:
            raise UnavailableError("the server is shutting down")
        arrived = time.monotonic()
        coordinator = self._coordinator
        limits = Limits(
            coordinator.settings,
            coordinator.max_model_len,
            coordinator.target.vocab_size,
            coordinator.pool.window_size,
        )
        prompt = PromptReader(coordinator.tokenizer, limits.max_model_len, limits.vocab_size)
        parsed = replace(parse_request(request, coordinator.tokenizer.eos_token_ids, limits), client=client)
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
