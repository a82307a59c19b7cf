"""What a fault is: a function from the answer that a worker should give to the one that it gives instead."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass
class Answer:
    """An answer that is about to be spoiled."""

    request: Any
    response: Any
    """The right answer; a copy, which may be changed."""
    earlier: Any | None
    """The right answer to the request before."""
    number: int
    """Number of this answer, from 1."""

    @property
    def pairs(self) -> Iterable[tuple[Any, Any]]:
        """Items of the request beside their results."""
        return zip(self.request.items, self.response.results, strict=True)


class RefusedError(Exception):
    """The call ends in an error instead of an answer."""

    def __init__(self, code: str, details: str, by_worker: bool = True) -> None:
        """`code`: name of the status code. `by_worker`: whether it is marked as the worker's own, and not one of the
        transport."""
        super().__init__(details)
        self.code, self.details, self.by_worker = code, details, by_worker


Spoil: TypeAlias = Callable[[Answer], Any]
"""Returns a message, bytes to send instead of one, or an awaitable of either; or raises RefusedError."""
Table: TypeAlias = dict[str, Spoil]


@dataclass(frozen=True)
class Fault:
    """A way to spoil the answers to one method."""

    method: str
    spoil: Spoil

    @property
    def description(self) -> str:
        """What the fault does, in one line."""
        return self.spoil.__doc__ or ""


def entry(table: Table) -> Callable[[Spoil], Spoil]:
    """A decorator that adds a function to a table under its own name."""

    def add(function: Spoil) -> Spoil:
        table[function.__name__] = function
        return function

    return add


def faults_of(**tables: Iterable[Table]) -> dict[str, Fault]:
    """All faults of some tables by name; each table is given by the name of the method that its faults are for."""
    faults = [(name, Fault(method, spoil)) for method, its in tables.items() for t in its for name, spoil in t.items()]
    assert len(dict(faults)) == len(faults), "two faults have the same name"
    return dict(faults)
