"""Real weights through real processes: what `specpool up` serves is what plain decoding of the target gives."""

import asyncio

import grpc
import pytest
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

from coordinator.client import AsyncClient
from coordinator.commands.generate import answers
from coordinator.commands.prompts import own_prompts
from coordinator.commands.up import UpSettings, running

MAX_TOKENS = 64


@pytest.mark.real_pair
async def test_32_chats_in_batches_of_8_are_those_of_plain_decoding_alone() -> None:
    async with (
        running(UpSettings(port=0, drain_seconds=1, log_level="warning")) as address,
        AsyncClient(address) as client,
    ):
        info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.target.equivalence == common_pb2.EQUIVALENCE_BITWISE
        alone = await all_answers(client, concurrency=1, k=0)
        # Draft lengths differ from request to request, so that every round is ragged.
        mixed = await asyncio.gather(*(all_answers(client, concurrency=3, k=k, part=k - 1) for k in (1, 2, 3)))
        for part, responses in enumerate(mixed):
            assert [tokens(response) for response in responses] == [tokens(response) for response in alone[part::3]]
        accepted = sum(r.speculative_decoding.num_accepted_draft_tokens for responses in mixed for r in responses)
        assert accepted > 0
        assert "Oslo" in alone[0].text


async def all_answers(
    client: AsyncClient, concurrency: int, k: int, part: int | None = None
) -> list[pb.GenerateResponse]:
    """Answers to our own prompts, or to every third of them."""
    lines = own_prompts() if part is None else own_prompts()[part::3]
    found = []
    async for response in answers(client, lines, concurrency, max_tokens=MAX_TOKENS, num_speculative_tokens=k):
        assert not isinstance(response, grpc.aio.AioRpcError), response
        found.append(response)
    return found


def tokens(response: pb.GenerateResponse) -> list[int]:
    """Token ids, to compare."""
    return list(response.token_ids)
