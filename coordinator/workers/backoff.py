"""Exponential backoff of a worker link, like a half-open circuit breaker. Pure."""

from dataclasses import dataclass


@dataclass
class Backoff:
    """Doubles the pause before a worker is tried again, until the worker has been up for long enough."""

    first: float
    """Seconds of the first pause."""
    second: float
    """Seconds of the second pause. Later ones double."""
    maximum: float
    reset_after: float
    """Uptime that resets the backoff, as a multiple of the last pause.

    0: one success is enough, so that a worker that fails every second round never pauses longer.
    """

    _failures: int = 0
    _pause: float = 0.0
    _retried_at: float = 0.0
    _succeeded: bool = False

    def failed(self, now: float) -> float:
        """Record a failure at `now`, in seconds of a monotonic clock. Return the seconds to pause."""
        uptime = now - self._retried_at
        if self._succeeded and uptime >= self.reset_after * max(self._pause, self.first, self.second):
            self._failures = 0
        self._pause = self.first if not self._failures else min(self.maximum, max(self.second, 2 * self._pause))
        self._failures += 1
        self._retried_at, self._succeeded = now + self._pause, False
        return self._pause

    def succeeded(self) -> None:
        self._succeeded = True
