"""All lanes: one for each target worker. They are added and removed while the coordinator runs."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

from coordinator.lanes.lane import Lane
from coordinator.prompts.template_file import read_template
from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.rounds.shared import Shared
from coordinator.workers.discovery import Discovery, Endpoint
from coordinator.workers.draft_group import DraftGroup
from coordinator.workers.draft_link import DraftLink
from coordinator.workers.interface import Target
from coordinator.workers.standby import TargetPair
from coordinator.workers.target_link import TargetLink
from coordinator.workers.target_model import TargetModel
from specpool.drafting.plans import SpeculationState
from specpool.protocol.errors import UnavailableError
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
        self._lanes = [self._make(endpoint) for endpoint in self._discovery.fixed]

    def __iter__(self) -> Iterator[Lane]:
        """The lanes in the order of their addresses, then those that are about to be removed."""
        return iter(sorted(self._lanes, key=lambda lane: lane.is_draining))

    @property
    def first(self) -> Lane:
        """The first lane that serves rounds, or else the first one whose model is known, or else the first one.

        Raises UnavailableError if there are no lanes.
        """
        if not self._lanes:
            raise UnavailableError(f"no address is known for {self._shared.settings.target_address}")
        return max(self, key=lambda lane: (lane.is_ready, lane.is_known))

    def __len__(self) -> int:
        return len(self._lanes)

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
        """Mean share of the target workers' KV caches that is reserved, 0 to 1."""
        known = [lane.window.kv_usage for lane in self if lane.is_known]
        return sum(known) / max(1, len(known))

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
                lane.start(self._tasks)
            async for endpoints in self._discovery.endpoints():
                self._follow(endpoints)

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.close()

    def _make(self, endpoint: Endpoint) -> Lane:
        # Unique to this lane, so that no worker confuses its sequences with those of another lane or coordinator.
        coordinator_id, settings = uuid.uuid4().hex, self._shared.settings
        standby = [Endpoint(settings.target_standby_address)] if settings.target_standby_address is not None else []
        targets = TargetPair(*(self._target_link(each, coordinator_id) for each in (endpoint, *standby)))
        return Lane(targets, self._make_draft(coordinator_id, targets), self._shared, self._changed)

    def _make_draft(self, coordinator_id: str, target: Target) -> DraftGroup | None:
        settings = self._shared.settings
        if not settings.draft_addresses:
            return None

        def open_link(endpoint: Endpoint) -> DraftLink:
            connector = Connector(endpoint.address, **endpoint.secured(settings.worker_security))
            return DraftLink(connector, coordinator_id, settings.draft_timeout_seconds, target)

        return DraftGroup(Discovery(settings.draft_addresses), open_link)

    def _target_link(self, endpoint: Endpoint, coordinator_id: str) -> TargetLink:
        settings = self._shared.settings
        connector = Connector(endpoint.address, **endpoint.secured(settings.worker_security))
        link = TargetLink(connector, coordinator_id, settings.target_timeout_seconds, self._tokenizers, self._model)
        link.replicas = self._links
        if settings.chat_template is not None:
            link.chat_template = read_template(settings.chat_template)
        return link

    def _links(self) -> list[TargetLink]:
        return [link for lane in self._lanes for link in lane.targets.links]

    def _changed(self) -> None:
        """Move sequences of lost target workers, and wake all lanes: they may have more to do."""
        for lane in self._lanes:
            lane.vacate()
        self._shared.queue.wake()
        if any(lane.is_ready for lane in self._lanes):
            self._ready.set()
        else:
            self._ready.clear()
        self.on_change()

    def _follow(self, endpoints: list[Endpoint]) -> None:
        """Add lanes for new addresses, and drain those whose address has vanished."""
        assert self._tasks is not None
        new = {endpoint.address: endpoint for endpoint in endpoints}
        for lane in self._lanes:
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
            lane.start(self._tasks)

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
