"""A group of draft workers, with one or more draft models, behind the interface of a single one."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from coordinator.scheduling.drafts import DRAFT_BACKOFF_ROUNDS
from coordinator.workers.draft_calls import DraftCalls, Parts, chances
from coordinator.workers.draft_link import DraftLink
from coordinator.workers.draft_roster import DraftRoster
from coordinator.workers.link import RENEWED
from coordinator.workers.placement import Placement
from specpool.drafting.costs import StepTimes, Timed
from specpool.drafting.draft_models import DraftModel
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem
from specpool.rpc.discovery import Discovery, Endpoint

log = logging.getLogger(__name__)

PREFIX_TOKENS = 16
"""Sequences that share this many leading tokens are placed on the same worker if possible."""

Answers = dict[int, Proposal]
"""Proposals by sequence id."""


class DraftGroup:
    """Draft workers, each with the caches of some sequences. A sequence stays with the workers of its draft model.

    A failing worker only costs the drafts of its own sequences. They move to another worker, which rebuilds the caches.
    """

    def __init__(self, discovery: Discovery, open_link: Callable[[Endpoint], DraftLink]) -> None:
        self._discovery, self._open_link = discovery, open_link
        self._links = {endpoint.address: open_link(endpoint) for endpoint in discovery.fixed}
        self._only = next(iter(self._links.values())) if discovery.is_single else None
        """The only worker that there will ever be."""
        self._leaving: list[DraftLink] = []
        """Workers that are no longer found, and get no new sequences."""
        self._probing: dict[DraftLink, asyncio.Task[None]] = {}
        self._placement: Placement[DraftLink] = Placement()
        self._moved: set[int] = set()
        """Sequences whose worker has not been told to begin at position 0 yet. It may have an old cache."""
        self._full_until: dict[DraftLink, int] = {}
        """First round that may place sequences again on a worker that had no free slot."""
        self._calls = DraftCalls(self._release_moved)
        self.roster = DraftRoster(self._links.values)

    @property
    def links(self) -> list[DraftLink]:
        return [*self._links.values()]

    @property
    def _ready(self) -> list[DraftLink]:
        return [link for link in self._links.values() if link.is_ready]

    @property
    def is_ready(self) -> bool:
        return any(link.is_ready for link in self._links.values())

    @property
    def hosts_and_devices(self) -> frozenset[tuple[str, str]]:
        return frozenset().union(*(link.hosts_and_devices for link in self._links.values()))

    @property
    def step_times(self) -> StepTimes:
        """See `DraftRoster.step_times`."""
        return self.roster.step_times(self._placement.count)

    async def propose(
        self,
        round_id: int,
        items: Sequence[ProposeItem],
        models: Mapping[int, DraftModel | None],
        step_cost: float = 0.0,
        traceparent: str = "",
        slack: float = 0.0,
    ) -> tuple[list[Proposal], Timed]:
        """Run a draft round on all workers involved, and return the proposals in item order, and the duration.

        `models`: the draft model of each sequence. A sequence gets no proposal without a model, or if its worker fails
        or is late. For the duration and `slack` see `DraftCalls.send`, for the other arguments `DraftLink.propose`.
        Raises WorkerUnreachableError or WorkerRefusedError if all workers fail.
        """
        if self._only is not None:
            return await self._only.propose(round_id, [*items], chances(self._only), step_cost, traceparent)
        parts, answers = self._split(round_id, items, models)
        speed, learns = step_cost / self.step_times(1), len(self._ready) > 1
        proposals, slowest, failures = await self._calls.send(
            round_id, parts, step_cost, traceparent, slack=slack, speed=speed, learns=learns
        )
        for link, own in proposals.items():
            answers |= self._answers(round_id, link, parts[link], own)
        if failures and not answers:
            raise failures[0]
        return [answers[item.sequence_id] for item in items if item.sequence_id in answers], slowest

    def _release_moved(self, link: DraftLink, sequence_ids: Iterable[int]) -> None:
        """Release sequences that have ended or moved, because a late call may have claimed slots for them again."""
        link.release_soon([i for i in sequence_ids if self._placement.worker_of(i) is not link])

    def _split(
        self, round_id: int, items: Iterable[ProposeItem], models: Mapping[int, DraftModel | None]
    ) -> tuple[Parts, Answers]:
        """Assign the items to workers. Answer those that no worker can serve in this round."""
        parts: Parts = {}
        answers: Answers = {}
        for item in items:
            sequence_id, model = item.sequence_id, models[item.sequence_id]
            if model is None:
                continue
            before = self._placement.worker_of(sequence_id)
            # A worker keeps its sequences while it reconnects with new certificates.
            is_kept = before is not None and before.model is model and (before.is_ready or before.reason == RENEWED)
            link = before if is_kept else self._place(item, round_id, model)
            if link is None:
                if before is None:
                    answers[sequence_id] = Proposal(sequence_id, ItemStatus.NO_SLOT)
                continue
            if link is not before:
                self._moved.add(sequence_id)
            if item.base_length and sequence_id in self._moved:
                answers[sequence_id] = Proposal(sequence_id, ItemStatus.CACHE_MISS)
            elif link.is_ready and not self._calls.is_late(link):
                self._moved.discard(sequence_id)
                parts.setdefault(link, []).append(item)
        return parts, answers

    def _place(self, item: ProposeItem, round_id: int, model: DraftModel) -> DraftLink | None:
        """Place a sequence on a ready worker of its model with a free slot. None if there is none."""
        if not (workers := self._with_room(round_id, model)):
            return None
        self._remove(item.sequence_id)
        shares = item.cache_namespace is not None and len(item.token_ids) > PREFIX_TOKENS
        prefix = (item.cache_namespace, item.token_ids[:PREFIX_TOKENS]) if shares else None
        return self._placement.place(item.sequence_id, workers, prefix)

    def _with_room(self, round_id: int, model: DraftModel | None) -> list[DraftLink]:
        """Return the ready workers of a model that, as far as this coordinator knows, have a free slot."""
        return [
            link
            for link in self._ready
            if link.model is model
            and link not in self._leaving
            and round_id >= self._full_until.get(link, 0)
            and link.info is not None
            and self._placement.count(link) < link.info.slots_total
        ]

    def _remove(self, sequence_id: int) -> None:
        """Take a sequence from its worker."""
        if (link := self._placement.remove(sequence_id)) is not None:
            link.release_soon([sequence_id])

    def _answers(self, round_id: int, link: DraftLink, items: list[ProposeItem], proposals: list[Proposal]) -> Answers:
        """Return a worker's proposals. A sequence without a slot moves to another worker, if one has room."""
        answers = {proposal.sequence_id: proposal for proposal in proposals}
        refused = [item for item in items if answers[item.sequence_id].status is ItemStatus.NO_SLOT]
        for item in refused:
            self._full_until[link] = round_id + DRAFT_BACKOFF_ROUNDS
            self._remove(item.sequence_id)
        if refused and self._with_room(round_id, link.model):
            for item in refused:
                del answers[item.sequence_id]
                if item.base_length:
                    answers[item.sequence_id] = Proposal(item.sequence_id, ItemStatus.CACHE_MISS)
        return answers

    def release_soon(self, sequence_ids: Iterable[int]) -> None:
        """Free sequences in the background, each on the workers that have seen it."""
        sequence_ids = [*sequence_ids]
        for link in self._links.values():
            link.release_soon(sequence_ids)
        self._placement.release(sequence_ids)
        self._moved.difference_update(sequence_ids)

    @property
    def is_releasing(self) -> bool:
        """Whether a background release is being sent."""
        return any(link.is_releasing for link in self._links.values())

    async def keep_connected(self) -> None:
        """Follow the addresses and probe the workers, forever."""
        async with asyncio.TaskGroup() as tasks:
            async for endpoints in self._discovery.endpoints():
                self._update(endpoints)
                for link in (link for link in self.links if link not in self._probing):
                    self._probing[link] = tasks.create_task(link.keep_connected())
                for link in [*self._leaving]:
                    if not link.is_ready or not (self._placement.count(link) or link.is_releasing):
                        await self._drop(link)

    def _update(self, endpoints: Sequence[Endpoint]) -> None:
        found = {endpoint.address: endpoint for endpoint in endpoints}
        for address, endpoint in found.items():
            if address not in self._links:
                log.info("found a draft worker at %s", address)
                self._links[address] = self._open_link(endpoint)
        leaving = [link for address, link in self._links.items() if address not in found]
        for link in leaving:
            if link not in self._leaving:
                log.info("draft worker at %s is no longer listed; draining", link.address)
        self._leaving = leaving

    async def _drop(self, link: DraftLink) -> None:
        """Close the link to a worker that has left."""
        self._probing.pop(link).cancel()
        self._leaving.remove(link)
        del self._links[link.address]
        self._full_until.pop(link, None)
        self._placement.forget(link)
        await link.close()

    async def close(self) -> None:
        self._calls.cancel()
        for link in self.links:
            await link.close()
