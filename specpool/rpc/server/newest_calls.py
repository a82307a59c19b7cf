"""Health checks and reflection: many clients may hold such calls open, so the newest win."""

from contextlib import ExitStack

from specpool.protocol.errors import InvalidArgumentError
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.calls import Call, CallLimits, Client, too_many
from specpool.rpc.server.limits import Calls

MAX_HEALTH_CALLS = 256
"""Maximum number of calls of all clients together."""
HEALTH_RECEIVE_SECONDS = 1.0
MAX_HEALTH_REQUEST_BYTES = 4096
"""A health check request holds only the name of a service."""


class NewestCalls(Calls):
    """Calls of which the newest win: a new one ends the oldest one of the client with most of them."""

    max_slow = 8

    def __init__(self, settings: ServerSettings) -> None:
        calls, memory = MAX_HEALTH_CALLS, settings.request_memory
        super().__init__(CallLimits(calls, calls, memory, HEALTH_RECEIVE_SECONDS))

    def _admit(self, client: Client) -> None:
        clients = [each for each in self._clients.values() if each.replaceable]
        if sum(len(each.replaceable) for each in clients) >= self._limits.calls:
            largest = max(clients, key=lambda each: len(each.replaceable) + (each is client))
            next(iter(largest.replaceable)).end(too_many("newer calls took the place of this one"))

    def _arrived(self, call: Call) -> None:
        """Keep the call replaceable."""

    async def _take_slot(self, client: Client, slot: ExitStack) -> None:
        """Read at once."""

    async def _checked(self, client: Client, size: int, needed: int) -> int:
        if size > MAX_HEALTH_REQUEST_BYTES:
            raise InvalidArgumentError("request", f"{size} bytes exceed {MAX_HEALTH_REQUEST_BYTES}")
        return needed
