"""How ranks stay together. When one end of a connection closes, the other end notices: nobody waits for the dead."""

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
from typing import NoReturn, TypeVar

from pydantic import BaseModel

log = logging.getLogger(__name__)

STOPS = {signal.SIGINT, signal.SIGTERM}
"""Signals that end rank 0, which drains and then ends the others, although they may be sent to all of them."""

Message = TypeVar("Message", bound=BaseModel)


def send(connection: Connection, message: BaseModel) -> None:
    """Sends a message as JSON."""
    connection.send_bytes(message.model_dump_json().encode())


def receive(connection: Connection, kind: type[Message], most: int | None = None) -> Message:
    """Waits for a message of at most `most` bytes. EOFError: the other end is closed. OSError: it is longer."""
    return kind.model_validate_json(connection.recv_bytes(most))


def watch(connections: Mapping[str, Connection], on_hangup: Callable[[str], None]) -> None:
    """Calls `on_hangup` with the name of the first connection whose other end closes, on a thread of its own."""

    def wait() -> None:
        poller = select.poll()
        names = {connection.fileno(): name for name, connection in connections.items()}
        for number in names:
            poller.register(number, select.POLLRDHUP)
        on_hangup(names[poller.poll()[0][0]])

    threading.Thread(target=wait, name="ranks", daemon=True).start()


def hang_up(connection: Connection) -> None:
    """Closes a connection, even while a thread watches it: a socket that is polled stays open until it is shut down."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link, contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    connection.close()


def end_process(reason: str) -> NoReturn:
    """Ends this process at once, whatever its threads wait for."""
    log.error("%s: the process ends", reason)
    logging.shutdown()
    os._exit(1)


@contextmanager
def signals_held() -> Iterator[None]:
    """A context in which processes are started that these signals do not reach until they ignore them: imports take
    seconds. Threads have masks of their own, and that of the caller is restored."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stops() -> None:
    """Ignores these signals from now on, and those that were held."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
