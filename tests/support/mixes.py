"""Random mixes of requests for equality tests: prompts, arrival times, cancellations, and how to run them."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest import mock

from hypothesis import strategies as st

from specpool.client import AsyncClient
from specpool.drafting.branching import Branching, BranchPlan
from specpool.testing import EOS_TOKEN_ID
from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 24


def branches_only() -> AbstractContextManager[object]:
    """Let all drafts be branches, drafted during the verification."""
    plan = BranchPlan(num_branches=4, length=3, speed=1e9)
    return mock.patch.object(Branching, "best", return_value=plan)


@dataclass(frozen=True)
class Case:
    """One request of a mix."""

    prompt: tuple[int, ...]
    max_tokens: int
    k: int | None  # None: adaptive
    ignore_eos: bool
    starts_after: int  # hundredths of a second
    cancelled_after: int | None  # tokens
    edits: int | None = None  # turn the answer into the client's prediction; None: no prediction


def make_prompt(seed_and_length: tuple[int, int]) -> tuple[int, ...]:
    seed, length = seed_and_length
    chance = random.Random(seed)
    return tuple(chance.randrange(EOS_TOKEN_ID) for _ in range(length))


# Few seeds, so that examples share prompts and reference runs. Lengths are near the sizes of engine tiles and prefill
# chunks.
prompts = st.tuples(
    st.integers(0, 2), st.one_of(st.integers(1, 40), st.sampled_from([1, 15, 16, 17, 63, 64, 65, 250, 256, 300]))
).map(make_prompt)
cases = st.builds(
    Case,
    prompt=prompts,
    max_tokens=st.integers(1, MAX_TOKENS),
    k=st.one_of(st.none(), st.integers(0, 8)),
    ignore_eos=st.booleans(),
    starts_after=st.integers(0, 6),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 10)),
    edits=st.sampled_from([None, None, 0, 1, 3, MAX_TOKENS]),
)


async def play(client: AsyncClient, case: Case, answer: Sequence[int] = ()) -> list[int]:
    """Run one request of a mix. Return the tokens received before its end or cancellation.

    `answer`: answer to derive the prediction from.
    """
    await asyncio.sleep(case.starts_after / 100)
    tokens: list[int] = []
    call = client.stub.GenerateStream(make_request(case, answer))
    async for message in call:
        if message.HasField("complete"):
            assert list(message.complete.token_ids) == tokens
        tokens.extend(message.chunk.token_ids)
        if case.cancelled_after is not None and len(tokens) > case.cancelled_after:
            call.cancel()
            break
    return tokens


def assert_equal(mix: list[Case], got: list[list[int]], expected: list[list[int]]) -> None:
    """Assert that every request has its expected tokens, or a prefix of them if it was cancelled."""
    for case, tokens, truth in zip(mix, got, expected, strict=True):
        assert tokens == (truth if case.cancelled_after is None else truth[: len(tokens)])


def make_request(case: Case, answer: Sequence[int] = ()) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=case.prompt),
        sampling_params=pb.SamplingParams(max_tokens=case.max_tokens, ignore_eos=case.ignore_eos),
        speculative=pb.SpeculativeParams(num_speculative_tokens=case.k),
    )
    if answer and case.edits is not None:
        prediction = edited(answer, case.edits, random.Random(repr(case)))
        request.speculative.prediction.tokenized.input_ids.extend(prediction)
    return request


def edited(answer: Sequence[int], edits: int, chance: random.Random) -> list[int]:
    """Apply random replacements, insertions and deletions of up to two tokens."""
    tokens = [*answer]
    for _ in range(edits):
        place = chance.randrange(len(tokens) + 1)
        tokens[place : place + chance.randrange(3)] = [
            chance.randrange(EOS_TOKEN_ID) for _ in range(chance.randrange(3))
        ]
    return tokens or [0]
