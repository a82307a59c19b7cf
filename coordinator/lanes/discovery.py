"""The addresses of the target workers. The records of a DNS name are followed, such as those of a headless Service."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specpool.rpc.security.channel import FOLLOWED, is_followed, join_address, split_address

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 5.0
"""Time between two lookups of a name."""


@dataclass(frozen=True)
class Place:
    """Where a worker listens."""

    address: str
    tls_name: str | None = None
    """The name that its address was looked up with."""


class Discovery:
    """Looks up names again and again."""

    def __init__(self, entries: Iterable[str], changed: Callable[[], None]) -> None:
        """`entries`: addresses, or names as "dns:///host:port". `changed`: called when `places` has changed."""
        self._found = {entry: set() if is_followed(entry) else {Place(entry)} for entry in entries}
        self._changed = changed
        self._failures: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return [entry for entry in self._found if is_followed(entry)]

    @property
    def places(self) -> list[Place]:
        """All places, with different addresses."""
        places = [place for entry in self._found.values() for place in sorted(entry, key=lambda place: place.address)]
        return list({place.address: place for place in reversed(places)}.values())[::-1]

    async def follow(self, name: str) -> None:
        """Look up a name forever. A failed lookup changes nothing."""
        while True:
            try:
                found = await resolve(name)
            except OSError as error:
                self._failed(name, str(error))
            else:
                self._failures.pop(name, None)
                if found != self._found[name]:
                    self._found[name] = found
                    self._changed()
            await asyncio.sleep(FOLLOW_SECONDS)

    def _failed(self, name: str, reason: str) -> None:
        if self._failures.get(name) != reason:
            log.warning("looking up %s failed: %s", name, reason)
        self._failures[name] = reason


async def resolve(name: str) -> set[Place]:
    """Look up the addresses of a name, "dns:///host:port". Raises OSError."""
    address = split_address(name.removeprefix(FOLLOWED))
    assert address is not None
    host, port = address
    records = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {Place(join_address(str(record[4][0]), port), host) for record in records}
