"""Latencies of requests, observed when tokens are committed and when a sample ends.

This is all that metrics add to a round: about a microsecond for each commit.
"""

from bisect import bisect_left
from collections.abc import Sequence

from coordinator.requests.generation import Sample

# The buckets of vLLM, and finer ones below: rounds of small models take milliseconds.
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


class Histogram:
    """Counts of observations by bucket, without locks, which an event loop does not need."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the largest value of each bucket but the last."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, once or `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Latencies:
    """Histograms of samples: seconds of their phases, and their tokens.

    As in vLLM, tokens of a sample that come together are one observation of `between_tokens`. Phases are observed
    only for samples that ended by themselves.
    """

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.between_tokens = Histogram(TOKEN_SECONDS)
        self.per_token = Histogram(TOKEN_SECONDS)
        self.whole, self.queue, self.prefill, self.decode = (Histogram(REQUEST_SECONDS) for _ in range(4))
        self.prompt_tokens, self.generation_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self.prefilled_tokens = self.cached_tokens = 0
        """Prompt tokens of samples whose first token was committed, and how many of them were copied from a cache."""

    def committed(self, sample: Sample) -> None:
        """Observes the tokens that the sample has just gained."""
        if sample.gap is not None:
            self.between_tokens.observe(sample.gap)
            return
        self.first_token.observe(sample.timings.first_token)
        self.prefilled_tokens += sample.sequence.prompt_length
        self.cached_tokens += sample.sequence.cached_tokens

    def ended(self, sample: Sample) -> None:
        """Observes a sample that has ended by itself."""
        timings, tokens = sample.timings, sample.sequence.num_generated
        self.whole.observe(timings.total)
        self.queue.observe(timings.queue)
        self.prefill.observe(timings.prefill)
        self.decode.observe(timings.decode)
        self.prompt_tokens.observe(sample.sequence.prompt_length)
        self.generation_tokens.observe(tokens)
        if tokens > 1:
            self.per_token.observe(timings.decode / (tokens - 1))
