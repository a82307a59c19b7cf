"""Retries that deliver nothing twice: when to try again, and which part of a repeated stream is new."""

import random
import time
from dataclasses import dataclass, field

import grpc

from specpool.rpc.status import retry_delay
from specpool.v1 import generation_pb2 as pb

# CANCELLED here comes from the server or the transport: calls that clients cancelled themselves never get here.
_RETRYABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
# A request that was cut off stays in flight under its id until the server notices; by then its place may be taken.
_RETRYABLE_ONCE_CUT_OFF = {grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED}
# Timers cannot count longer ones, and nobody waits that long.
LONGEST_TIMEOUT_SECONDS = 1e9
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0


class DivergedError(Exception):
    """A repeated request gave other tokens than before: the target's model has changed, or it is not bitwise exact."""


class Retries:
    """One call and the attempts to make it. A call is tried again while the server is UNAVAILABLE, or says how long to
    wait, with growing pauses, for `patience` seconds since it last answered anything and at most until the deadline."""

    def __init__(self, patience: float, timeout: float | None) -> None:
        """`patience` and `timeout` in seconds. ValueError for a timeout that is not above 0."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout_seconds must be above 0, not {timeout}")
        if timeout is not None and timeout > LONGEST_TIMEOUT_SECONDS:
            timeout = None
        self._patience = patience
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._failing_since: float | None = None
        self._pause = SHORTEST_PAUSE_SECONDS

    @property
    def remaining(self) -> float | None:
        """Seconds that the next attempt may take."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def progress(self) -> None:
        """Notes that the server answered."""
        self._failing_since, self._pause = None, SHORTEST_PAUSE_SECONDS

    def pause(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt. Raises the error if there should be none."""
        now = time.monotonic()
        delay = retry_delay(error) if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else None
        retryable = _RETRYABLE if self._failing_since is None else _RETRYABLE | _RETRYABLE_ONCE_CUT_OFF
        if error.code() not in retryable and delay is None:
            raise error
        if self._failing_since is None:
            self._failing_since = now
        # Clients that were refused together do not come back together.
        pause = self._pause * random.uniform(0.5, 1.0) + (delay or 0.0) * random.uniform(1.0, 1.5)
        ends = min(self._failing_since + self._patience, self._deadline or float("inf"))
        if now + pause > ends:
            raise error
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return pause


@dataclass
class _Delivered:
    """The part of one sample that the caller has."""

    token_ids: list[int] = field(default_factory=list)
    characters: int = 0
    complete: bool = False


class Replay:
    """A filter that leaves out of a repeated stream what was delivered: it goes on where the first one broke off."""

    def __init__(self) -> None:
        self._delivered: dict[int, _Delivered] = {}
        self._position: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """Begins a stream, the first one or a repeated one."""
        self._position = {}

    def fresh(self, message: pb.GenerateStreamResponse) -> pb.GenerateStreamResponse | None:
        """The new part of a message; None if nothing in it is new. DivergedError."""
        is_end = message.HasField("complete")
        index = message.complete.index if is_end else message.chunk.index
        delivered = self._delivered.setdefault(index, _Delivered())
        if delivered.complete:
            return None
        if is_end:
            # A repeated request that was aborted may have ended before it came as far as the first one.
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
            raise DivergedError(f"sample {index} has other tokens from its token {tokens} on")
        text = chunk.text[max(0, delivered.characters - characters) :]
        if repeated == len(chunk.token_ids) and not text:
            return None
        delivered.token_ids.extend(chunk.token_ids[repeated:])
        delivered.characters += len(text)
        new = pb.GenerateChunk(
            index=index, text=text, token_ids=chunk.token_ids[repeated:], logprobs=chunk.logprobs[repeated:]
        )
        return pb.GenerateStreamResponse(request_id=message.request_id, chunk=new)
