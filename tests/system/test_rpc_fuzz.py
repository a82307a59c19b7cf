"""Malformed messages to every method of all three processes, over real sockets.

Each is served or refused with a reason. Nothing is logged as an internal error, and valid requests still succeed.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from framings import framings
from google.protobuf.descriptor import MethodDescriptor
from grpc import StatusCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair_service import PairService, serving_pair
from payloads import GENERATE, almost_valid, garbage
from serving import free_address
from smg_grpc_proto import vllm_engine_pb2

from specpool.v1 import common_pb2, draft_worker_pb2, generation_pb2, target_worker_pb2

EXAMPLES = 20
PATIENCE_SECONDS = 20.0
MAX_MODEL_LEN = 64
REFUSALS = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.ALREADY_EXISTS,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.RESOURCE_EXHAUSTED,
}
FUZZING = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
SERVICES = {
    "coordinator": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    "draft": draft_worker_pb2.DESCRIPTOR.services_by_name["DraftWorkerService"],
    "target": target_worker_pb2.DESCRIPTOR.services_by_name["TargetWorkerService"],
}
ENGINE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
METHODS = [
    *((process, method) for process, service in SERVICES.items() for method in service.methods),
    *(("coordinator", ENGINE.methods_by_name[name]) for name in ("Generate", "Abort")),
]


@dataclass
class Processes:
    """The servers of all three processes in another thread, and a channel to each."""

    loop: asyncio.AbstractEventLoop
    pair: PairService
    addresses: dict[str, str]
    errors: list[str] = field(default_factory=list)
    """Logged errors."""

    def __post_init__(self) -> None:
        options = [("grpc.max_receive_message_length", 2**27), ("grpc.max_send_message_length", 2**27)]
        self.channels = {name: grpc.insecure_channel(it, options) for name, it in self.addresses.items()}

    def forget(self) -> None:
        """Frees all slots."""
        for host in (self.pair.target, self.pair.draft):
            assert host is not None
            asyncio.run_coroutine_threadsafe(self.pair.forget(host), self.loop).result(PATIENCE_SECONDS)

    def check(self) -> None:
        """Asserts that all three serve valid requests, and that no error was logged."""
        self.forget()
        generated = self.call("coordinator", "/specpool.v1.GenerationService/Generate", GENERATE.SerializeToString())
        assert len(generation_pb2.GenerateResponse.FromString(generated).token_ids) == 3
        for name in ("draft", "target"):
            method = f"/specpool.v1.{name.title()}WorkerService/GetWorkerInfo"
            assert common_pb2.GetWorkerInfoResponse.FromString(self.call(name, method, b"")).model.vocab_size
        assert self.errors == []

    def call(self, process: str, method: str, payload: bytes) -> bytes:
        response: bytes = self.channels[process].unary_unary(method)(payload, timeout=PATIENCE_SECONDS)
        return response

    def send(self, process: str, method: MethodDescriptor, payloads: list[bytes]) -> None:
        """Calls a method. Asserts an answer or a refusal with a reason."""
        path, channel = f"/{method.containing_service.full_name}/{method.name}", self.channels[process]
        try:
            if method.client_streaming:
                list(channel.stream_stream(path)(iter(payloads), timeout=PATIENCE_SECONDS))
            elif method.server_streaming:
                list(channel.unary_stream(path)(payloads[0], timeout=PATIENCE_SECONDS))
            else:
                channel.unary_unary(path)(payloads[0], timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            refusal = error
        else:
            return
        assert refusal.code() in REFUSALS, f"{refusal.code()}: {refusal.details()}"
        assert refusal.details()


class _Errors(logging.Handler):
    """Records errors and stack traces."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self._found.append(f"{record.name}: {record.getMessage()}")


@pytest.fixture(scope="module")
def processes(tiny_pair: tuple[Path, Path]) -> Iterator[Processes]:
    started: list[Processes] = []
    ready, done, failed = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        worker = {"max_model_len": MAX_MODEL_LEN, "max_sequences": 16}
        address = free_address()
        port = int(address.rpartition(":")[2])
        async with serving_pair(*tiny_pair, worker=worker, default_max_tokens=4, port=port, smg=True) as pair:
            coordinator = pair.process.coordinator
            assert coordinator.draft is not None
            workers = {"target": coordinator.target.address, "draft": coordinator.draft.address}
            addresses = {"coordinator": address, **workers}
            started.append(Processes(asyncio.get_running_loop(), pair, addresses))
            ready.set()
            await done.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if failed:
        raise failed[0]
    (servers,) = started
    handler = _Errors(servers.errors)
    logging.getLogger().addHandler(handler)
    yield servers
    logging.getLogger().removeHandler(handler)
    for channel in servers.channels.values():
        channel.close()
    servers.loop.call_soon_threadsafe(done.set)
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("payloads_of", [garbage, almost_valid])
@pytest.mark.parametrize(("process", "method"), METHODS, ids=lambda it: getattr(it, "name", it))
def test_messages_are_served_or_refused(
    processes: Processes, process: str, method: MethodDescriptor, payloads_of: Any
) -> None:
    @FUZZING
    @given(payloads_of(method))
    def send(payloads: list[bytes]) -> None:
        processes.send(process, method, payloads)
        if process != "coordinator":
            processes.forget()

    send()
    processes.check()


@pytest.mark.parametrize("process", SERVICES)
def test_unknown_methods_are_refused(processes: Processes, process: str) -> None:
    @FUZZING
    @given(st.text("abcXYZ019._-%", min_size=1, max_size=30), st.binary(max_size=30))
    def send(name: str, payload: bytes) -> None:
        for path in (f"/{name}", f"/{SERVICES[process].full_name}/{name}", f"/{name}/Generate"):
            with pytest.raises(grpc.RpcError) as caught:
                processes.call(process, path, payload)
            assert caught.value.code() is StatusCode.UNIMPLEMENTED

    send()
    processes.check()


@pytest.mark.parametrize("process", SERVICES)
def test_oversized_messages_are_refused(processes: Processes, process: str) -> None:
    method = SERVICES[process].methods[0]
    size = 2**20 * (5 if process == "coordinator" else 129)
    with pytest.raises(grpc.RpcError) as caught:
        processes.call(process, f"/{SERVICES[process].full_name}/{method.name}", bytes(size))
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    processes.check()


@pytest.mark.parametrize("process", SERVICES)
@pytest.mark.parametrize("wrong", framings("/"))
def test_malformed_framing_disturbs_nobody(processes: Processes, process: str, wrong: str) -> None:
    method = SERVICES[process].methods[0]
    payload = framings(f"/{SERVICES[process].full_name}/{method.name}")[wrong]
    host, _, port = processes.addresses[process].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=0.1) as connection:
        try:
            connection.sendall(payload)
            while connection.recv(65_536):
                pass
        except (TimeoutError, ConnectionError):
            pass  # the server may wait for more, or close the connection
    processes.check()
