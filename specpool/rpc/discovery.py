"""Server discovery: fixed addresses, and DNS names that are resolved periodically."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from specpool.rpc.security.channel import FOLLOWED, SecurityOptions, is_followed, join_address, split_address

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
"""Interval between resolutions of a name."""
TIMEOUT_SECONDS = 5.0
"""Timeout of a resolution."""

NO_RECORDS = {socket.EAI_NONAME, socket.EAI_NODATA}
"""Resolution errors that mean a DNS server answered that there are no records."""

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""Resolves a host and a port to IP addresses. Raises OSError."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens."""

    address: str
    name: str | None = None
    """DNS name that resolved to the address; None for a fixed address."""
    label: str = ""
    """The operator's name for the entry behind the address."""

    def secured(self, security: SecurityOptions) -> SecurityOptions:
        """Return connector options that expect the DNS name, not the IP address, in the server's certificate."""
        if self.name is None or security.get("tls_ca") is None or security.get("tls_name") is not None:
            return security
        return security | SecurityOptions(tls_name=self.name)


class Discovery:
    """Follows entries: "dns:///host:port" stands for every record of the name, any other entry for itself."""

    def __init__(
        self,
        entries: Iterable[str],
        resolve: Resolve | None = None,
        labels: Mapping[str, str] = MappingProxyType({}),
        forgets: bool = False,
    ) -> None:
        """`labels`: operator's names by entry.

        `forgets`: drop the records of a DNS name once DNS answers that it has none. Servers can then be withdrawn.
        """
        self._resolve, self._forgets, entries = resolve or _resolve, forgets, list(entries)
        names = {
            entry: split_address(entry.removeprefix(FOLLOWED)) if is_followed(entry) else None for entry in entries
        }
        self.fixed = [Endpoint(entry, None, labels.get(entry, "")) for entry, name in names.items() if name is None]
        self._labels = {name: labels.get(entry, "") for entry, name in names.items() if name}
        self._resolved: dict[tuple[str, int], list[Endpoint]] = {name: [] for name in names.values() if name}
        """The last known records of each name."""
        self._errors: dict[tuple[str, int], str] = {}

    @property
    def is_single(self) -> bool:
        """Whether there is one endpoint, which never changes."""
        return len(self.fixed) == 1 and not self._resolved

    async def endpoints(self) -> AsyncIterator[list[Endpoint]]:
        """Yield the fixed endpoints at once, and all of them after every resolution of the names; never returns.

        Unless `forgets` is set, a name that cannot be resolved keeps its last records: DNS may be at fault.
        """
        if self.fixed:
            yield self.fixed
        while self._resolved:
            await asyncio.gather(*map(self._follow, self._resolved))
            found: dict[str, Endpoint] = {}
            for endpoint in chain(self.fixed, *self._resolved.values()):
                found.setdefault(endpoint.address, endpoint)
            yield [*found.values()]
            await asyncio.sleep(RESOLVE_SECONDS)
        await asyncio.Event().wait()

    async def _follow(self, name: tuple[str, int]) -> None:
        host, port = name
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                records = await self._resolve(host, port)
        except (OSError, TimeoutError) as error:
            if self._forgets and getattr(error, "errno", None) in NO_RECORDS:
                self._resolved[name] = []
            reason = str(error) or "no response"
            if self._errors.get(name) != reason:
                log.warning("cannot resolve %s (%s); keeping %d addresses", host, reason, len(self._resolved[name]))
            self._errors[name] = reason
        else:
            self._errors.pop(name, None)
            addresses = [join_address(record, port) for record in sorted(set(records))]
            self._resolved[name] = [Endpoint(address, host, self._labels[name]) for address in addresses]


async def _resolve(host: str, port: int) -> Iterable[str]:
    records: list[Any] = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [record[4][0] for record in records]
