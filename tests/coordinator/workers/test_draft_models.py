"""Several draft models behind one coordinator: names, moves, and workers that are slow, faulty or replaced."""

import asyncio
from typing import Any

import pytest
from draft_links import FakeLink, group_of, item, propose
from serving import PATIENCE_SECONDS

from coordinator.workers.draft_group import DraftGroup
from coordinator.workers.draft_registry import MAX_DRAFTS, DraftRegistry
from coordinator.workers.interface import Cause, WorkerUnreachableError
from specpool.drafting.draft_models import DraftModel
from specpool.protocol.rounds import ItemStatus
from specpool.protocol.worker_info import WorkerInfo


def two_models(**knobs: Any) -> tuple[FakeLink, FakeLink, DraftGroup, list[DraftModel]]:
    current, new = FakeLink("a", label="current"), FakeLink("b", label="new", weights="two", **knobs)
    group = group_of(current, new)
    return current, new, group, group.roster.models


def described(*workers: tuple[str, str]) -> list[tuple[str, WorkerInfo]]:
    return [(label, WorkerInfo(model="hub/model", weights_fingerprint=weights)) for label, weights in workers]


def names(registry: DraftRegistry, *workers: tuple[str, str]) -> list[str | None]:
    return [model and model.name for model in registry.update(described(*workers))]


def test_names(caplog: pytest.LogCaptureFixture) -> None:
    registry = DraftRegistry()
    assert names(registry, ("", "one"), ("current", "one"), ("new", "two")) == ["hub/model", "current", "new"]
    assert not caplog.text
    rolling = [("current", "one"), ("current", "0123456789")]
    assert names(registry, *rolling) == ["current", "current (01234567)"]
    assert "named current have different weights (one and 0123456789)" in caplog.text
    assert names(registry, rolling[1]) == ["current"], "the update is complete"
    assert names(registry, *rolling) == ["current", "current (01234567)"]
    assert names(registry, ("x", "01234567a"), ("x", "01234567b"), ("x", "01234567c")) == [
        "x", "x (01234567)", "x (01234567-2)"
    ]  # fmt: skip


def test_the_number_of_models_is_bounded() -> None:
    registry = DraftRegistry()
    for number in range(3 * MAX_DRAFTS):
        assert names(registry, ("a", str(number)))[0]
        assert len(registry.models) <= MAX_DRAFTS
    many = [("a", str(number)) for number in range(MAX_DRAFTS + 2)]
    assert names(registry, *many).count(None) == 2


async def test_sequences_stay_with_their_model() -> None:
    current, new, group, (one, two) = two_models()
    assert (one.name, two.name) == ("current", "new")
    models = {i: two if i == 3 else one for i in range(4)}
    await propose(group, 1, [item(i) for i in range(4)], models)
    assert (sorted(current.caches), sorted(new.caches)) == ([0, 1, 2], [3])
    moved = {**models, 3: one, 2: None}
    proposals, _ = await propose(group, 2, [item(i, 3) for i in range(4)], moved)
    assert {each.sequence_id: each.status for each in proposals} == {
        0: ItemStatus.OK, 1: ItemStatus.OK, 3: ItemStatus.CACHE_MISS
    }  # fmt: skip
    assert not new.caches, "the cache of the moved sequence is released"


async def test_a_worker_with_changed_weights_is_another_model() -> None:
    current, new, group, (_, two) = two_models()
    await propose(group, 1, [item(0)], {0: two})
    current.info = new.info
    assert [model.key for model in group.roster.models] == [("current", "two"), ("new", "two")]
    new.info = WorkerInfo(model="other", weights_fingerprint="three", slots_total=9, max_model_len=50, max_branches=0)
    assert [model.name for model in group.roster.models] == ["current", "new"]
    assert two not in group.roster.models
    assert (await propose(group, 2, [item(0, 3)], {0: two}))[0] == []


async def test_rounds_do_not_wait_long_for_a_slower_draft() -> None:
    current, new, group, (one, two) = two_models()
    new.open.clear()
    async with asyncio.timeout(PATIENCE_SECONDS):
        proposals, timed = await propose(group, 1, [item(i) for i in range(3)], {0: one, 1: one, 2: two})
        assert [each.sequence_id for each in proposals] == [0, 1]
        assert timed.elapsed == current.seconds, "the late draft does not count"
        await propose(group, 2, [item(0, 3), item(2)], {0: one, 2: two})
        assert new.calls == 1, "a late worker gets no other call until it has answered"
        group.release_soon([2])
        assert two.reliability < 1 == one.reliability
        new.open.set()
        while new.caches or new.calls_running:  # noqa: ASYNC110 - polls a fake worker
            await asyncio.sleep(0)
        await propose(group, 3, [item(0, 6), item(3)], {0: one, 3: two})
    assert list(new.caches) == [3]


async def test_overlapping_rounds_may_both_have_late_calls() -> None:
    _, new, group, (one, two) = two_models()
    new.open.clear()
    rounds = [
        propose(group, number, [item(number), item(number + 2)], {number: one, number + 2: two}) for number in (1, 2)
    ]
    answers = await asyncio.gather(*rounds)
    assert [[each.sequence_id for each in proposals] for proposals, _ in answers] == [[1], [2]]
    assert new.calls == 2
    new.open.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while new.calls < 3:  # until both calls have ended
            await propose(group, 3, [item(1, 3), item(3)], {1: one, 3: two})


async def test_a_failure_lowers_the_reliability() -> None:
    _, new, group, (one, two) = two_models()
    new.error = WorkerUnreachableError("gone", Cause.LOST)
    proposals, _ = await propose(group, 1, [item(0), item(1)], {0: one, 1: two})
    assert [each.sequence_id for each in proposals] == [0]
    assert two.reliability < 0.95
    assert group.roster.models == [one]
    assert group.roster.known_models == [one, two]


async def test_step_times_are_those_of_the_draft_with_the_most_sequences() -> None:
    _, new, group, (one, two) = two_models()
    new.step_times.observe_steps([1] * 50, 50.0)
    await propose(group, 1, [item(i) for i in range(4)], {i: two if i == 3 else one for i in range(4)})
    assert group.step_times(8) < 0.01
    assert group.step_times is group.step_times
    group.release_soon([0, 1, 2])
    assert group.step_times(8) > 0.01
