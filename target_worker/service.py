"""The target worker's RPCs: protobuf in, protobuf out, and the verifier in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from specpool.protocol.codec import read_verify_items, tokenizer_response, verify_response
from specpool.protocol.rounds import Verdict
from specpool.v1 import target_worker_pb2 as pb
from specpool.v1 import target_worker_pb2_grpc
from specpool.worker.servicer import WorkerServicer

if TYPE_CHECKING:
    from target_worker.verifier import Verifier


class TargetWorkerServicer(WorkerServicer, target_worker_pb2_grpc.TargetWorkerServiceServicer):
    """Servicer of `specpool.v1.TargetWorkerService`."""

    method = "Verify"
    respond = staticmethod(verify_response)

    @staticmethod
    def serve(request: pb.VerifyRequest, verifier: Verifier) -> list[Verdict]:
        """Verifies one round."""
        items = read_verify_items(request, verifier.limits(request.coordinator_id))
        return verifier.verify(request.coordinator_id, request.round_id, items)

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        """Realigns, extends and verifies one round."""
        response: pb.VerifyResponse = await self.round(request)
        return response

    async def VerifyStream(
        self, requests: AsyncIterator[pb.VerifyRequest], context: Any
    ) -> AsyncIterator[pb.VerifyResponse]:
        """Answers a stream of rounds."""
        async for response in self.rounds(requests, context):
            yield response

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        """Sends the target's tokenizer."""
        return tokenizer_response(self._host.backend.tokenizer())
