"""How long a link rests after a failure, like a half-open circuit breaker. Pure."""


class Breaker:
    """Rests that double with each failure, until the link has worked for long enough."""

    def __init__(self, longest: float, forgiven_after: float) -> None:
        """`longest`: the longest rest in seconds. `forgiven_after`: how long a link must have worked until its failures
        are forgiven, as a multiple of its last rest. 0: one success is enough, so that a worker that fails in every
        second round never rests for longer.
        """
        self._longest, self._forgiven_after = longest, forgiven_after
        self._failures = 0
        self._rest = 0.0
        self._usable_since = 0.0
        self._has_worked = False

    def failed(self, now: float, first: float, second: float) -> float:
        """Notes a failure at `now`, in seconds of a monotonic clock; returns the seconds to rest.

        `first` and `second`: the first and the second rest; later ones double.
        """
        if self._has_worked and now - self._usable_since >= self._forgiven_after * max(self._rest, first, second):
            self._failures = 0
        self._rest = first if not self._failures else min(self._longest, max(second, 2 * self._rest))
        self._failures += 1
        self._usable_since, self._has_worked = now + self._rest, False
        return self._rest

    def worked(self) -> None:
        """Notes a success."""
        self._has_worked = True
