"""Fake links to draft workers. They check that each call continues the cached tokens."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from coordinator.workers.draft_group import DraftGroup
from specpool.drafting.costs import StepTimes, Timed
from specpool.drafting.draft_models import DraftModel
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.discovery import Discovery
from specpool.testing.fake_caches import FakeCaches

STEP_SECONDS = {1: 0.001, 8: 0.002}
WRONG_TOKEN = -1


class FakeLink(FakeCaches):
    """A link to a fake worker that checks its caches."""

    model: DraftModel | None

    def __init__(self, address: str, slots: int = 100, label: str = "", weights: str = "one") -> None:
        super().__init__(slots)
        self.address, self.reason, self.is_ready, self.is_releasing = address, "", True, False
        self.label, self.model = label, None
        limits = WorkerInfo(vocab_size=100, max_model_len=1000, max_branches=4, slots_total=slots)
        self.info = replace(limits, model="draft", weights_fingerprint=weights)
        self.hosts_and_devices = frozenset({(address, "cpu")})
        self.step_times = StepTimes(STEP_SECONDS)
        self.error: Exception | None = None
        self.pending: set[int] = set()
        """Releases not sent to the worker yet."""
        self.seen: list[ProposeItem] = []
        """Items of the last call."""
        self.refused: set[int] = set()
        """Sequences without a slot in the last call."""
        self.seconds = 0.001
        self.tokens = {sequence_id: [*range(100)] for sequence_id in range(100)}
        """Committed tokens by sequence id."""
        self.is_closed = False
        self.open = asyncio.Event()
        """Calls wait while it is cleared."""
        self.open.set()
        self.calls = self.calls_running = 0

    def release_soon(self, sequence_ids: Iterable[int]) -> None:
        self.pending.update(sequence_ids)
        if self.is_ready:
            self.send_releases()

    def send_releases(self) -> None:
        for sequence_id in self.pending:
            self.release(sequence_id)
        self.pending.clear()

    async def propose(self, round_id: int, items: list[ProposeItem], *hints: Any) -> tuple[list[Proposal], Timed]:
        assert self.is_ready
        self.seen = items
        self.calls, self.calls_running = self.calls + 1, self.calls_running + 1
        await asyncio.sleep(0)
        await self.open.wait()
        self.calls_running -= 1
        if self.error is not None:
            self.is_ready, error, self.error = False, self.error, None
            raise error
        return [self.answer(item) for item in items], Timed(self.seconds, self.seconds / 2)

    def answer(self, item: ProposeItem) -> Proposal:
        sequence_id = item.sequence_id
        status, _ = self.realign(sequence_id, item, item.end)
        if status is not ItemStatus.OK:
            if status is ItemStatus.NO_SLOT:
                self.refused.add(sequence_id)
            return Proposal(sequence_id, status)
        self.keep(sequence_id)
        cached = self.caches[sequence_id]
        assert cached == self.tokens[sequence_id][: len(cached)], "the worker continues another text"
        self.caches[sequence_id] = [*cached, *[WRONG_TOKEN] * 8]  # draft tokens that will be rejected
        return Proposal(sequence_id, ItemStatus.OK, (1, 2, 3), len(cached) + 2)

    async def keep_connected(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


def group_of(*links: FakeLink) -> DraftGroup:
    by_address = {link.address: link for link in links}
    discovery = Discovery(by_address)
    return DraftGroup(discovery, lambda endpoint: by_address[endpoint.address])  # type: ignore[arg-type, return-value]


def item(sequence_id: int, base_length: int = 0, count: int = 3, **fields: Any) -> ProposeItem:
    sampling = SamplingParams() if not base_length else None
    tokens = tuple(range(base_length, base_length + count))
    return ProposeItem(sequence_id, base_length, tokens, sampling=sampling, num_draft_tokens=3, **fields)


def two_links(**knobs: Any) -> tuple[FakeLink, FakeLink]:
    return FakeLink("a", **knobs), FakeLink("b", **knobs)


async def propose(
    group: DraftGroup, round_id: int, items: Iterable[ProposeItem], models: dict[int, DraftModel | None] | None = None
) -> tuple[list[Proposal], Timed]:
    """Run a round. `models`: draft model by sequence id; default: the first model for all."""
    items = [*items]
    first, *_ = group.roster.models
    return await group.propose(round_id, items, models or {item.sequence_id: first for item in items})
