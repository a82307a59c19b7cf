"""Connections between ranks. When one end closes, the other end notices at once, so no rank waits for a dead one."""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn, TypeVar

from pydantic import BaseModel

log = logging.getLogger(__name__)

STOPS = {signal.SIGINT, signal.SIGTERM}
"""Stop signals. A terminal signals all ranks, but only rank 0 reacts: it drains, then ends the others."""

Message = TypeVar("Message", bound=BaseModel)


class Link(NamedTuple):
    """The two connections between rank 0 and another rank."""

    commands: Connection
    data: socket.socket
    """Of CPU ranks, for passes. GPU ranks do not use it."""


def send(connection: Connection, message: BaseModel) -> None:
    """Send a message as JSON."""
    connection.send_bytes(message.model_dump_json().encode())


def receive(connection: Connection, kind: type[Message], max_bytes: int | None = None) -> Message:
    """Wait for a message. EOFError: the other end is closed. OSError: the message exceeds `max_bytes`."""
    return kind.model_validate_json(connection.recv_bytes(max_bytes))


def watch(connections: Mapping[str, Connection], on_hangup: Callable[[str], None]) -> None:
    """Call `on_hangup` on a new thread with the name of the first connection whose other end closes."""

    def wait() -> None:
        poller = select.poll()
        names = {connection.fileno(): name for name, connection in connections.items()}
        for number in names:
            poller.register(number, getattr(select, "POLLRDHUP", 0))  # macOS reports POLLHUP only
        on_hangup(names[poller.poll()[0][0]])

    threading.Thread(target=wait, name="ranks", daemon=True).start()


def hang_up(connection: Connection) -> None:
    """Shut a connection down, then close it. Without the shutdown, a polled socket would stay open."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link, contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    connection.close()


def end_process(reason: str) -> NoReturn:
    """End this process at once, even if its threads are blocked."""
    log.error("%s: the process ends", reason)
    logging.shutdown()
    os._exit(1)


@contextmanager
def signals_held() -> Iterator[None]:
    """Start processes with stop signals blocked until they call `ignore_stops`: imports take seconds."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # of this thread only
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stops() -> None:
    """Ignore stop signals from now on, including pending ones."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
