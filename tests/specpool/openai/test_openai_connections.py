"""Clients that disconnect, clients that stop reading, many streams at once, and the drain."""

import asyncio
import gc
import json
import logging
import socket
from typing import Any

import httpx2
import openai
import pytest
from openai_service import MODEL, OpenAIService, openai_service
from scripted_target import ScriptedTarget
from secure_service import until
from serving import RecordingTarget

CHAT = [{"role": "user", "content": "Hi"}]
OPTIONS: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0}


def endless() -> dict[str, Any]:
    """Return the body of a request that lasts until its client leaves."""
    return {**OPTIONS, "max_tokens": 2000, "ignore_eos": True}


async def read_first(client: httpx2.AsyncClient, **fields: Any) -> tuple[Any, Any]:
    """Begin a stream, and return it after its first event."""
    request = client.build_request("POST", "/v1/chat/completions", json={**endless(), "stream": True, **fields})
    response = await client.send(request, stream=True)
    assert response.status_code == 200
    lines = response.aiter_lines()
    assert (await anext(lines)).startswith("data: {")
    return response, lines


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_frees_its_slots(stream: bool) -> None:
    async with openai_service(target=RecordingTarget()) as service:
        async with httpx2.AsyncClient(base_url=service.url) as client:
            if stream:
                await read_first(client)
            else:
                service.coordinator.target.open.clear()
                answer = asyncio.create_task(client.post("/v1/chat/completions", json=endless()))
                await service.coordinator.until(lambda info: info.running)
                answer.cancel()
        service.coordinator.target.open.set()
        await service.coordinator.until_idle()
        assert f'status="{200 if stream else 499}"' in await metrics_of(service)


async def metrics_of(service: OpenAIService) -> str:
    async with httpx2.AsyncClient(base_url=service.url) as client:
        return str((await client.get("/metrics")).text)


async def test_a_client_that_does_not_read_pauses_only_itself() -> None:
    async with openai_service({"stream_stall_seconds": 1.0}, stream_stall_seconds=1.0, max_num_seqs=20) as service:
        host, port = service.url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        # More than all buffers on the way can hold.
        large = {"n": 16, "temperature": 1, "logprobs": True, "top_logprobs": 20}
        body = json.dumps({**endless(), **large, "stream": True}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readexactly(1)
        answers = [await service.client.chat.completions.create(**OPTIONS, max_tokens=8) for _ in range(8)]
        assert all(answer.usage.completion_tokens == 8 for answer in answers)
        # The coordinator ends the unread stream.
        await service.coordinator.until(lambda info: info.counters.finished["abort"] == 16)
        await service.coordinator.until_idle()
        # The system closes the unread connection.
        registry, labels = service.server.handlers.metrics.registry, {"route": "/v1/chat/completions"}
        await until(lambda: registry.get_sample_value("specpool:http_requests_in_progress", labels) == 0)
        writer.close()


@pytest.mark.slow
async def test_many_streams_run_at_once() -> None:
    async def text_of_stream(client: openai.AsyncOpenAI, number: int) -> str:
        chat = [{"role": "user", "content": f"Number {number}"}]
        options = {**OPTIONS, "messages": chat, "max_tokens": 6}
        chunks = await client.chat.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async with openai_service(target=ScriptedTarget("Hello"), max_num_seqs=200) as service:
        service.coordinator.target.open.clear()
        streams = [asyncio.create_task(text_of_stream(service.client, number)) for number in range(200)]
        await service.coordinator.until(lambda info: info.running + info.queued == 200)
        service.coordinator.target.open.set()
        assert await asyncio.gather(*streams) == ["Hello"] * 200


@pytest.mark.parametrize("prompts", [1, 4])
async def test_errors_after_the_first_event_end_the_stream(prompts: int, caplog: pytest.LogCaptureFixture) -> None:
    async with openai_service(num_speculative_tokens=0, stream_stall_seconds=60.0) as service:
        chunks = await service.client.completions.create(
            model=MODEL, prompt=["Hi"] * prompts, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(chunks))
        await service.coordinator.target.stop()
        service.coordinator.process.server.stop(drain=False)
        stopping = asyncio.create_task(service.coordinator.process.wait_stopped())
        with pytest.raises(openai.APIError, match=r"(?i)unavailable|shutting down|cancel|reached"):
            async for _ in chunks:
                pass
        await stopping
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_the_first_error_ends_all_prompts() -> None:
    async with openai_service(target=RecordingTarget()) as service:
        service.coordinator.target.open.clear()  # the first prompt has no answer
        with pytest.raises(openai.BadRequestError, match="prompt: must not be empty"):
            await service.client.completions.create(model=MODEL, prompt=["Hi", ""], timeout=10)
        service.coordinator.target.open.set()
        await service.coordinator.until_idle()


async def test_the_drain_finishes_requests_and_then_ends_the_rest() -> None:
    target = ScriptedTarget("x" * 5000)
    async with (
        openai_service({"drain_seconds": 0.3}, target=target) as service,
        httpx2.AsyncClient(base_url=service.url, timeout=20) as client,
    ):
        response, lines = await read_first(client)
        target.open.clear()
        service.server.stop()
        rest = [line async for line in lines if line]
        target.open.set()
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        assert rest[-1] == "data: [DONE]"
        await response.aclose()


async def test_connections_are_limited_except_for_probes() -> None:
    async with (
        openai_service({"max_connections": 1}) as service,
        httpx2.AsyncClient(base_url=service.url) as first,
        httpx2.AsyncClient(base_url=service.url) as second,
    ):
        response, _ = await read_first(first)
        statuses = [(await second.get(path)).status_code for path in ("/v1/models", "/health", "/metrics")]
        assert statuses == [503, 200, 200]
        await response.aclose()


async def test_the_head_of_a_request_must_arrive_in_time(
    service: OpenAIService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specpool.openai.protocol.HEAD_SECONDS", 0.05)
    host, port = service.url.removeprefix("http://").split(":")
    whole = f"GET /health HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()
    for sent, status in ((b"", b""), (whole[:20], b""), (whole + whole[:20], b"HTTP/1.1 200 ")):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        assert (await reader.read()).startswith(status)
        writer.close()
        await writer.wait_closed()


async def connect(service: OpenAIService, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    return reader, writer


async def test_the_rest_of_a_refused_body_must_arrive_in_time(
    service: OpenAIService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specpool.openai.protocol.HEAD_SECONDS", 0.2)
    reader, writer = await connect(service, b"POST /v2 HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
    writer.write(b"x")
    async with asyncio.timeout(10):  # less than an idle connection has
        await reader.read()
    writer.close()


async def test_invalid_http_is_refused_in_openais_form(
    service: OpenAIService, caplog: pytest.LogCaptureFixture
) -> None:
    chunked = b"POST /v2 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    large = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 2**14 + b"\r\n\r\n"
    for sent in (b"?\r\n\r\n", chunked + b"?\r\n", large, large.replace(b"\r", b"")):
        reader, writer = await connect(service, sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        writer.close()
    reader, writer = await connect(service, chunked)
    assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
    writer.write(b"?\r\n")  # after the answer
    await reader.read()
    writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_connections_above_the_limit_are_refused() -> None:
    head = b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with openai_service({"max_connections": 1}, target=RecordingTarget()) as service:
        # A connection without a request makes room.
        waiting, writer = await connect(service, b"")
        await until(lambda: service.server._uvicorn.server_state.connections)
        service.coordinator.target.open.clear()
        answer = asyncio.create_task(service.client.chat.completions.create(**OPTIONS, max_tokens=4))
        assert await waiting.read() == b""
        writer.close()
        await service.coordinator.until(lambda info: info.running)
        # One that waits for its answer does not. Probes are answered.
        for path, status in ((b"/v1/models", b"503"), (b"/health", b"200"), (b"/metrics", b"200")):
            reader, writer = await connect(service, head % path)
            text = await reader.read()
            assert text.startswith(b"HTTP/1.1 " + status)
            writer.close()
            if status == b"503":
                assert b"retry-after: 1\r\n" in text
                assert json.loads(text.partition(b"\r\n\r\n")[2])["error"]["message"] == "too many connections"
        service.coordinator.target.open.set()
        assert (await answer).usage.completion_tokens == 4


async def test_clients_read_why_a_large_body_is_refused() -> None:
    async with openai_service({"max_body_bytes": 1000}) as service:
        with pytest.raises(openai.APIStatusError, match="more than 1000 bytes"):
            await service.client.completions.create(model=MODEL, prompt="x" * 2**24)


async def test_a_client_that_disconnects_after_a_pipelined_request_frees_its_slots() -> None:
    async with openai_service(target=RecordingTarget()) as service:
        service.coordinator.target.open.clear()
        body = json.dumps(endless()).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n".encode()
        _, writer = await connect(service, head + body)
        await service.coordinator.until(lambda info: info.running)
        writer.write(b"GET ")
        [connection] = [each for each in service.server._uvicorn.server_state.connections if each.cycle is not None]
        await until(lambda: connection.conn.trailing_data[0])
        writer.close()
        await service.coordinator.until(lambda info: not info.running)
        service.coordinator.target.open.set()
