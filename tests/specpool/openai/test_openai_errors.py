"""Errors have OpenAI's form, name the field, and never show a stack trace."""

import asyncio
import json
import logging

import httpx2
import pytest
from openai_service import MODEL, OpenAIService, openai_server, openai_service
from pydantic import ValidationError
from secure_service import until
from serving import free_address, serving

from specpool.openai.bodies import ChatBody, CompletionBody, GenerationBody

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
URL = "/v1/chat/completions"


def body(**fields: object) -> bytes:
    return json.dumps({**CHAT, **fields}).replace("Infinity", "1e999").encode()


def json_client(url: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, headers={"content-type": "application/json"})


def error_of(response: httpx2.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    [(name, error)] = response.json().items()
    assert (name, error.keys()) == ("error", {"message", "type", "param", "code"})
    return error


async def test_bad_bodies_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    bodies = {
        b"": "is not JSON",
        b"{": "is not JSON",
        b"[]": "must be a JSON object",
        b"[" * 100_000: "is nested too deeply",
        body(seed=1).replace(b"1", b"9" * 10_000): "is not JSON",
        body(top_p=1.0).replace(b"1.0", b"NaN"): "NaN",
        b'{"model": "a", "model": "b"}': "the key 'model' twice",
        body().replace(b"Hi", b"\\ud800"): "is not UTF-8 text",
        body().replace(b"Hi", b"\xff"): "is not UTF-8 text",
        body().replace(b"Hi", b"\\ud800").decode().encode("utf-16"): "is not UTF-8 text",
    }
    async with openai_service() as service, json_client(service.url) as client:
        for content, reason in bodies.items():
            error = error_of(await client.post(URL, content=content), 400)
            assert reason in error["message"]
            assert error["code"] == "invalid_json"
        for levels in (40, 400, 900):
            deep = b'{"a":' * levels + b"1" + b"}" * levels
            fields = (b'"chat_template_kwargs": %b', b'"tools": [%b]', b'"structured_outputs": {"json": %b}')
            for field in fields:
                response = await client.post(URL, content=body(max_tokens=1)[:-1] + b", " + field % deep + b"}")
                assert response.status_code == 400 or b"json" in field
                assert response.status_code < 500
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "invalid_type"),
        ({"model": None}, "model", "invalid_type"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_type"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"chat_template_kwargs": {"enable_thinking": 10**400}}, "chat_template_kwargs", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": float("inf")}}]}, "tools[0]", "invalid_value"),
        ({"stop": 1}, "stop", "invalid_type"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_errors_name_the_field(fields: dict[str, object], param: str, code: str, service: OpenAIService) -> None:
    async with json_client(service.url) as client:
        error = error_of(await client.post(URL, content=body(**fields)), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (CompletionBody, "prompt", [-1] * 500_000),
        (CompletionBody, "prompt", [[]] * 500_000),
        (ChatBody, "messages", [1] * 500_000),
        (ChatBody, "stop", [1] * 500_000),
    ],
)
def test_a_body_has_one_error_for_all_elements_of_a_list(kind: type[GenerationBody], field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": MODEL, field: value})
    assert caught.value.error_count() <= 5  # one for each alternative of a union


async def test_routes_methods_and_sizes_are_checked() -> None:
    async with (
        openai_service({"max_body_bytes": 1000}) as service,
        json_client(service.url) as client,
    ):
        error_of(await client.get("/v2"), 404)
        error_of(await client.get("/v1/models/"), 404)
        error_of(await client.get(URL), 405)
        for kind in ("", "text/plain", "application/x-www-form-urlencoded"):  # what pages of other sites can send
            refused = await client.post(URL, content=body(), headers={"content-type": kind})
            assert error_of(refused, 415)["code"] == "unsupported_media_type"
        assert (await client.options(URL, headers={"origin": "http://x"})).status_code == 405
        assert "1000 bytes" in error_of(await client.post(URL, content=b"x" * 1001), 413)["message"]

        async def pieces() -> object:
            for _ in range(3):
                yield b"x" * 500

        assert error_of(await client.post(URL, content=pieces()), 413)["code"] == "body_too_large"


async def test_a_body_that_does_not_arrive_times_out() -> None:
    async with openai_service({"receive_seconds": 0.1}) as service:
        host, port = service.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {URL} HTTP/1.1\r\nhost: {host}\r\n".encode())
        writer.write(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()


async def test_a_full_queue_is_429_with_the_time_to_wait() -> None:
    async with (
        openai_service(max_num_seqs=1, queue_size=1) as service,
        json_client(service.url) as client,
    ):
        service.coordinator.target.open.clear()
        waiting = [asyncio.create_task(client.post(URL, content=body(max_tokens=1))) for _ in range(2)]
        await service.coordinator.until(lambda info: info.running + info.queued == 2)
        refused = await client.post(URL, content=body())
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        service.coordinator.target.open.set()
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]


async def test_without_a_coordinator_requests_are_503() -> None:
    async with (
        openai_server(free_address()) as (_, url),
        json_client(url) as client,
    ):
        response = await client.post(URL, content=body())
        error = error_of(response, 503)
        assert (error["message"], response.headers["retry-after"]) == ("no coordinator can be reached", "1")
        assert (await client.get("/health")).status_code == 503


async def test_a_request_above_the_coordinators_limit_is_413() -> None:
    async with (
        openai_service(max_request_bytes=2000) as service,
        json_client(service.url) as client,
    ):
        long = [{"role": "user", "content": "x" * 3000}]
        error_of(await client.post(URL, content=body(messages=long)), 413)


async def test_requests_do_not_wait_for_a_model() -> None:
    async with (
        serving(with_target=False, served_model_name=MODEL) as coordinator,
        openai_server(coordinator.address) as (_, url),
        json_client(url) as client,
    ):
        for response in (await client.post(URL, content=body()), await client.get("/v1/models")):
            error_of(response, 503)
            assert response.headers["retry-after"]


async def test_health_and_metrics_need_no_token() -> None:
    async with openai_service() as service, json_client(service.url) as client:
        assert (await client.get("/health")).status_code == 200
        await client.post(URL, content=body(max_tokens=1, stream=True))
        metrics = (await client.get("/metrics")).text
        assert f'specpool:http_requests_total{{route="{URL}",status="200"}} 1.0' in metrics
        assert f'specpool:http_time_to_first_token_seconds_count{{route="{URL}"}} 1.0' in metrics
        await service.coordinator.target.stop()
        await until(lambda: not service.server.coordinators.is_serving)
        assert (await client.get("/health")).status_code == 503
