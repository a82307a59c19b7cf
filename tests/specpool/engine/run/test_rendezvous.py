"""Rank 0 admits the ranks of other nodes, and refuses everyone else."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.run import rendezvous
from specpool.engine.run.rendezvous import Invitation, await_ranks, join
from specpool.engine.sharding.links import Link
from specpool.engine.sharding.nccl import Store, open_store
from specpool.rpc.ports import free_port

PATIENCE_SECONDS = 30
RANKS = range(1, 3)


@pytest.fixture
def own() -> EngineOptions:
    nodes = {"tensor_parallel": 3, "nnodes": 3, "master_addr": "127.0.0.1", "master_port": free_port()}
    return EngineOptions.model_validate({"model": "m", **nodes})


@pytest.fixture
def ended() -> SimpleQueue[str]:
    """Names of ranks that have ended."""
    return SimpleQueue()


@contextmanager
def waiting(own: EngineOptions, ended: SimpleQueue[str]) -> Iterator[Future[tuple[Store, list[Link]]]]:
    """Rank 0, waiting for its ranks."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(await_ranks, own, RANKS, ended.put)


def check(found: Future[tuple[Store, list[Link]]], links: dict[int, Link]) -> None:
    """Each rank has its link to rank 0. Hangs up."""
    _, others = found.result(PATIENCE_SECONDS)
    assert [link.name for link in others] == ["rank 1", "rank 2"]
    for rank, other in enumerate(others, 1):
        links[rank].send(bytes([rank]))
        assert other.receive() == bytes([rank])
    for link in [*others, *links.values()]:
        link.hang_up()


def test_ranks_join_in_any_order(own: EngineOptions, ended: SimpleQueue[str]) -> None:
    with waiting(own, ended) as found:
        check(found, {rank: join(own, rank) for rank in reversed(RANKS)})


@pytest.mark.parametrize("payload", [b"", b"\0", b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n", b"\xff" * 33])
def test_strangers_are_refused(payload: bytes, own: EngineOptions, ended: SimpleQueue[str]) -> None:
    with waiting(own, ended) as found:
        links = {1: join(own, 1)}
        store = open_store("127.0.0.1", own.master_port)
        port = Invitation.model_validate_json(store.get("invitation")).port
        for each in (own.master_port, port):
            with socket.create_connection(("127.0.0.1", each)) as stranger:
                stranger.sendall(payload)
        check(found, {**links, 2: join(own, 2)})


def test_rank_0_notices_a_rank_that_ends_before_all_have_joined(own: EngineOptions, ended: SimpleQueue[str]) -> None:
    with waiting(own, ended) as found:
        first = join(own, 1)
        first.hang_up()
        assert ended.get(timeout=PATIENCE_SECONDS) == "rank 1"
        second = join(own, 2)
        for link in (second, *found.result(PATIENCE_SECONDS)[1]):
            link.hang_up()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel": 6}, "tensor_parallel is 6 on this node, but 3 on node 0"),
        ({"model": "other"}, "model is 'other' on this node, but 'm' on node 0"),
        ({"node_rank": 1}, "another node has --node-rank 1 too"),
    ],
)
def test_ranks_that_do_not_fit_learn_why(
    changes: dict[str, object], reason: str, own: EngineOptions, ended: SimpleQueue[str]
) -> None:
    with waiting(own, ended) as found:
        links = {1: join(own, 1)}
        with pytest.raises(UnsupportedModelError, match=reason):
            join(own.model_copy(update=changes), 1)
        check(found, {**links, 2: join(own, 2)})


def test_a_rank_of_another_version_learns_why_it_is_refused(
    own: EngineOptions, ended: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting(own, ended) as found:
        links = {1: join(own, 1)}
        with monkeypatch.context() as patch:
            patch.setattr(rendezvous, "package_version", lambda: "0.0.1")
            with pytest.raises(UnsupportedModelError, match=r"this node has 0\.0\.1"):
                join(own, 2)
        check(found, {**links, 2: join(own, 2)})


def test_a_rank_logs_once_that_rank_0_does_not_answer(
    own: EngineOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses = iter(range(3))

    def pause(seconds: float) -> None:
        if next(pauses) == 2:
            raise TimeoutError

    monkeypatch.setattr(rendezvous.time, "sleep", pause)
    with pytest.raises(TimeoutError):
        join(own, 1)
    assert caplog.text.count(f"rank 0 at 127.0.0.1:{own.master_port}: ") == 1
    assert "refused; trying again" in caplog.text
