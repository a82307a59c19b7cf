"""Whether a sequence is the reason why rounds fail: then it is tried alone, and finally given up. Pure.

Otherwise one request that kills the target worker could do so for ever, and none of its neighbours would be served.
"""

from dataclasses import dataclass

# Failed rounds, at one point of a sequence, after which it is tried alone, and after which it is given up.
FAILURES_IN_COMPANY, FAILURES_IN_ALL = 2, 4
# How often the target worker may lose the sequence's cache before the sequence gets beyond the point of the first loss.
MOST_MISSES = 64

Progress = tuple[int, int]
"""Tokens of a sequence, and positions of it that the target worker has cached."""


@dataclass
class Suspicion:
    """What went wrong with a sequence since it last made progress."""

    failures: int = 0
    misses: int = 0
    _reached: Progress = (0, 0)

    def failed(self, progress: Progress) -> None:
        """Notes that the target worker failed in a round with the sequence."""
        self.failures += 1
        self._reached = max(self._reached, progress)

    def missed(self, progress: Progress) -> None:
        """Notes that the target worker had lost the cache of the sequence."""
        self.misses += 1
        self._reached = max(self._reached, progress)

    def clear(self, progress: Progress) -> None:
        """Ends the suspicion once the sequence has got beyond the point where things went wrong."""
        if progress > self._reached:
            self.failures = self.misses = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the sequence is to be in rounds of its own."""
        return self.failures >= FAILURES_IN_COMPANY

    @property
    def verdict(self) -> str | None:
        """Why the sequence is to be given up; None if it is not."""
        if self.failures >= FAILURES_IN_ALL:
            return f"the target worker failed {self.failures} times while it served this request, the last times alone"
        if self.misses >= MOST_MISSES:
            return f"the target worker lost the cache of this request {self.misses} times"
        return None
