"""Worker processes with a sharded model: worker info, and the exit of all ranks when one ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tiny_models import save_model, small_config
from worker_service import PATIENCE_SECONDS

from specpool.rpc.ports import free_port
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
    """Flags of two nodes on this machine."""
    return ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(master_port)]


def info_of(port: int, process: subprocess.Popen[str]) -> common_pb2.GetWorkerInfoResponse:
    """The info of a worker, once it has loaded its model."""
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


def rank_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The only rank that a worker process has started, once it has started it."""
    while not (ranks := ranks_of(process)):
        assert process.poll() is None
        time.sleep(0.05)
    (rank,) = ranks
    return rank


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "specpool.engine.startup.follower" in child.cmdline()]


def listeners(process: psutil.Process) -> list[Any]:
    """The TCP sockets on which a process listens."""
    return [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def log_of(process: subprocess.Popen[str]) -> str:
    """The log of a process that ends."""
    return process.communicate(timeout=PATIENCE_SECONDS)[1]


@pytest.mark.slow
def test_a_worker_reports_its_ranks_and_exits_if_one_dies(start: Start) -> None:
    port = free_port()
    worker = start("--port", str(port))
    rank = rank_of(worker)
    for number in (signal.SIGTERM, signal.SIGINT):  # a terminal sends them to all processes of a group
        rank.send_signal(number)
    info = info_of(port, worker)
    assert info.model.tensor_parallel == 2
    assert [listener.laddr.port for listener in listeners(psutil.Process(worker.pid))] == [port]
    assert not listeners(rank)
    assert [rank.device for rank in info.load.ranks] == ["cpu", "cpu"]
    assert info.load.weight_bytes == sum(rank.weight_bytes for rank in info.load.ranks)
    assert info.load.kv_bytes_total == sum(rank.kv_bytes for rank in info.load.ranks)
    rank.send_signal(signal.SIGKILL)
    assert "rank 1 has ended: the process ends" in log_of(worker)
    assert worker.returncode == 1


@pytest.mark.slow
def test_ranks_end_with_their_worker(start: Start) -> None:
    worker = start("--port", "0")
    rank = rank_of(worker)
    worker.send_signal(signal.SIGKILL)
    log_of(worker)
    rank.wait(PATIENCE_SECONDS)


@pytest.mark.slow
def test_two_nodes_serve_one_model_and_end_with_a_rank(start: Start) -> None:
    port, nodes = free_port(), nodes_of(free_port())
    other = start(*nodes, "--node-rank", "1")
    leader = start(*nodes, "--port", str(port))
    info = info_of(port, leader)
    assert [rank.device for rank in info.load.ranks] == ["cpu", "cpu"]
    assert not ranks_of(leader)
    assert not listeners(rank_of(other))
    other.send_signal(signal.SIGTERM)
    assert "rank 1 has ended: the process ends" in log_of(leader)
    assert leader.returncode == 1


@pytest.mark.slow
def test_stopping_node_0_stops_all_nodes(start: Start) -> None:
    port, nodes = free_port(), nodes_of(free_port())
    other, leader = start(*nodes, "--node-rank", "1"), start(*nodes, "--port", str(port))
    info_of(port, leader)
    leader.send_signal(signal.SIGTERM)
    log_of(leader)
    assert leader.returncode == 0
    assert "ended" not in log_of(other)
    assert other.returncode == 0


@pytest.mark.slow
def test_ranks_of_a_node_end_with_node_0(start: Start) -> None:
    port, nodes = free_port(), nodes_of(free_port())
    other, leader = start(*nodes, "--node-rank", "1"), start(*nodes, "--port", str(port))
    info_of(port, leader)
    leader.send_signal(signal.SIGKILL)
    assert "rank 0 has " in log_of(other)
    assert other.returncode == 1


@pytest.mark.slow
def test_ranks_of_a_node_end_with_their_node(start: Start) -> None:
    node = start(*nodes_of(free_port()), "--node-rank", "1")
    rank = rank_of(node)
    node.send_signal(signal.SIGKILL)
    log = log_of(node)
    rank.wait(PATIENCE_SECONDS)
    assert log.count("trying again") <= 1


@pytest.mark.slow
def test_a_node_with_other_options_says_which(start: Start) -> None:
    nodes = nodes_of(free_port())
    other, _ = start(*nodes, "--node-rank", "1", "--max-model-len", "64"), start(*nodes, "--port", "0")
    assert "max_model_len is 64 on this node, but None on node 0" in log_of(other)
    assert other.returncode == 1
