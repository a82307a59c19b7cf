"""The link to the target worker."""

import asyncio
import logging
import re
from dataclasses import replace
from typing import Any

import grpc

from coordinator.drafting.costs import UNKNOWN_VERIFY
from coordinator.prompts.tokenizer import TargetTokenizer
from coordinator.scheduling.counters import Timed
from coordinator.workers.backoff import Backoff
from coordinator.workers.errors import Cause, MismatchError
from coordinator.workers.link import PROBE_TIMEOUT_SECONDS, WorkerLink, timed
from coordinator.workers.streams import RoundCalls
from specpool.protocol.codec import verify_request
from specpool.protocol.responses import InvalidResponseError, decoded, read_tokenizer, read_verdicts
from specpool.protocol.rounds import Verdict, VerifyItem
from specpool.v1 import common_pb2, target_worker_pb2, target_worker_pb2_grpc

log = logging.getLogger(__name__)

# Compared only if both workers report them.
FINGERPRINTS = ("weights_fingerprint", "numerics_fingerprint")


class TargetLink(WorkerLink):
    """The target worker. `tokenizer` is set after the worker was first ready."""

    _unknown_times = UNKNOWN_VERIFY
    tokenizer: TargetTokenizer | None = None
    chat_template: str | None = None
    """Replaces the model's chat templates."""

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return target_worker_pb2_grpc.TargetWorkerServiceStub(channel)

    def _make_rounds(self) -> RoundCalls:
        return RoundCalls(self._stub.VerifyStream, self._stub.Verify, self._timeout)

    def _make_backoff(self) -> Backoff:
        return Backoff(first=0.0, second=0.05, maximum=2.0, reset_after=0)  # every request waits for the target

    async def _check(self, info: common_pb2.ModelInfo) -> None:
        if self.info is not None:
            self._check_same_model(self.info, info)
            return
        response = await self._stub.GetTokenizer(target_worker_pb2.GetTokenizerRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        files = read_tokenizer(decoded(response, "tokenizer"))
        if self.chat_template is not None:
            files = replace(files, chat_template=self.chat_template, tool_chat_template="")
        try:  # in a thread: large vocabularies take a while
            self.tokenizer = await asyncio.to_thread(TargetTokenizer, files, info.vocab_size)
        except ValueError as error:
            raise InvalidResponseError(f"unusable tokenizer: {error}") from None

    @staticmethod
    def _check_same_model(known: common_pb2.ModelInfo, info: common_pb2.ModelInfo) -> None:
        """Check a restarted worker. Keep known fingerprints that the worker does not report. Raises MismatchError."""
        before, now = _identity(known), _identity(info)
        # A larger max_model_len is fine: sequences in flight have reserved fewer positions.
        now["max_model_len"] = min(info.max_model_len, known.max_model_len)
        for field in FINGERPRINTS:
            setattr(info, field, getattr(info, field) or getattr(known, field))
        for field in before:
            if before[field] != now[field] and ((before[field] and now[field]) or field not in FINGERPRINTS):
                reason = f"{field} was {before[field]}, is {now[field]}"
                raise MismatchError(f"the target worker would finish sequences in flight differently: {reason}")

    def _refuse(self, error: MismatchError) -> None:
        """Stop the coordinator. It must be restarted for another model."""
        super()._refuse(error)
        raise error

    async def verify(
        self, round_id: int, items: list[VerifyItem], traceparent: str = ""
    ) -> tuple[list[Verdict], Timed]:
        """Run a target round. Raises WorkerUnreachableError, WorkerRefusedError.

        An invalid response is retried once, since a repeated round gets the same answer. `traceparent`: parent span.
        """
        request = verify_request(self._coordinator_id, round_id, items, traceparent)
        try:
            return await self._verify(request, items)
        except InvalidResponseError as error:
            log.error("invalid response of the worker at %s: %s", self.address, error)
            self._rounds.close()  # a desynchronized stream does not recover
        try:
            return await self._verify(request, items)
        except InvalidResponseError as error:
            raise self._lost(f"invalid response, twice: {error}", Cause.FAILED) from None

    async def _verify(
        self, request: target_worker_pb2.VerifyRequest, items: list[VerifyItem]
    ) -> tuple[list[Verdict], Timed]:
        response, elapsed = await self._round(request)
        return read_verdicts(response, request.round_id, items, self.vocab_size), timed(elapsed, response)


def _identity(info: common_pb2.ModelInfo) -> dict[str, object]:
    """Return the properties that decide the tokens of a sequence and whether it fits.

    Logits are bit-identical on devices of the same kind only. The device index does not matter.
    """
    fields = ("model", "tokenizer_fingerprint", "vocab_size", "parameters", "dtype", "max_model_len", *FINGERPRINTS)
    return {
        **{field: getattr(info, field) for field in fields},
        "device": re.sub(r":\d+", "", info.device, count=1),
        "equivalence": common_pb2.Equivalence.Name(info.equivalence),
    }
