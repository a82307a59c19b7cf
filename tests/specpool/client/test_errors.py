"""Exceptions of both clients: one for every status code, with the details that the server sends."""

import asyncio
import pickle
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from serving import serving
from test_client import CLIENTS

import specpool
from specpool import errors
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

EXPECTED = {
    "CANCELLED": errors.CallCancelledError,
    "UNKNOWN": errors.UnavailableError,
    "INVALID_ARGUMENT": errors.InvalidArgumentError,
    "DEADLINE_EXCEEDED": errors.DeadlineExceededError,
    "NOT_FOUND": errors.NotFoundError,
    "ALREADY_EXISTS": errors.AlreadyExistsError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
    "RESOURCE_EXHAUSTED": errors.ResourceExhaustedError,
    "FAILED_PRECONDITION": errors.ServerError,
    "ABORTED": errors.ServerError,
    "OUT_OF_RANGE": errors.ServerError,
    "UNIMPLEMENTED": errors.UnimplementedError,
    "INTERNAL": errors.ServerError,
    "UNAVAILABLE": errors.UnavailableError,
    "DATA_LOSS": errors.ServerError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
}


class Refusing(generation_pb2_grpc.GenerationServiceServicer):
    """Refuses every call with a status, and with these bytes as its details."""

    def __init__(self, code: grpc.StatusCode, details: bytes = b"") -> None:
        self.code, self.metadata = code, (("grpc-status-details-bin", details),) if details else ()

    async def _refuse(self, request: Any, context: Any) -> Any:
        await context.abort(self.code, "told to refuse", self.metadata)

    Generate = Abort = GetModelInfo = GetServerInfo = _refuse

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._refuse(request, context)
        yield


@asynccontextmanager
async def refusing(code: grpc.StatusCode, details: bytes = b"") -> AsyncIterator[str]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Refusing(code, details), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def all_of(stream: AsyncIterator[pb.GenerateStreamResponse]) -> list[pb.GenerateStreamResponse]:
    return [message async for message in stream]


@CLIENTS
@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK], ids=str)
async def test_every_status_code_has_an_exception(make_client: Any, code: grpc.StatusCode) -> None:
    async with refusing(code) as address, make_client(address, retry_seconds=0) as client:
        calls = (
            client.generate("a"),
            all_of(client.stream("a")),
            client.abort("id"),
            client.model_info(),
            client.server_info(),
        )
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                await call
            error = caught.value
            assert type(error) is EXPECTED[code.name]
            assert isinstance(error, specpool.RequestError)
            assert isinstance(error, specpool.SpecpoolError)
            assert isinstance(error, grpc.aio.AioRpcError)
            assert (error.code(), error.details(), str(error)) == (
                code,
                "told to refuse",
                f"{code.name}: told to refuse",
            )
            assert isinstance(error.__cause__, grpc.RpcError)


@CLIENTS
async def test_a_request_above_the_servers_limit_is_explained(make_client: Any) -> None:
    async with serving(max_request_bytes=1024) as served, make_client(served.address) as client:
        with pytest.raises(errors.ResourceExhaustedError, match=r"the request has \d+ bytes, more than .*, 1024$"):
            await client.generate("a", prediction="x" * 1024)


def test_the_drawn_tree_is_the_tree_of_classes() -> None:
    drawn, path = {}, ["Exception"]
    for indent, name in re.findall(r"^((?:│   |    |├── |└── )*)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE):
        path[1 + len(indent) // 4 :] = [name]
        drawn[name] = path[-2]
    assert drawn == {name: getattr(errors, name).__bases__[0].__name__ for name in errors.__all__}


def packed(*details: Any) -> bytes:
    """A `google.rpc.Status` with these details."""
    status = status_pb2.Status()
    for detail in details:
        anything = any_pb2.Any()
        anything.Pack(detail)
        status.details.append(anything)
    return status.SerializeToString()


@CLIENTS
async def test_details_of_other_servers_do_no_harm(make_client: Any) -> None:
    other_limit = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="elsewhere", metadata={"limit": "5"})
    no_number = error_details_pb2.ErrorInfo(reason="INVALID_FIELD", domain="specpool", metadata={"limit": "many"})
    for details in (b"\xff", packed(other_limit), packed(no_number), packed(error_details_pb2.BadRequest())):
        for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
            async with refusing(code, details) as address, make_client(address) as client:
                with pytest.raises(errors.RequestError) as caught:
                    await client.generate("a")
            assert type(caught.value) is EXPECTED[code.name]
            empty = {"field": "", "reason": "", "limit": None, "retry_after": None}
            assert {name: getattr(caught.value, name, default) for name, default in empty.items()} == empty


@CLIENTS
@pytest.mark.parametrize(
    ("options", "field", "limit"),
    [
        ({"n": 65, "temperature": 1.0}, "sampling_params.n", 24),
        ({"temperature": -1.0}, "sampling_params.temperature", 0),
        ({"temperature": 0.001}, "sampling_params.temperature", 0.01),
        ({"max_tokens": 5000}, "sampling_params.max_tokens", 4095),
        ({"min_tokens": 9, "max_tokens": 8}, "sampling_params.min_tokens", 8),
        ({"stop": ["a", "b" * 257]}, "sampling_params.stop[1]", 256),
        ({"request_id": "a" * 129}, "request_id", 128),
        ({"num_speculative_tokens": 10_000}, "speculative.num_speculative_tokens", 16),
    ],
)
async def test_invalid_fields_have_their_limit(
    make_client: Any, options: dict[str, Any], field: str, limit: float
) -> None:
    async with serving(queue_size=8) as served, make_client(served.address) as client:
        with pytest.raises(errors.InvalidArgumentError) as caught:
            await client.generate("a", **options)
    error = caught.value
    assert (error.field, error.limit) == (field, limit)
    assert str(error) == f"INVALID_ARGUMENT: {field}: {error.reason}"


@CLIENTS
async def test_errors_can_be_pickled(make_client: Any) -> None:
    async with serving() as served, make_client(served.address) as client:
        with pytest.raises(errors.InvalidArgumentError) as caught:
            await client.generate("a", max_tokens=5000)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.code()) == (type(caught.value), str(caught.value), caught.value.code())
    assert (copy.field, copy.limit) == ("sampling_params.max_tokens", 4095)
    assert list(copy.trailing_metadata()) == list(caught.value.trailing_metadata())


async def test_cancelling_a_call_is_no_error_of_the_server() -> None:
    async with specpool.AsyncClient("127.0.0.1:1") as client:
        answer = asyncio.create_task(client.generate("a"))
        await asyncio.sleep(0.05)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
