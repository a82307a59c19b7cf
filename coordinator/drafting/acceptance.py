"""Recent acceptance rates: by sequence, of all sequences, and by the draft's own probabilities. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

# Factors by which observations of one sequence and of all sequences fade with every draft token, and the weight in
# tokens of the rate of all sequences in the estimate for one.
FADING, FADING_OF_ALL, PRIOR_TOKENS = 0.985, 0.995, 10.0
# Bins of a draft's own probabilities.
CONFIDENCES = 10


@dataclass
class Acceptance:
    """The rate at which draft tokens are accepted, lately."""

    fading: float = FADING
    accepted: float = 0.0
    tried: float = 0.0

    def add(self, drafted: float, accepted: float) -> None:
        """Takes in a round. Tokens after the first rejected one do not count as tried."""
        tried = min(drafted, accepted + 1)
        fading = self.fading**tried
        self.accepted = self.accepted * fading + accepted
        self.tried = self.tried * fading + tried

    def rate(self, prior: float) -> float:
        """The estimated rate, which is `prior` before the first observation."""
        return (self.accepted + PRIOR_TOKENS * prior) / (self.tried + PRIOR_TOKENS)


@dataclass
class Calibration:
    """Chances of draft tokens by the draft's own probabilities: the rates at which they were accepted."""

    _bins: list[Acceptance] = field(default_factory=lambda: [Acceptance(FADING_OF_ALL) for _ in range(CONFIDENCES)])

    def chance(self, confidence: float) -> float:
        """The chance that a draft token of this confidence is accepted."""
        return self._rate(_bin(confidence))

    @property
    def chances(self) -> list[float]:
        """Chances by confidence, from 0 to 1 in equal steps."""
        return [self._rate(index) for index in range(CONFIDENCES)]

    def _rate(self, index: int) -> float:
        return self._bins[index].rate((index + 0.5) / CONFIDENCES)

    def add(self, confidences: Sequence[float], accepted: int) -> None:
        """Takes in a round: the confidences of verified draft tokens, of which the first `accepted` were accepted."""
        for i, confidence in enumerate(confidences[: accepted + 1]):
            self._bins[_bin(confidence)].add(1, int(i < accepted))


def _bin(confidence: float) -> int:
    return min(CONFIDENCES - 1, int(confidence * CONFIDENCES))


@dataclass
class AcceptanceOfAll:
    """The acceptance rates of many sequences: a new one is expected to be like all others."""

    first_rate: float
    """Rate believed of a draft before it was tried."""
    _all: Acceptance = field(default_factory=lambda: Acceptance(FADING_OF_ALL))
    _sequences: dict[int, Acceptance] = field(default_factory=dict)

    def add(self, sequence_id: int, drafted: float, accepted: float) -> None:
        """Takes in a round of one sequence."""
        if drafted:
            self._all.add(drafted, accepted)
            self._sequences.setdefault(sequence_id, Acceptance()).add(drafted, accepted)

    def rate(self, sequence_id: int) -> float:
        """The expected rate of a sequence."""
        prior = self.rate_of_all
        return self._sequences[sequence_id].rate(prior) if sequence_id in self._sequences else prior

    @property
    def rate_of_all(self) -> float:
        """The expected rate of a newcomer."""
        return self._all.rate(self.first_rate)

    def forget(self, sequence_id: int) -> None:
        """Drops what is known of a sequence that has ended."""
        self._sequences.pop(sequence_id, None)
