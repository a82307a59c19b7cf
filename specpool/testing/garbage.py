"""Fakes that answer garbage: a named fault spoils a share of their answers.

`TARGET_FAULTS` and `DRAFT_FAULTS` say which faults there are; each one's docstring says what it does.

    target = GarbageTarget(fault="tokens_after_the_vocabulary", share=0.2, rounds=50)
"""

import inspect
import random
from collections.abc import Mapping
from typing import Any

import grpc

from specpool.rpc.status import ANSWERED
from specpool.testing.fakes import FakeDraft, FakeTarget, FakeWorker
from specpool.testing.faults import Answer, Fault, RefusedError, faults_of
from specpool.testing.info_faults import DESCRIPTIONS, TOKENIZERS
from specpool.testing.propose_faults import PROPOSALS
from specpool.testing.round_faults import ROUNDS
from specpool.testing.verify_faults import VERDICTS

TARGET_FAULTS: Mapping[str, Fault] = faults_of(
    Verify=(ROUNDS, VERDICTS), GetWorkerInfo=(DESCRIPTIONS,), GetTokenizer=(TOKENIZERS,)
)
"""Faults of a target worker by name."""
DRAFT_FAULTS: Mapping[str, Fault] = faults_of(Propose=(ROUNDS, PROPOSALS), GetWorkerInfo=(DESCRIPTIONS,))
"""Faults of a draft worker by name."""


class _Garbage(FakeWorker):
    """Answers of a fake, some of them spoiled."""

    _faults: Mapping[str, Fault]

    def __init__(
        self,
        *arguments: Any,
        fault: str | None,
        share: float = 1.0,
        rounds: int | None = None,
        seed: int = 0,
        **knobs: Any,
    ) -> None:
        """`fault`: a name in the table; None: all is well. `share`: share of answers that are spoiled, drawn with
        `seed`.

        `rounds`: the greatest number of answers to spoil; None: no end. KeyError for an unknown fault.
        """
        super().__init__(*arguments, **knobs)
        self.share, self.rounds = share, rounds
        self.spoiled = 0
        """Number of answers that were spoiled."""
        self._interceptors = (_AnyPayload(),)
        self._random = random.Random(seed)
        self._answered = 0
        self._earlier: Any = None
        self.spoil(fault)

    def spoil(self, fault: str | None) -> None:
        """Changes to another fault; None: answers as a worker should from now on. KeyError for an unknown fault."""
        self.fault = self._faults[fault] if fault is not None else None

    async def _answer(self, method: str, request: Any, response: Any, context: Any) -> Any:
        """The answer to a request of a method, as it is or spoiled."""
        fault = self.fault
        if fault is None or fault.method != method:
            return response
        earlier, self._earlier = self._earlier, response
        self._answered += 1
        if self._random.random() >= self.share or (self.rounds is not None and self.spoiled >= self.rounds):
            return response
        self.spoiled += 1
        copy = type(response).FromString(response.SerializeToString())
        try:
            spoiled = fault.spoil(Answer(request, copy, earlier, self._answered))
            return await spoiled if inspect.isawaitable(spoiled) else spoiled
        except RefusedError as refusal:
            return await context.abort(
                grpc.StatusCode[refusal.code], refusal.details, (ANSWERED,) if refusal.by_worker else ()
            )

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:
        """Describes the fake, or something else."""
        return await self._answer("GetWorkerInfo", request, await super().GetWorkerInfo(request, context), context)


class GarbageTarget(_Garbage, FakeTarget):
    """A fake target with a fault of `TARGET_FAULTS`; its further knobs are those of `FakeTarget`."""

    _faults = TARGET_FAULTS

    async def Verify(self, request: Any, context: Any) -> Any:
        """Verifies, and spoils the verdicts."""
        return await self._answer("Verify", request, await super().Verify(request, context), context)

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        """Returns the byte tokenizer, or none."""
        return await self._answer("GetTokenizer", request, await super().GetTokenizer(request, context), context)


class GarbageDraft(_Garbage, FakeDraft):
    """A fake draft with a fault of `DRAFT_FAULTS`; its further arguments are those of `FakeDraft`."""

    _faults = DRAFT_FAULTS

    async def Propose(self, request: Any, context: Any) -> Any:
        """Drafts, and spoils the proposals."""
        return await self._answer("Propose", request, await super().Propose(request, context), context)


class _AnyPayload(grpc.aio.ServerInterceptor):
    """Lets handlers answer with bytes, which are sent as they are, instead of a message."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        return handler and handler._replace(response_serializer=_serialized)


def _serialized(response: Any) -> bytes:
    payload: bytes = response if isinstance(response, bytes) else response.SerializeToString()
    return payload
