"""A response with many log-probabilities is made beside other work."""

import asyncio

from coordinator.generation import Piece, Sample
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from coordinator.service import PIECES_AT_ONCE, _response
from protocol.sampling import TokenLogprobs

PIECES = 20 * PIECES_AT_ONCE


def make_sample() -> Sample:
    sequence = Sequence(1, GenerationRequest("r", (1,), PIECES, frozenset(), 0, logprobs=1))
    sequence.token_ids += range(PIECES)
    sequence.finish = Finish(FinishReason.LENGTH)
    sample = Sample(sequence, 0, 0.0)
    for token in range(PIECES):
        sample.add(Piece((token,), lambda: "x", (TokenLogprobs(-1.0, ((token, -1.0),)),)))
    sample.end()
    return sample


async def test_other_work_goes_on_while_a_large_response_is_made() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    response = await _response(make_sample())
    working.cancel()
    assert turns >= PIECES / PIECES_AT_ONCE
    assert [each.top_token_ids[0] for each in response.logprobs] == list(response.token_ids) == list(range(PIECES))
    assert response.text == "x" * PIECES
