"""Committed tokens reach their callers in order, after the next round has been sent, and wake few tasks."""

import asyncio

from coordinator.requests.generation import UNREAD_COMMITS, Generation, Sample
from coordinator.requests.in_flight import RequestsInFlight
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import Finish, FinishReason, GenerationRequest, Sequence

TOKENS = 200


def make_sequence() -> Sequence:
    return Sequence(1, GenerationRequest("id", (1,), TOKENS, frozenset(), 0))


def generation_of(sequence: Sequence) -> Generation:
    return Generation([sequence], 0.0, 1.0, pause=lambda _: None, resume=lambda _: None)


def commit_of(sequence: Sequence, token: int) -> Commit:
    """A commit of one token, shown as its number."""
    sequence.token_ids.append(token)
    return Commit(sequence, (token,), lambda: f"{token} ")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_callers_that_do_not_stream_wake_up_rarely() -> None:
    sequence = make_sequence()
    generation = generation_of(sequence)
    (sample,) = generation.samples
    finished = asyncio.create_task(generation.finished())
    await settle()
    reads = 0
    for token in range(TOKENS):
        before = sample.text
        generation.publish(sample, commit_of(sequence, token))
        await settle()
        reads += sample.text != before
    assert reads == TOKENS // UNREAD_COMMITS
    generation.end(sample)
    assert await finished == [sample]
    assert sample.text == "".join(f"{token} " for token in range(TOKENS))


async def test_tokens_are_published_before_the_end_of_their_request() -> None:
    """An abort may come between a commit and its publication."""
    requests, sequence = RequestsInFlight(), make_sequence()
    generation = generation_of(sequence)
    requests.add(generation)
    requests.committed([commit_of(sequence, 5)])
    (sample,) = generation.samples
    assert sample.unread == 0
    sequence.finish = Finish(FinishReason.ABORT)
    requests.aborted(sequence)
    assert await finished_text(generation, sample) == "5 "
    requests.discard(generation)


async def finished_text(generation: Generation, sample: Sample) -> str:
    async with asyncio.timeout(5):
        await generation.finished()
    return sample.text
