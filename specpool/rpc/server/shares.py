"""Fair shares of a limited resource, and a pace for refusals."""

import asyncio
import math
from collections.abc import Collection

MAX_CLIENTS = 1024
"""Clients to remember until their turns are checked for age."""


def fair_share(held: Collection[int], capacity: int) -> int:
    """Return the max-min fair share: clients that hold less keep what they hold, and the others get this much.

    `held`: what each client holds. At least 1.
    """
    remaining = capacity
    for index, count in enumerate(sorted(held)):
        share = remaining // (len(held) - index)
        if count > share:
            return max(1, share)
        remaining -= count
    return capacity


class Pace:
    """Gives each client turns at a limited rate, so that its refusals leave time for others."""

    def __init__(self, per_second: float, max_wait: float = math.inf) -> None:
        """`per_second`: cost of the turns in each second. `max_wait`: maximum seconds to wait for a turn."""
        self._seconds, self._max_wait = 1 / per_second, max_wait
        self._next: dict[str, float] = {}
        """Time of the next turn, by client."""

    async def turn(self, client: str, cost: float = 1) -> None:
        """Wait for the next turn of a client, but not at all if that takes longer than the maximum.

        The turn after it is later, the more this one costs.
        """
        now = asyncio.get_running_loop().time()
        turn = max(now, self._next.get(client, now))
        if turn > now + self._max_wait:
            return
        self._next[client] = turn + cost * self._seconds
        if len(self._next) > MAX_CLIENTS:
            self._next = {client: after for client, after in self._next.items() if after > now}
        if turn > now:
            await asyncio.sleep(turn - now)
