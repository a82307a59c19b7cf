"""A rate limit that allows bursts."""


class TokenBucket:
    """Starts with `burst` tokens, its maximum, and gains `per_second`.

    Times are in seconds of any monotonic clock.
    """

    def __init__(self, burst: float, per_second: float, now: float) -> None:
        self._burst, self._per_second = burst, per_second
        self._tokens, self._at = burst, now

    def take(self, now: float) -> bool:
        """Take a token. Return False if there is none."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
