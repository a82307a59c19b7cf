"""Errors of calls to workers.

WorkerUnreachableError    no valid response in time; `cause` says why
WorkerRefusedError        an error from the worker's handler; a retry would most likely fail again
MismatchError             the worker runs a model that must not be used
UnusableModelError        no coordinator can serve the worker's model
"""

from enum import Enum, auto


class Cause(Enum):
    """Why a call failed."""

    NOT_SENT = auto()
    """The worker was unreachable before the call was sent."""
    LOST = auto()
    """The connection or the worker was lost during the call. If the worker has restarted, the call may have crashed
    it."""
    FAILED = auto()
    """The worker hung or sent an invalid response. The call may be the reason."""


class WorkerUnreachableError(Exception):
    """A worker sent no valid response in time."""

    def __init__(self, reason: str, cause: Cause) -> None:
        super().__init__(reason)
        self.cause = cause


class WorkerRefusedError(Exception):
    """A worker's handler returned an error."""


class MismatchError(Exception):
    """A worker runs a model that does not match the one in use."""


class UnusableModelError(MismatchError):
    """The target worker's model cannot be served, and retrying does not help."""
