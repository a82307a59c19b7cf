"""Acceptance rates of predictions: how likely the next token is, by what is known about its place. Pure."""

from itertools import chain

# Upper bounds of the run of agreeing tokens, and of the tokens since the last confirmed run, that share a rate.
RUNS, DIFFERENCES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)
# Upper bounds of the share of right tokens of a sequence so far.
QUALITIES = (0.15, 0.4, 0.75)
# Initial rates: at the start of an answer, by the run near the expected place, by the run far away, and by the tokens
# since a difference without a run.
FIRST_START = 0.65
FIRST_NEAR = (0.55, 0.75, 0.88, 0.92, 0.95, 0.97, 0.98, 0.985)
FIRST_FAR = (0.3, 0.4, 0.6, 0.85, 0.95, 0.97, 0.98, 0.985)
FIRST_GUESS = (0.45, 0.3, 0.15, 0.05)
# Exponent of the initial rates by the share of right tokens: where most were wrong, so are the next ones.
EXPONENTS = (4.0, 2.0, 1.2, 0.8)
# Weight of an initial rate, in tokens.
PRIOR_TOKENS = 6.0
# Decay of earlier drafts per draft, and weight of the assumption that they gain what the rates let expect, in tokens.
DRAFT_DECAY, PRIOR_GAIN = 0.95, 8.0
# Maximum weight of a rate or share; then half of it is forgotten.
MAX_TOKENS, MAX_QUALITY_TOKENS = 256.0, 32.0


class Quality:
    """Share of right tokens of a sequence, recently."""

    def __init__(self) -> None:
        self._right, self._all = 1.0, 2.0
        self.bin = _bin(0.5, QUALITIES)

    def add(self, is_right: bool) -> None:
        self._right, self._all = self._right + is_right, self._all + 1
        if self._all > MAX_QUALITY_TOKENS:
            self._right, self._all = self._right / 2, self._all / 2
        self.bin = _bin(self._right / self._all, QUALITIES)


class _Rate:
    """An acceptance rate."""

    def __init__(self, first: float) -> None:
        self._right, self._all = PRIOR_TOKENS * first, PRIOR_TOKENS

    @property
    def value(self) -> float:
        return self._right / self._all

    def add(self, is_right: bool) -> None:
        self._right, self._all = self._right + is_right, self._all + 1
        if self._all > MAX_TOKENS:
            self._right, self._all = self._right / 2, self._all / 2


class PlaceRates:
    """Acceptance rates of one client's predictions."""

    def __init__(self) -> None:
        def rates(*first: float) -> list[list[_Rate]]:
            return [[_Rate(rate**exponent) for rate in first] for exponent in EXPONENTS]

        self._start, self._guess = rates(FIRST_START), rates(*FIRST_GUESS)
        self._near, self._far = rates(*FIRST_NEAR), rates(*FIRST_FAR)
        """By quality, then by run or tokens since the difference."""
        self._expected, self._gained = PRIOR_GAIN, PRIOR_GAIN

    def add_draft(self, expected: float, gained: int) -> None:
        """Record how many tokens of a verified draft were right, and how many the chances let expect.

        Rates of tokens can be right on average while drafts are not, such as where each begins before a difference.
        """
        self._expected, self._gained = (
            DRAFT_DECAY * before + (1 - DRAFT_DECAY) * PRIOR_GAIN + new
            for before, new in ((self._expected, expected), (self._gained, gained))
        )

    def add(self, run: int, since: int, is_distant: bool, quality: Quality, is_right: bool) -> None:
        """Record whether the token after a run was right. See `chances`."""
        self._rate(run, since, is_distant, quality.bin).add(is_right)

    def chance(self, run: int, since: int, is_distant: bool, quality: Quality) -> float:
        """Acceptance probability of the next token. See `chances`."""
        return self._rate(run, since, is_distant, quality.bin).value

    def chances(self, run: int, since: int, is_distant: bool, quality: Quality, num_tokens: int) -> tuple[float, ...]:
        """Acceptance probability of each of the next tokens, if all before it are right.

        `run`: agreeing tokens before the first. `since`: tokens since the last confirmed run. `is_distant`: whether the
        run began far from the expected place.
        """
        parts: list[tuple[float, ...]] = []
        if not run and num_tokens:
            parts.append((self._corrected(self._rate(run, since, is_distant, quality.bin)),))
            run, num_tokens = 1, num_tokens - 1
        rates = (self._far if is_distant else self._near)[quality.bin]
        for index in range(_bin(run, RUNS), len(rates)):
            last = RUNS[index] if index < len(RUNS) else run + num_tokens
            count = min(num_tokens, last + 1 - run)
            parts.append((self._corrected(rates[index]),) * count)
            run, num_tokens = run + count, num_tokens - count
        return tuple(chain.from_iterable(parts))

    def _corrected(self, rate: _Rate) -> float:
        """The rate, with its odds multiplied by what recent drafts gained, relative to what they should have."""
        right = rate.value * self._gained
        return right / (right + (1 - rate.value) * self._expected)

    def _rate(self, run: int, since: int, is_distant: bool, quality: int) -> _Rate:
        if run:
            return (self._far if is_distant else self._near)[quality][_bin(run, RUNS)]
        return self._guess[quality][_bin(since, DIFFERENCES)] if since else self._start[quality][0]


def _bin(value: float, bounds: tuple[float, ...]) -> int:
    """Index of the first bound that is not below the value."""
    return next((index for index, bound in enumerate(bounds) if value <= bound), len(bounds))
