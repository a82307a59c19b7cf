"""Sockets that drop what they receive."""

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from specpool.rpc.server.sockets import cut, stall

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs socket filters")


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection: the client's and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with closing(accepted):
            yield client, accepted


def test_a_stalled_connection_receives_nothing(connection: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = connection
    client.send(b"before")
    assert accepted.recv(10) == b"before"
    assert stall(accepted)
    client.send(b"after")
    accepted.settimeout(0.3)
    with pytest.raises(TimeoutError):
        accepted.recv(10)


def test_a_client_fills_its_buffers_once_its_connection_is_stalled(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = connection
    assert stall(accepted)
    client.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while sent < 2**30:
            sent += client.send(bytes(2**16))
    assert 0 < sent < 2**30


def test_a_client_learns_that_its_stalled_connection_is_closed(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = connection
    assert stall(accepted)
    client.send(b"lost")
    cut(accepted)
    client.settimeout(10)
    with suppress(ConnectionResetError):
        assert client.recv(10) == b""
