"""Deltas: the typed pieces of an answer."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a tool call. `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Join adjacent deltas of the same part."""
    result: list[Delta] = []
    for (kind, index), group in groupby(deltas, key=_part_of):
        if kind is CallStart:
            result += group
            continue
        text = "".join(delta.text for delta in group if not isinstance(delta, CallStart))
        if kind is CallArguments:
            result.append(CallArguments(index, text))
        else:
            result.append(Reasoning(text) if kind is Reasoning else Content(text))
    return result


def _part_of(delta: Delta) -> tuple[type[Delta], int]:
    return type(delta), delta.index if isinstance(delta, CallStart | CallArguments) else 0
