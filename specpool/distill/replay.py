"""Draft tokens that would have been accepted, from where a draft agrees with the text that its target wrote. Pure.

A target that decodes greedily writes the same text whatever is drafted, so rounds can be replayed on it.
"""

from collections.abc import Iterator, Sequence

# Draft lengths for which the mean acceptance length is reported.
ACCEPTANCE_AT = (1, 2, 3, 4, 5)


def agreement_rate(agreed: Sequence[Sequence[bool]]) -> float:
    """The share of all tokens that the draft would have chosen too; 0 without any."""
    return sum(map(sum, agreed)) / max(1, sum(map(len, agreed)))


def mean_acceptance_length(agreed: Sequence[Sequence[bool]], k: int) -> float:
    """Tokens gained per round with k draft tokens. `agreed`: where the draft agrees, for each answer."""
    return 1 + sum(acceptance_by_position(agreed, k))


def acceptance_by_position(agreed: Sequence[Sequence[bool]], k: int) -> list[float]:
    """The share of rounds with k draft tokens in which the first was accepted, the first two, and so on."""
    accepted = list(_rounds(agreed, k))
    return [sum(count > j for count in accepted) / max(1, len(accepted)) for j in range(k)]


def _rounds(agreed: Sequence[Sequence[bool]], k: int) -> Iterator[int]:
    """Draft tokens accepted in each round, without rounds that the end of the answer cuts short."""
    for answer in agreed:
        at = 0
        while at + k <= len(answer):
            accepted = 0
            while accepted < k and answer[at + accepted]:
                accepted += 1
            yield accepted
            at += accepted + 1
