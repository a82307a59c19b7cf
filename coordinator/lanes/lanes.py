"""All lanes: one for each target worker. They are added and removed while the coordinator runs.

A standby is a lane that opens when no other one serves rounds.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any

from coordinator.lanes.lane import Lane
from coordinator.prompts.process_link import read_template
from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.rounds.running import Shared
from coordinator.workers.draft_group import DraftGroup
from coordinator.workers.draft_link import DraftLink
from coordinator.workers.interface import Target
from coordinator.workers.link import WorkerLink
from coordinator.workers.states import LISTEN_SECONDS, LinkState
from coordinator.workers.target_link import TargetLink
from coordinator.workers.target_model import TargetModel
from specpool.drafting.plans import SpeculationState
from specpool.protocol.errors import UnavailableError
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.discovery import Discovery, Endpoint
from specpool.rpc.security.channel import Connector

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
# Time for a lost target worker that was removed to come back, if no other one may continue its sequences.
LOST_SECONDS = 30.0


class Lanes:
    """The lanes share a queue and a model."""

    def __init__(self, shared: Shared, tokenizers: TokenizerPool) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when the state of a target worker has changed."""
        self._shared, self._tokenizers = shared, tokenizers
        self._model = TargetModel()
        self._discovery = Discovery(shared.settings.target_addresses)
        self._ready = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self.takeovers = 0
        """Number of takeovers by the standby."""
        self._lanes = [self._make(endpoint) for endpoint in self._discovery.fixed]
        if shared.settings.target_standby_address is not None:
            self._lanes.append(self._make(Endpoint(shared.settings.target_standby_address), is_standby=True))

    def __iter__(self) -> Iterator[Lane]:
        """Iterate over the lanes except the standby, in address order, with draining lanes last."""
        return iter(sorted((lane for lane in self._lanes if not lane.is_standby), key=lambda lane: lane.is_draining))

    @property
    def standby(self) -> Lane | None:
        """The lane that serves once all others are lost."""
        return next((lane for lane in self._lanes if lane.is_standby), None)

    @property
    def links(self) -> list[TargetLink]:
        """The links to all target workers, including the standby."""
        return [lane.link for lane in self._lanes]

    @property
    def drafts(self) -> list[tuple[WorkerLink, WorkerInfo | None]]:
        """Links to target workers that carry a draft, and to draft workers, with the description of each draft.

        Draft workers are those of the first lane whose target carries no draft. A description is None until the worker
        has sent one.
        """
        carried: list[tuple[WorkerLink, WorkerInfo | None]] = [
            (lane.link, lane.link.info.draft) for lane in self if lane.link.info is not None and lane.link.info.draft
        ]
        links = {link for link, _ in carried}
        others = [lane for lane in self if lane.link not in links and (lane.is_known or not carried)]
        group = _first(others).draft if others else None
        return carried + [(link, link.info) for link in (group.links if group is not None else ())]

    @property
    def first(self) -> Lane:
        """The first lane that serves rounds, otherwise the first whose model is known, otherwise the first.

        Raises UnavailableError if there are no lanes.
        """
        if not self._lanes:
            raise UnavailableError(f"no address is known for {self._shared.settings.target_address}")
        return _first(self)

    @property
    def is_ready(self) -> bool:
        """Whether any lane serves rounds."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences in all windows."""
        windows = [lane.window for lane in self]
        usable = [window for window in windows if window.is_open] or windows
        return sum(window.max_num_seqs for window in usable) or self._shared.settings.usable_window

    @property
    def running(self) -> int:
        """Sequences being generated."""
        return sum(lane.window.running for lane in self)

    @property
    def kv_usage(self) -> float:
        """Mean share of the target workers' pages held by sequences, 0 to 1."""
        known = [lane.window.kv_usage for lane in self if lane.is_known]
        return sum(known) / max(1, len(known))

    @property
    def kv_pages(self) -> tuple[int, int]:
        """Number of pages of all target workers, and positions per page; 0 if unknown."""
        capacities = [lane.window.pages.capacity for lane in self if lane.is_known]
        return sum(each.pages for each in capacities), max((each.page_size for each in capacities), default=0)

    @property
    def speculation(self) -> SpeculationState:
        """The estimates of the first lane, with the speeds of all lanes. Raises UnavailableError if there are none."""
        state = self.first.drafting.state()
        others = [lane.drafting.state() for lane in self if lane.window.occupied and lane is not self.first]
        return replace(
            state,
            expected_tokens_per_s=sum(each.expected_tokens_per_s for each in (state, *others)),
            plain_tokens_per_s=sum(each.plain_tokens_per_s for each in (state, *others)),
        )

    async def run(self, beside: Coroutine[Any, Any, None]) -> None:
        """Run all lanes. Raises MismatchError if no target worker serves the known model any more; never returns.

        `beside`: runs at the same time.
        """
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(beside)
            for lane in self._lanes:
                lane.start(self._tasks, self._probe_standby(lane) if lane.is_standby else lane.link.keep_connected())
            async for endpoints in self._discovery.endpoints():
                self._follow(endpoints)

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.close()

    def _make(self, endpoint: Endpoint, is_standby: bool = False) -> Lane:
        # Unique to this lane, so that no worker confuses its sequences with those of another lane or coordinator.
        coordinator_id = uuid.uuid4().hex
        link = self._target_link(endpoint, coordinator_id)
        return Lane(link, self._make_draft(coordinator_id, link), self._shared, self._changed, is_standby)

    def _make_draft(self, coordinator_id: str, target: Target) -> DraftGroup | None:
        settings = self._shared.settings
        if not settings.draft_entries:
            return None

        def open_link(endpoint: Endpoint) -> DraftLink:
            connector = Connector(endpoint.address, **endpoint.secured(settings.worker_security))
            return DraftLink(connector, coordinator_id, settings.draft_timeout_seconds, target, endpoint.label)

        labels = {address: label for label, address in settings.draft_entries if label}
        addresses = (address for _, address in settings.draft_entries)
        return DraftGroup(Discovery(addresses, labels=labels, forgets=True), open_link)

    def _target_link(self, endpoint: Endpoint, coordinator_id: str) -> TargetLink:
        settings = self._shared.settings
        connector = Connector(endpoint.address, **endpoint.secured(settings.worker_security))
        link = TargetLink(connector, coordinator_id, settings.target_timeout_seconds, self._tokenizers, self._model)
        link.replicas = lambda: self.links
        if settings.chat_template is not None:
            link.chat_template = read_template(settings.chat_template)
        link.reasoning_tags = settings.reasoning_tags
        return link

    async def _probe_standby(self, standby: Lane) -> None:
        """Connect to the standby after the target, which decides the model to serve, unless the target is down."""
        first, link = self.first.link, standby.link
        link.reason = f"waiting for the target worker at {first.address}"
        clock = asyncio.get_running_loop().time
        deadline = clock() + LISTEN_SECONDS
        while first.info is None and (first.state is LinkState.LOADING or clock() < deadline):  # noqa: ASYNC110 - polls
            await asyncio.sleep(POLL_SECONDS)
        await link.keep_connected()

    def _take_over(self) -> None:
        """Let the standby serve if no other lane can. The lost lane becomes the standby."""
        standby = self.standby
        if standby is None or not standby.is_ready or not self.first.is_lost:
            return
        lost, self.takeovers = self.first, self.takeovers + 1
        log.warning("the standby at %s takes over from the target worker at %s", standby.address, lost.address)
        standby.take_over()
        lost.stand_by()

    def _changed(self) -> None:
        """Move sequences of lost target workers, and wake all lanes: they may have more to do."""
        self._take_over()
        for lane in self._lanes:
            lane.vacate()
        self._shared.queue.wake()
        if any(lane.is_ready for lane in self):
            self._ready.set()
        else:
            self._ready.clear()
        self.on_change()

    def _follow(self, endpoints: list[Endpoint]) -> None:
        """Add lanes for new addresses, and drain those whose address has vanished."""
        assert self._tasks is not None
        new = {endpoint.address: endpoint for endpoint in endpoints}
        for lane in self:
            was_draining, lane.is_draining = lane.is_draining, new.pop(lane.address, None) is None
            if lane.is_draining == was_draining:
                continue
            if lane.is_draining:
                log.info("draining the target worker at %s", lane.address)
                self._tasks.create_task(self._drain(lane))
            lane.update()
        for endpoint in new.values():
            log.info("adding the target worker at %s", endpoint.address)
            self._lanes.append(lane := self._make(endpoint))
            lane.start(self._tasks, lane.link.keep_connected())

    async def _drain(self, lane: Lane) -> None:
        """Remove a lane once its sequences have finished or moved, unless its address comes back."""
        clock = asyncio.get_running_loop().time
        lost_since: float | None = None
        while lane.is_draining and lane.window.occupied and (lost_since is None or clock() < lost_since + LOST_SECONDS):
            lost_since = None if lane.is_ready else (lost_since or clock())
            await asyncio.sleep(POLL_SECONDS)
        if lane.is_draining and lane in self._lanes:
            self._lanes.remove(lane)
            await lane.remove()
            log.info("removed the target worker at %s", lane.address)
            self._changed()


def _first(lanes: Iterable[Lane]) -> Lane:
    """Return the first lane that serves rounds, otherwise the first whose model is known, otherwise the first."""
    return max(lanes, key=lambda lane: (lane.is_ready, lane.is_known))
