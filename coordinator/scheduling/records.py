"""Records of one sequence: speculation statistics and failures. Pure."""

from dataclasses import dataclass, field


@dataclass
class SpeculationStats:
    """Draft tokens and acceptance, over the rounds that verified at least one draft token.

    A round emits one token more than it accepts. If a stop cuts the round short, the last emitted token counts as the
    bonus token; it and all later draft tokens count as not accepted.
    """

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    """At index i: rounds that accepted exactly i draft tokens."""

    accepted_prediction_tokens: int = 0
    """Accepted draft tokens from the request's prediction."""
    rejected_prediction_tokens: int = 0
    """Rejected draft tokens from the request's prediction."""

    def add(self, drafted: int, accepted: int) -> None:
        """Add a round, including forced tokens."""
        if drafted == 0:
            return
        self.rounds += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def add_prediction(self, drafted: int, accepted: int) -> None:
        """Add a round that drafted from the request's prediction."""
        self.accepted_prediction_tokens += accepted
        self.rejected_prediction_tokens += drafted - accepted

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per round, bonus included; 0 without rounds."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted divided by drafted tokens; 0 if nothing has been drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


# Failed rounds without progress before a sequence runs alone, and before it fails.
FAILURES_TO_ISOLATE, FAILURES_TO_FAIL = 2, 4
# Cache misses without progress before a sequence fails.
MAX_CACHE_MISSES = 64

Progress = tuple[int, int]
"""Tokens of a sequence, and positions cached in the target worker."""


@dataclass
class Blame:
    """Failures of a sequence since it last made progress. A sequence whose rounds keep failing runs alone, then fails.

    Otherwise one request could crash the target worker again and again, along with all other requests of its rounds.
    """

    failures: int = 0
    cache_misses: int = 0
    _reached: Progress = (0, 0)

    def record_failure(self, progress: Progress) -> None:
        """Record that the target worker failed in a round with the sequence."""
        self.failures += 1
        self._reached = max(self._reached, progress)

    def forgive(self) -> None:
        """Undo a recorded failure: only the connection was lost."""
        self.failures = max(0, self.failures - 1)

    def record_cache_miss(self, progress: Progress) -> None:
        """Record that the target worker lost the cache of the sequence."""
        self.cache_misses += 1
        self._reached = max(self._reached, progress)

    def clear(self, progress: Progress) -> None:
        """Clear the failures once the sequence has progressed beyond them."""
        if progress > self._reached:
            self.failures = self.cache_misses = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the sequence must run alone."""
        return self.failures >= FAILURES_TO_ISOLATE

    @property
    def reason_to_fail(self) -> str | None:
        """Why the sequence must fail; None if it may continue."""
        if self.failures >= FAILURES_TO_FAIL:
            return f"the target worker failed {self.failures} times on this request, most recently running it alone"
        if self.cache_misses >= MAX_CACHE_MISSES:
            return f"the target worker lost the cache of this request {self.cache_misses} times"
        return None
