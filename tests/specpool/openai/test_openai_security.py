"""TLS on both sides, and the caller's token on its way to the coordinator."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

import httpx2
import openai
import pytest
from certificates import OTHER_TOKEN, TOKEN, Authority, Certificate
from openai import AsyncOpenAI
from openai_service import MODEL, openai_server
from scripted_target import ScriptedTarget
from secure_service import coordinator as secure_coordinator
from secure_service import until, worker
from serving import free_address, serving

from coordinator.server import CoordinatorServer
from specpool.openai.settings import OpenAISettings
from specpool.testing import FakeDraft

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"alice {TOKEN}\nbob {OTHER_TOKEN}\n")
    return path


def clients_in(process: CoordinatorServer) -> list[str]:
    """Return the clients of the requests in flight."""
    samples = [sample for _, sample in process.coordinator.in_flight._samples.values()]
    return sorted(sample.sequence.request.client for sample in samples)


async def test_tokens_reach_the_coordinator(tokens: Path, ca: Authority, server: Certificate) -> None:
    target = ScriptedTarget()
    security = {"api_tokens": tokens, **server.options}
    async with (
        worker(target) as target_address,
        worker(FakeDraft(target)) as draft_address,
        secure_coordinator(target, target_address, draft_address, served_model_name=MODEL, **security) as service,
        openai_server(service.address, coordinator_tls_ca=ca.path) as (front, url),
    ):
        await service.until_ready()
        await until(lambda: front.coordinators.is_serving)
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as alice,
            AsyncOpenAI(base_url=f"{url}/v1", api_key=OTHER_TOKEN, max_retries=0) as bob,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as nobody,
        ):
            target.open.clear()
            running = [asyncio.create_task(each.chat.completions.create(**CHAT)) for each in (alice, bob)]
            await until(lambda: clients_in(service.process) == ["token:alice", "token:bob"])
            target.open.set()
            for answer in await asyncio.gather(*running):
                assert answer.choices[0].message.content == "Hello"
            for call in (nobody.chat.completions.create(**CHAT), nobody.models.list(), nobody.models.retrieve("x")):
                with pytest.raises(openai.AuthenticationError) as caught:
                    await call
                assert caught.value.code == "invalid_api_key"
            # Only known callers learn the model's name.
            with pytest.raises(openai.AuthenticationError):
                await nobody.chat.completions.create(**{**CHAT, "model": "other"})
            with pytest.raises(openai.AuthenticationError):
                await nobody.chat.completions.create(**CHAT, tool_choice="required")
        async with httpx2.AsyncClient(base_url=url) as client:
            assert (await client.get("/v1/models")).status_code == 401
            repeated = [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {OTHER_TOKEN}")]
            assert (await client.get("/v1/models", headers=repeated)).status_code == 401
            assert (await client.get("/v1/models", headers={"authorization": b"Bearer \xff"})).status_code == 401
            assert (await client.get("/health")).status_code == 200
        # Strangers cannot make the server read a large body.
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        writer.write(b"content-type: application/json\r\ncontent-length: 1000000\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        await writer.wait_closed()


def trusting(ca: Authority, certificate: Certificate | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca.path)
    if certificate is not None:
        context.load_cert_chain(certificate.cert, certificate.key)
    return context


async def status_of(url: str, context: ssl.SSLContext) -> int:
    async with httpx2.AsyncClient(verify=context) as client:
        return (await client.get(f"{url}/health")).status_code


async def test_clients_use_tls_with_certificates_and_reloaded_files(
    ca: Authority, other_ca: Authority, tmp_path: Path
) -> None:
    served = Certificate(tmp_path / "served.pem", tmp_path / "served.key")
    served.cert.write_bytes(b"")
    served.copy_from(ca.issue("first"))
    client, stranger = ca.issue("client"), other_ca.issue("client")
    async with (
        serving() as coordinator,
        openai_server(coordinator.address, tls_ca=ca.path, **served.options) as (front, url),
    ):
        await until(lambda: front.coordinators.is_serving)
        assert await status_of(url, trusting(ca, client)) == 200
        for context in (trusting(ca), trusting(ca, stranger), trusting(other_ca, client)):
            with pytest.raises(httpx2.TransportError):
                await status_of(url, context)
        served.copy_from(other_ca.issue("second"))
        assert await status_of(url, trusting(other_ca, client)) == 200


def resume(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> tuple[bytes, ssl.SSLSession]:
    """Return the answer over a new connection, which resumes a TLS session."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        return connection.recv(12), connection.session


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_sessions_of_an_earlier_ca_are_not_resumed(
    ca: Authority, other_ca: Authority, server: Certificate, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    clients = tmp_path / "clients.pem"
    clients.write_bytes(ca.path.read_bytes())
    context = trusting(ca, ca.issue("client"))
    context.maximum_version = version
    async with openai_server(free_address(), tls_ca=clients, **server.options) as (_, url):
        port = int(url.rpartition(":")[2])
        answer, session = await asyncio.to_thread(resume, port, context)
        assert answer == b"HTTP/1.1 503"
        assert (await asyncio.to_thread(resume, port, context, session))[0] == answer
        clients.write_bytes(other_ca.path.read_bytes())
        with contextlib.suppress(OSError):
            assert (await asyncio.to_thread(resume, port, context, session))[0] == b""


async def test_coordinators_with_other_certificates_are_not_used(
    ca: Authority, other_ca: Authority, server: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    target = ScriptedTarget()
    async with (
        secure_coordinator(target, "127.0.0.1:1", "127.0.0.1:1", **server.options) as service,
        openai_server(service.address, coordinator_tls_ca=other_ca.path) as (front, url),
        httpx2.AsyncClient(base_url=url) as client,
    ):
        await until(lambda: "certificate" in caplog.text)
        assert not front.coordinators.is_serving
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert service.address not in response.text


async def test_coordinators_may_require_the_servers_certificate(ca: Authority, server: Certificate) -> None:
    own = ca.issue("front")
    security = {**server.options, "tls_ca": ca.path}
    options = {"coordinator_tls_cert": own.cert, "coordinator_tls_key": own.key}
    async with secure_coordinator(ScriptedTarget(), "127.0.0.1:1", "127.0.0.1:1", **security) as service:
        for given, reason in (({}, "no coordinator can be reached"), (options, "target worker")):
            async with (
                openai_server(service.address, coordinator_tls_ca=ca.path, **given) as (_, url),
                httpx2.AsyncClient(base_url=url) as client,
            ):
                response = await client.post("/v1/chat/completions", json=CHAT)
                assert (response.status_code, reason in response.text) == (503, True)


def test_settings_for_tls_name_their_flags(ca: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("coordinator-tls-cert", "x"), ("coordinator-tls-ca", "/missing"), ("tls-ca", ca.path)):
        with pytest.raises(SystemExit):
            OpenAISettings.load("specpool-openai", [f"--{flag}", str(value)])
        assert f"specpool-openai: {flag}: " in capsys.readouterr().err
