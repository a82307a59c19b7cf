"""The link to the target worker."""

from typing import Any

import grpc

from coordinator.counters import Timed
from coordinator.drafting.costs import UNKNOWN_VERIFY
from coordinator.workers.link import PROBE_TIMEOUT_SECONDS, MismatchError, WorkerLink, timed
from coordinator.workers.streams import RoundCalls
from protocol.codec import read_tokenizer, read_verdicts, verify_request
from protocol.rounds import Verdict, VerifyItem
from protocol.tokenizer import TokenizerFiles
from specpool.v1 import common_pb2, target_worker_pb2, target_worker_pb2_grpc


class TargetLink(WorkerLink):
    """The target worker; `tokenizer` is set as soon as the worker was ready once."""

    _unknown_times = UNKNOWN_VERIFY
    tokenizer: TokenizerFiles | None = None

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return target_worker_pb2_grpc.TargetWorkerServiceStub(channel)

    def _make_rounds(self) -> RoundCalls:
        return RoundCalls(self._stub.VerifyStream, self._stub.Verify, self._timeout)

    async def _check(self, info: common_pb2.ModelInfo) -> None:
        if self.info is not None:
            # Sequences in flight were begun with the first model: another one would finish them differently.
            for field in ("model", "tokenizer_fingerprint", "vocab_size", "parameters", "dtype"):
                before, now = getattr(self.info, field), getattr(info, field)
                if before != now:
                    raise MismatchError(f"the target worker now runs another model: {field} was {before}, is {now}")
            return
        files = await self._stub.GetTokenizer(target_worker_pb2.GetTokenizerRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        self.tokenizer = read_tokenizer(files)

    async def _refuse(self, error: MismatchError) -> None:
        """Ends the coordinator: it must be started again for the other model."""
        await super()._refuse(error)
        raise error

    async def verify(self, round_id: int, items: list[VerifyItem]) -> tuple[list[Verdict], Timed]:
        """Runs a round's verification. WorkerUnreachableError, WorkerRefusedError."""
        request = verify_request(self._coordinator_id, round_id, items)
        response, elapsed = await self._answer(self._rounds(request))
        return read_verdicts(response), timed(elapsed, response)
