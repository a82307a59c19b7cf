"""The link to the target worker."""

import re
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
            before, now = _lasting(self.info), _lasting(info)
            # More positions than before do no harm: sequences in flight have reserved fewer.
            now["max_model_len"] = min(info.max_model_len, self.info.max_model_len)
            for field in before:
                if before[field] != now[field]:
                    reason = f"{field} was {before[field]}, is {now[field]}"
                    raise MismatchError(f"the target worker would finish sequences in flight differently: {reason}")
            return
        files = await self._stub.GetTokenizer(target_worker_pb2.GetTokenizerRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        self.tokenizer = read_tokenizer(files)

    def _refuse(self, error: MismatchError) -> None:
        """Ends the coordinator: it must be started again for the other model."""
        super()._refuse(error)
        raise error

    async def verify(self, round_id: int, items: list[VerifyItem]) -> tuple[list[Verdict], Timed]:
        """Runs a round's verification. WorkerUnreachableError, WorkerRefusedError."""
        request = verify_request(self._coordinator_id, round_id, items)
        response, elapsed = await self._round(request)
        return read_verdicts(response), timed(elapsed, response)


def _lasting(info: common_pb2.ModelInfo) -> dict[str, object]:
    """Properties of a worker that decide the tokens of a sequence, and whether it fits. Logits are bit-identical on
    devices of one kind only; the index of a device does not matter."""
    fields = ("model", "tokenizer_fingerprint", "vocab_size", "parameters", "dtype", "max_model_len")
    return {
        **{field: getattr(info, field) for field in fields},
        "device": re.sub(r":\d+", "", info.device, count=1),
        "equivalence": common_pb2.Equivalence.Name(info.equivalence),
    }
