"""Suggestions for misspelled names."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(words: Iterable[str], known: Iterable[str], prefix: str = "") -> str:
    """Return a suffix for an error message, such as " (did you mean --port?)". Empty if no known name is similar.

    `prefix`: prefix of the words, which the known names lack.
    """
    names = sorted(known)
    found = (get_close_matches(word.removeprefix(prefix), names, n=1, cutoff=0.75) for word in words)
    matches = [f"{prefix}{name}" for close in found for name in close]
    return f" (did you mean {', '.join(matches)}?)" if matches else ""
