"""A lane: a target worker with its window, its rounds and its draft worker."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from coordinator.rounds.loop import RoundLoop
from coordinator.rounds.running import Shared
from coordinator.scheduling.capacity import KVCapacity
from coordinator.scheduling.window import Window
from coordinator.workers.draft_group import DraftGroup
from coordinator.workers.interface import Workers
from coordinator.workers.link import RENEWED
from coordinator.workers.target_link import TargetLink
from specpool.drafting.draft_shares import DraftShares
from specpool.drafting.drafting import Drafting

log = logging.getLogger(__name__)


class Lane:
    """Runs rounds with one target worker."""

    def __init__(
        self,
        link: TargetLink,
        draft: DraftGroup | None,
        shared: Shared,
        on_change: Callable[[], None],
        is_standby: bool = False,
    ) -> None:
        """`on_change`: called when the state of the target worker has changed.

        `is_standby`: serve no rounds before `take_over`.
        """
        settings = shared.settings
        self.link, self.draft, self.is_draining = link, draft, False
        self._settings, self._on_change, self._queue = settings, on_change, shared.queue
        self._tasks: list[asyncio.Task[None]] = []
        preempts = settings.policy != "eqspec"  # a fixed batch neither preempts nor overlaps
        self.window = Window(settings.usable_window, shared.queue, preempts=preempts, cache_events=shared.cache_events)
        self.window.is_open, self.window.is_standby = False, is_standby
        if is_standby:
            self._queue.windows.remove(self.window)
        shares = DraftShares(settings.draft_shares)
        self.drafting = Drafting(settings.max_num_speculative_tokens, sources=shared.sources, shares=shares)
        self._loop = RoundLoop(shared, self.window, Workers(link, draft), self.drafting)
        link.on_change, link.on_replaced = self.update, self._target_replaced
        link.on_evicted = self.window.forget_pages

    @property
    def address(self) -> str:
        return self.link.address

    @property
    def is_ready(self) -> bool:
        """Whether the target worker is ready for rounds."""
        return self.link.is_ready

    @property
    def is_lost(self) -> bool:
        """Whether the target worker is unavailable for a reason other than renewed certificates."""
        return not self.link.is_ready and self.link.reason != RENEWED

    @property
    def is_standby(self) -> bool:
        """Whether another lane serves the rounds."""
        return self.window.is_standby

    @property
    def is_known(self) -> bool:
        """Whether the target worker was ready before."""
        return self.link.info is not None

    @property
    def is_releasing(self) -> bool:
        """Whether slots are about to be released."""
        return bool(self.window.occupied) or (self.draft is not None and self.draft.is_releasing)

    def start(self, tasks: asyncio.TaskGroup, probing: Coroutine[Any, Any, None]) -> None:
        """Connect to the workers and run rounds. `probing`: keeps the link to the target worker connected.

        The tasks never return. They raise MismatchError if the target worker has another model, and no other one
        serves the known model.
        """
        drafts: list[Coroutine[Any, Any, None]] = [] if self.draft is None else [self.draft.keep_connected()]
        self._tasks = [tasks.create_task(task) for task in (probing, *drafts, self._loop.run())]

    def update(self) -> None:
        """Adapt the window to the state of the target worker."""
        if self.is_ready:
            self._fit_window()
        self.window.is_open = self.is_ready and not self.is_draining and not self.is_standby
        self.window.is_lost = self.is_lost or self.is_standby
        self._on_change()

    def take_over(self) -> None:
        """Serve rounds from now on. The target worker is ready."""
        self.window.is_standby = False
        if self.window not in self._queue.windows:
            self._queue.windows.append(self.window)
        self._target_replaced()
        self.update()

    def stand_by(self) -> None:
        """Serve no more rounds. The sequences continue in another lane."""
        self.window.is_standby = True
        self.link.abort_rounds()
        self.update()

    def _target_replaced(self) -> None:
        info = self.link.info
        if self.draft is not None and info is not None and info.draft is not None:
            log.warning("the target worker at %s carries a draft; not using the draft workers", self.address)
        if not self.is_standby:
            self._loop.failures.target_replaced()

    def vacate(self) -> None:
        """Let the sequences continue in other lanes if the target worker is lost."""
        self._loop.failures.vacate()

    def _fit_window(self) -> None:
        """Limit the window to the target's slots. More sequences would only evict each other."""
        info = self.link.info
        assert info is not None
        page_size = info.kv_positions_multiple
        self.window.fit(info.slots_total, KVCapacity(info.kv_positions_total // max(1, page_size), page_size))
        self.window.max_num_seqs = min(self._settings.usable_window, self.window.slots)

    async def remove(self) -> None:
        """Stop the lane. Its sequences continue in other lanes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._loop.failures.target_removed()
        self.window.forget_target_caches()
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.link.close()
        if self.draft is not None:
            await self.draft.close()
