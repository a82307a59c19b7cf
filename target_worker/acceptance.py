"""Acceptance of draft tokens. Pure."""

from collections.abc import Iterable, Sequence


def accept(draft: Sequence[int], choices: Iterable[int]) -> list[int]:
    """Return the tokens that a sequence gains: the longest common prefix of `draft` and `choices`, then one choice.

    The last token is the recovered token after a mismatch, or the bonus token after full acceptance. `choices[i]` is
    the target's choice given `draft[:i]`. Choices after the first mismatch are not read. Without a
    mismatch, too few choices are all accepted draft tokens.
    """
    gained: list[int] = []
    for choice in choices:
        gained.append(choice)
        if len(gained) > len(draft) or choice != draft[len(gained) - 1]:
            break
    return gained
