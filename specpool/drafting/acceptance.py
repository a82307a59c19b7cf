"""Recent acceptance rates: by sequence, overall, and by the draft's own probabilities. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul

# Decay of older observations per draft token.
DECAY = 0.995
# Weight of a prior in observations: a new sequence starts with the overall rate.
PRIOR_TOKENS = 10.0
# Initial acceptance rate of a draft model's tokens, and of the first branch.
FIRST_RATE = 0.6
# Bins of acceptance rates: planning counts sequences per bin instead of examining each one.
RATE_BINS = 32
# Bins of the draft's own probabilities, fewer because each of them learns by itself.
CONFIDENCES = RATE_BINS // 3


def expected_tokens(rate: float, k: int) -> float:
    """Expected tokens of a round with k draft tokens."""
    return 1.0 + expected_gain(repeat(rate, k))


def expected_gain(chances: Iterable[float]) -> float:
    """Expected number of accepted draft tokens. `chances`: see `likely_tokens`."""
    return float(sum(accumulate(chances, mul)))


def agreement_length(drafted: tuple[int, ...], gained: tuple[int, ...]) -> int:
    """Number of draft tokens, verified or not, before the first that differs from the target's choice."""
    pairs = enumerate(zip(drafted, gained, strict=False))
    return next((i for i, (draft, choice) in pairs if draft != choice), min(len(drafted), len(gained)))


def known_tokens(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The tokens before the first one outside the vocabulary."""
    end = next((i for i, token in enumerate(token_ids) if token >= vocab_size), len(token_ids))
    return token_ids[:end]


def likely_tokens(token_ids: tuple[int, ...], chances: Iterable[float], min_chance: float) -> tuple[int, ...]:
    """Draft tokens before the first whose acceptance is less probable than `min_chance`.

    `chances`: acceptance probability of each token if all before it are accepted; may be empty.
    """
    end = next((i for i, chance in enumerate(accumulate(chances, mul)) if chance < min_chance), len(token_ids))
    return token_ids[:end]


@dataclass
class Acceptance:
    """Recent acceptance rate of draft tokens."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, drafted: float, accepted: float) -> None:
        """Add a round. Tokens after the first rejected one do not count as tried."""
        tried = min(drafted, accepted + 1)
        decay = DECAY**tried
        self.accepted = self.accepted * decay + accepted
        self.tried = self.tried * decay + tried

    def rate(self, prior: float) -> float:
        return (self.accepted + PRIOR_TOKENS * prior) / (self.tried + PRIOR_TOKENS)


@dataclass
class Calibration:
    """Acceptance probabilities by the draft's own probabilities."""

    _bins: list[Acceptance] = field(default_factory=lambda: [Acceptance() for _ in range(CONFIDENCES)])

    def chance(self, confidence: float) -> float:
        """Acceptance probability of a draft token with this confidence."""
        return self._rate(_bin(confidence))

    @property
    def chances(self) -> list[float]:
        """Acceptance probabilities for confidences from 0 to 1, in equal steps."""
        return [self._rate(index) for index in range(CONFIDENCES)]

    def _rate(self, index: int) -> float:
        return self._bins[index].rate((index + 0.5) / CONFIDENCES)

    def add(self, confidences: Sequence[float], accepted: int) -> None:
        """Add the verified draft tokens of a round, of which the first `accepted` were accepted."""
        for i, confidence in enumerate(confidences[: accepted + 1]):
            self._bins[_bin(confidence)].add(1, int(i < accepted))


def _bin(confidence: float) -> int:
    return min(CONFIDENCES - 1, int(confidence * CONFIDENCES))


def rate_bin(rate: float) -> int:
    """The bin of an acceptance rate."""
    return min(RATE_BINS - 1, int(rate * RATE_BINS))


def rate_of(rate_bin: int) -> float:
    """The acceptance rate in the middle of a bin."""
    return (rate_bin + 0.5) / RATE_BINS


@dataclass
class AcceptanceRates:
    """Acceptance rates of many sequences. A new sequence starts with its draft's rate, or with the overall rate."""

    first_rate: float
    """Overall rate before the first draft token."""
    _overall: Acceptance = field(default_factory=Acceptance)
    _sequences: dict[int, Acceptance] = field(default_factory=dict)
    _drafts: dict[int, Acceptance] = field(default_factory=dict)
    """Rate of each sequence's draft, by sequence id, if there are several drafts."""

    def assign(self, sequence_id: int, draft: Acceptance) -> None:
        """Assign a draft with the rate `draft` to a sequence, and forget the sequence's rate with any other draft."""
        if self._drafts.get(sequence_id) is not draft:
            self._sequences.pop(sequence_id, None)
            self._drafts[sequence_id] = draft

    def add(self, sequence_id: int, drafted: float, accepted: float) -> None:
        """Add a round of one sequence."""
        if drafted:
            self._overall.add(drafted, accepted)
            if sequence_id in self._drafts:
                self._drafts[sequence_id].add(drafted, accepted)
            self._sequences.setdefault(sequence_id, Acceptance()).add(drafted, accepted)

    def rate(self, sequence_id: int) -> float:
        prior = self._drafts.get(sequence_id, self._overall).rate(self.first_rate)
        return self._sequences[sequence_id].rate(prior) if sequence_id in self._sequences else prior

    @property
    def overall_rate(self) -> float:
        return self._overall.rate(self.first_rate)

    def forget(self, sequence_id: int) -> None:
        self._sequences.pop(sequence_id, None)
        self._drafts.pop(sequence_id, None)
