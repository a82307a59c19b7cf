"""Rendezvous of nodes: a TCPStore at the master port tells the ranks of other nodes where and how to connect.

Traffic is neither encrypted nor authenticated: ranks need a private network.
"""

import errno
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from pydantic import BaseModel

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.sharding.links import Link
from specpool.engine.sharding.nccl import Store, open_store, serve_store
from specpool.environment.process import package_version

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
HELLO_SECONDS = 5.0
OUTDATED_SECONDS = 60.0
"""Time for a name server to learn this node's address."""
NODE_OPTIONS = {"device", "threads", "node_rank"}
"""Options in which nodes may differ."""


class Invitation(BaseModel):
    """What rank 0 tells the other ranks through the store."""

    version: str
    options: dict[str, Any]
    """Options that all nodes share."""
    port: int
    """Port that ranks connect to."""
    key: str
    """Hexadecimal key that ranks send, followed by one byte with their number."""


def await_ranks(options: EngineOptions, ranks: range, on_hangup: Callable[[str], None]) -> tuple[Store, list[Link]]:
    """Wait for these ranks, which run on other nodes. `on_hangup` gets the name of a rank that ends. OSError: cannot
    listen."""
    store_server = _listen(str(options.master_addr), options.master_port)
    host = store_server.getsockname()[0]
    log.info("waiting for %d ranks of other nodes at %s, port %d", len(ranks), host, options.master_port)
    if ip_address(host).is_loopback:
        log.warning("%s is a loopback address here, which other nodes cannot reach", options.master_addr)
    key, links = secrets.token_bytes(32), dict[int, Link]()
    with store_server, socket.create_server((host, 0), family=store_server.family) as server:
        store = serve_store(store_server)
        invitation = _invitation(options, server.getsockname()[1], key.hex())
        store.set("invitation", invitation.model_dump_json())
        while len(links) < len(ranks):
            peer, address = server.accept()
            rank = _greet(peer, key)
            if rank is None or rank not in ranks or rank in links:
                log.warning("refused a connection from %s, which is no rank of this model", address[0])
                peer.close()
                continue
            links[rank] = Link(f"rank {rank}", peer)
            links[rank].watch(on_hangup)
    return store, [links[rank] for rank in ranks]


def _greet(peer: socket.socket, key: bytes) -> int | None:
    """Return the number of a rank that sent the key, otherwise None."""
    peer.settimeout(HELLO_SECONDS)
    try:
        hello = peer.recv(len(key) + 1)
    except OSError:
        return None
    return hello[-1] if hmac.compare_digest(hello[:-1], key) else None


def join(options: EngineOptions, rank: int) -> Link:
    """Connect to rank 0, retrying until it listens. Raises UnsupportedModelError if the nodes' options differ."""
    host, port, logged = str(options.master_addr), options.master_port, ""
    while True:
        try:
            store = open_store(host, port)
            break
        except OSError as error:
            if logged != (reason := str(error)):
                logged = reason
                log.warning("rank 0 at %s:%d: %s; trying again", host, port, reason)
            time.sleep(RETRY_SECONDS)
    own, invitation = _invitation(options), Invitation.model_validate_json(store.get("invitation"))
    if invitation.version != own.version:
        raise UnsupportedModelError(f"node 0 has version {invitation.version}, but this node has {own.version}")
    for name, value in own.options.items():
        if (others := invitation.options.get(name)) != value:
            raise UnsupportedModelError(f"{name} is {value!r} on this node, but {others!r} on node 0")
    if store.add(f"rank {rank}", 1) > 1:
        raise UnsupportedModelError(f"another node has --node-rank {options.node_rank} too")
    peer = socket.create_connection((host, invitation.port))
    peer.sendall(bytes([*bytes.fromhex(invitation.key), rank]))
    return Link("rank 0", peer)


def _invitation(options: EngineOptions, port: int = 0, key: str = "") -> Invitation:
    shared = options.model_dump(mode="json", exclude=NODE_OPTIONS)
    return Invitation(version=package_version(), options=shared, port=port, key=key)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on a port. Retries for a while if the name does not resolve yet, or resolves to another host."""
    gives_up = time.monotonic() + OUTDATED_SECONDS
    while True:
        try:
            (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            is_outdated = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            if not is_outdated or time.monotonic() >= gives_up:
                raise
            log.warning("%s: %s; trying again", host, error)
            time.sleep(RETRY_SECONDS)
