"""Free ports for processes that are about to start."""

import socket

import pytest

from specpool.rpc.ports import bind_error, free_port


def test_free_ports_are_consecutive_and_free() -> None:
    first = free_port(3)
    assert [bind_error("127.0.0.1", port) for port in range(first, first + 3)] == [None] * 3


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr("specpool.rpc.ports.UNASSIGNED_PORTS", range(taken, taken + 2))
        assert free_port() == taken + 1
