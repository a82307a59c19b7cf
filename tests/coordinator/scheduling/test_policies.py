"""Every policy gives the tokens of plain decoding, in every KV layout, batch size and draft length."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import MAX_TOKENS, Case, assert_equal, cases, make_prompt, make_request, play
from pair_service import LogitsTap, PairService, serving_coordinator, serving_pair
from serving import info_with_loads

from coordinator.scheduling.grouping import POLICIES
from specpool.engine.cache.layout import LAYOUTS
from specpool.v1 import generation_pb2 as pb

EVERY_POLICY, EVERY_LAYOUT = sorted(POLICIES), sorted(LAYOUTS)
# Some equal lengths, and others.
LENGTHS = (20, 20, 5, 63, 5, 130, 20, 41)


class Workers:
    """A pair of workers for each layout, shared by short-lived coordinators."""

    def __init__(self, runner: asyncio.Runner, services: dict[str, PairService], taps: list[LogitsTap]) -> None:
        self.runner, self.services, self._taps = runner, services, taps
        self._plain: dict[tuple[tuple[int, ...], bool], list[int]] = {}

    @property
    def compared(self) -> int:
        return sum(tap.compared for tap in self._taps)

    @property
    def different(self) -> list[tuple[int, ...]]:
        """Contexts whose logits differed between batches, policies or layouts."""
        return [context for tap in self._taps for context in tap.different]

    async def plain(self, case: Case) -> list[int]:
        """Plain decoding of the target, alone in its batch, in slots."""
        key = (case.prompt, case.ignore_eos)
        if key not in self._plain:
            alone = make_request(Case(case.prompt, MAX_TOKENS, 0, case.ignore_eos, 0, None))
            self._plain[key] = list((await self.services["slots"].client.stub.Generate(alone)).token_ids)
        return self._plain[key][: case.max_tokens]

    async def check(self, layout: str, mix: list[Case], **coordinator: Any) -> pb.ServerCounters:
        """Play a mix with a new coordinator, and compare the tokens."""
        expected = [await self.plain(case) for case in mix]
        service = self.services[layout]
        addresses = service.process.coordinator.target.address, service.draft_link.address
        async with serving_coordinator(*addresses, **coordinator) as (client, _):
            assert_equal(mix, await asyncio.gather(*(play(client, case) for case in mix)), expected)
            await self.services[layout].wait_idle()
            info = await info_with_loads(client.server_info)
        assert info.target.load.kv_layout == info.draft.load.kv_layout == layout
        return info.counters


@pytest.fixture(scope="module")
def workers(tiny_pair: tuple[Path, Path]) -> Iterator[Workers]:
    with asyncio.Runner() as runner:
        contexts = {
            layout: serving_pair(
                *tiny_pair, worker={"max_sequences": 12, "max_num_batched_tokens": 96, "kv_layout": layout}
            )
            for layout in EVERY_LAYOUT
        }
        services = {layout: runner.run(context.__aenter__()) for layout, context in contexts.items()}
        seen: dict[tuple[int, ...], bytes] = {}
        taps = []
        for service in services.values():
            taps.append(LogitsTap(runner.run(service.target.run(lambda backend: backend.engine)), seen))
            assert runner.run(service.target.run(lambda backend: backend.info())).bitwise
        yield Workers(runner, services, taps)
        for context in contexts.values():
            runner.run(context.__aexit__(None, None, None))


SIZES = [
    (3, 4),
    *(pytest.param(batch, k, marks=pytest.mark.slow) for batch, k in [(1, 0), (1, 7), (3, 1), (8, 0), (8, 7)]),
]


@pytest.mark.parametrize(("batch", "k"), SIZES)
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_tokens_match_plain_decoding(workers: Workers, policy: str, layout: str, batch: int, k: int) -> None:
    mix = [Case(make_prompt((i % 3, n)), 10 + i, k, True, 0, None) for i, n in enumerate(LENGTHS)]
    counters = workers.runner.run(
        workers.check(layout, mix, policy=policy, max_batch_size=batch, max_num_seqs=2 * batch, prefill_tokens=64)
    )
    assert not workers.different
    assert len(counters.grouping.group_sizes) <= batch
    assert bool(counters.draft_tokens) == bool(k)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(EVERY_POLICY),
    layout=st.sampled_from(EVERY_LAYOUT),
    batch=st.sampled_from([1, 3, 8]),
    window=st.integers(1, 12),
    min_group_size=st.integers(1, 8),
    max_wait_rounds=st.integers(0, 5),
    prefer=st.sampled_from(["largest", "oldest"]),
    admission=st.sampled_from(["arrival", "length"]),
    mix=st.lists(cases, min_size=1, max_size=12),
)
def test_tokens_are_equal_for_any_settings_lengths_and_arrivals(
    workers: Workers,
    policy: str,
    layout: str,
    batch: int,
    window: int,
    min_group_size: int,
    max_wait_rounds: int,
    prefer: str,
    admission: str,
    mix: list[Case],
) -> None:
    coordinator = {
        "policy": policy,
        "min_group_size": min(min_group_size, batch),
        "max_wait_rounds": max_wait_rounds,
        "prefer_group": prefer,
        "max_batch_size": batch,
        "max_num_seqs": window,
        "admission": admission,
        "prefill_tokens": 16,
    }
    workers.runner.run(workers.check(layout, mix, **coordinator))
    assert not workers.different


def test_logits_were_compared_across_layouts(workers: Workers) -> None:
    """The tests above compare the same contexts in both layouts. Every stage of a round is timed."""
    before = workers.compared
    mix = [Case(make_prompt((0, 33)), MAX_TOKENS, 4, True, 0, None)]
    for layout in EVERY_LAYOUT:
        counters = workers.runner.run(workers.check(layout, mix))
        assert all(counters.stage_seconds[stage] > 0 for stage in ("draft", "verify", "realign", "wire", "schedule"))
    assert workers.compared - before > MAX_TOKENS


def test_exspec_groups_sequences_of_equal_length(workers: Workers) -> None:
    """Without drafts, prompts of equal length stay equally long; unequal ones fall back to mixed groups."""
    equal = [Case(make_prompt((i, 20)), MAX_TOKENS, 0, True, 0, None) for i in range(3)]
    limits = {"policy": "exspec", "max_batch_size": 4, "min_group_size": 2, "prefill_tokens": 512}
    counters = workers.runner.run(workers.check("padded", equal, **limits))
    assert counters.grouping.same_length_rounds > MAX_TOKENS // 2
    unequal = [Case(make_prompt((i, 20 + 30 * i)), MAX_TOKENS, 0, True, 0, None) for i in range(3)]
    counters = workers.runner.run(workers.check("padded", unequal, **limits))
    assert counters.grouping.fallback_rounds == counters.grouping.mixed_rounds > MAX_TOKENS // 2
