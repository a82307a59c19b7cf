"""Decides when to retry a call, how long to wait for a starting server, and what a repeated stream has delivered."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specpool.client.failures import is_permanent
from specpool.errors import (
    AlreadyExistsError,
    CallCancelledError,
    CertificateError,
    DeadlineExceededError,
    DivergedError,
    NotReadyError,
    ProtocolError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
)
from specpool.v1 import generation_pb2 as pb

# The server or the transport cancelled the call: calls that the client cancels never reach this code.
_RETRYABLE = (UnavailableError, CallCancelledError)
_FINAL = (ProtocolError, CertificateError)
# A disconnected request keeps its id and place until the server notices. Meanwhile, the queue may be full.
_RETRYABLE_AFTER_FAILURE = (*_RETRYABLE, AlreadyExistsError, ResourceExhaustedError)
TRANSIENT = (UnavailableError, DeadlineExceededError, ResourceExhaustedError)
"""Errors after which the server may recover soon."""
# Timers cannot handle longer timeouts.
MAX_TIMEOUT_SECONDS = 1e9
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 2.0

POLL_SECONDS = 0.2
# The server queries its workers before it answers, and they may be busy.
ANSWER_SECONDS = 10.0

ProgressCallback = Callable[[str], None]


class Retries:
    """Retries one call with exponential backoff while the server is unavailable or asks the client to wait.

    Retries end at the deadline, or after `patience` seconds of failures without progress.
    """

    def __init__(
        self,
        patience: float,
        timeout: float | None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`patience` and `timeout` in seconds. ValueError unless the timeout is positive."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout_seconds must be above 0, not {timeout}")
        if timeout is not None and timeout > MAX_TIMEOUT_SECONDS:
            timeout = None
        self._patience, self._clock, self._jitter = patience, clock, jitter
        self._deadline = None if timeout is None else clock() + timeout
        self._failing_since: float | None = None
        self._pause = MIN_BACKOFF_SECONDS

    @property
    def remaining(self) -> float | None:
        """Timeout of the next attempt in seconds."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def progress(self) -> None:
        """Record an answer of the server."""
        self._failing_since, self._pause = None, MIN_BACKOFF_SECONDS

    def pause(self, error: RequestError) -> float:
        """Seconds to wait before the next attempt. Raises the error if it is final."""
        now = self._clock()
        delay = error.retry_after if isinstance(error, ResourceExhaustedError) else None
        retryable = _RETRYABLE if self._failing_since is None else _RETRYABLE_AFTER_FAILURE
        if isinstance(error, _FINAL) or (not isinstance(error, retryable) and delay is None):
            raise error
        if self._failing_since is None:
            self._failing_since = now
        # Jitter: clients that were refused together must not retry together.
        pause = self._pause * self._jitter(0.5, 1.0) + (delay or 0.0) * self._jitter(1.0, 1.5)
        if now + pause > min(self._failing_since + self._patience, self._deadline or float("inf")):
            raise error
        self._pause = min(2 * self._pause, MAX_BACKOFF_SECONDS)
        return pause


@dataclass
class _Delivered:
    """The part of a sample that the caller already has."""

    token_ids: list[int] = field(default_factory=list)
    characters: int = 0
    complete: bool = False


class Replay:
    """Filters a repeated stream, so that it continues where the previous stream broke."""

    def __init__(self) -> None:
        self._delivered: dict[int, _Delivered] = {}
        self._position: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        self._position = {}

    def fresh(self, message: pb.GenerateStreamResponse) -> pb.GenerateStreamResponse | None:
        """Return the undelivered part of a message; None if there is none. Raises DivergedError."""
        is_end = message.HasField("complete")
        index = message.complete.index if is_end else message.chunk.index
        delivered = self._delivered.setdefault(index, _Delivered())
        if delivered.complete:
            return None
        if is_end:
            # A repeated request may have been aborted earlier than the first one.
            common = len(message.complete.token_ids) if message.complete.finish_reason == "abort" else None
            if list(message.complete.token_ids[: len(delivered.token_ids)]) != delivered.token_ids[:common]:
                raise DivergedError(f"sample {index} ended differently")
            delivered.complete = True
            return message
        tokens, characters = self._position.get(index, (0, 0))
        chunk = message.chunk
        self._position[index] = tokens + len(chunk.token_ids), characters + len(chunk.text)
        repeated = min(len(chunk.token_ids), max(0, len(delivered.token_ids) - tokens))
        if list(chunk.token_ids[:repeated]) != delivered.token_ids[tokens : tokens + repeated]:
            raise DivergedError(f"sample {index} has other tokens from position {tokens}")
        text = chunk.text[max(0, delivered.characters - characters) :]
        if repeated == len(chunk.token_ids) and not text:
            return None
        delivered.token_ids.extend(chunk.token_ids[repeated:])
        delivered.characters += len(text)
        new = pb.GenerateChunk(
            index=index, text=text, token_ids=chunk.token_ids[repeated:], logprobs=chunk.logprobs[repeated:]
        )
        return pb.GenerateStreamResponse(
            request_id=message.request_id, chunk=new, starts_in_reasoning=message.starts_in_reasoning
        )


class Readiness:
    """Follows the startup of a server. The timeout restarts whenever the server reports that it is loading."""

    def __init__(
        self, patience: float, on_progress: ProgressCallback | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`patience`: timeout in seconds."""
        self._patience, self._on_progress, self._clock = patience, on_progress, clock
        self._shown = ""
        self._alive_at = self._clock()

    @property
    def answer_seconds(self) -> float:
        """Timeout of the next query."""
        return min(ANSWER_SECONDS, max(POLL_SECONDS, self._alive_at + self._patience - self._clock()))

    def is_ready(self, info: pb.GetServerInfoResponse) -> bool:
        """Return whether the server can generate. Raises NotReadyError if it never will, or after too long."""
        target = info.target
        if target.state == "ready":
            return True
        if target.state in ("failed", "refused"):
            raise NotReadyError(f"the target worker cannot start: {target.reason}")
        if target.state == "loading":
            self._alive_at = self._clock()
            self._show(target.reason)
        else:
            self._show("waiting for the target worker")
        if self._is_over:
            raise NotReadyError(f"the target worker is {target.state}: {target.reason}")
        return False

    def unanswered(self, error: RequestError) -> None:
        """Record a failed query. Raises the error if it is final, or after too long."""
        if is_permanent(error) or not isinstance(error, TRANSIENT) or self._is_over:
            raise error
        self._show("no answer")

    @property
    def _is_over(self) -> bool:
        return self._clock() >= self._alive_at + self._patience

    def _show(self, text: str) -> None:
        if text != self._shown and self._on_progress is not None:
            self._on_progress(text)
        self._shown = text
