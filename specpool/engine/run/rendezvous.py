"""Rendezvous of nodes: the ranks of other nodes connect to rank 0 over TCP, at its master port."""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from multiprocessing.connection import Connection

from pydantic import BaseModel, ValidationError

from specpool.engine.config.options import EngineOptions
from specpool.engine.run.connections import receive, send

log = logging.getLogger(__name__)

# Notice a host that vanishes within about 11 seconds. TCP would wait for 15 minutes while sent data is unacknowledged.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
"""Socket options by name; macOS lacks some of them."""
RETRY_SECONDS = 1.0
# Drop peers whose hello is late or oversized.
HELLO_SECONDS, HELLO_BYTES = 5, 1 << 16
NODE_OPTIONS = {"device", "threads", "node_rank"}
"""Options in which nodes may differ."""


class Hello(BaseModel):
    """From a rank of another node: its version and options."""

    version: str
    options: EngineOptions

    @classmethod
    def of(cls, options: EngineOptions) -> "Hello":
        """The hello of this version with these options."""
        return cls(version=version("specpool"), options=options)

    def differs_from(self, other: "Hello") -> str | None:
        """The first setting that must be equal on both nodes but differs; None if there is none."""
        if self.version != other.version:
            return "version"
        own, others = (hello.options.model_dump(exclude=NODE_OPTIONS) for hello in (self, other))
        return next((name for name, value in own.items() if others[name] != value), None)


def await_ranks(options: EngineOptions, count: int) -> list[Connection]:
    """Wait until `count` ranks of other nodes are connected. OSError: cannot listen on the port."""
    links, own = list[Connection](), Hello.of(options)
    with _server(str(options.master_addr), options.master_port) as server:
        log.info("waiting for %d ranks of other nodes at port %d", count, options.master_port)
        # A rank sends nothing after its hello, so a readable connection has been closed.
        while len(links := [link for link in links if not link.poll()]) < count:
            link = _kept_alive(server.accept()[0])
            refusal = _why_refused(link, own)
            if refusal is None:
                links.append(link)
            else:
                log.warning("refused a connection to the master port: %s", refusal)
                link.close()
    return links


def join(options: EngineOptions) -> Connection:
    """Connect to rank 0, retrying until it listens."""
    logged = ""
    while True:
        try:
            link = _kept_alive(socket.create_connection((str(options.master_addr), options.master_port)))
            send(link, Hello.of(options))
            return link
        except OSError as error:
            if logged != str(error):
                logged = str(error)
                log.warning("rank 0 at %s:%d: %s; trying again", options.master_addr, options.master_port, logged)
        time.sleep(RETRY_SECONDS)


def _why_refused(link: Connection, own: Hello) -> str | None:
    try:
        with _deadline(link):
            different = own.differs_from(receive(link, Hello, HELLO_BYTES))
    except (OSError, EOFError, ValidationError):
        return f"it sent no valid hello within {HELLO_SECONDS} s"
    return None if different is None else f"it was started with another {different}"


@contextmanager
def _deadline(link: Connection) -> Iterator[None]:
    """Make reads fail after `HELLO_SECONDS`, even if the peer sends a byte now and then."""
    with socket.socket(fileno=os.dup(link.fileno())) as copy:

        def shut_down() -> None:
            with suppress(OSError):  # the peer has gone
                copy.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(HELLO_SECONDS, shut_down)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _server(host: str, port: int) -> socket.socket:
    """Listen on a port; retry while the host name does not resolve yet."""
    while True:
        try:
            (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return socket.create_server(address[:2], family=family)
        except socket.gaierror as error:
            log.warning("%s: %s; trying again", host, error)
            time.sleep(RETRY_SECONDS)


def _kept_alive(link: socket.socket) -> Connection:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            link.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(link.detach())
