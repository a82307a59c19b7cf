"""Acceptance of draft tokens, replayed on text that the target generated. Pure.

Draft tokens do not change greedy text, so one pass of the draft is enough to replay all rounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Numbers of draft tokens for which the mean acceptance length is reported.
REPORTED_K = (1, 2, 3, 4, 5)

Agreed = Sequence[Sequence[Sequence[bool]]]
"""By draft step and answer: which tokens the draft predicts. The last step stands for all after it, so that a draft
whose steps do not differ has one."""


@dataclass(frozen=True)
class Prediction:
    """A draft's predictions of an answer's tokens, by draft step. The last step stands for all after it."""

    agreed: Sequence[Sequence[bool]]
    """Whether the draft predicts each token."""
    confidences: Sequence[Sequence[float]]
    """The draft's probability of its own choice at each token; 0 where an earlier step is wrong."""

    def at(self, position: int, step: int) -> tuple[bool, float]:
        """Whether a draft step predicts the token at this position of the answer, and the confidence."""
        step = min(step, len(self.agreed) - 1)
        return self.agreed[step][position], self.confidences[step][position]


def agreement_rate(agreed: Sequence[Sequence[bool]]) -> float:
    """Share of all tokens that the draft predicts in a step; 0 without tokens."""
    return sum(map(sum, agreed)) / max(1, sum(map(len, agreed)))


def mean_acceptance_length(agreed: Agreed, k: int) -> float:
    """Tokens gained per round with k draft tokens."""
    return 1 + sum(acceptance_by_position(agreed, k))


def acceptance_by_position(agreed: Agreed, k: int) -> list[float]:
    """Share of rounds with k draft tokens that accept at least 1, 2, ... of them."""
    accepted = list(_rounds(agreed, k))
    return [sum(count > j for count in accepted) / max(1, len(accepted)) for j in range(k)]


def _rounds(agreed: Agreed, k: int) -> Iterator[int]:
    """Accepted draft tokens of each round, except rounds truncated by the end of an answer."""
    for answer in zip(*agreed, strict=True):
        position = 0
        while position + k <= len(answer[0]):
            accepted = 0
            while accepted < k and answer[min(accepted, len(answer) - 1)][position + accepted]:
                accepted += 1
            yield accepted
            position += accepted + 1
