"""Who makes a call: limits, fairness and ownership of requests go by it."""

from typing import Any


def client_of(context: Any) -> str:
    """The client of a call: its host, since every connection has a port of its own."""
    peer: str = context.peer()
    kind, _, address = peer.partition(":")
    return f"{kind}:{address.rpartition(':')[0]}" if kind in ("ipv4", "ipv6") else peer
