"""Rank 0 admits the ranks of other nodes, and neither strangers nor dead ranks stop or delay them."""

import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from specpool.engine.config.options import EngineOptions
from specpool.engine.run import rendezvous
from specpool.engine.run.connections import Link, hang_up
from specpool.engine.run.handshake import HELLO_BYTES, NONCE_BYTES, PROOF_BYTES
from specpool.rpc.ports import free_port

GREETING_BYTES = 1 + NONCE_BYTES
HTTP = b"GET / HTTP/1.1\r\nHost: node0\r\nAccept: */*\r\nUser-Agent: someone-who-scans-ports\r\n\r\n"
PATIENCE_SECONDS = 30
SILENT_CONNECTIONS = 300

Secret = Callable[[str], Path]


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    def written(text: str) -> Path:
        path = tmp_path / text
        path.write_text(f"{text}\n")
        return path

    return written


def options(port: int, **others: object) -> EngineOptions:
    nodes = {"tensor_parallel": 3, "nnodes": 3, "master_addr": "127.0.0.1", "master_port": port}
    return EngineOptions.model_validate({"model": "m", **nodes, **others})


@contextmanager
def leader_of(own: EngineOptions, links: list[Link]) -> Iterator[threading.Thread]:
    """Rank 0, which waits for two ranks, adds them to `links`, and must then end."""
    leader = threading.Thread(target=lambda: links.extend(rendezvous.await_ranks(own, 2)), daemon=True)
    leader.start()
    yield leader
    leader.join(PATIENCE_SECONDS)
    assert not leader.is_alive()


def connect(port: int) -> socket.socket:
    """A stranger's connection, once rank 0 listens and has answered."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)) == GREETING_BYTES
    return stranger


def is_closed(stranger: socket.socket) -> bool:
    """Whether rank 0 closes a connection within the time of the test."""
    try:
        return not stranger.recv(1)
    except ConnectionError:
        return True


def check(links: list[Link], ranks: list[Link]) -> None:
    """Both connections of each rank lead to rank 0. Closes them."""
    assert len(links) == len(ranks)
    for number, rank in enumerate(ranks):
        rank.commands.send_bytes(bytes([number]))
        rank.data.sendall(bytes([number]))
    for link in links:
        assert link.commands.recv_bytes() == link.data.recv(1)
    for link in (*links, *ranks):
        link.commands.close()
        link.data.close()


@pytest.mark.parametrize("has_secret", [False, True])
@pytest.mark.parametrize("payload", [b"", b"\0", HTTP, b"\xff" * HELLO_BYTES])
def test_strangers_and_dead_ranks_are_dropped(payload: bytes, has_secret: bool, secret: Secret) -> None:
    links = list[Link]()
    own = options(free_port(), master_secret_file=secret("the secret of all nodes") if has_secret else None)
    before = psutil.Process().num_fds()
    with leader_of(own, links):
        ended = rendezvous.join(own.model_copy(update={"node_rank": 1}))
        with connect(own.master_port) as stranger:
            stranger.sendall(payload)
            hang_up(ended.commands)
            ended.data.close()
            ranks = [rendezvous.join(own.model_copy(update={"node_rank": node})) for node in (1, 2)]
    check(links, ranks)
    assert psutil.Process().num_fds() == before


def test_silent_strangers_neither_delay_ranks_nor_keep_descriptors(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 10 * PATIENCE_SECONDS)  # no deadline helps the ranks
    links = list[Link]()
    own = options(free_port(), master_secret_file=secret("the secret of all nodes"))
    before = psutil.Process().num_fds()
    with ExitStack() as strangers:
        with leader_of(own, links):
            silent = [strangers.enter_context(connect(own.master_port)) for _ in range(SILENT_CONNECTIONS)]
            ranks = [rendezvous.join(own) for _ in range(2)]
        assert all(is_closed(stranger) for stranger in silent)
    check(links, ranks)
    assert psutil.Process().num_fds() == before


def test_a_peer_that_trickles_its_hello_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.5)
    links, own = list[Link](), options(free_port())
    with leader_of(own, links):
        with connect(own.master_port) as stranger:
            stranger.sendall((4096).to_bytes(4))
            for _ in range(10 * PATIENCE_SECONDS):
                if select.select([stranger], [], [], 0.1)[0]:
                    break
                stranger.sendall(b" ")
            assert is_closed(stranger)
        ranks = [rendezvous.join(own) for _ in range(2)]
    check(links, ranks)


@pytest.mark.parametrize(
    ("leaders", "others", "reason"),
    [
        (
            "the secret of all nodes",
            "the secret of a stranger",
            "it does not accept the secret of --master-secret-file",
        ),
        ("the secret of all nodes", None, "it has a --master-secret-file, which this node lacks"),
        (None, "the secret of a stranger", "it has no --master-secret-file"),
    ],
)
def test_ranks_without_the_secret_do_not_join(
    leaders: str | None, others: str | None, reason: str, secret: Secret, caplog: pytest.LogCaptureFixture
) -> None:
    links, port = list[Link](), free_port()
    own, wrong = (options(port, master_secret_file=text and secret(text)) for text in (leaders, others))
    before = psutil.Process().num_fds()
    with leader_of(own, links), pytest.MonkeyPatch.context() as patch:
        connect(port).close()

        def give_up(seconds: float) -> None:
            raise TimeoutError

        patch.setattr(rendezvous.time, "sleep", give_up)
        with pytest.raises(TimeoutError):
            rendezvous.join(wrong)
        assert not links
        patch.undo()
        ranks = [rendezvous.join(own) for _ in range(2)]
    check(links, ranks)
    assert f"rank 0 at 127.0.0.1:{port}: {reason}; trying again" in caplog.text
    assert psutil.Process().num_fds() == before


def test_ranks_do_not_join_a_rank_0_that_lacks_the_secret(secret: Secret, caplog: pytest.LogCaptureFixture) -> None:
    """It may replay a proof of the rank."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        port = server.getsockname()[1]

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"\1" + bytes(NONCE_BYTES))
                peer.sendall(peer.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)[NONCE_BYTES:])
                assert is_closed(peer), "the rank says no hello"

        def give_up(seconds: float) -> None:
            raise TimeoutError

        patch.setattr(rendezvous.time, "sleep", give_up)
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TimeoutError):
            rendezvous.join(options(port, master_secret_file=secret("the secret of all nodes")))
        thread.join(PATIENCE_SECONDS)
    assert "it does not know the secret of --master-secret-file" in caplog.text


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    links, own = list[Link](), options(free_port())
    with leader_of(own, links):
        for _ in range(20):
            with connect(own.master_port) as stranger:
                stranger.sendall(b"\xff" * 4)
                assert is_closed(stranger)
        ranks = [rendezvous.join(own) for _ in range(2)]
    check(links, ranks)
    assert caplog.text.count("refused") == 1


def test_a_rank_of_another_version_learns_why_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Its options may have names that this version does not know."""
    hello = b'{"version": "0.0.1", "options": {"unknown": 1}, "rank": "a", "channel": "commands"}'
    links, own = list[Link](), options(free_port())
    with leader_of(own, links):
        with connect(own.master_port) as stranger:
            stranger.sendall(len(hello).to_bytes(4) + hello)
            assert is_closed(stranger)
        ranks = [rendezvous.join(own) for _ in range(2)]
    check(links, ranks)
    assert "it has another version" in caplog.text


def test_strangers_that_use_all_descriptors_do_not_end_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.05)
    links, own = list[Link](), options(free_port())
    with leader_of(own, links):
        connect(own.master_port).close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/dev/fd"))
        strangers = [socket.socket() for _ in range(highest)]  # they leave no number below theirs free
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(stranger.fileno() for stranger in strangers) + 4, hard))
        try:
            for stranger in strangers[:8]:
                stranger.connect(("127.0.0.1", own.master_port))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while "too many open files" not in caplog.text.lower():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for stranger in strangers:
                stranger.close()
        ranks = [rendezvous.join(own) for _ in range(2)]
    check(links, ranks)
