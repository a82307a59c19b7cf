"""Building a response with many log-probabilities does not block the event loop."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable
from typing import TypeVar

from coordinator.requests.generation import TOKENS_PER_TURN, Sample
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence
from coordinator.serving.service import _response
from coordinator.smg.messages import complete
from specpool.protocol.sampling import Logprobs

COMMITS = 20 * TOKENS_PER_TURN
R = TypeVar("R")


def make_sample() -> Sample:
    sequence = Sequence(1, GenerationRequest("r", (1,), COMMITS, frozenset(), 0, logprobs=1))
    sequence.token_ids += range(COMMITS)
    sequence.finish = Finish(FinishReason.LENGTH)
    sample = Sample(sequence, 0, 0.0)
    for token in range(COMMITS):
        commit = Commit(sequence, (token,), lambda: "x", Logprobs.of(1, [(-1.0, [token], [-1.0])]))
        sample.add(commit)
        sample.read(commit)
    sample.end()
    return sample


async def turns_during(work: Awaitable[R]) -> tuple[int, R]:
    """Turns that another task gets meanwhile, and the result."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    result = await work
    counting.cancel()
    return turns, result


async def test_large_responses_leave_turns_to_other_tasks() -> None:
    turns, response = await turns_during(_response(make_sample(), defaultdict(str)))
    assert turns >= COMMITS / TOKENS_PER_TURN
    assert [each.top_token_ids[0] for each in response.logprobs] == list(response.token_ids) == list(range(COMMITS))
    assert response.text == "x" * COMMITS


async def test_large_gateway_responses_leave_turns_to_other_tasks() -> None:
    turns, response = await turns_during(complete(make_sample()))
    assert turns >= COMMITS / TOKENS_PER_TURN
    logprobs = response.complete.output_logprobs
    assert list(logprobs.token_ids) == list(response.complete.output_ids) == list(range(COMMITS))
    assert [each.token_ids[0] for each in logprobs.top_logprobs] == list(range(COMMITS))
