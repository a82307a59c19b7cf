"""The requests in flight: which generation each sequence belongs to, and what is counted when it ends."""

import time
from collections import Counter, deque

from coordinator.requests.generation import Generation, Piece, Sample
from coordinator.requests.latencies import Latencies
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import FinishReason, Sequence
from specpool.protocol.errors import WorkerFailedError

# Past ends from which the rate of the next ones is estimated.
LAST_ENDS = 32
# Seconds after which a refused client is told to try again: at first, at least and at most.
FIRST_RETRY, LEAST_RETRY, MOST_RETRY = 1.0, 0.05, 10.0

# Finish reasons of samples that nothing cut short.
BY_THEMSELVES = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class EndRate:
    """The rate at which sequences ended lately. Times are in seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=LAST_ENDS + 1)
        """Times of the last ends, preceded by the time of the beginning or of the end before them."""

    def begin(self, now: float) -> None:
        """Notes that there is work again: the idle time before it says nothing."""
        self._times.clear()
        self._times.append(now)

    def add(self, now: float) -> None:
        """Notes that a sequence ended."""
        self._times.append(now)

    def seconds_until(self, ends: int, now: float) -> float:
        """The time that this number of ends will take."""
        known = len(self._times) - 1
        if known < 1:
            return FIRST_RETRY
        return min(MOST_RETRY, max(LEAST_RETRY, ends * (now - self._times[0]) / known))


class RequestsInFlight:
    """Hands what happens to a sequence to the generation that its caller reads: the `RoundEvents` of the round loop."""

    def __init__(self, latencies: Latencies | None = None) -> None:
        """`latencies`: observes the samples, if metrics are wanted."""
        self.latencies = latencies
        self.requests = 0
        """Requests since the start."""
        self.finished: Counter[str] = Counter()
        """Samples since the start, by how they ended: a finish reason, or "error"."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._samples: dict[int, tuple[Generation, Sample]] = {}
        self._ends = EndRate()

    def seconds_until_free(self, places: int) -> float:
        """An estimate of the time until this number of sequences have ended, for a client that was refused."""
        return self._ends.seconds_until(places, time.monotonic())

    def add(self, generation: Generation) -> None:
        """Begins to hand over what happens to the samples of a generation."""
        self.requests += 1
        if not self._samples:
            self._ends.begin(time.monotonic())
        self._samples.update({sample.sequence.sequence_id: (generation, sample) for sample in generation.samples})

    def discard(self, generation: Generation) -> None:
        """Forgets a generation that is no longer read."""
        for sample in generation.samples:
            del self._samples[sample.sequence.sequence_id]

    def admitted(self, sequence: Sequence) -> None:
        """The sequence entered the window."""
        _, sample = self._samples[sequence.sequence_id]
        sample.admit()

    def committed(self, commit: Commit) -> None:
        """The sequence gained tokens, and may have finished with them."""
        if commit.sequence.sequence_id not in self._samples:
            return
        generation, sample = self._samples[commit.sequence.sequence_id]
        generation.publish(sample, Piece(commit.token_ids, commit.shown, commit.logprobs))
        if self.latencies is not None:
            self.latencies.committed(sample)
        if commit.sequence.finish is not None:
            self._end(commit.sequence, commit.sequence.finish.reason)

    def failed(self, sequence: Sequence, reason: str) -> None:
        """The sequence was given up."""
        self._end(sequence, "error", WorkerFailedError(reason))

    def aborted(self, sequence: Sequence) -> None:
        """The caller ended the sequence; text that was held back is published."""
        if sequence.text is not None:
            generation, sample = self._samples[sequence.sequence_id]
            generation.publish(sample, Piece((), sequence.text.flush))
        self._end(sequence, FinishReason.ABORT)

    def _end(self, sequence: Sequence, how: str, error: WorkerFailedError | None = None) -> None:
        self.finished[how] += 1
        self._ends.add(time.monotonic())
        self.prompt_tokens += sequence.prompt_length
        self.cached_tokens += sequence.cached_tokens
        if sequence.sequence_id in self._samples:
            generation, sample = self._samples[sequence.sequence_id]
            generation.end(sample, error)
            if self.latencies is not None and how in BY_THEMSELVES:
                self.latencies.ended(sample)
