"""Finished answers speed up repeated requests of the same client and cache_salt, and never change tokens."""

import asyncio
import random
from typing import Any

import pytest
from serving import RecordingTarget, Serving, check_tokens, make_request, serving

from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 60
ANNE, BOB = (("client", "anne"),), (("client", "bob"),)


pytestmark = pytest.mark.usefixtures("clients_by_metadata")


def salted(salt: str, number: int = 1, **fields: Any) -> pb.GenerateRequest:
    """A request whose answer repeats no run of tokens by itself."""
    request = make_request([number, 2, 3], MAX_TOKENS, method=pb.DRAFT_METHOD_SUFFIX, ignore_eos=True, **fields)
    request.cache_salt = salt
    return request


async def rounds_of(served: Serving, request: pb.GenerateRequest, client: Any = ANNE) -> int:
    """Rounds that the answer took. Its tokens equal plain decoding."""
    before = len(served.target.requests)  # type: ignore[attr-defined]
    response = await served.stub.Generate(request, metadata=client)
    check_tokens(served.target, request, response)
    return len(served.target.requests) - before  # type: ignore[attr-defined]


@pytest.mark.parametrize("k", [4, None], ids=["fixed", "adaptive"])
async def test_a_repeated_request_takes_fewer_rounds(k: int | None) -> None:
    async with serving(with_draft=False, num_speculative_tokens=k, lookup_store_tokens=1000) as served:
        first = await rounds_of(served, salted("s"))
        assert first > 0.8 * MAX_TOKENS
        while await rounds_of(served, salted("s")) >= first / 2:
            pass  # adaptive lengths learn that the answers repeat


@pytest.mark.parametrize(
    ("store_tokens", "salt", "again", "client"),
    [(1000, "s", "t", ANNE), (1000, "s", "s", BOB), (1000, "", "", ANNE), (0, "s", "s", ANNE)],
    ids=["another salt", "another client", "no salt", "no store"],
)
async def test_other_repeated_requests_take_all_rounds(store_tokens: int, salt: str, again: str, client: Any) -> None:
    settings = {"lookup_store_tokens": store_tokens, "prefix_caching": False}
    async with serving(with_draft=False, **settings) as served:
        for request, caller in ((salted(salt), ANNE), (salted(again), client)):
            assert await rounds_of(served, request, caller) > 0.8 * MAX_TOKENS


async def test_aborted_answers_are_not_kept() -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 0.01)
    async with serving(target, with_draft=False, lookup_store_tokens=1000) as served:
        call = served.stub.Generate(salted("s", request_id="aborted"), metadata=ANNE)
        await served.until(lambda info: info.counters.completion_tokens > MAX_TOKENS // 2)
        await served.stub.Abort(pb.AbortRequest(request_id="aborted"), metadata=ANNE)
        assert (await call).finish_reason == "abort"
        assert await rounds_of(served, salted("s")) > 0.8 * MAX_TOKENS


async def test_a_small_store_under_load_changes_no_token() -> None:
    """Many repeats and namespaces at a time, in a store that evicts answers all the time."""
    rng = random.Random(1)
    async with serving(with_draft=False, lookup_store_tokens=300, num_speculative_tokens=None) as served:

        async def one(request: pb.GenerateRequest, client: Any) -> None:
            check_tokens(served.target, request, await served.stub.Generate(request, metadata=client))

        cases = [
            (salted(rng.choice("abc"), rng.randrange(4), k=rng.choice([None, 0, 3])), rng.choice([ANNE, BOB]))
            for _ in range(60)
        ]
        for start in range(0, len(cases), 12):
            await asyncio.gather(*(one(*case) for case in cases[start : start + 12]))
