"""The promise: token ids of plain decoding, and the logits behind them bit for bit, whatever happens meanwhile."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair_service import LogitsTap, PairService, serving_pair
from specpool.v1 import generation_pb2 as pb
from specpool.v1.common_pb2 import EQUIVALENCE_BITWISE

from coordinator.fakes import EOS_TOKEN_ID

MAX_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """One request of a mix."""

    prompt: tuple[int, ...]
    max_tokens: int
    k: int
    ignore_eos: bool
    starts_after: int  # so many hundredths of a second
    cancelled_after: int | None  # so many tokens


def _prompt(seed_and_length: tuple[int, int]) -> tuple[int, ...]:
    seed, length = seed_and_length
    chance = random.Random(seed)
    return tuple(chance.randrange(EOS_TOKEN_ID) for _ in range(length))


# Few seeds, so that examples share prompts and the plain runs to compare with. Lengths around the engine's tiles
# and the chunks of the prefill.
prompts = st.tuples(
    st.integers(0, 2), st.one_of(st.integers(1, 40), st.sampled_from([1, 15, 16, 17, 63, 64, 65, 250, 256, 300]))
).map(_prompt)
cases = st.builds(
    Case,
    prompt=prompts,
    max_tokens=st.integers(1, MAX_TOKENS),
    k=st.integers(0, 8),
    ignore_eos=st.booleans(),
    starts_after=st.integers(0, 6),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 10)),
)


class Mixes:
    """The service, and the plain decoding of every prompt alone."""

    def __init__(self, runner: asyncio.Runner, service: PairService, tap: LogitsTap) -> None:
        self.runner, self.service, self.tap = runner, service, tap
        self._plain: dict[tuple[tuple[int, ...], bool], list[int]] = {}

    async def plain(self, case: Case) -> list[int]:
        """What the target alone gives, with nothing beside it."""
        key = (case.prompt, case.ignore_eos)
        if key not in self._plain:
            await self.service.wait_idle()
            alone = _request(Case(case.prompt, MAX_TOKENS, 0, case.ignore_eos, 0, None))
            self._plain[key] = list((await self.service.client.stub.Generate(alone)).token_ids)
        return self._plain[key][: case.max_tokens]

    async def play(self, case: Case) -> list[int]:
        """The tokens of one request of the mix, as far as it was let run."""
        await asyncio.sleep(case.starts_after / 100)
        tokens: list[int] = []
        call = self.service.client.stub.GenerateStream(_request(case))
        async for message in call:
            if message.HasField("complete"):
                assert list(message.complete.token_ids) == tokens
            tokens.extend(message.chunk.token_ids)
            if case.cancelled_after is not None and len(tokens) > case.cancelled_after:
                call.cancel()
                break
        return tokens

    async def check(self, mix: list[Case], forget_after: list[int]) -> None:
        """Plays a mix, while workers lose their caches now and then, and compares."""
        expected = [await self.plain(case) for case in mix]
        forgetting = asyncio.create_task(self._forget(forget_after))
        got = await asyncio.gather(*(self.play(case) for case in mix))
        await forgetting
        for case, tokens, truth in zip(mix, got, expected, strict=True):
            if case.cancelled_after is None:
                assert tokens == truth
            else:
                assert tokens == truth[: len(tokens)]
        await self.service.wait_idle()

    async def _forget(self, after: list[int]) -> None:
        for hundredths in after:
            await asyncio.sleep(hundredths / 100)
            for host in (self.service.target, self.service.draft):
                assert host is not None
                await self.service.forget(host)


def _request(case: Case) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=case.prompt),
        sampling_params=pb.SamplingParams(max_tokens=case.max_tokens, ignore_eos=case.ignore_eos),
        speculative=pb.SpeculativeParams(num_speculative_tokens=case.k),
    )


@pytest.fixture(scope="module")
def mixes(tiny_pair: tuple[Path, Path]) -> Iterator[Mixes]:
    """A service whose window, batches and chunks are all smaller than what the mixes ask for."""
    with asyncio.Runner() as runner:
        context = serving_pair(
            *tiny_pair, worker={"max_sequences": 5, "max_forward_tokens": 48}, window_size=5, max_batch_size=4,
            prefill_tokens=16,
        )  # fmt: skip
        service = runner.run(context.__aenter__())
        tap = LogitsTap(runner.run(service.target.run(lambda backend: backend.engine)))
        yield Mixes(runner, service, tap)
        runner.run(context.__aexit__(None, None, None))


def test_the_tiny_pair_is_a_fair_test(mixes: Mixes) -> None:
    """Drafts are accepted and rejected, and the engine claims what is tested."""

    async def ask() -> tuple[pb.GenerateResponse, pb.GetModelInfoResponse]:
        stub = mixes.service.client.stub
        case = Case(_prompt((0, 20)), MAX_TOKENS, 4, True, 0, None)
        return await stub.Generate(_request(case)), await stub.GetModelInfo(pb.GetModelInfoRequest())

    response, info = mixes.runner.run(ask())
    assert 0.05 < response.speculative_decoding.draft_acceptance_rate < 0.95
    assert info.target.equivalence == EQUIVALENCE_BITWISE


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mix=st.lists(cases, min_size=1, max_size=9),
    forget_after=st.lists(st.integers(1, 8), max_size=2),
)
def test_tokens_and_logits_are_those_of_plain_decoding(mixes: Mixes, mix: list[Case], forget_after: list[int]) -> None:
    mixes.runner.run(mixes.check(mix, forget_after))
    assert not mixes.tap.different


def test_verified_logits_were_compared(mixes: Mixes) -> None:
    """The property above is about something: contexts did come again."""
    mix = [Case(_prompt((seed, 20)), MAX_TOKENS, k, True, 0, None) for seed in range(2) for k in (0, 3, 8)]
    before = mixes.tap.compared
    mixes.runner.run(mixes.check(mix, []))
    assert mixes.tap.compared - before > 5 * MAX_TOKENS
    assert not mixes.tap.different
