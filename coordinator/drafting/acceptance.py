"""How often drafts are right, lately. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

# What a sequence, and what all of them have shown fades by such a factor with every draft token; a sequence begins as
# with so many tokens like all others'.
FADING, FADING_OF_ALL, PRIOR_TOKENS = 0.985, 0.995, 10.0
# A draft's own probabilities are told apart in so many steps.
CONFIDENCES = 10


@dataclass
class Acceptance:
    """The rate at which draft tokens are accepted, lately."""

    fading: float = FADING
    accepted: float = 0.0
    tried: float = 0.0

    def add(self, drafted: float, accepted: float) -> None:
        """Takes in a round. Behind the first token that was rejected, nothing was tried."""
        tried = min(drafted, accepted + 1)
        fading = self.fading**tried
        self.accepted = self.accepted * fading + accepted
        self.tried = self.tried * fading + tried

    def rate(self, prior: float) -> float:
        """Estimated, beginning with `prior`."""
        return (self.accepted + PRIOR_TOKENS * prior) / (self.tried + PRIOR_TOKENS)


@dataclass
class Calibration:
    """What a draft's own probabilities of its tokens are worth: how often tokens of about this one were accepted."""

    _bins: list[Acceptance] = field(default_factory=lambda: [Acceptance(FADING_OF_ALL) for _ in range(CONFIDENCES)])

    def chance(self, confidence: float) -> float:
        """That a draft token is right."""
        return self._rate(_bin(confidence))

    @property
    def chances(self) -> list[float]:
        """By confidence, from 0 to 1 in equal steps."""
        return [self._rate(index) for index in range(CONFIDENCES)]

    def _rate(self, index: int) -> float:
        return self._bins[index].rate((index + 0.5) / CONFIDENCES)

    def add(self, confidences: Sequence[float], accepted: int) -> None:
        """Takes in a round: draft tokens that were verified, of which the first so many were accepted."""
        for i, confidence in enumerate(confidences[: accepted + 1]):
            self._bins[_bin(confidence)].add(1, int(i < accepted))


def _bin(confidence: float) -> int:
    return min(CONFIDENCES - 1, int(confidence * CONFIDENCES))


@dataclass
class AcceptanceOfAll:
    """The rates of many sequences: each begins like all the others."""

    first_rate: float
    """Believed of a draft that was never tried."""
    _all: Acceptance = field(default_factory=lambda: Acceptance(FADING_OF_ALL))
    _sequences: dict[int, Acceptance] = field(default_factory=dict)

    def add(self, sequence_id: int, drafted: float, accepted: float) -> None:
        """Takes in what became of a sequence's draft tokens."""
        if drafted:
            self._all.add(drafted, accepted)
            self._sequences.setdefault(sequence_id, Acceptance()).add(drafted, accepted)

    def rate(self, sequence_id: int) -> float:
        """The rate that is expected of a sequence."""
        prior = self.rate_of_all
        return self._sequences[sequence_id].rate(prior) if sequence_id in self._sequences else prior

    @property
    def rate_of_all(self) -> float:
        """The rate that is expected of a newcomer."""
        return self._all.rate(self.first_rate)

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        self._sequences.pop(sequence_id, None)
