"""A group of draft workers: which worker gets which items, with fake links."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from draft_links import STEP_SECONDS, FakeLink, group_of, item, propose, two_links
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.drafts import DRAFT_BACKOFF_ROUNDS
from coordinator.workers.draft_group import DraftGroup
from coordinator.workers.interface import Cause, WorkerRefusedError, WorkerUnreachableError
from specpool.drafting.costs import StepTimes, Timed
from specpool.drafting.draft_models import DraftModel
from specpool.protocol.features import FeatureSpec
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem
from specpool.protocol.sampling import SamplingParams
from specpool.rpc.discovery import Discovery, Endpoint


async def statuses(
    group: DraftGroup, round_id: int, *items: ProposeItem, models: dict[int, DraftModel | None] | None = None
) -> dict[int, str]:
    proposals, _ = await propose(group, round_id, items, models)
    return {proposal.sequence_id: proposal.status.name for proposal in proposals}


async def test_items_are_split_and_merged_in_order() -> None:
    a, b = two_links()
    a.seconds, b.seconds = 0.002, 0.005
    group = group_of(a, b)
    proposals, timed = await propose(group, 1, [item(i) for i in (4, 3, 2, 1)])
    assert [proposal.sequence_id for proposal in proposals] == [4, 3, 2, 1]
    assert (sorted(a.caches), sorted(b.caches)) == ([2, 4], [1, 3])
    assert timed == Timed(0.005, 0.0025)


@pytest.mark.parametrize(
    "error",
    [WorkerUnreachableError("gone", Cause.LOST), WorkerRefusedError("no"), ZeroDivisionError("a bug")],
    ids=["unreachable", "refused", "unexpected"],
)
async def test_failure_costs_only_the_workers_own_sequences(error: Exception) -> None:
    a, b = two_links()
    group = group_of(a, b)
    await propose(group, 1, [item(i) for i in range(4)])
    b.error = error
    assert await statuses(group, 2, *(item(i, 3) for i in range(4))) == {0: "OK", 2: "OK"}
    moved = await statuses(group, 3, *(item(i, 6) for i in range(4)))
    assert moved == {0: "OK", 1: "CACHE_MISS", 2: "OK", 3: "CACHE_MISS"}
    assert {each.sequence_id for each in a.seen} == {0, 2}, "a worker gets no items for caches that it never had"
    assert await statuses(group, 4, item(1), item(3)) == {1: "OK", 3: "OK"}
    b.is_ready = True
    b.send_releases()
    assert not b.caches
    await statuses(group, 5, *(item(i, 3) for i in (1, 3)), item(4))
    assert [each.sequence_id for each in b.seen] == [4], "sequences do not move back"


async def test_failure_of_all_is_raised() -> None:
    a, b = two_links()
    group = group_of(a, b)
    await propose(group, 1, [item(0), item(1)])
    a.error, b.error = WorkerRefusedError("a"), WorkerRefusedError("b")
    with pytest.raises(WorkerRefusedError, match="a"):
        await propose(group, 2, [item(0, 3), item(1, 3)])
    assert not group.is_ready
    a.is_ready = b.is_ready = True
    assert await statuses(group, 3, item(0, 3), item(1, 3)) == {0: "OK", 1: "OK"}, "both kept their caches"


async def test_full_worker_passes_sequences_on() -> None:
    a, b = two_links()
    a.slots = 1  # another coordinator has taken the other slots
    group = group_of(a, b)
    assert await statuses(group, 1, item(0), item(1), item(2)) == {0: "OK", 1: "OK"}
    assert await statuses(group, 2, item(2)) == {2: "OK"}
    assert await statuses(group, 3, item(3)) == {3: "OK"}
    assert sorted(b.caches) == [1, 2, 3]
    b.slots = 3
    assert await statuses(group, 4, item(4)) == {4: "NO_SLOT"}, "now both are full"
    a.slots = 2
    assert await statuses(group, 5, item(4)) == {4: "NO_SLOT"}, "without asking"
    assert await statuses(group, 1 + DRAFT_BACKOFF_ROUNDS, item(4)) == {4: "OK"}
    assert 4 in a.caches


async def test_cache_that_cannot_grow_moves() -> None:
    a, b = two_links()
    group = group_of(a, b)
    await propose(group, 1, [item(0)])
    a.answer = lambda item: Proposal(item.sequence_id, ItemStatus.NO_SLOT)  # type: ignore[method-assign]
    assert await statuses(group, 2, item(0, 3)) == {0: "CACHE_MISS"}
    assert not a.caches
    assert await statuses(group, 3, item(0, count=6)) == {0: "OK"}
    assert 0 in b.caches


async def test_sequences_are_placed_where_their_prefix_may_be_cached() -> None:
    a, b = two_links()
    group = group_of(a, b)

    def shared(sequence_id: int, expected: int = 32) -> ProposeItem:
        return item(sequence_id, count=40, cache_namespace=b"x", expected_prefix_length=expected)

    await propose(group, 1, [shared(0, expected=0)])
    assert await statuses(group, 2, shared(1)) == {1: "OK"}
    assert sorted(a.caches) == [0, 1]
    assert await statuses(group, 3, shared(2)) == {2: "CACHE_MISS"}, "balance matters more"
    assert await statuses(group, 4, shared(2, expected=0)) == {2: "OK"}
    group.release_soon([0, 1])
    assert await statuses(group, 5, item(3, count=40)) == {3: "OK"}
    assert await statuses(group, 6, shared(4)) == {4: "OK"}
    assert (sorted(a.caches), sorted(b.caches)) == ([3], [2, 4])


async def test_worker_that_renews_certificates_keeps_its_sequences() -> None:
    a, b = two_links()
    group = group_of(a, b)
    await propose(group, 1, [item(0), item(1)])
    b.is_ready, b.reason = False, "certificates have changed"
    assert await statuses(group, 2, item(0, 3), item(1, 3)) == {0: "OK"}
    b.is_ready = True
    assert await statuses(group, 3, item(0, 6), item(1, 3)) == {0: "OK", 1: "OK"}


async def test_drafts_must_read_the_same_hidden_states() -> None:
    a, b = FakeLink("a"), FakeLink("b", weights="two")
    group, spec = group_of(a, b), FeatureSpec((10, 20), 64)
    assert group.roster.features is None
    a.info = replace(a.info, feature_layers=spec.layers, feature_width=spec.width)
    assert group.roster.features == spec
    assert [model.features for model in group.roster.models] == [spec, None]
    b.info = replace(b.info, feature_layers=(10,), feature_width=32)
    assert group.roster.features is None
    b.is_ready = False
    assert group.roster.features == spec


async def test_common_limits() -> None:
    a, b = two_links()
    b.info = replace(b.info, max_model_len=500, max_branches=0)
    group = group_of(a, b)
    (model,) = group.roster.models
    limits = group.roster.limits(model)
    assert limits is not None
    assert (limits.max_model_len, limits.max_branches, model.max_model_len) == (500, 0, 500)
    assert group.hosts_and_devices == {("a", "cpu"), ("b", "cpu")}
    shared = group.step_times
    assert shared is group.step_times
    assert (shared(2), shared(16)) == (STEP_SECONDS[1], STEP_SECONDS[8])
    b.is_ready = False
    assert group.step_times is a.step_times
    assert [each.max_model_len for each in group.roster.models] == [1000]
    b.is_ready, b.step_times = True, StepTimes({1: 0.01, 8: 0.02})
    assert group.step_times(2) == 0.01, "the slowest counts"


class Names(Discovery):
    """Endpoints that a test chooses."""

    def __init__(self, *addresses: str) -> None:
        super().__init__(["dns:///drafts:1"])
        self.addresses, self.resolved = addresses, asyncio.Event()

    async def endpoints(self) -> Any:
        while True:
            yield [*map(Endpoint, self.addresses)]
            self.resolved.set()
            await asyncio.sleep(0)

    async def change(self, *addresses: str) -> None:
        self.addresses = addresses
        for _ in range(2):
            self.resolved.clear()
            await self.resolved.wait()


async def test_workers_come_and_go() -> None:
    a, b = two_links()
    names, by_address = Names("a"), {"a": a, "b": b}
    group = DraftGroup(names, lambda endpoint: by_address[endpoint.address])  # type: ignore[arg-type, return-value]
    assert not group.is_ready
    assert group.step_times(1) > 0
    following = asyncio.create_task(group.keep_connected())
    await names.change("a")
    await propose(group, 1, [item(0), item(1)])
    await names.change("a", "b")
    await propose(group, 2, [item(0, 3), item(1, 3), item(2), item(3)])
    assert (sorted(a.caches), sorted(b.caches)) == ([0, 1], [2, 3]), "only new sequences go to the new worker"
    await names.change("b")
    assert await statuses(group, 3, item(0, 6), item(4)) == {0: "OK", 4: "OK"}
    assert (sorted(a.caches), a.is_closed) == ([0, 1], False), "it drains"
    group.release_soon([0, 1])
    await names.change("b")
    assert a.is_closed
    assert group.links == [b]
    await names.change()
    b.is_ready = False
    await names.change()
    assert b.is_closed
    assert not group.is_ready
    following.cancel()
    await group.close()


class Sequence:
    """A sequence as the coordinator sees it."""

    def __init__(self, sequence_id: int, tokens: list[int], predicted: int) -> None:
        self.sequence_id, self.tokens, self.length, self.predicted = sequence_id, tokens, 40, predicted
        self.cached = self.backoff_until = 0
        self.model: DraftModel | None = None

    def item(self) -> ProposeItem:
        base = min(self.cached, self.length - 1)
        first: dict[str, Any] = {"sampling": SamplingParams(), "cache_namespace": b""} if base == 0 else {}
        expected = 0 if base else self.predicted
        tokens = tuple(self.tokens[base : self.length])
        return ProposeItem(self.sequence_id, base, tokens, **first, expected_prefix_length=expected, num_draft_tokens=3)

    def take(self, proposal: Proposal, round_id: int) -> None:
        is_ok = proposal.status is ItemStatus.OK
        self.cached, self.predicted = self.length if is_ok else 0, 0
        if proposal.status is ItemStatus.NO_SLOT:
            self.backoff_until = round_id + DRAFT_BACKOFF_ROUNDS


@given(st.integers(0), st.integers(2, 4), st.integers(1, 5))
def test_no_worker_continues_another_text(seed: int, workers: int, slots: int) -> None:
    """Sequences are on one worker each, move only when they must, and every worker has the text that it continues."""
    chance = random.Random(seed)
    links = [FakeLink(str(i), slots, weights=chance.choice("ab")) for i in range(workers)]
    group = group_of(*links)
    sequences: list[Sequence] = []
    placed: dict[int, FakeLink | None] = {}
    may_move: set[int] = set()
    tokens = {i: [*range(33), *(chance.randrange(33, 100) for _ in range(400))] for i in range(40)}
    for link in links:
        link.tokens = tokens
    for round_id in range(1, 60):
        for link in links:
            if link.is_ready and chance.random() < 0.15:
                link.error = WorkerUnreachableError("told to fail", Cause.LOST)
            elif not link.is_ready and chance.random() < 0.3:
                link.is_ready, link.error = True, None
                if chance.random() < 0.5:
                    link.caches.clear()
                if chance.random() < 0.5:
                    link.send_releases()
        if tokens.keys() - range(len(placed)) and chance.random() < 0.5:
            sequences.append(Sequence(len(placed), tokens[len(placed)], chance.choice([0, 16, 32])))
            placed[len(placed)] = None
        if sequences and chance.random() < 0.2:
            group.release_soon([sequences.pop(chance.randrange(len(sequences))).sequence_id])
        asked = [each for each in sequences if chance.random() < 0.8 and round_id >= each.backoff_until]
        if not asked or not group.is_ready:
            continue
        for each in asked:
            if each.model not in (ready := group.roster.models):
                each.model = chance.choice(ready)
        for link in links:
            link.seen, link.refused = [], set()
        may_move |= {each for each, link in placed.items() if link is not None and not link.is_ready}
        may_move |= {
            each.sequence_id for each in asked if (on := placed[each.sequence_id]) and on.model is not each.model
        }
        try:
            proposals, _ = asyncio.run(
                propose(
                    group, round_id, [each.item() for each in asked], {each.sequence_id: each.model for each in asked}
                )
            )
        except WorkerUnreachableError:
            proposals = []
        answered = [proposal.sequence_id for proposal in proposals]
        assert answered == [each.sequence_id for each in asked if each.sequence_id in answered]
        if chance.random() < 0.2:
            proposals = []  # too late
        by_id = {each.sequence_id: each for each in asked}
        for proposal in proposals:
            by_id[proposal.sequence_id].take(proposal, round_id)
        served = [(each.sequence_id, link) for link in links for each in link.seen]
        assert len(dict(served)) == len(served), "a sequence is on one worker"
        for sequence_id, link in served:
            assert link.model is by_id[sequence_id].model
            assert placed[sequence_id] in (None, link) or sequence_id in may_move
            placed[sequence_id] = link
            may_move.discard(sequence_id)
        may_move |= {sequence_id for link in links for sequence_id in link.refused}
        for sequence in asked:
            sequence.length += chance.randint(0, 4)
