"""Acceptance rates of predictions, by the match that led to the current place. Pure."""

from itertools import chain

# Upper bounds of the bins of agreeing tokens, and of tokens since the last confirmed run.
RUNS, DIFFERENCES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)
# Upper bounds of the bins of a sequence's recent share of right tokens.
QUALITIES = (0.15, 0.4, 0.75)
# Initial rates: at the start of an answer; by run near the expected place, and far from it; and, without a run, by
# tokens since the last confirmed run.
FIRST_START = 0.65
FIRST_NEAR = (0.55, 0.75, 0.88, 0.92, 0.95, 0.97, 0.98, 0.985)
FIRST_FAR = (0.3, 0.4, 0.6, 0.85, 0.95, 0.97, 0.98, 0.985)
FIRST_GUESS = (0.45, 0.3, 0.15, 0.05)
# Exponents of the initial rates, by bin of the share of right tokens: wrong tokens predict more wrong tokens.
EXPONENTS = (4.0, 2.0, 1.2, 0.8)
# Weight of an initial rate, in tokens.
PRIOR_TOKENS = 6.0
# Decay of earlier drafts per draft, and prior weight, in tokens, of drafts that gain what the rates predict.
DRAFT_DECAY, PRIOR_GAIN = 0.95, 8.0
# Weights above which a rate, or a share of right tokens, is halved.
MAX_TOKENS, MAX_QUALITY_TOKENS = 256.0, 32.0


class _Rate:
    def __init__(self, first: float, weight: float = PRIOR_TOKENS, max_weight: float = MAX_TOKENS) -> None:
        """`weight`: of the initial rate `first`, in tokens. `max_weight`: halve all weights above it."""
        self._right, self._all, self._max_weight = weight * first, weight, max_weight

    @property
    def value(self) -> float:
        return self._right / self._all

    def add(self, is_right: bool) -> None:
        self._right, self._all = self._right + is_right, self._all + 1
        if self._all > self._max_weight:
            self._right, self._all = self._right / 2, self._all / 2


class Quality(_Rate):
    """Recent share of right tokens of a sequence."""

    def __init__(self) -> None:
        super().__init__(0.5, 2.0, MAX_QUALITY_TOKENS)
        self.bin = _bin(self.value, QUALITIES)

    def add(self, is_right: bool) -> None:
        super().add(is_right)
        self.bin = _bin(self.value, QUALITIES)


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
        """Return the acceptance probability of the next token. See `chances`."""
        return self._rate(run, since, is_distant, quality.bin).value

    def chances(self, run: int, since: int, is_distant: bool, quality: Quality, num_tokens: int) -> tuple[float, ...]:
        """Return the acceptance probability of each of the next tokens, if all before it are right.

        `run`: agreeing tokens before the first one. `since`: tokens since the last confirmed run. `is_distant`: whether
        the run began far from the expected place.
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
    """Return the index of the first bound that is not below the value."""
    return next((index for index, bound in enumerate(bounds) if value <= bound), len(bounds))
