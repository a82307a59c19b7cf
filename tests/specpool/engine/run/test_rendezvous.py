"""Rank 0 drops strangers and dead ranks that connect to its master port."""

import socket
import threading
from multiprocessing.connection import Connection
from unittest import mock

import pytest

from specpool.engine.config.options import EngineOptions
from specpool.engine.run import rendezvous
from specpool.engine.run.connections import hang_up

HTTP = b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n"
PATIENCE_SECONDS = 30


def options(port: int, **others: object) -> EngineOptions:
    nodes = {"tensor_parallel": 3, "nnodes": 3, "master_addr": "127.0.0.1", "master_port": port}
    return EngineOptions.model_validate({"model": "m", **nodes, **others})


@pytest.mark.parametrize("payload", [b"", b"\0", HTTP])
def test_strangers_and_dead_ranks_are_not_awaited(payload: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    links: list[Connection] = []
    with mock.patch.object(rendezvous, "HELLO_SECONDS", 1):
        leader = threading.Thread(target=lambda: links.extend(rendezvous.await_ranks(options(port), 2)), daemon=True)
        leader.start()
        ended = rendezvous.join(options(port, node_rank=1))
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(payload)
            hang_up(ended)
            ranks = [rendezvous.join(options(port, node_rank=node)) for node in (1, 2)]
            leader.join(PATIENCE_SECONDS)
    assert not leader.is_alive()
    for link, rank in zip(links, ranks, strict=True):
        rank.send_bytes(b"here")
        assert link.recv_bytes() == b"here"
        rank.close()
        link.close()
