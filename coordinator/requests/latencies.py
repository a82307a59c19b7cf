"""Request latencies, observed at each commit and at the end of each sample.

All other metrics cost nothing during a round. An observation takes about a microsecond per commit.
"""

from bisect import bisect_left
from collections.abc import Sequence

from coordinator.requests.generation import Sample

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


class Histogram:
    """Observations by bucket, without locks: everything runs on one event loop."""

    def __init__(self, bounds: Sequence[float]) -> None:
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
        timings, tokens = sample.timings, sample.sequence.num_generated
        self.total.observe(timings.total_s)
        self.queue.observe(timings.queue_s)
        self.prefill.observe(timings.prefill_s)
        self.decode.observe(timings.decode_s)
        self.prompt_tokens.observe(sample.sequence.prompt_length)
        self.generation_tokens.observe(tokens)
        if tokens > 1:
            self.per_token.observe(timings.decode_s / (tokens - 1))
