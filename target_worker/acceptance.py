"""Acceptance of draft tokens. Pure."""

from collections.abc import Iterable, Sequence


def accept(draft: Sequence[int], choices: Iterable[int]) -> list[int]:
    """The tokens that a verified sequence gains: the longest prefix of `draft` that equals the target's `choices`, then
    the target's own choice (the recovered token at the first mismatch, or the bonus token if all were accepted).

    The i-th choice is the one that the target makes given `draft[:i]`. Choices after the first mismatch are not read.
    """
    gained: list[int] = []
    for choice in choices:
        gained.append(choice)
        if len(gained) > len(draft) or choice != draft[len(gained) - 1]:
            return gained
    raise ValueError(f"{len(gained)} choices for {len(draft)} draft tokens")
