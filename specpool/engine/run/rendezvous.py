"""How the ranks of other nodes reach rank 0: over TCP, at its master port."""

import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection

from pydantic import BaseModel, ValidationError

from specpool.engine.config.options import EngineOptions
from specpool.engine.run.connections import receive, send

log = logging.getLogger(__name__)

# A host that disappears without closing its connections is noticed after about 5 + 3 * 2 seconds. It is not even probed
# while something was sent to it that it does not acknowledge: TCP would wait for 15 minutes.
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 11_000,
}
RETRY_SECONDS = 1.0
# A connection on which nothing is said for as long is not one of a rank, nor is one on which more is said.
HELLO_SECONDS, HELLO_BYTES = 5, 1 << 16
# Options in which nodes may differ.
OWN = {"device", "threads", "node_rank"}


class Hello(BaseModel):
    """From a rank of another node: what it was started as."""

    version: str
    options: EngineOptions

    @classmethod
    def of(cls, options: EngineOptions) -> "Hello":
        """What a process of this version with these options says."""
        return cls(version=version("specpool"), options=options)

    def differs_from(self, other: "Hello") -> str | None:
        """The name of something that should be the same on both nodes; None if all is."""
        if self.version != other.version:
            return "version"
        own, its = (hello.options.model_dump(exclude=OWN) for hello in (self, other))
        return next((name for name, value in own.items() if its[name] != value), None)


def await_ranks(options: EngineOptions, count: int) -> list[Connection]:
    """Waits until `count` ranks of other nodes are connected. OSError: the port cannot be listened on."""
    links, own = list[Connection](), Hello.of(options)
    with _server(str(options.master_addr), options.master_port) as server:
        log.info("waiting for %d ranks of other nodes at port %d", count, options.master_port)
        # A rank says nothing more by itself: whatever can be read is its end.
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
    """Connects to rank 0, and waits until it listens."""
    said = ""
    while True:
        try:
            link = _kept_alive(socket.create_connection((str(options.master_addr), options.master_port)))
            send(link, Hello.of(options))
            return link
        except OSError as error:
            if said != str(error):
                said = str(error)
                log.warning("rank 0 at %s:%d: %s; trying again", options.master_addr, options.master_port, said)
        time.sleep(RETRY_SECONDS)


def _why_refused(link: Connection, own: Hello) -> str | None:
    try:
        with _impatient(link):
            different = own.differs_from(receive(link, Hello, HELLO_BYTES))
    except BlockingIOError:
        return "it did not say what it is"
    except (OSError, EOFError, ValidationError):
        return "it is no rank"
    return None if different is None else f"it was started with another {different}"


@contextmanager
def _impatient(link: Connection) -> Iterator[None]:
    """A context in which nothing is waited for longer than `HELLO_SECONDS`: BlockingIOError."""
    with socket.socket(fileno=os.dup(link.fileno())) as its:
        its.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_SECONDS, 0))
        yield
        its.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _server(host: str, port: int) -> socket.socket:
    """Listens on a port; waits while the host's name cannot be resolved yet."""
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
    for option, value in KEEPALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(link.detach())
