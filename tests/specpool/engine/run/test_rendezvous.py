"""Who connects to the master port and is no rank is turned away, however it behaves."""

import socket
import threading
from multiprocessing.connection import Connection
from unittest import mock

import pytest

from specpool.engine.config.options import EngineOptions
from specpool.engine.run import rendezvous as meeting
from specpool.engine.run.connections import hang_up

HTTP = b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n"
PATIENCE_SECONDS = 30


def options(port: int, **others: object) -> EngineOptions:
    nodes = {"tensor_parallel": 3, "nnodes": 3, "master_addr": "127.0.0.1", "master_port": port}
    return EngineOptions.model_validate({"model": "m", **nodes, **others})


@pytest.mark.parametrize("said", [b"", b"\0", HTTP])
def test_strangers_and_dead_ranks_are_not_awaited(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found: list[Connection] = []
    with mock.patch.object(meeting, "HELLO_SECONDS", 1):
        leader = threading.Thread(target=lambda: found.extend(meeting.await_ranks(options(port), 2)), daemon=True)
        leader.start()
        ended = meeting.join(options(port, node_rank=1))
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            hang_up(ended)
            ranks = [meeting.join(options(port, node_rank=node)) for node in (1, 2)]
            leader.join(PATIENCE_SECONDS)
    assert not leader.is_alive()
    for link, rank in zip(found, ranks, strict=True):
        rank.send_bytes(b"here")
        assert link.recv_bytes() == b"here"
        rank.close()
        link.close()
