"""A response with many log-probabilities is made beside other work."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from coordinator.requests.generation import PIECES_AT_ONCE, Piece, Sample
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from coordinator.serving.service import _response
from coordinator.smg.responses import complete
from specpool.protocol.sampling import TokenLogprobs

PIECES = 20 * PIECES_AT_ONCE
R = TypeVar("R")


def make_sample() -> Sample:
    sequence = Sequence(1, GenerationRequest("r", (1,), PIECES, frozenset(), 0, logprobs=1))
    sequence.token_ids += range(PIECES)
    sequence.finish = Finish(FinishReason.LENGTH)
    sample = Sample(sequence, 0, 0.0)
    for token in range(PIECES):
        sample.add(Piece((token,), lambda: "x", (TokenLogprobs(-1.0, ((token, -1.0),)),)))
    sample.end()
    return sample


async def turns_during(making: Awaitable[R]) -> tuple[int, R]:
    """The turns that other work gets meanwhile, and the result."""
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    result = await making
    working.cancel()
    return turns, result


async def test_other_work_goes_on_while_a_large_response_is_made() -> None:
    turns, response = await turns_during(_response(make_sample()))
    assert turns >= PIECES / PIECES_AT_ONCE
    assert [each.top_token_ids[0] for each in response.logprobs] == list(response.token_ids) == list(range(PIECES))
    assert response.text == "x" * PIECES


async def test_other_work_goes_on_while_a_large_answer_to_the_gateway_is_made() -> None:
    turns, response = await turns_during(complete(make_sample()))
    assert turns >= PIECES / PIECES_AT_ONCE
    logprobs = response.complete.output_logprobs
    assert list(logprobs.token_ids) == list(response.complete.output_ids) == list(range(PIECES))
    assert [each.token_ids[0] for each in logprobs.top_logprobs] == list(range(PIECES))
