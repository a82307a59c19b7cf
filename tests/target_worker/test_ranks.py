"""Worker processes whose model is divided: what they report, and that no rank outlives another."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from scraping import free_port
from tiny_models import save_model, small_config
from worker_service import PATIENCE_SECONDS

from specpool.v1 import common_pb2, target_worker_pb2_grpc

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), small_config("llama"))


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def started(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "target_worker.server", "--model", str(folder), "--device", "cpu"]
        command += ["--max-sequences", "2", "--tensor-parallel", "2", *flags]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def nodes_of(master_port: int) -> list[str]:
    """Flags of two nodes, both on this machine."""
    return ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(master_port)]


def info_of(port: int, process: subprocess.Popen[str]) -> common_pb2.GetWorkerInfoResponse:
    """Of a worker, once it has loaded its model."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = target_worker_pb2_grpc.TargetWorkerServiceStub(channel)
        while True:
            try:
                info: common_pb2.GetWorkerInfoResponse = stub.GetWorkerInfo(common_pb2.GetWorkerInfoRequest())
                return info
            except grpc.RpcError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process.pid).children()
        if "specpool.engine.startup.follower" in child.cmdline()
    ]


def test_a_worker_reports_its_ranks_and_ends_with_them(start: Start) -> None:
    port = free_port()
    worker = start("--port", str(port))
    info = info_of(port, worker)
    assert info.model.tensor_parallel == 2
    assert [rank.device for rank in info.load.ranks] == ["cpu", "cpu"]
    assert info.load.weight_bytes == sum(rank.weight_bytes for rank in info.load.ranks)
    assert info.load.kv_bytes_total == sum(rank.kv_bytes for rank in info.load.ranks)
    (rank,) = ranks_of(worker)
    rank.send_signal(signal.SIGKILL)
    _, log = worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == 1
    assert "rank 1 has ended: the process ends" in log


def test_ranks_end_with_their_worker(start: Start) -> None:
    port = free_port()
    worker = start("--port", str(port))
    while not (ranks := ranks_of(worker)):
        assert worker.poll() is None
    (rank,) = ranks
    rank.send_signal(signal.SIGTERM)  # as it is sent to all processes of a group: the worker decides when to end
    rank.send_signal(signal.SIGINT)
    info_of(port, worker)
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=PATIENCE_SECONDS)
    rank.wait(PATIENCE_SECONDS)


def test_nodes_share_a_model(start: Start) -> None:
    port, nodes = free_port(), nodes_of(free_port())
    other = start(*nodes, "--node-rank", "1")
    leader = start(*nodes, "--port", str(port))
    info = info_of(port, leader)
    assert [rank.device for rank in info.load.ranks] == ["cpu", "cpu"]
    assert not ranks_of(leader)
    other.send_signal(signal.SIGTERM)
    _, log = leader.communicate(timeout=PATIENCE_SECONDS)
    assert leader.returncode == 1
    assert "rank 1 has ended" in log


def test_a_stop_of_node_0_is_one_of_all_nodes(start: Start) -> None:
    port, nodes = free_port(), nodes_of(free_port())
    other, leader = start(*nodes, "--node-rank", "1"), start(*nodes, "--port", str(port))
    info_of(port, leader)
    leader.send_signal(signal.SIGTERM)
    leader.communicate(timeout=PATIENCE_SECONDS)
    assert leader.returncode == 0
    _, log = other.communicate(timeout=PATIENCE_SECONDS)
    assert other.returncode == 0
    assert "ended" not in log


def test_a_node_says_that_node_0_has_hung_up(start: Start) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as node_0:
        other = start(*nodes_of(port), "--node-rank", "1")
        node_0.accept()[0].close()
        _, log = other.communicate(timeout=PATIENCE_SECONDS)
    assert other.returncode == 1
    assert log.count("\n") == 1
    assert "rank 0 has turned this rank away, or has ended: the process ends" in log


def test_ranks_of_a_node_that_is_killed_end(start: Start) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as node_0:
        other = start(*nodes_of(port), "--node-rank", "1")
        link, _ = node_0.accept()
        (rank,) = ranks_of(other)
        other.send_signal(signal.SIGKILL)
        other.communicate(timeout=PATIENCE_SECONDS)
        rank.wait(PATIENCE_SECONDS)
        link.close()
