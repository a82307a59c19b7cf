"""Real weights in real processes: speculation in `specpool up` gives the tokens of plain decoding."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Unpack

import grpc
import pytest
import pytest_asyncio
from gateway import gateway
from openai import AsyncOpenAI

from specpool.cli.generate import answers
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient, GenerateOptions
from specpool.client.prompts import own_prompts
from specpool.engine.cache.layout import PAGE_SIZE
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

# All tests share one service and event loop, because the pair takes long to start.
pytestmark = [pytest.mark.real_pair, pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = 16
SAMPLING: GenerateOptions = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 2, "seed": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    """The address of `specpool up`."""
    async with running(UpSettings(port=0, drain_seconds=1, log_level="warning", smg=True)) as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address) as client:
        yield client


@pytest.mark.parametrize("prompts", [3, pytest.param(32, marks=pytest.mark.slow)])
async def test_chats_in_ragged_batches_equal_plain_decoding_alone(client: AsyncClient, prompts: int) -> None:
    info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.target.equivalence == common_pb2.EQUIVALENCE_BITWISE
    # Different salts, so neither run uses the other's cached prompts.
    alone = await all_answers(client, 1, 0, range(prompts), cache_salt=f"alone {prompts}")
    parts = [range(part, prompts, 3) for part in range(3)]
    calls = [
        all_answers(client, 3, k, part, cache_salt=f"mixed {prompts}")
        for part, k in zip(parts, (1, 3, None), strict=True)
    ]
    mixed = await asyncio.gather(*calls)
    for part, responses in zip(parts, mixed, strict=True):
        assert [tokens(response) for response in responses] == [tokens(alone[i]) for i in part]
    assert sum(each.speculative_decoding.num_accepted_draft_tokens for responses in mixed for each in responses) > 0
    assert "Oslo" in alone[0].text


@pytest.mark.slow
async def test_samples_in_mixed_batches_equal_plain_decoding_alone(client: AsyncClient) -> None:
    """The batch also has greedy sequences, samples share a prompt, and all prompts are cached."""
    some, others = range(0, 32, 3), range(1, 32, 3)
    alone = await all_answers(client, 1, 0, some, **SAMPLING)
    greedy = all_answers(client, 2, 3, others)
    mixed = await asyncio.gather(*(all_answers(client, 2, k, some, **SAMPLING) for k in (None, 8)), greedy)
    for responses in mixed[:-1]:
        for together, plain in zip(responses, alone, strict=True):
            assert (tokens(together), together.text) == (tokens(plain), plain.text)
            assert list(together.logprobs) == list(plain.logprobs)
    prompt = own_prompts()[0].prompt
    several = await client.generate(prompt, n=4, max_tokens=MAX_TOKENS, num_speculative_tokens=2, **SAMPLING)
    samples = [several, *several.other_samples]
    assert tokens(several) == tokens(alone[0])
    assert len({tuple(tokens(sample)) for sample in samples}) == 4
    first, *others_cached = [sample.usage.cached_tokens for sample in samples]
    assert 0 < first < several.usage.prompt_tokens  # all prompts share the template's system prompt
    assert others_cached == [(several.usage.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE] * 3


@pytest.mark.slow
async def test_openai_client_gets_the_same_answers_through_the_gateway(client: AsyncClient, address: str) -> None:
    async with gateway(address) as openai:
        for line in own_prompts()[::3][:2]:
            own = await client.generate(line.prompt, max_tokens=MAX_TOKENS, **SAMPLING)
            assert await texts_over_http(openai, line.prompt, **SAMPLING) == [own.text] * 2


async def texts_over_http(openai: AsyncOpenAI, chat: Any, **options: Unpack[GenerateOptions]) -> list[str | None]:
    """The text of an answer through the gateway: unary, and streamed."""
    extra = {"repetition_penalty": options.pop("repetition_penalty")}
    request: Any = {
        "model": "SmolLM2-135M-Instruct",
        "messages": chat,
        "max_tokens": MAX_TOKENS,
        "extra_body": extra,
        **options,
    }
    request |= {"logprobs": True, "top_logprobs": options["logprobs"]}
    answer = await openai.chat.completions.create(**request)
    stream = await openai.chat.completions.create(stream=True, **request)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return [answer.choices[0].message.content, "".join(pieces)]


async def all_answers(
    client: AsyncClient, concurrency: int, k: int | None, some: range, **options: Unpack[GenerateOptions]
) -> list[pb.GenerateResponse]:
    """Answers to some of our own prompts."""
    lines = [own_prompts()[i] for i in some]
    options = {"max_tokens": MAX_TOKENS, "num_speculative_tokens": k, **options}
    found = []
    async for response in answers(client, lines, concurrency, **options):
        assert not isinstance(response, grpc.aio.AioRpcError), response
        found.append(response)
    return found


def tokens(response: pb.GenerateResponse) -> list[int]:
    """Token ids as a list, which compares with ==."""
    return list(response.token_ids)
