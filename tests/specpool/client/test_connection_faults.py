"""Faults of connections that no retry mends, over real sockets: both clients name them at once."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import OTHER_TOKEN, TOKEN, Authority, Certificate
from secure_service import listening
from serving import PATIENCE_SECONDS, serving
from tls_servers import in_thread

from specpool import AsyncClient, Client, errors
from specpool.client.failures import is_permanent
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.server import Server

RETRY_SECONDS = 10 * PATIENCE_SECONDS
"""A test that waits for retries fails."""


@asynccontextmanager
async def running(**security: Any) -> AsyncIterator[str]:
    """Run a gRPC server without services; yield its address, with a host name."""
    async with listening(Server(ServerSettings(port=0, **security), 1000)) as address:
        yield address.replace("127.0.0.1", "localhost")


async def ask(address: str, **options: Any) -> None:
    async with AsyncClient(address, **{"retry_seconds": RETRY_SECONDS} | options) as client:
        await client.generate("a")


async def ask_in_chunks(address: str, **options: Any) -> None:
    async with AsyncClient(address, **{"retry_seconds": RETRY_SECONDS} | options) as client:
        async for _ in client.stream("a"):
            pass


async def ask_blocking(address: str, **options: Any) -> None:
    with Client(address, **{"retry_seconds": RETRY_SECONDS} | options) as client:
        await asyncio.to_thread(client.generate, "a")


Ask = Callable[..., Any]
CLIENTS = pytest.mark.parametrize("ask", [ask, ask_in_chunks, ask_blocking])


async def fault(ask: Ask, address: str, kind: type[errors.RequestError], **options: Any) -> str:
    """The message of the error that ends a call without retries."""
    with pytest.raises(kind) as caught:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await ask(address, **options)
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert is_permanent(caught.value)
    return str(caught.value).removeprefix(f"{caught.value.code().name}: ")


@CLIENTS
async def test_plain_text_to_a_server_with_tls(server: Certificate, ask: Ask) -> None:
    async with running(**server.options) as address:
        assert await fault(ask, address, errors.ProtocolError) == f"{address} requires TLS: set tls_ca"


@CLIENTS
async def test_tls_to_a_server_without_it(ca: Authority, ask: Ask) -> None:
    async with running() as address:
        message = await fault(ask, address, errors.ProtocolError, tls_ca=ca.path)
    assert message == f"{address} does not use TLS: connect without tls_ca"


@CLIENTS
async def test_a_certificate_with_another_name(ca: Authority, server: Certificate, ask: Ask) -> None:
    async with running(**server.options) as address:
        options = {"tls_ca": ca.path, "tls_name": "elsewhere"}
        message = await fault(ask, address, errors.CertificateError, **options)
    why = "it is not valid for 'elsewhere'; set tls_name to a name in it"
    assert message == f"cannot trust the certificate of {address}: {why}"


@CLIENTS
async def test_a_certificate_of_another_ca(other_ca: Authority, server: Certificate, ask: Ask) -> None:
    async with running(**server.options) as address:
        message = await fault(ask, address, errors.CertificateError, tls_ca=other_ca.path)
    assert f"it is not signed by {other_ca.path}" in message


@CLIENTS
async def test_a_client_certificate_that_is_missing_or_refused(
    ca: Authority, other_ca: Authority, server: Certificate, ask: Ask
) -> None:
    own = other_ca.issue("client")
    async with running(**server.options, tls_ca=ca.path) as address:
        missing = await fault(ask, address, errors.CertificateError, tls_ca=ca.path)
        refused = await fault(ask, address, errors.CertificateError, tls_ca=ca.path, **own.options)
    assert missing == f"{address} requires a client certificate: set tls_cert and tls_key"
    assert refused == f"{address} refuses the client certificate in {own.cert}"


@CLIENTS
async def test_tokens_that_are_missing_or_wrong(tmp_path: Path, ask: Ask) -> None:
    known = tmp_path / "tokens"
    known.write_text(f"alice {TOKEN}")
    async with running(api_tokens=known) as address:
        for options in ({}, {"token": OTHER_TOKEN}):
            assert "authorization" in await fault(ask, address, errors.UnauthenticatedError, **options)


@CLIENTS
async def test_a_server_without_grpc(ask: Ask) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web, in_thread(web):
        address = f"127.0.0.1:{web.server_port}"
        message = await fault(ask, address, errors.ProtocolError)
    assert message == f"{address} is not a gRPC server: check the port"


# --- Faults that may pass


@CLIENTS
async def test_a_server_that_does_not_listen_is_retried(ask: Ask) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(errors.ConnectError, match=f"cannot connect to {address}: Connection refused") as caught:
            await ask(address, retry_seconds=0.3)
    assert not is_permanent(caught.value)


async def test_unknown_host_names_are_named() -> None:
    impossible = "a" * 64  # a part of a name has at most 63 characters
    async with AsyncClient(f"{impossible}:50050", 0.0) as client:
        with pytest.raises(errors.ResolveError, match=r"cannot resolve the host name of a+:50050") as caught:
            await client.model_info()
    assert is_permanent(caught.value)


async def test_clients_accept_the_other_forms_of_grpc(tmp_path: Path) -> None:
    async with serving() as served, AsyncClient(f"ipv4:{served.address}", 0.0) as client:
        assert (await client.model_info()).max_model_len == 4096
    async with AsyncClient(f"unix:{tmp_path}/none", 0.0) as client:
        with pytest.raises(errors.UnavailableError):
            await client.model_info()


# --- Commands


async def test_grpc_logs_nothing_beside_the_error_of_a_command(ca: Authority) -> None:
    async with running() as address:
        command = ["-m", "specpool", "generate", "a", "--address", address, "--tls-ca", str(ca.path)]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
        _, stderr = await process.communicate()
    reason = f"{address} does not use TLS: connect without --tls-ca"
    assert stderr.decode() == f"specpool generate: UNAVAILABLE: {reason}\n"
