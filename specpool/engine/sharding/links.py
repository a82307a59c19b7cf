"""Links between rank 0 and each other rank: a star of stream sockets for messages, and for the tensors of CPU ranks."""

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

TCP_OPTIONS = {
    "TCP_NODELAY": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000,
}  # fmt: skip
"""Notice within a minute that a host has vanished. Socket options by name; macOS lacks some of them."""


class Link:
    """One end of a socket, which takes messages and tensors in turn. All methods raise EOFError if the rank ends."""

    def __init__(self, name: str, peer: socket.socket) -> None:
        """`name`: of the rank at the other end."""
        self.name, self._peer = name, peer
        self._messages = Connection(os.dup(peer.fileno()))
        peer.setblocking(True)
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in TCP_OPTIONS.items():
                if hasattr(socket, option):
                    peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: bytes) -> None:
        self._try(self._messages.send_bytes, message)

    def receive(self) -> bytes:
        message: bytes = self._try(self._messages.recv_bytes)
        return message

    def send_data(self, data: memoryview) -> None:
        self._try(self._peer.sendall, data)

    def receive_data(self, data: memoryview) -> None:
        while data:
            received = self._try(self._peer.recv_into, data, 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError(f"{self.name} has ended")
            data = data[received:]

    def watch(self, on_hangup: Callable[[str], None]) -> None:
        """Call `on_hangup` with the other rank's name, on a new thread, once that rank ends."""

        def wait() -> None:
            poller = select.poll()
            poller.register(self._peer, getattr(select, "POLLRDHUP", 0))  # macOS reports POLLHUP only
            poller.poll()
            on_hangup(self.name)

        threading.Thread(target=wait, name="ranks", daemon=True).start()

    def wait_readable(self, seconds: float) -> None:
        """Wait until the other rank sends something or ends."""
        self._try(self._messages.poll, seconds)

    def hang_up(self) -> None:
        """Shut the socket down, then close it. Without the shutdown, a polled socket would stay open."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()
        self._messages.close()

    def _try(self, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except (EOFError, OSError) as error:
            raise EOFError(f"{self.name} has ended") from error


class LinkExchange:
    """One rank's end of the star. Rank 0 gathers the tensors of all ranks, then sends each rank those it lacks."""

    def __init__(self, rank: int, links: Sequence[Link]) -> None:
        """`links`: to the other ranks in rank order for rank 0, otherwise to rank 0."""
        self._rank, self._links = rank, links

    def all_gather(self, x: torch.Tensor, stack: torch.Tensor) -> None:
        """Fill `stack` [ranks, ...] with every rank's contiguous tensor `x` [...]. EOFError: a rank has ended."""
        stack[self._rank] = x
        shares, size = stack.view(-1).view(torch.uint8).numpy().data, x.nbytes  # any data type
        if self._rank == 0:
            for rank, link in enumerate(self._links, 1):
                link.receive_data(shares[rank * size : (rank + 1) * size])
            for rank, link in enumerate(self._links, 1):
                link.send_data(shares[: rank * size])
                link.send_data(shares[(rank + 1) * size :])
        else:
            # All other ranks send before they receive, so nobody waits in a circle.
            [leader] = self._links
            first, end = self._rank * size, (self._rank + 1) * size
            leader.send_data(shares[first:end])
            leader.receive_data(shares[:first])
            leader.receive_data(shares[end:])

    def close(self) -> None:
        """Hang up."""
        for link in self._links:
            link.hang_up()
