"""A lane: a target worker with its window, its rounds and its draft worker."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from coordinator.rounds.loop import RoundLoop
from coordinator.rounds.shared import Shared
from coordinator.scheduling.capacity import KVCapacity
from coordinator.scheduling.window import Window
from coordinator.workers.draft_group import DraftGroup
from coordinator.workers.interface import Workers
from coordinator.workers.link import RENEWED
from coordinator.workers.standby import TargetPair
from specpool.drafting.drafting import Drafting


class Lane:
    """Runs rounds with one target worker."""

    def __init__(
        self, targets: TargetPair, draft: DraftGroup | None, shared: Shared, on_change: Callable[[], None]
    ) -> None:
        """`on_change`: called when the state of the target worker has changed."""
        settings = shared.settings
        self.targets, self.draft, self.is_draining = targets, draft, False
        self._settings, self._on_change = settings, on_change
        self._tasks: list[asyncio.Task[None]] = []
        preempts = settings.policy != "eqspec"  # a fixed batch neither preempts nor overlaps
        self.window = Window(
            settings.usable_window, shared.queue, prefix_caching=settings.prefix_caching, preempts=preempts
        )
        self.window.is_open = False
        self.drafting = Drafting(settings.max_num_speculative_tokens, lookup=shared.lookup)
        self._loop = RoundLoop(shared, self.window, Workers(targets, draft), self.drafting)
        targets.on_change = self.update
        for link in targets.links:
            link.on_replaced = self._loop.failures.target_replaced

    @property
    def address(self) -> str:
        return self.targets.active.address

    @property
    def is_ready(self) -> bool:
        """Whether the target worker serves rounds."""
        return self.targets.active.is_ready

    @property
    def is_known(self) -> bool:
        """Whether the target worker was ready before."""
        return self.targets.info is not None

    @property
    def is_releasing(self) -> bool:
        """Whether slots are about to be released."""
        return bool(self.window.occupied) or (self.draft is not None and self.draft.is_releasing)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Connect to the workers and run rounds.

        The tasks never return. They raise MismatchError if the target worker has another model, and no other one
        serves the known model.
        """
        drafts: list[Coroutine[Any, Any, None]] = [] if self.draft is None else [self.draft.keep_connected()]
        self._tasks = [tasks.create_task(task) for task in (*self.targets.probes(), *drafts, self._loop.run())]

    def update(self) -> None:
        """Adapt the window to the state of the target worker."""
        if self.is_ready:
            self._fit_window()
        self.window.is_open = self.is_ready and not self.is_draining
        self.window.is_lost = not self.is_ready and self.targets.active.reason != RENEWED
        self._on_change()

    def vacate(self) -> None:
        """Let the sequences continue in other lanes if the target worker is lost."""
        self._loop.failures.vacate()

    def _fit_window(self) -> None:
        """Limit the window to the target's slots. More sequences would only evict each other."""
        info = self.targets.active.info
        assert info is not None
        self.window.slots = info.slots_total
        self.window.max_num_seqs = min(self._settings.usable_window, self.window.slots)
        grows = self._settings.policy != "eqspec"  # a fixed batch does not preempt
        self.window.reservations.capacity = KVCapacity(info.kv_positions_total, info.kv_positions_multiple, grows)

    async def remove(self) -> None:
        """Stop the lane. Its sequences continue in other lanes, or fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._loop.failures.target_removed()
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for link in self.targets.links:
            await link.close()
        if self.draft is not None:
            await self.draft.close()
