"""The errors in which calls to workers end, and whether the calls themselves may be at fault.

WorkerUnreachableError    no answer, or none that can be used; `cause` says what is known about why
WorkerRefusedError        the worker's own answer: the same call would most likely fail again
MismatchError             the worker runs a model that must not be used
"""

from enum import Enum, auto


class Cause(Enum):
    """What made a call fail."""

    NOT_SENT = auto()
    """The worker was away before the call was sent."""
    LOST = auto()
    """The connection or the worker was lost during the call. If the worker turns out to have been restarted, the call
    may have killed it."""
    FAILED = auto()
    """The worker hung, or gave an answer that does not fit: the call may be the reason."""


class WorkerUnreachableError(Exception):
    """A worker does not answer, does not answer in time, or gives an answer that does not fit."""

    def __init__(self, reason: str, cause: Cause) -> None:
        super().__init__(reason)
        self.cause = cause


class WorkerRefusedError(Exception):
    """A worker answered with an error: the same call would most likely fail again."""


class MismatchError(Exception):
    """A worker runs a model that does not fit the one that this coordinator already uses."""
