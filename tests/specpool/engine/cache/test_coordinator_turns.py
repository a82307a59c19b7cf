"""Turns of coordinators that compete for slots."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixes import make_prompt
from pair_service import PairService, serving_coordinator, serving_pair

from specpool.client import AsyncClient
from specpool.engine.cache.slots import SlotTable
from specpool.engine.cache.turns import IDLE_SECONDS, TURN_SECONDS, WAITING_SECONDS, Turns
from specpool.protocol.rounds import ItemStatus, SequenceItem
from specpool.worker import round_merging
from specpool.worker.host import WorkerHost

SLOTS = 4
NUM_REQUESTS = 24


def ask(turns: Turns, coordinator: str, now: float, is_free: bool = True) -> bool:
    """Ask for a slot. Return whether the coordinator gets it."""
    if turns.admits(coordinator, now) and is_free:
        turns.started(coordinator, now)
        return True
    turns.refused(coordinator, now)
    return False


def test_everybody_may_start_while_nobody_waits() -> None:
    turns = Turns(SLOTS)
    assert all(ask(turns, coordinator, 0.0) for coordinator in "abcabc")


def test_owner_keeps_its_turn_until_it_has_filled_the_slots() -> None:
    turns = Turns(SLOTS)
    for _ in range(SLOTS):
        assert ask(turns, "a", 0.0)
    assert not ask(turns, "b", 0.1, is_free=False)
    turns.ended("a", 0.3)
    assert not ask(turns, "b", 0.4)
    assert ask(turns, "a", 0.45)
    for step in range(5, int(TURN_SECONDS / 0.1)):
        assert not ask(turns, "b", step / 10)
        turns.ended("a", step / 10)
    assert not ask(turns, "a", TURN_SECONDS + 0.05)
    assert ask(turns, "b", TURN_SECONDS + 0.1)
    assert not ask(turns, "a", TURN_SECONDS + 0.2)


def test_idle_owner_loses_its_turn() -> None:
    turns = Turns(SLOTS)
    assert ask(turns, "a", 0.0)
    assert not ask(turns, "b", 0.1, is_free=False)
    assert not ask(turns, "b", IDLE_SECONDS)
    assert ask(turns, "b", IDLE_SECONDS + 0.05)


def test_coordinator_that_stops_asking_no_longer_waits() -> None:
    turns = Turns(SLOTS)
    for _ in range(SLOTS):
        assert ask(turns, "a", 0.0)
    assert not ask(turns, "b", 0.0, is_free=False)
    now = TURN_SECONDS + WAITING_SECONDS
    turns.ended("a", now)
    assert ask(turns, "a", now)


@given(st.lists(st.sampled_from("abc"), min_size=200, max_size=200), st.sampled_from([0.01, 0.1]))
def test_nobody_waits_for_more_than_the_turns_of_the_others(askers: list[str], step: float) -> None:
    """A slot is always free, and every coordinator asks again and again."""
    turns = Turns(SLOTS)
    served = dict.fromkeys("abc", 0.0)
    for index, asker in enumerate(askers * 3):
        for coordinator in (asker, *"abc"):
            now = index * step
            if ask(turns, coordinator, now):
                served[coordinator] = now
        assert now - min(served.values()) <= 3 * (TURN_SECONDS + SLOTS * step)


def test_waiting_coordinator_does_not_inherit_a_slot_out_of_turn() -> None:
    table = SlotTable(1)
    table.renew_lease("a", 0.0)
    table.renew_lease("b", 0.0)
    assert table.realign(("a", 1), 1, SequenceItem(1, 0, (0,)), 1) is ItemStatus.OK
    table.answered("a", ItemStatus.OK)
    table.answered("b", ItemStatus.NO_SLOT)
    table.release([("a", 1)])
    assert not table.admits("b")
    table.renew_lease("b", 2 * IDLE_SECONDS)
    assert table.admits("b")


async def generate(client: AsyncClient, seed: int) -> list[list[int]]:
    prompts = [make_prompt((100 * seed + i, 30)) for i in range(NUM_REQUESTS)]
    calls = (client.generate(prompt, max_tokens=30, ignore_eos=True) for prompt in prompts)
    return [list(response.token_ids) for response in await asyncio.gather(*calls)]


async def passes_of(service: PairService, work: Any) -> tuple[Any, int]:
    """The result of some work, and the passes of the target that it takes."""
    before = service.target.backend.passes
    return await work, service.target.backend.passes - before


def slow_down(host: WorkerHost, seconds: float) -> None:
    """Make passes take as long as those of a large model."""
    engine = host.backend.engine
    run = engine.run_pass

    def run_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return run(*args, **kwargs)

    engine.run_pass = run_slowly


async def one_after_the_other(*clients: AsyncClient) -> list[list[list[int]]]:
    return [await generate(client, seed) for seed, client in enumerate(clients)]


@pytest.mark.slow
@pytest.mark.parametrize("with_draft", [True, False])
async def test_two_coordinators_take_few_more_passes_than_one(
    tiny_pair: tuple[Path, Path], with_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without merged rounds, they took 1.4 times as many without drafts, and 1.6 times with drafts."""
    monkeypatch.setattr(round_merging, "LATENESS", 4.0)  # rounds of a busy machine come late
    settings = {"overlap": "off", "num_speculative_tokens": 4, "draft_method": "model"} if with_draft else {}
    target, draft = tiny_pair
    # The draft worker has slots for both: sequences without drafts would take more passes.
    workers = {"max_sequences": 12}, {"max_sequences": 6}
    async with serving_pair(target, draft if with_draft else None, *workers, **settings) as service:
        first = service.process.coordinator
        addresses = first.target.address, service.draft_link.address if with_draft else None
        async with serving_coordinator(*addresses, **settings) as (other, process):
            slow_down(service.target, 0.05)  # long compared with the delays of a busy machine
            clients = service.client, other
            alone, alone_passes = await passes_of(service, one_after_the_other(*clients))
            both = asyncio.gather(*(generate(client, seed) for seed, client in enumerate(clients)))
            together, passes = await passes_of(service, both)
            assert together == alone
            assert passes <= (1.3 if with_draft else 1.1) * alone_passes
            # Coordinators that share a worker may lose caches (docs/operations.md), but seldom do.
            assert first.counters.cache_misses + process.coordinator.counters.cache_misses <= NUM_REQUESTS // 4
