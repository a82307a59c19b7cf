"""The target worker's RPCs: protobuf in, protobuf out, and the verifier in between."""

from collections.abc import AsyncIterator
from typing import Any

from engine.sampling import SamplingParams
from protocol.sampling import logprobs_message
from rpc.errors import InvalidArgumentError
from specpool.v1 import target_worker_pb2 as pb
from specpool.v1 import target_worker_pb2_grpc
from target_worker.verifier import Verdict, Verifier, VerifyItem
from worker.service import (
    RoundLimits,
    WorkerServicer,
    check_item,
    extension_fields,
    require_coordinator,
    round_limits,
    timed,
    wire_status,
)


class TargetWorkerServicer(WorkerServicer, target_worker_pb2_grpc.TargetWorkerServiceServicer):
    """`specpool.v1.TargetWorkerService`."""

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        """Realigns, extends and verifies one round."""
        require_coordinator(request.coordinator_id)

        def verify(verifier: Verifier) -> tuple[list[Verdict], dict[str, int]]:
            items = _items(request, round_limits(verifier, request.coordinator_id))
            return timed(verifier, lambda: verifier.verify(request.coordinator_id, request.round_id, items))

        verdicts, spent = await self._host.run(verify, request.coordinator_id)
        results = [
            pb.VerifyResult(
                sequence_id=item.sequence_id,
                status=wire_status(verdict.realignment),
                token_ids=verdict.token_ids,
                cached_length=verdict.cached_length,
                logprobs=map(logprobs_message, verdict.logprobs),
            )
            for item, verdict in zip(request.items, verdicts, strict=True)
        ]
        return pb.VerifyResponse(round_id=request.round_id, results=results, **spent)

    async def VerifyStream(
        self, requests: AsyncIterator[pb.VerifyRequest], context: Any
    ) -> AsyncIterator[pb.VerifyResponse]:
        """Round after round."""
        async for response in self._host.each(requests, lambda request: self.Verify(request, context)):
            yield response

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        """The target's tokenizer."""
        files = await self._host.run(lambda verifier: verifier.tokenizer())
        return pb.GetTokenizerResponse(
            tokenizer_json=files.tokenizer_json,
            chat_template=files.chat_template,
            special_tokens=files.special_tokens,
            eos_token_ids=files.eos_token_ids,
        )


def _items(request: pb.VerifyRequest, limits: RoundLimits) -> list[VerifyItem]:
    seen: set[int] = set()
    for index, item in enumerate(request.items):
        check_item(index, item, limits, len(item.draft_token_ids), seen)
        if item.draft_token_ids and item.prefill_only:
            raise InvalidArgumentError(f"items[{index}].draft_token_ids", "must be empty with prefill_only")
        if item.draft_token_ids and max(item.draft_token_ids) >= limits.vocab_size:
            largest = max(item.draft_token_ids)
            raise InvalidArgumentError(f"items[{index}].draft_token_ids", f"{largest} is not below {limits.vocab_size}")
    return [
        VerifyItem(
            **extension_fields(item, index, SamplingParams),
            draft_token_ids=tuple(item.draft_token_ids),
            prefill_only=item.prefill_only,
            logprobs=item.logprobs if item.HasField("logprobs") else None,
        )
        for index, item in enumerate(request.items)
    ]
