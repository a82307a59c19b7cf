"""The coordinator's traces of requests and rounds. Here nothing is recorded; `coordinator.tracing.recorded` records."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from coordinator.requests.generation import Generation
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.grouping import Group

Messages: TypeAlias = Sequence[tuple[str, str]]
"""A prompt as (role, text)."""


@dataclass(frozen=True)
class Asked:
    """What is known of a call before its request is validated."""

    operation: str
    """As the GenAI conventions name it: "chat" or "text_completion"."""
    stream: bool
    metadata: Iterable[tuple[str, Any]]
    """Metadata of the call, with its caller's trace if there is one."""
    messages: Callable[[], Messages] = tuple
    """The prompt, if it came as text; empty if it came as token ids."""


class RequestTrace:
    """The trace of one request."""

    def follow(self, generation: Generation) -> None:
        """Takes in the generation that answers the request, once it has begun."""

    def failed(self, error: BaseException) -> None:
        """Notes why the request ends, where the call itself will only see a cancellation."""


class RoundTrace:
    """The trace of one round."""

    def calling(self, method: str, round_id: int) -> AbstractContextManager[str]:
        """A context in which a worker is called, with the `traceparent` to send along; empty if there is none.
        `method`: "propose" or "verify"."""
        return _CALLING_UNTRACED

    def committed(self, round_id: int, commits: Sequence[Commit], cache_misses: int) -> None:
        """Notes the tokens that the round gained."""


class Traces:
    """The traces of a coordinator."""

    def request(self, asked: Callable[[], Asked]) -> AbstractContextManager[RequestTrace]:
        """A context in which the request of a call is served."""
        return _UNTRACED_REQUEST

    def round(self, group: Group) -> AbstractContextManager[RoundTrace]:
        """A context in which the round of a group runs."""
        return _UNTRACED_ROUND


_CALLING_UNTRACED = nullcontext("")
_UNTRACED_REQUEST = nullcontext(RequestTrace())
_UNTRACED_ROUND = nullcontext(RoundTrace())
UNTRACED = Traces()
"""For a coordinator without traces."""
