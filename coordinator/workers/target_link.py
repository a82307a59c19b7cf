"""The link to the target worker."""

import asyncio
import logging
import re
from typing import Any

import grpc

from coordinator.drafting.costs import UNKNOWN_VERIFY
from coordinator.prompts.tokenizer import TargetTokenizer
from coordinator.scheduling.counters import Timed
from coordinator.workers.backoff import Breaker
from coordinator.workers.errors import Cause, MismatchError
from coordinator.workers.link import PROBE_TIMEOUT_SECONDS, WorkerLink, timed
from coordinator.workers.streams import RoundCalls
from specpool.protocol.answers import MisfitError, decoded, read_tokenizer, read_verdicts
from specpool.protocol.codec import verify_request
from specpool.protocol.rounds import Verdict, VerifyItem
from specpool.v1 import common_pb2, target_worker_pb2, target_worker_pb2_grpc

log = logging.getLogger(__name__)

LONGEST_REST_SECONDS = 2.0


class TargetLink(WorkerLink):
    """The target worker; `tokenizer` is set as soon as the worker was ready once."""

    _unknown_times = UNKNOWN_VERIFY
    tokenizer: TargetTokenizer | None = None

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return target_worker_pb2_grpc.TargetWorkerServiceStub(channel)

    def _make_rounds(self) -> RoundCalls:
        return RoundCalls(self._stub.VerifyStream, self._stub.Verify, self._timeout)

    def _make_breaker(self) -> Breaker:
        return Breaker(LONGEST_REST_SECONDS, forgiven_after=0)  # every request waits for the target

    def _rests(self) -> tuple[float, float]:
        return 0.0, 0.05

    async def _check(self, info: common_pb2.ModelInfo) -> None:
        if self.info is not None:
            before, now = _lasting(self.info), _lasting(info)
            # More positions than before do no harm: sequences in flight have reserved fewer.
            now["max_model_len"] = min(info.max_model_len, self.info.max_model_len)
            for field in FINGERPRINTS:  # of a worker that has none, nothing is learned
                setattr(info, field, getattr(info, field) or getattr(self.info, field))
            for field in before:
                if before[field] != now[field] and ((before[field] and now[field]) or field not in FINGERPRINTS):
                    reason = f"{field} was {before[field]}, is {now[field]}"
                    raise MismatchError(f"the target worker would finish sequences in flight differently: {reason}")
            return
        files = await self._stub.GetTokenizer(target_worker_pb2.GetTokenizerRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        files = decoded(files, "tokenizer")
        try:  # in a thread, because a large vocabulary takes a while
            self.tokenizer = await asyncio.to_thread(TargetTokenizer, read_tokenizer(files), info.vocab_size)
        except ValueError as error:
            raise MisfitError(f"its tokenizer cannot be used: {error}") from None

    def _refuse(self, error: MismatchError) -> None:
        """Ends the coordinator: it must be started again for the other model."""
        super()._refuse(error)
        raise error

    async def verify(
        self, round_id: int, items: list[VerifyItem], traceparent: str = ""
    ) -> tuple[list[Verdict], Timed]:
        """Runs a round's verification. If the answer does not fit, the round is sent once more: a repeated round gets
        the same answer. `traceparent`: the span that the call is part of. WorkerUnreachableError, WorkerRefusedError.
        """
        request = verify_request(self._coordinator_id, round_id, items, traceparent)
        try:
            return await self._verify(request, items)
        except MisfitError as error:
            log.error("worker at %s gave an answer that does not fit: %s", self.address, error)
            self._rounds.close()  # a stream that is out of step stays so
        try:
            return await self._verify(request, items)
        except MisfitError as error:
            raise self._lost(f"twice it gave an answer that does not fit: {error}", Cause.FAILED) from None

    async def _verify(
        self, request: target_worker_pb2.VerifyRequest, items: list[VerifyItem]
    ) -> tuple[list[Verdict], Timed]:
        response, elapsed = await self._round(request)
        return read_verdicts(response, request.round_id, items, self.vocab_size), timed(elapsed, response)


# Compared only if both workers have them.
FINGERPRINTS = ("weights_fingerprint", "numerics_fingerprint")


def _lasting(info: common_pb2.ModelInfo) -> dict[str, object]:
    """Properties of a worker that decide the tokens of a sequence, and whether it fits. Logits are bit-identical on
    devices of one kind only; the index of a device does not matter."""
    fields = ("model", "tokenizer_fingerprint", "vocab_size", "parameters", "dtype", "max_model_len", *FINGERPRINTS)
    return {
        **{field: getattr(info, field) for field in fields},
        "device": re.sub(r":\d+", "", info.device, count=1),
        "equivalence": common_pb2.Equivalence.Name(info.equivalence),
    }
