"""Durations of rounds: by stage, by client, and of rounds without costly rows."""

import copy
import time

from coordinator.rounds.running import RunningRound
from coordinator.scheduling.counters import Counters
from coordinator.scheduling.window import Window
from coordinator.scheduling.worker_time import Part
from coordinator.workers.interface import Target


class Durations:
    """Measures rounds. They may overlap: each counts the time since the last one ended."""

    def __init__(self, counters: Counters, window: Window, target: Target) -> None:
        self._target, self._window, self._counters = target, window, counters
        self._measured_times = target.step_times
        self._plain_times = copy.deepcopy(self._measured_times)
        """Seconds by rows of rounds without costly requests, learned from wall time. Begins with the target's times."""
        self._ended = 0.0
        """When the last round ended."""

    def end(self, round_: RunningRound) -> float:
        """Count the stages of a round that ends now. Return its seconds."""
        ended = time.perf_counter()
        seconds, self._ended = ended - max(round_.began, self._ended), ended
        self._counters.add_times(round_.proposed, round_.outcome.verified, seconds)
        return seconds

    def observe(self, round_: RunningRound, seconds: float) -> None:
        """Count the time of a round by client. Learn how long rounds without costly rows take."""
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
