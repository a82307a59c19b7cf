"""Rendezvous of nodes: the ranks of other nodes connect to rank 0 over TCP, at its master port.

Each rank opens two connections, for commands and for data. Rank 0 talks to all peers at once, so none delays another.
"""

import asyncio
import errno
import logging
import secrets
import socket
import time
from ipaddress import ip_address
from multiprocessing.connection import Connection
from typing import Any

from pydantic import ValidationError

from specpool.engine.config.master_secret import read_secret
from specpool.engine.config.options import EngineOptions
from specpool.engine.run.connections import Link
from specpool.engine.run.handshake import Hello, RefusedError, receive_hello, send_hello

log = logging.getLogger(__name__)

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Notice a host that vanishes within about 11 seconds. Socket options by name; macOS lacks some of them."""
COMMAND_TIMEOUT = {"TCP_USER_TIMEOUT": 11_000}
"""TCP would wait for 15 minutes while commands are unacknowledged, or find no room at the other end. Data may wait:
a rank can be slow to read it."""
RETRY_SECONDS = 1.0
HELLO_SECONDS = 5.0
OUTDATED_SECONDS = 60.0
"""Time for a name server to forget a former address of this node."""
MAX_PEERS = 256
"""Peers that have not said hello. One more replaces the oldest: a rank says hello at once."""
LOG_SECONDS = 10.0
"""Log refused connections at most this often."""


def await_ranks(options: EngineOptions, count: int) -> list[Link]:
    """Wait until `count` ranks of other nodes are connected. OSError: cannot listen on the port."""
    secret = read_secret(options.master_secret_file)
    if secret is None:
        log.warning(
            "anyone who reaches port %d can join the ranks; set --master-secret-file on all nodes", options.master_port
        )
    with _server(str(options.master_addr), options.master_port) as server:
        host = server.getsockname()[0]
        log.info("waiting for %d ranks of other nodes at %s, port %d", count, host, options.master_port)
        if ip_address(host).is_loopback:
            log.warning("%s is a loopback address here, which other nodes cannot reach", options.master_addr)
        return asyncio.run(_Reception(Hello.of(options), secret, count).run(server))


def join(options: EngineOptions) -> Link:
    """Connect to rank 0, retrying until it listens and accepts this rank."""
    secret, logged = read_secret(options.master_secret_file), ""
    while True:
        rank, peers = secrets.token_hex(16), list[socket.socket]()
        try:
            for channel in ("commands", "data"):
                address = (str(options.master_addr), options.master_port)
                peers.append(socket.create_connection(address, timeout=HELLO_SECONDS))
                asyncio.run(_join(peers[-1], Hello.of(options, rank, channel), secret))
            return _link(*peers)
        except (OSError, RefusedError) as error:
            for peer in peers:
                peer.close()
            if logged != (reason := str(error) or "no answer"):
                logged = reason
                log.warning("rank 0 at %s:%d: %s; trying again", options.master_addr, options.master_port, reason)
        time.sleep(RETRY_SECONDS)


async def _join(peer: socket.socket, hello: Hello, secret: bytes | None) -> None:
    peer.setblocking(False)
    async with asyncio.timeout(HELLO_SECONDS):
        await send_hello(peer, hello, secret)


class _Reception:
    """Rank 0's side: peers that have not said hello, and the connections of ranks that have."""

    def __init__(self, own: Hello, secret: bytes | None, count: int) -> None:
        self._own, self._secret, self._count = own, secret, count
        self._greeting: dict[asyncio.Task[None], None] = {}  # oldest first
        self._arrived: dict[str, dict[str, socket.socket]] = {}
        self._refused, self._next_log = 0, 0.0

    async def run(self, server: socket.socket) -> list[Link]:
        """Wait for all ranks, then close all other connections."""
        server.setblocking(False)
        self._complete: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        accepting = asyncio.create_task(self._accept(server))
        ends: list[asyncio.Future[Any]] = [accepting, self._complete]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        tasks = [accepting, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links = [self._arrived.pop(rank) for rank in self._complete.result()] if self._complete.done() else []
        for rank in [*self._arrived]:
            self._drop(rank)
        if not links:
            accepting.result()  # raises
        return [_link(link["commands"], link["data"]) for link in links]

    async def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(server)
            except OSError as error:  # such as too many open files
                log.warning("cannot accept a connection to the master port: %s", error.strerror)
                self._drop_oldest()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if len(self._greeting) >= MAX_PEERS:
                self._drop_oldest()
            task = asyncio.create_task(self._greet(peer))
            self._greeting[task] = None
            task.add_done_callback(lambda task: self._greeting.pop(task, None))
            await asyncio.sleep(0)  # accepting never waits while others connect

    def _drop_oldest(self) -> None:
        if self._greeting:
            oldest = next(iter(self._greeting))
            del self._greeting[oldest]
            oldest.cancel()

    async def _greet(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        _keep_alive(peer)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await receive_hello(peer, self._own, self._secret)
        except RefusedError as refusal:
            self._refuse(peer, str(refusal))
        except (OSError, ValidationError):
            self._refuse(peer, f"it sent no valid hello within {HELLO_SECONDS:g} s")
        except asyncio.CancelledError:
            self._refuse(peer, "too many connections have sent no hello")
            raise
        else:
            self._admit(peer, hello)

    def _refuse(self, peer: socket.socket, reason: str) -> None:
        peer.close()
        if self._complete.done():
            return
        self._refused += 1
        if time.monotonic() >= self._next_log:
            log.warning("refused %d connections to the master port; the last one: %s", self._refused, reason)
            self._refused, self._next_log = 0, time.monotonic() + LOG_SECONDS

    def _admit(self, peer: socket.socket, hello: Hello) -> None:
        if self._complete.done():
            peer.close()
            return
        channels = self._arrived.setdefault(hello.rank, {})
        if hello.channel in channels:
            self._refuse(peer, "it is connected already")
            return
        channels[hello.channel] = peer
        for rank, others in [*self._arrived.items()]:
            if any(_is_closed(other) for other in others.values()):
                self._drop(rank)
        complete = [rank for rank, others in self._arrived.items() if len(others) == 2]
        if len(complete) == self._count:
            self._complete.set_result(complete)

    def _drop(self, rank: str) -> None:
        for peer in self._arrived.pop(rank).values():
            peer.close()


def _is_closed(peer: socket.socket) -> bool:
    """Whether a rank that has said hello, and must now wait, has closed its connection."""
    try:
        peer.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _server(host: str, port: int) -> socket.socket:
    """Listen on a port; retry while the host name does not resolve yet, and for a while if it is another host's."""
    gives_up = time.monotonic() + OUTDATED_SECONDS
    while True:
        try:
            (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return socket.create_server(address[:2], family=family, backlog=MAX_PEERS)
        except OSError as error:
            is_outdated = error.errno == errno.EADDRNOTAVAIL and time.monotonic() < gives_up
            if not is_outdated and not isinstance(error, socket.gaierror):
                raise
            log.warning("%s: %s; trying again", host, error)
            time.sleep(RETRY_SECONDS)


def _link(commands: socket.socket, data: socket.socket) -> Link:
    for peer in (commands, data):
        peer.setblocking(True)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(peer)
    _set_options(commands, COMMAND_TIMEOUT)
    return Link(Connection(commands.detach()), data)


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set_options(peer, KEEPALIVE)


def _set_options(peer: socket.socket, options: dict[str, int]) -> None:
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
