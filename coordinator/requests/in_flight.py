"""Requests in flight: routes events to generations, counts finish reasons, and observes latencies."""

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Items

from coordinator.requests.generation import Generation, Sample
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import Finish, FinishReason, Sequence
from specpool.protocol.errors import ServiceError

# vLLM's buckets, plus finer ones at the lower end: rounds of small models take milliseconds.
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))

# Number of recent ends that the rate is estimated from.
MAX_ENDS = 32
# Retry delay of refused clients in seconds: initial estimate, minimum and maximum.
FIRST_RETRY, MIN_RETRY, MAX_RETRY = 1.0, 0.05, 10.0

COMPLETED = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class Histogram:
    """Observations by bucket, without locks: everything runs on one event loop."""

    def __init__(self, bounds: Items[float]) -> None:
        """`bounds`: upper bound of each bucket but the last."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Latencies:
    """Histograms of samples: seconds per phase, and tokens.

    As in vLLM, a commit of several tokens is one observation of `between_tokens`. Phases are observed only for samples
    that finished by `stop` or `length`.
    """

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.between_tokens = Histogram(TOKEN_SECONDS)
        self.per_token = Histogram(TOKEN_SECONDS)
        self.total, self.queue, self.prefill, self.decode = (Histogram(REQUEST_SECONDS) for _ in range(4))
        self.prompt_tokens, self.generation_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self.prefilled_tokens = self.cached_tokens = 0
        """Prompt tokens of samples that have a first token, and how many of them came from a cached prefix."""

    def committed(self, sample: Sample) -> None:
        if sample.gap is not None:
            self.between_tokens.observe(sample.gap)
            return
        self.first_token.observe(sample.timings.time_to_first_token_s)
        self.prefilled_tokens += sample.sequence.prompt_length
        self.cached_tokens += sample.sequence.cached_tokens

    def ended(self, sample: Sample) -> None:
        timings, per_token = sample.timings, sample.seconds_per_token
        self.total.observe(timings.total_s)
        self.queue.observe(timings.queue_s)
        self.prefill.observe(timings.prefill_s)
        self.decode.observe(timings.decode_s)
        self.prompt_tokens.observe(sample.sequence.prompt_length)
        self.generation_tokens.observe(sample.sequence.num_generated)
        if per_token is not None:
            self.per_token.observe(per_token)


class EndRate:
    """The rate at which sequences ended recently. Times are in seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_ENDS + 1)
        """Start of the measurement, then the times of the most recent ends."""

    def begin(self, now: float) -> None:
        """Restart the measurement after idle time, which says nothing about the rate."""
        self._times.clear()
        self._times.append(now)

    def add(self, now: float) -> None:
        self._times.append(now)

    def seconds_until(self, ends: int, now: float) -> float:
        """Estimated seconds until `ends` more sequences have ended."""
        known = len(self._times) - 1
        if known < 1:
            return FIRST_RETRY
        return min(MAX_RETRY, max(MIN_RETRY, ends * (now - self._times[0]) / known))


class RequestsInFlight:
    """Passes the events of the round loop to the generations."""

    def __init__(self, latencies: Latencies | None = None) -> None:
        """`latencies`: None without metrics."""
        self.latencies = latencies
        self.requests = 0
        """Requests since the start."""
        self.finished: Counter[str] = Counter()
        """Samples since the start, by finish reason or "error"."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._samples: dict[int, tuple[Generation, Sample]] = {}
        self._unpublished: deque[tuple[Commit, Finish | None]] = deque()
        """Commits, and how they ended their sequences."""
        self._ends = EndRate()

    def seconds_until_free(self, places: int) -> float:
        """Retry delay of a refused client: estimated seconds until `places` sequences have ended."""
        return self._ends.seconds_until(places, time.monotonic())

    def add(self, generation: Generation) -> None:
        """Start passing events to a generation."""
        self.requests += not generation.is_background
        if all(other.is_background for other, _ in self._samples.values()):
            self._ends.begin(time.monotonic())
        self._samples.update({sample.sequence.sequence_id: (generation, sample) for sample in generation.samples})

    def discard(self, generation: Generation) -> None:
        """Drop a generation that is no longer read."""
        self._publish_all()
        for sample in generation.samples:
            del self._samples[sample.sequence.sequence_id]

    def admitted(self, sequence: Sequence) -> None:
        _, sample = self._samples[sequence.sequence_id]
        sample.admit()

    def committed(self, commits: Iterable[Commit]) -> None:
        """Queue the commits of a round. Call right after the commit: a later abort would change the finish reasons."""
        self._unpublished.extend((commit, commit.sequence.finish) for commit in commits)

    def publish_soon(self) -> None:
        """Schedule publication of the queued commits, after tasks that are ready to run, such as the next round."""
        asyncio.get_running_loop().call_soon(self._publish_all)

    def _publish_all(self) -> None:
        while self._unpublished:
            commit, finish = self._unpublished.popleft()
            if commit.sequence.sequence_id not in self._samples:
                continue
            generation, sample = self._samples[commit.sequence.sequence_id]
            generation.publish(sample, commit)
            if self.latencies is not None and not generation.is_background:
                self.latencies.committed(sample)
            if finish is not None:
                self._end(commit.sequence, finish.reason)

    def failed(self, sequence: Sequence, error: ServiceError) -> None:
        self._publish_all()
        self._end(sequence, "error", error)

    def aborted(self, sequence: Sequence) -> None:
        """Handle an abort by the caller. Publish the text held back."""
        self._publish_all()
        if sequence.text is not None:
            generation, sample = self._samples[sequence.sequence_id]
            generation.publish(sample, Commit(sequence, (), sequence.text.flush))
        self._end(sequence, FinishReason.ABORT)

    def _end(self, sequence: Sequence, reason: str, error: ServiceError | None = None) -> None:
        is_counted = not sequence.request.is_background
        if is_counted:
            self.finished[reason] += 1
            self._ends.add(time.monotonic())
            self.prompt_tokens += sequence.prompt_length
            self.cached_tokens += sequence.cached_tokens
        if sequence.sequence_id in self._samples:
            generation, sample = self._samples[sequence.sequence_id]
            generation.end(sample, error)
            if self.latencies is not None and is_counted and reason in COMPLETED:
                self.latencies.ended(sample)
