"""A lane: a target worker with its window, its rounds and its draft worker."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from coordinator.config.settings import CoordinatorSettings
from coordinator.requests.in_flight import RequestsInFlight
from coordinator.rounds.loop import RoundLoop
from coordinator.rounds.runner import RoundRunner
from coordinator.scheduling.capacity import KVCapacity
from coordinator.scheduling.counters import Counters
from coordinator.scheduling.grouping import POLICIES, GroupingLimits
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.tracing.traces import Traces
from coordinator.workers.draft_group import DraftGroup
from coordinator.workers.interface import Workers
from coordinator.workers.link import RENEWED
from coordinator.workers.standby import TargetPair
from specpool.drafting.drafting import Drafting
from specpool.drafting.lookup import PromptLookup


@dataclass(frozen=True)
class Shared:
    """What all lanes share."""

    settings: CoordinatorSettings
    queue: RequestQueue
    in_flight: RequestsInFlight
    traces: Traces
    lookup: PromptLookup
    on_admission: Callable[[], None]
    """Called before sequences are admitted."""
    on_other_numerics: Callable[[], None]
    """Called when a target process takes over that may choose other tokens."""
    counters: Counters = field(default_factory=Counters)


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
        is_eqspec = settings.policy == "eqspec"  # a fixed batch neither preempts nor overlaps
        self.pool = Pool(
            settings.usable_window, shared.queue, prefix_caching=settings.prefix_caching, preempts=not is_eqspec
        )
        self.drafting = Drafting(settings.max_num_speculative_tokens, lookup=shared.lookup)
        runner = RoundRunner(
            self.pool,
            Workers(targets, draft),
            self.drafting,
            shared.in_flight,
            shared.traces,
            shared.counters,
            prefill_tokens=settings.prefill_tokens,
            overlap="off" if is_eqspec else settings.overlap,
            runs_ahead=POLICIES[settings.policy].runs_ahead,
            feature_window=settings.feature_window,
        )
        limits = GroupingLimits(
            settings.max_batch_size, settings.default_group_size, settings.max_wait_rounds, settings.prefer_group
        )
        self._loop = RoundLoop(self.pool, POLICIES[settings.policy](limits), runner, shared.in_flight)
        targets.on_change = self.update
        for link in targets.links:
            link.on_replaced = self._target_replaced
        self._loop.on_admission, self._on_other_numerics = shared.on_admission, shared.on_other_numerics
        self.pool.is_open = False

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
        return bool(self.pool.occupied) or (self.draft is not None and self.draft.is_releasing)

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
        self.pool.is_open = self.is_ready and not self.is_draining
        self.pool.is_lost = not self.is_ready and self.targets.active.reason != RENEWED
        self._on_change()

    def _target_replaced(self, numerics: str) -> None:
        if numerics != self.pool.numerics:
            self._on_other_numerics()
        self._loop.target_replaced(numerics)

    def vacate(self) -> None:
        """Let the sequences continue in other lanes if the target worker is lost."""
        self._loop.vacate()

    def _fit_window(self) -> None:
        """Limit the window to the target's slots. More sequences would only evict each other."""
        load = self.targets.active.load_at_start
        self.pool.slots = load.slots_total
        self.pool.max_num_seqs = min(self._settings.usable_window, self.pool.slots)
        grows = load.kv_reservations_grow and self._settings.policy != "eqspec"  # a fixed batch does not preempt
        self.pool.reservations.capacity = KVCapacity(load.kv_positions_total, load.kv_positions_multiple, grows)

    async def remove(self) -> None:
        """Stop the lane. Its sequences continue in other lanes, or fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._loop.close()
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for link in self.targets.links:
            await link.close()
        if self.draft is not None:
            await self.draft.close()
