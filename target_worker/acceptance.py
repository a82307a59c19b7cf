"""Which draft tokens stand. Pure."""

from collections.abc import Sequence


def accept(draft: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The tokens that a verified sequence gains: the longest prefix of `draft` that equals the target's `choices`, and
    then the target's own choice - the recovered token at the first mismatch, the bonus token if all was accepted.

    `choices[i]` is the target's choice given `draft[:i]`, so there is one more of them than draft tokens.
    """
    if len(choices) != len(draft) + 1:
        raise ValueError(f"{len(choices)} choices for {len(draft)} draft tokens")
    accepted = next((i for i, (d, c) in enumerate(zip(draft, choices, strict=False)) if d != c), len(draft))
    return list(choices[: accepted + 1])
