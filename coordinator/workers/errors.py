"""The errors that calls of workers end in, and whether the calls may be at fault themselves.

WorkerUnreachableError    no answer, or none that can be used; `cause` says what is known of it
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
    """The worker hung, or answered what it was not asked: the call may be the reason."""


class WorkerUnreachableError(Exception):
    """A worker does not answer, not in time, or not what it was asked."""

    def __init__(self, reason: str, cause: Cause) -> None:
        super().__init__(reason)
        self.cause = cause


class WorkerRefusedError(Exception):
    """A worker answered with an error: the same call would most likely fail again."""


class MismatchError(Exception):
    """A worker runs a model that does not fit the one that this coordinator already uses."""
