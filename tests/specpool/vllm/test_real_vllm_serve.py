"""`vllm serve` with drafts, as documented in docs/vllm.md, gives the answers of plain `vllm serve`.

Only `make test-vllm` runs these tests.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from vllm_server import VllmServer, ask

from benchmarks.vllm_process import DraftProcess, draft_process
from specpool.client.prompts import own_prompts
from specpool.engine.models.embedded_pair import embedded_pair, float32_copy

pytestmark = pytest.mark.vllm

TOKENS, FEW_TOKENS = 32, 16
PATIENCE_SECONDS = 600
PROMPTS: list[Any] = [list(line.prompt) for line in own_prompts()[:8]]
TEXTS = ["The capital of Norway is", "def fibonacci(n):\n"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [20, 30, 40]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Otherwise a small model may generate line breaks forever.
FLAGS = ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftProcess]:
    with draft_process(embedded_pair().target) as process:
        yield process


@pytest.fixture(scope="module")
def servers(draft: DraftProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Plain vLLM, and vLLM with drafts."""
    with ExitStack() as stack:
        both = [
            stack.enter_context(VllmServer(float32_copy(), tmp_path_factory.mktemp("vllm"), address, *FLAGS))
            for address in (None, draft.address)
        ]
        plain, remote = (server.wait_ready() for server in both)
        yield plain, remote


@pytest.fixture(scope="module")
def remote(servers: tuple[VllmServer, VllmServer]) -> VllmServer:
    return servers[1]


@pytest.fixture(scope="module")
def plain(servers: tuple[VllmServer, VllmServer]) -> list[str]:
    """Answers of plain vLLM."""

    async def answers() -> list[str]:
        async with servers[0].client() as client:
            return await asyncio.gather(*(stream(client, servers[0], prompt) for prompt in PROMPTS))

    return asyncio.run(answers())


async def stream(client: Any, server: VllmServer, prompt: Any, max_chunks: int | None = None) -> str:
    """The streamed answer to a chat. The client disconnects after `max_chunks`."""
    options = {"temperature": 0, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    text = ""
    async with await client.chat.completions.create(
        model=server.model, messages=prompt, stream=True, **options
    ) as chunks:
        count = 0
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            count += 1
            if count == max_chunks:
                break
    return text


async def test_streams_with_disconnecting_clients(remote: VllmServer, plain: list[str]) -> None:
    """Every third client disconnects in the middle of its answer."""
    async with remote.client() as client:
        before = remote.counter("accepted")
        running = []
        for i, prompt in enumerate([*PROMPTS, *PROMPTS]):
            max_chunks = 3 if i % 3 == 2 else None
            running.append(asyncio.create_task(stream(client, remote, prompt, max_chunks)))
            await asyncio.sleep(0.1)
        answers = await asyncio.gather(*running)
        expected = [*plain, *plain]
        assert answers == [text[: len(answers[i])] if i % 3 == 2 else text for i, text in enumerate(expected)]
        assert remote.counter("accepted") > before


async def test_a_killed_draft_worker_only_costs_drafts(
    draft: DraftProcess, remote: VllmServer, plain: list[str]
) -> None:
    async with remote.client() as client:

        async def all_answers() -> None:
            assert await asyncio.gather(*(stream(client, remote, prompt) for prompt in PROMPTS)) == plain

        running = asyncio.create_task(all_answers())
        await asyncio.sleep(0.5)
        draft.kill()
        await running
        await all_answers()
        draft.start()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(re.findall(r" INFO .*draft worker at .* is ready", remote.log.read_text())) < 2:
                await all_answers()
        await all_answers()


@pytest.mark.parametrize(
    ("options", "is_valid"),
    [
        ({"choice": ["Oslo", "Bergen", "Trondheim"]}, lambda text: text in ("Oslo", "Bergen", "Trondheim")),
        ({"regex": "[0-9]{3}-[a-z]{5,9}[.]"}, lambda text: re.fullmatch("[0-9]{3}-[a-z]{5,9}[.]", text)),
        ({"json": SCHEMA}, lambda text: {*json.loads(text)} == {"name", "age"}),
    ],
)
async def test_structured_output(
    options: dict[str, Any], is_valid: Any, servers: tuple[VllmServer, VllmServer]
) -> None:
    """Constrained requests share a batch with free-form ones."""

    async def answers(server: VllmServer) -> list[str]:
        async with server.client() as client:
            free = [ask(client, server.model, text, max_tokens=FEW_TOKENS) for text in TEXTS]
            constrained = [
                ask(client, server.model, text, max_tokens=2 * TOKENS, extra_body={"structured_outputs": options})
                for text in TEXTS
            ]
            return [choices[0].text for choices in await asyncio.gather(*constrained, *free)]

    plain, remote = [await answers(server) for server in servers]
    assert remote == plain
    assert all(is_valid(text) for text in remote[: len(TEXTS)])


async def test_logprobs_and_stop_strings(servers: tuple[VllmServer, VllmServer]) -> None:
    async def answers(server: VllmServer) -> Any:
        async with server.client() as client:
            options: dict[str, Any] = {"max_tokens": FEW_TOKENS, "logprobs": 2, "stop": [" of", "return"]}
            return [(await ask(client, server.model, text, **options))[0] for text in TEXTS]

    for one, other in zip(*[await answers(server) for server in servers], strict=True):
        assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
        assert one.logprobs.tokens == other.logprobs.tokens
        assert one.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=1e-3)


async def test_penalties(servers: tuple[VllmServer, VllmServer]) -> None:
    async def answers(server: VllmServer) -> list[str]:
        async with server.client() as client:
            options: dict[str, Any] = {"max_tokens": TOKENS, "frequency_penalty": 0.5, "presence_penalty": 0.2}
            return [(await ask(client, server.model, text, **options))[0].text for text in TEXTS]

    plain, remote = [await answers(server) for server in servers]
    assert remote == plain


async def test_several_answers_and_sampling(servers: tuple[VllmServer, VllmServer]) -> None:
    """Sampling with `top_k` 1 is greedy, even in a batch with real sampling."""
    plain, remote = servers
    async with plain.client() as client:
        truth = [(await ask(client, plain.model, text, max_tokens=TOKENS))[0].text for text in TEXTS]
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 5}
    async with remote.client() as client:
        free = [ask(client, remote.model, text, n=3, top_p=0.9, **options) for text in TEXTS]
        greedy = [ask(client, remote.model, text, n=3, extra_body={"top_k": 1}, **options) for text in TEXTS]
        default = [ask(client, remote.model, text, max_tokens=TOKENS) for text in TEXTS]
        done = await asyncio.gather(*free, *greedy, *default)
    for choices, text in zip(done[len(TEXTS) :], [*truth, *truth], strict=True):
        assert {choice.text for choice in choices} == {text}
    assert all(len({choice.text for choice in choices}) == 3 for choices in done[: len(TEXTS)])


async def test_the_log_has_no_errors(remote: VllmServer) -> None:
    """Run last: neither Specpool nor vLLM logged an error in the tests above."""
    written = remote.log.read_text()
    assert " ERROR " not in written, written[-3000:]
    assert "drafts for vLLM" in written
