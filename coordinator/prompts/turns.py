"""The order of prompts: clients take turns, and large or slow prompts leave one process to the others."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from specpool.protocol.errors import QueueFullError

# Maximum number of waiting large prompts of a client. Each keeps its text in memory.
MAX_LARGE_WAITING = 16
# Retry delay for refused clients.
RETRY_SECONDS = 0.5
# A client whose small prompt takes longer counts as slow for a while: its prompts count as large.
SLOW_SECONDS, SLOW_FOR_SECONDS = 0.25, 60.0
# Maximum number of clients whose turns are remembered.
MAX_CLIENTS = 1024

Place = TypeVar("Place")
Number = TypeVar("Number", int, float)


@dataclass(eq=False)
class Turn(Generic[Place]):
    client: str
    is_large: bool
    began: float
    granted: asyncio.Future[Place]
    is_slow: bool = False
    """Whether it kept a process busy for long, or ended it."""


class Turns(Generic[Place]):
    """Grants places to prompts. Only one large prompt has a place at a time."""

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_waiting`: maximum number of waiting prompts of a client; others are refused."""
        self._max_waiting, self._clock = max_waiting, clock
        self._free: list[Place] = []
        self._waiting: list[Turn[Place]] = []
        self._num_large = 0
        self._numbers = count(1)
        self._served: dict[str, int] = {}
        """The number of each client's last turn."""
        self._slow_until: dict[str, float] = {}

    async def take(self, client: str, is_large: bool = False) -> tuple[Turn[Place], Place]:
        """Wait for a place. Raises QueueFullError."""
        waiting = Counter(turn.is_large for turn in self._waiting if turn.client == client)
        if waiting.total() >= self._max_waiting or (is_large and waiting[True] >= MAX_LARGE_WAITING):
            reason = f"too many prompts are waiting to be tokenized ({waiting.total()})"
            raise QueueFullError(reason, RETRY_SECONDS)
        turn: Turn[Place] = Turn(client, is_large, 0.0, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._grant()
        try:
            return turn, await turn.granted
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:  # it was granted at the same time
                self._num_large -= turn.is_large
                self.add(turn.granted.result())
            raise

    def restart(self, turn: Turn[Place]) -> None:
        """Do not charge the time that a turn has taken so far to its client."""
        turn.began = self._clock()

    def end(self, turn: Turn[Place]) -> None:
        """End a prompt. Its place stays occupied until it is added again."""
        self._num_large -= turn.is_large
        if turn.is_slow or (not turn.is_large and self._clock() - turn.began > SLOW_SECONDS):
            self._remember(self._slow_until, turn.client, self._clock() + SLOW_FOR_SECONDS)
        self._grant()  # another large prompt may fit now

    def add(self, place: Place) -> None:
        self._free.append(place)
        self._grant()

    def take_free(self) -> list[Place]:
        places, self._free = self._free, []
        return places

    def _grant(self) -> None:
        while self._free:
            fitting = [turn for turn in self._waiting if self._fits(turn)]
            if not fitting:
                return
            turn = min(fitting, key=lambda turn: self._served.get(turn.client, 0))
            self._waiting.remove(turn)
            turn.is_large = self._counts_as_large(turn)
            self._num_large += turn.is_large
            self._remember(self._served, turn.client, next(self._numbers))
            turn.began = self._clock()
            turn.granted.set_result(self._free.pop())

    def _fits(self, turn: Turn[Place]) -> bool:
        return not turn.granted.done() and not (self._num_large and self._counts_as_large(turn))

    def _counts_as_large(self, turn: Turn[Place]) -> bool:
        return turn.is_large or self._slow_until.get(turn.client, 0.0) > self._clock()

    @staticmethod
    def _remember(clients: dict[str, Number], client: str, value: Number) -> None:
        clients.pop(client, None)
        clients[client] = value
        if len(clients) > MAX_CLIENTS:
            clients.pop(next(iter(clients)))
