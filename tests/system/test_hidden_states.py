"""A draft that reads the target's hidden states gets the right ones over the wire, and no token depends on them."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from feature_drafts import encoded_states, save_pair_draft
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import MAX_TOKENS, Case, assert_equal, branches_only, cases, make_prompt, make_request, play
from pair_service import PairService, running_pair, serving_pair

from specpool.engine.cache.spans import Span
from specpool.protocol.rounds import ProposeItem, Verdict, VerifyRound
from target_worker.verifier import Verifier

LAYERS = (1, 2)
WINDOW = 8
SMALL = {"max_sequences": 5, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def pair(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair[0], save_pair_draft(tmp_path_factory.mktemp("features"), *tiny_pair, LAYERS)


class Requested:
    """Records the items of a draft worker."""

    def __init__(self, service: PairService) -> None:
        self.items: list[ProposeItem] = []
        assert service.draft is not None
        self._backend = service.draft.backend
        self._propose = self._backend.propose
        self._backend.propose = self._watch

    def _watch(self, rounds: Any) -> Any:
        self.items += [item for round_ in rounds for item in round_.items]
        return self._propose(rounds)


def states_of(service: PairService, tokens: list[int]) -> torch.Tensor:
    """The target's states after all tokens, computed in a slot that no sequence has."""
    engine = service.target.backend.engine
    span = Span(engine.slots.total - 1, 0, tokens, 1, num_states=len(tokens))
    return engine.forward_with_states([span], LAYERS)[1]


@pytest.mark.parametrize("mode", ["chosen drafts", "branches", "one round at a time"])
async def test_draft_gets_the_states_before_all_generated_tokens(pair: tuple[Path, Path], mode: str) -> None:
    overlap = "off" if mode == "one round at a time" else "on"
    with branches_only() if mode == "branches" else nullcontext():
        async with serving_pair(
            *pair, worker=SMALL, max_num_seqs=5, prefill_tokens=16, overlap=overlap, feature_window=WINDOW
        ) as service:
            requested = Requested(service)
            prompt = make_prompt((0, 40))
            response = await service.client.stub.Generate(make_request(Case(prompt, MAX_TOKENS, 4, True, 0, None)))
            tokens = [*prompt, *response.token_ids]
            await service.wait_idle()
            rows = [encoded_states(row) for row in await service.target.run(lambda _: states_of(service, tokens))]
            assert 0 < response.speculative_decoding.draft_acceptance_rate < 1
    covered = set[int]()
    ends = [item.base_length + len(item.token_ids) - item.num_unverified for item in requested.items]
    for item, end in zip(requested.items, ends, strict=True):
        assert len(item.features) % len(rows[0]) == 0
        count = len(item.features) // len(rows[0])
        assert item.features == b"".join(rows[end - count - 1 : end - 1])
        covered.update(range(end - count, end))
    assert covered >= set(range(len(prompt), max(ends)))
    assert min(covered) >= len(prompt) - WINDOW


async def test_a_carried_draft_reads_states_without_messages(pair: tuple[Path, Path]) -> None:
    rates = []
    for draft, options in ((pair[1], {}), (None, {"target_worker": {"draft": str(pair[1])}})):
        async with serving_pair(pair[0], draft, worker=SMALL, **options) as service:
            answer = await service.client.stub.Generate(make_request(Case(make_prompt((0, 40)), 100, 4, True, 0, None)))
            await service.wait_idle()
        rates.append(answer.speculative_decoding.draft_acceptance_rate)
    assert rates[0] > 0.05
    assert rates[1] == pytest.approx(rates[0], abs=0.1)


async def test_only_drafts_that_read_states_cost_them(tiny_pair: tuple[Path, Path]) -> None:
    async with serving_pair(*tiny_pair, worker=SMALL) as service:
        requested = Requested(service)
        with mock.patch.object(service.target.backend.engine, "forward_with_states", side_effect=AssertionError):
            await service.client.stub.Generate(make_request(Case(make_prompt((0, 9)), 12, 3, True, 0, None)))
    assert requested.items
    assert not any(item.features for item in requested.items)


async def test_requests_without_model_drafts_cost_no_states(pair: tuple[Path, Path]) -> None:
    async with serving_pair(*pair, worker=SMALL) as service:
        with mock.patch.object(service.target.backend.engine, "forward_with_states", side_effect=AssertionError):
            await service.client.stub.Generate(make_request(Case(make_prompt((0, 9)), 12, 0, True, 0, None)))


stale: dict[int, bytes] = {}


def lose_some(features: bytes) -> bytes:
    return features if random.random() < 0.5 else b""


def swap(features: bytes) -> bytes:
    """Return the last states of this size."""
    last = stale.get(len(features), features)
    stale[len(features)] = features
    return last


def garble(features: bytes) -> bytes:
    size = len(features) if random.random() < 0.5 else random.randrange(2 * len(features) + 1)
    return random.randbytes(size)


OPTIONS: dict[str, Any] = {
    "worker": SMALL,
    "max_num_seqs": 5,
    "max_batch_size": 4,
    "prefill_tokens": 16,
    "overlap": "on",
}


@pytest.fixture(scope="module", params=[lose_some, swap, garble, None], ids=["lose some", "swap", "garble", "carried"])
def service(pair: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[tuple[asyncio.Runner, PairService]]:
    """A service whose target worker returns mangled features, or carries the draft that reads them."""
    mangle = request.param
    if mangle is None:
        with running_pair(pair[0], None, target_worker={"draft": str(pair[1])}, **OPTIONS) as running:
            yield running
        return
    verify = Verifier.verify

    def verify_and_mangle(self: Verifier, rounds: Sequence[VerifyRound]) -> list[list[Verdict]]:
        verdicts = verify(self, rounds)
        for verdict in chain.from_iterable(verdicts):
            verdict.features = mangle(verdict.features) if verdict.features else b""
        return verdicts

    with mock.patch.object(Verifier, "verify", verify_and_mangle), running_pair(*pair, **OPTIONS) as running:
        yield running


plain: dict[tuple[tuple[int, ...], bool], list[int]] = {}
"""Tokens of plain decoding, by prompt and whether it ignores the end of sequence."""


async def expected(service: PairService, case: Case) -> list[int]:
    key = case.prompt, case.ignore_eos
    if key not in plain:
        alone = make_request(Case(case.prompt, MAX_TOKENS, 0, case.ignore_eos, 0, None))
        plain[key] = list((await service.client.stub.Generate(alone)).token_ids)
    return plain[key][: case.max_tokens]


@pytest.mark.thorough
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(cases, min_size=1, max_size=9), forget_after=st.lists(st.integers(1, 8), max_size=2))
def test_tokens_equal_plain_decoding(
    service: tuple[asyncio.Runner, PairService], mix: list[Case], forget_after: list[int]
) -> None:
    runner, running = service

    async def check() -> None:
        right = [await expected(running, case) for case in mix]
        forgetting = asyncio.create_task(running.forget_after(forget_after))
        got = await asyncio.gather(*(play(running.client, case) for case in mix))
        await forgetting
        assert_equal(mix, got, right)
        await running.wait_idle()

    runner.run(check())
