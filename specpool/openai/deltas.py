"""What an answer's text consists of, piece by piece."""

from dataclasses import dataclass


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
