"""Malformed messages to every method of all three processes, over real sockets.

Every message is served, or refused with a reason. No process logs an error, and valid requests still succeed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
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

EXAMPLES = 10
PATIENCE_SECONDS = 20.0
MAX_MODEL_LEN = 64
# A stream whose end meets a write: gRPC's client then hides the status.
HIDDEN = "Internal error from Core"
REFUSALS = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.ALREADY_EXISTS,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.RESOURCE_EXHAUSTED,
}
FUZZING = settings(max_examples=EXAMPLES, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
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
    """All three servers on one event loop, and a channel to each."""

    runner: asyncio.Runner
    pair: PairService
    addresses: dict[str, str]
    channels: dict[str, grpc.aio.Channel]

    async def forget(self) -> None:
        """Free all slots."""
        for host in (self.pair.target, self.pair.draft):
            assert host is not None
            await self.pair.forget(host)

    async def check(self, log: pytest.LogCaptureFixture) -> None:
        """Asserts that all three serve valid requests, and that none has logged an error."""
        await self.forget()
        generated = await self.call(
            "coordinator", "/specpool.v1.GenerationService/Generate", GENERATE.SerializeToString()
        )
        assert len(generation_pb2.GenerateResponse.FromString(generated).token_ids) == 3
        for name in ("draft", "target"):
            info = await self.call(name, f"/specpool.v1.{name.title()}WorkerService/GetWorkerInfo", b"")
            assert common_pb2.GetWorkerInfoResponse.FromString(info).model.vocab_size
        errors = [record for record in log.records if record.levelno >= logging.ERROR or record.exc_info]
        assert [record.getMessage() for record in errors] == []

    async def call(self, process: str, method: str, payload: bytes) -> bytes:
        response: bytes = await self.channels[process].unary_unary(method)(payload, timeout=PATIENCE_SECONDS)
        return response

    async def send(self, process: str, method: MethodDescriptor, payloads: list[bytes]) -> None:
        """Call a method. Assert an answer, or a refusal with a reason."""
        path, channel = f"/{method.containing_service.full_name}/{method.name}", self.channels[process]
        try:
            if method.client_streaming:
                responses = channel.stream_stream(path)(iter(payloads), timeout=PATIENCE_SECONDS)
            elif method.server_streaming:
                responses = channel.unary_stream(path)(payloads[0], timeout=PATIENCE_SECONDS)
            else:
                await self.call(process, path, payloads[0])
                return
            async for _ in responses:
                pass
        except grpc.aio.AioRpcError as error:
            refusal = error
        else:
            return
        if method.client_streaming and refusal.details() == HIDDEN:
            return
        assert refusal.code() in REFUSALS, f"{refusal.code()}: {refusal.details()}"
        assert refusal.details()


@pytest.fixture(scope="module")
def processes(tiny_pair: tuple[Path, Path]) -> Iterator[Processes]:
    @asynccontextmanager
    async def serve() -> AsyncIterator[Processes]:
        worker, address = {"max_model_len": MAX_MODEL_LEN, "max_sequences": 16}, free_address()
        port = int(address.rpartition(":")[2])
        async with serving_pair(*tiny_pair, worker=worker, default_max_tokens=4, port=port, smg=True) as pair:
            target, draft = pair.process.coordinator.target, pair.draft_link
            addresses = {"coordinator": address, "target": target.address, "draft": draft.address}
            options = [("grpc.max_receive_message_length", 2**27), ("grpc.max_send_message_length", 2**27)]
            channels = {name: grpc.aio.insecure_channel(each, options) for name, each in addresses.items()}
            yield Processes(runner, pair, addresses, channels)
            for channel in channels.values():
                await channel.close()

    with asyncio.Runner() as runner:
        context = serve()
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("payloads_of", [garbage, almost_valid])
@pytest.mark.parametrize(("process", "method"), METHODS, ids=lambda value: getattr(value, "name", value))
def test_messages_are_served_or_refused(
    processes: Processes, process: str, method: MethodDescriptor, payloads_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def send(payloads: list[bytes]) -> None:
        await processes.send(process, method, payloads)
        if process != "coordinator":
            await processes.forget()

    FUZZING(given(payloads_of(method))(lambda payloads: processes.runner.run(send(payloads))))()
    processes.runner.run(processes.check(caplog))


@pytest.mark.parametrize("process", SERVICES)
def test_unknown_methods_are_refused(processes: Processes, process: str, caplog: pytest.LogCaptureFixture) -> None:
    @FUZZING
    @given(st.text("abcXYZ019._-%", min_size=1, max_size=30), st.binary(max_size=30))
    def send(name: str, payload: bytes) -> None:
        for path in (f"/{name}", f"/{SERVICES[process].full_name}/{name}", f"/{name}/Generate"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                processes.runner.run(processes.call(process, path, payload))
            assert caught.value.code() is StatusCode.UNIMPLEMENTED

    send()
    processes.runner.run(processes.check(caplog))


@pytest.mark.parametrize("process", SERVICES)
def test_oversized_messages_are_refused(processes: Processes, process: str, caplog: pytest.LogCaptureFixture) -> None:
    method = SERVICES[process].methods[0]
    size = 2**20 * (5 if process == "coordinator" else 129)
    call = processes.call(process, f"/{SERVICES[process].full_name}/{method.name}", bytes(size))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        processes.runner.run(call)
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    processes.runner.run(processes.check(caplog))


@pytest.mark.parametrize("wrong", framings("/"))
def test_malformed_framing_disturbs_nobody(processes: Processes, wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    async def send(process: str) -> None:
        method = SERVICES[process].methods[0]
        host, _, port = processes.addresses[process].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(framings(f"/{SERVICES[process].full_name}/{method.name}")[wrong])
        # The server may wait for more bytes or close the connection.
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.1):
                await reader.read()
        writer.close()

    async def send_to_all() -> None:
        await asyncio.gather(*map(send, SERVICES))

    processes.runner.run(send_to_all())
    processes.runner.run(processes.check(caplog))
