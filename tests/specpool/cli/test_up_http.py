"""OpenAI's API of `specpool up`, called by the `openai` client."""

import os
import signal
import ssl
from pathlib import Path
from typing import Any

import openai
import pytest
from certificates import OTHER_TOKEN, TOKEN, Authority
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from up_process import Pair, address_of, api_of, children_of, end_all, plain_up, started

from specpool.rpc.ports import free_port

pytestmark = pytest.mark.slow
NAME = "tiny"


def serving_http(pair: Pair, *more: str) -> list[str]:
    return plain_up(pair, "--http-port", str(free_port()), "--served-model-name", NAME, *more)


def client_of(url: str, token: str = "none", max_retries: int = 0, **options: Any) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(**options)
    return AsyncOpenAI(base_url=url, api_key=token, http_client=http, max_retries=max_retries)


async def complete(client: AsyncOpenAI) -> str:
    options: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": 5, "temperature": 0}
    answer = await client.completions.create(**options)
    streamed = await client.completions.create(**options, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in streamed if chunk.choices])
    assert answer.choices[0].text == text
    return text


async def test_openai_clients_call_up_with_a_token_over_tls(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, tokens = Authority(tmp_path), tmp_path / "tokens"
    server = ca.issue("up", ["DNS:localhost", "IP:127.0.0.1"])
    tokens.write_text(f"alice {TOKEN}\n")
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--api-tokens", str(tokens)]
    async with started(*serving_http(tiny_pair, *flags)) as process:
        await address_of(process)
        url = await api_of(process)
        assert url.startswith("https://127.0.0.1:")
        async with client_of(url, TOKEN) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()
        monkeypatch.setenv("SSL_CERT_FILE", str(ca.path))  # as in docs/quickstart.md
        async with client_of(url, TOKEN) as client:
            assert [model.id async for model in client.models.list()] == [NAME]
            assert await complete(client)
            with pytest.raises(openai.AuthenticationError):
                await complete(client.with_options(api_key=OTHER_TOKEN))
        assert await end_all(process, signal.SIGTERM, 0, children=3) == ""


async def test_a_certificate_is_required_over_http_too(tiny_pair: Pair, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    server, alice = ca.issue("up"), ca.issue("alice")
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-ca", str(ca.path)]
    async with started(*serving_http(tiny_pair, *flags)) as process:
        await address_of(process)
        url = await api_of(process)
        trusting = ssl.create_default_context(cafile=ca.path)
        async with client_of(url, verify=trusting) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()
        trusting.load_cert_chain(alice.cert, alice.key)
        async with client_of(url, verify=trusting) as client:
            assert await complete(client)


async def test_a_lost_http_server_is_replaced(tiny_pair: Pair) -> None:
    async with started(*serving_http(tiny_pair, "--log-level", "warning")) as process:
        await address_of(process)
        url = await api_of(process)
        [lost] = [pid for pid, command in children_of(process.pid).items() if "specpool.openai" in command]
        os.kill(lost, signal.SIGKILL)
        async with client_of(url, max_retries=20) as client:
            assert await complete(client)
        assert "HTTP server: killed by SIGKILL" in await end_all(process, signal.SIGTERM, 0, children=3)
