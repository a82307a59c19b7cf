"""Health checks over HTTP. `test_processes.py` has those over gRPC."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificates import Authority, Certificate

from specpool.cli.preflight import health_check_security
from specpool.cli.probes import HttpProbe
from specpool.rpc.ports import free_port
from specpool.rpc.security.settings import ServerSecurity


@asynccontextmanager
async def answering(line: bytes | None, security: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run a server that answers requests with this line, or never; yield its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"GET /health HTTP/1.0\r\n"
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            if line is not None:
                writer.write(line + b"\r\n\r\n")
            else:
                await reader.read()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=security) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("line", "is_serving"),
    [(b"HTTP/1.1 200 OK", True), (b"HTTP/1.1 503 Service Unavailable", False), (b"SSH-2.0", False), (b"", False)],
)
async def test_a_process_serves_once_its_health_check_succeeds(line: bytes, is_serving: bool) -> None:
    async with answering(line) as address, HttpProbe(address).open() as checks:
        assert await checks.is_serving(os.getpid()) == is_serving
        assert await checks.answers(60.0)


async def test_only_a_timeout_is_no_answer() -> None:
    refusing = HttpProbe(f"127.0.0.1:{free_port()}")
    assert not await refusing.is_serving(os.getpid())
    assert await refusing.answers(60.0)
    async with answering(None) as address:
        assert not await HttpProbe(address).answers(0.1)


async def test_only_the_process_with_the_certificate_is_trusted(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    shown, other = ca.issue("shown", ["DNS:up.example"]), ca.issue("other")
    async with answering(b"HTTP/1.1 200 OK", context_of(shown, ca)) as address:
        probes = [
            HttpProbe(address, health_check_security(ServerSecurity(**each.options, tls_ca=ca.path)))
            for each in (shown, other)
        ]
        assert [await probe.is_serving(os.getpid()) for probe in probes] == [True, False]
        assert await probes[1].answers(60.0)


def context_of(shown: Certificate, ca: Authority) -> ssl.SSLContext:
    """Return the context of a server that requires certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.cert, shown.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(ca.path)
    return context
