"""Fake workers with a named fault that corrupts a share of their answers."""

import inspect
import random
from typing import Any

import grpc
from lab.faults import OWN_DRAFTS, PROPOSALS, ROUNDS, VERDICTS, Answer, Fault, RefusedError
from lab.info_faults import DESCRIPTIONS, TOKENIZERS

from specpool.rpc.status import ANSWERED
from specpool.testing import FakeDraft, FakeTarget, FakeWorker

TARGET_FAULTS = {"Verify": ROUNDS | VERDICTS, "GetWorkerInfo": DESCRIPTIONS, "GetTokenizer": TOKENIZERS}
DRAFT_FAULTS = {"Propose": ROUNDS | PROPOSALS, "GetWorkerInfo": DESCRIPTIONS}
"""Faults by the method whose answers they spoil, and by name."""


class Garbage(FakeWorker):
    """A fake worker with a fault."""

    faults: dict[str, dict[str, Fault]]

    def __init__(
        self,
        *arguments: Any,
        fault: str | None,
        share: float = 1.0,
        rounds: int | None = None,
        seed: int = 0,
        **knobs: Any,
    ) -> None:
        """`share`: share of answers that the fault spoils, drawn with `seed`. `rounds`: maximum number of spoiled
        answers; None: no limit."""
        super().__init__(*arguments, **knobs)
        self.share, self.rounds = share, rounds
        self.spoiled = 0
        """Number of spoiled answers."""
        self._interceptors = (_AnyPayload(),)
        self._random = random.Random(seed)
        self._answered, self._previous = 0, None
        self.spoil(fault)

    def spoil(self, fault: str | None) -> None:
        """Change the fault; None: answer correctly from now on. KeyError: unknown fault."""
        by_name = {name: (method, spoil) for method, table in self.faults.items() for name, spoil in table.items()}
        self._method, self._fault = by_name[fault] if fault is not None else ("", None)

    async def _answer(self, method: str, request: Any, response: Any, context: Any) -> Any:
        """The answer to a call, right or spoiled."""
        if self._fault is None or method != self._method:
            return response
        previous, self._previous = self._previous, response
        self._answered += 1
        if self._random.random() >= self.share or (self.rounds is not None and self.spoiled >= self.rounds):
            return response
        self.spoiled += 1
        answer = Answer(request, type(response).FromString(response.SerializeToString()), previous, self._answered)
        try:
            replaced = self._fault(answer)
            replaced = await replaced if inspect.isawaitable(replaced) else replaced
        except RefusedError as refusal:
            code, metadata = grpc.StatusCode[refusal.code], (ANSWERED,) if refusal.by_worker else ()
            return await context.abort(code, refusal.details, metadata)
        return answer.response if replaced is None else replaced

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:
        return await self._answer("GetWorkerInfo", request, await super().GetWorkerInfo(request, context), context)


class GarbageTarget(Garbage, FakeTarget):
    """A fake target with a fault of TARGET_FAULTS or OWN_DRAFTS."""

    faults = TARGET_FAULTS | {"Verify": TARGET_FAULTS["Verify"] | OWN_DRAFTS}

    async def Verify(self, request: Any, context: Any) -> Any:
        return await self._answer("Verify", request, await super().Verify(request, context), context)

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        return await self._answer("GetTokenizer", request, await super().GetTokenizer(request, context), context)


class GarbageDraft(Garbage, FakeDraft):
    """A fake draft worker with a fault of DRAFT_FAULTS."""

    faults = DRAFT_FAULTS

    async def Propose(self, request: Any, context: Any) -> Any:
        return await self._answer("Propose", request, await super().Propose(request, context), context)


class _AnyPayload(grpc.aio.ServerInterceptor):
    """Lets handlers return raw bytes instead of a message."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        return handler and handler._replace(response_serializer=_serialized)


def _serialized(response: Any) -> bytes:
    payload: bytes = response if isinstance(response, bytes) else response.SerializeToString()
    return payload
