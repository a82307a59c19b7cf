"""Wrong answers to rounds: garbage, and answers that only their round id or instance id gives away."""

import inspect
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from lab.faults import OWN_DRAFTS, PROPOSALS, ROUNDS, VERDICTS, Answer, Fault, RefusedError

from simulator.calls import AbortedError, Status
from simulator.model import EOS
from specpool.rpc.status import ANSWERED

if TYPE_CHECKING:
    from simulator.workers import Worker

# These depend on many rounds or real time, or have events of their own.
_OTHERS = {"flapping", "slow", "never", "a_million_tokens", "a_million_draft_tokens", "other_instance"}
_LOGPROBS = {name for name in VERDICTS if "logprobs" in name or "top_tokens" in name}
TARGET_GARBAGE = sorted((ROUNDS | VERDICTS).keys() - _OTHERS - _LOGPROBS)
DRAFT_GARBAGE = sorted((ROUNDS | PROPOSALS).keys() - _OTHERS)
OWN_DRAFT_GARBAGE = sorted(OWN_DRAFTS)
"""Names of faults in `lab.faults`."""
LOST, REPEATED = "lost", "repeated"
ANOTHER_ROUND, EARLIER_LIFE = "another_round", "earlier_life"


class Tampering:
    """Spoils the next answers of a worker."""

    def __init__(self, worker: "Worker", rng: random.Random) -> None:
        self.spoiled = 0
        """Number of spoiled answers."""
        self._worker, self._rng = worker, rng
        self._next: list[str] = []
        self._previous: Any = None
        self._number = 0

    def spoil(self, fault: str, count: int) -> None:
        """Apply a fault to the next answers."""
        self._next.extend([fault] * count)

    def clear(self) -> None:
        self._next.clear()

    async def answer(self, request: Any, serve: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer to a round: a message, or bytes. Raises AbortedError."""
        response = await serve(request)
        if self._next[:1] == [REPEATED]:
            self._next.pop(0)
            self.spoiled += 1
            return await serve(request)
        previous, self._previous = self._previous, response
        self._number += 1
        if not self._next:
            return response
        self.spoiled += 1
        answer = Answer(request, type(response).FromString(response.SerializeToString()), previous, self._number)
        try:
            spoiled = self._fault(self._next.pop(0))(answer)
            spoiled = await spoiled if inspect.isawaitable(spoiled) else spoiled
        except RefusedError as refusal:
            trailing = (ANSWERED,) if refusal.by_worker else ()
            raise AbortedError(Status(grpc.StatusCode[refusal.code], refusal.details, trailing)) from None
        return answer.response if spoiled is None else spoiled

    def _fault(self, name: str) -> Fault:
        own: dict[str, Callable[[Answer], Any]] = {
            LOST: self._lose,
            ANOTHER_ROUND: self._of_another_round,
            EARLIER_LIFE: self._of_an_earlier_life,
        }
        return own.get(name) or (ROUNDS | VERDICTS | PROPOSALS | OWN_DRAFTS)[name]

    def _lose(self, answer: Answer) -> None:
        """Cut the connection after serving the round."""
        self._worker.network.cut(self._worker.setup.address)

    def _of_another_round(self, answer: Answer) -> None:
        """Answer like another round, whose results happen to fit."""
        self._choose_otherwise(answer)
        answer.response.round_id += self._rng.choice([-1, 1, 7] if answer.response.round_id else [1, 7])

    def _of_an_earlier_life(self, answer: Answer) -> None:
        """Answer like an earlier process, whose results happen to fit."""
        self._choose_otherwise(answer)
        answer.response.instance_id = self._worker.former_id

    def _choose_otherwise(self, answer: Answer) -> None:
        """Replace the last token of each result, which keeps its shape."""
        for item, result in answer.pairs:
            tokens = result.token_ids if self._worker.is_target else result.draft_token_ids
            if tokens:
                rejected = [*item.draft_token_ids][len(tokens) - 1 : len(tokens)] if self._worker.is_target else []
                others = [token for token in range(EOS) if token not in (tokens[-1], *rejected)]
                tokens[-1] = self._rng.choice(others)
