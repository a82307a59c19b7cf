"""State of a running round: its progress, its durations, and the slots that leaving sequences free."""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.config.settings import CoordinatorSettings
from coordinator.requests.in_flight import RequestsInFlight
from coordinator.requests.traces import RoundTrace, Traces
from coordinator.scheduling.cache_events import CacheEvents
from coordinator.scheduling.commits import Commit, Counters
from coordinator.scheduling.grouping import Group
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.scheduling.round import Round
from coordinator.scheduling.window import Window
from coordinator.scheduling.worker_time import Part
from coordinator.workers.interface import Target, Workers
from specpool.drafting.costs import Timed
from specpool.drafting.drafting import Drafting
from specpool.drafting.outcome import RoundOutcome
from specpool.drafting.plans import DraftPlan
from specpool.drafting.sources import DraftSources
from specpool.protocol.features import WantedFeatures
from specpool.protocol.worker_info import WorkerInfo


@dataclass(frozen=True)
class Shared:
    """State shared by the rounds of all windows."""

    settings: CoordinatorSettings
    queue: RequestQueue
    in_flight: RequestsInFlight
    traces: Traces
    sources: DraftSources
    on_admission: Callable[[], None]
    """Called before sequences are admitted."""
    cache_events: CacheEvents | None
    """Receives every change of the target workers' cached pages. None: there are no subscribers."""
    counters: Counters = field(default_factory=Counters)


RETRY_SECONDS = 0.05


class Releasing:
    """Releases slots in both workers."""

    def __init__(self, workers: Workers, drafting: Drafting) -> None:
        self.drafting_ahead: set[asyncio.Task[None]] = set()
        """Calls to the draft worker that could take slots again."""
        self._workers, self._drafting = workers, drafting
        self._releasing: set[asyncio.Future[Any]] = set()

    async def release(self, sequence_ids: set[int]) -> None:
        """Free the slots of sequences. Return once the target worker has confirmed."""
        self._drafting.forget(sequence_ids)
        self._start(self._release_drafts(sequence_ids))
        while not await self._workers.target.release(sequence_ids):  # noqa: ASYNC110 - polls a remote worker
            await asyncio.sleep(RETRY_SECONDS)

    def abandon(self, sequence_ids: set[int]) -> None:
        """Free the slots of sequences that continue on another target worker, once the workers are reachable."""
        self._drafting.forget(sequence_ids)
        self._start(self._release_drafts(sequence_ids))
        self._start(self._workers.target.release(sequence_ids))

    def _start(self, release: Awaitable[Any]) -> None:
        self._releasing.add(releasing := asyncio.ensure_future(release))
        releasing.add_done_callback(self._releasing.discard)

    async def _release_drafts(self, sequence_ids: set[int]) -> None:
        if self.drafting_ahead:
            await asyncio.wait(set(self.drafting_ahead))
        if self._workers.draft is not None:
            self._workers.draft.release_soon(sequence_ids)


class RunningRound(Round):
    """A round between its plan and its publication."""

    def __init__(
        self,
        round_id: int,
        group: Group,
        plans: Mapping[int, DraftPlan],
        *,
        sent: Callable[[], None],
        may_join: bool,
        prefill_tokens: int,
        chance: Callable[[float], float],
        pass_seconds: Callable[[int], float],
        features: WantedFeatures | None,
        own_draft: WorkerInfo | None,
    ) -> None:
        """`sent`: called when the next round may be chosen. `may_join`: whether it may share a pass with the last one.

        For the other arguments see `Round`.
        """
        super().__init__(round_id, group.sequences, prefill_tokens, plans, chance, pass_seconds, features, own_draft)
        self.group, self.may_join, self.same_length = group, may_join, group.same_length
        """`same_length`: whether the sequences had equal lengths when the group was chosen."""
        self.sent = sent
        self.trace = RoundTrace()
        self.instance_id = ""
        """The target process whose caches the round assumes."""
        self.began = 0.0
        self.proposed = Timed()
        self.outcome: RoundOutcome[Commit] = RoundOutcome([], Timed(), [], is_trial=self.is_trial)
        self.committed = asyncio.Event()
        """Set once the round has committed or failed."""
        self.failed = False
        self.following: RunningRound | None = None
        """The round sent after this one, while this one was in flight."""
        self.drafting_ahead: asyncio.Task[None] | None = None
        """Drafts branches during the verification."""

    def begin(self, instance_id: str, is_quiet: bool) -> None:
        """Start the clock. `is_quiet`: see `RoundOutcome`."""
        self.began, self.instance_id, self.outcome.is_quiet = time.perf_counter(), instance_id, is_quiet

    def fail(self) -> None:
        """Drop the results of this round, and of those that continue it."""
        self.failed = True
        self.discard()
        if self.drafting_ahead is not None:
            self.drafting_ahead.cancel()


class Durations:
    """Measures rounds. They may overlap: each counts the time since the last one ended."""

    def __init__(self, counters: Counters, window: Window, target: Target) -> None:
        self._target, self._window, self._counters = target, window, counters
        self._measured_times = target.step_times
        self._plain_times = copy.deepcopy(self._measured_times)
        """Seconds of rounds without costly requests, by rows. Starts with the target's times, then learns."""
        self._ended = 0.0
        """When the last round ended."""

    def end(self, round_: RunningRound) -> float:
        """Record the stages of a round that ends now. Return its seconds."""
        ended = time.perf_counter()
        seconds, self._ended = ended - max(round_.began, self._ended), ended
        self._counters.add_times(round_.proposed, round_.outcome.verified, seconds)
        return seconds

    def observe(self, round_: RunningRound, seconds: float) -> None:
        """Record a round's time by client, and learn how long rounds without costly rows take."""
        if self._measured_times is not self._target.step_times:  # a new worker
            self._measured_times, self._plain_times = self._target.step_times, copy.deepcopy(self._target.step_times)
        requests = {sequence.sequence_id: sequence.request for sequence in round_.group.sequences}
        parts: dict[str, Part] = {}
        for sequence_id, rows in round_.outcome.rows.items():
            request = requests[sequence_id]
            part = parts.setdefault(request.client, Part())
            part.rows += rows
            part.costly_rows += rows * request.is_costly
        self._window.add_round_time(parts, seconds, self._plain_times)
        if not any(part.costly_rows for part in parts.values()):
            self._plain_times.observe(sum(part.rows for part in parts.values()), seconds)
