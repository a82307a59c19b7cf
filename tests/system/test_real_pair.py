"""Real weights in real processes: `specpool up` serves the tokens that plain decoding of the target gives."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Unpack

import grpc
import pytest
import pytest_asyncio
from gateway import gateway
from openai import AsyncOpenAI

from specpool.cli.generate import answers
from specpool.cli.up import UpSettings, running
from specpool.client import AsyncClient, GenerateOptions
from specpool.client.prompts import own_prompts
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

# One service and one event loop for all tests: the pair takes long to start.
pytestmark = [pytest.mark.real_pair, pytest.mark.asyncio(loop_scope="module")]

MAX_TOKENS = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    """The address of `specpool up`."""
    async with running(UpSettings(port=0, drain_seconds=1, log_level="warning", smg=True)) as address:
        yield address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(address: str) -> AsyncIterator[AsyncClient]:
    """A client of it."""
    async with AsyncClient(address) as client:
        yield client


async def test_32_chats_in_batches_of_8_are_those_of_plain_decoding_alone(client: AsyncClient) -> None:
    info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.target.equivalence == common_pb2.EQUIVALENCE_BITWISE
    # Salts of their own keep what is compared from sharing cached prompts.
    alone = await all_answers(client, concurrency=1, k=0, cache_salt="alone")
    # Draft lengths differ from request to request, so that every round is ragged.
    mixed = await asyncio.gather(
        *(all_answers(client, concurrency=3, k=k, part=part, cache_salt="mixed") for part, k in enumerate((1, 3, None)))
    )
    for part, responses in enumerate(mixed):
        assert [tokens(response) for response in responses] == [tokens(response) for response in alone[part::3]]
    accepted = sum(r.speculative_decoding.num_accepted_draft_tokens for responses in mixed for r in responses)
    assert accepted > 0
    assert "Oslo" in alone[0].text


SAMPLING: GenerateOptions = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 2, "seed": 5}


async def test_samples_in_mixed_batches_are_those_of_plain_decoding_alone(client: AsyncClient) -> None:
    """The batch also has greedy sequences, several samples share a prompt, and the cache already has the prompts."""
    alone = await all_answers(client, concurrency=1, k=0, part=0, **SAMPLING)
    greedy = all_answers(client, concurrency=2, k=3, part=1)
    mixed = await asyncio.gather(*(all_answers(client, 2, k, 0, **SAMPLING) for k in (None, 8)), greedy)
    for responses in mixed[:-1]:
        for together, plain in zip(responses, alone, strict=True):
            assert (tokens(together), together.text) == (tokens(plain), plain.text)
            assert list(together.logprobs) == list(plain.logprobs)
    prompt = own_prompts()[0].prompt
    several = await client.generate(prompt, n=4, max_tokens=MAX_TOKENS, num_speculative_tokens=2, **SAMPLING)
    samples = [several, *several.other_samples]
    assert tokens(several) == tokens(alone[0])
    assert len({tuple(tokens(sample)) for sample in samples}) == 4
    # All prompts begin with the template's system prompt.
    first, *others = [sample.usage.cached_tokens for sample in samples]
    assert 0 < first < several.usage.prompt_tokens
    assert others == [several.usage.prompt_tokens - 1] * 3


async def test_openai_s_client_gets_the_same_through_the_gateway(client: AsyncClient, address: str) -> None:
    chats = own_prompts()[::3][:2]
    async with gateway(address) as openai:
        for line in chats:
            own = await client.generate(line.prompt, max_tokens=MAX_TOKENS, **SAMPLING)
            assert await texts_over_http(openai, line.prompt, **SAMPLING) == [own.text] * 2


async def texts_over_http(openai: AsyncOpenAI, chat: Any, **options: Unpack[GenerateOptions]) -> list[str | None]:
    """The text of an answer through the gateway: at once, and streamed."""
    extra = {"repetition_penalty": options.pop("repetition_penalty")}
    asked: Any = {"model": "target", "messages": chat, "max_tokens": MAX_TOKENS, "extra_body": extra, **options}
    asked |= {"logprobs": True, "top_logprobs": options["logprobs"]}
    answer = await openai.chat.completions.create(**asked)
    stream = await openai.chat.completions.create(stream=True, **asked)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return [answer.choices[0].message.content, "".join(pieces)]


async def all_answers(
    client: AsyncClient, concurrency: int, k: int | None, part: int | None = None, **options: Unpack[GenerateOptions]
) -> list[pb.GenerateResponse]:
    """Answers to our own prompts, or to every third of them."""
    lines = own_prompts() if part is None else own_prompts()[part::3]
    options = {"max_tokens": MAX_TOKENS, "num_speculative_tokens": k, **options}
    found = []
    async for response in answers(client, lines, concurrency, **options):
        assert not isinstance(response, grpc.aio.AioRpcError), response
        found.append(response)
    return found


def tokens(response: pb.GenerateResponse) -> list[int]:
    """Token ids of a response as a list, which compares with ==."""
    return list(response.token_ids)
