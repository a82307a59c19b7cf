"""The target worker's RPCs: protobuf in, protobuf out, and the verifier in between."""

from collections.abc import AsyncIterator
from typing import Any

from specpool.protocol.codec import read_verify_items, require_coordinator, tokenizer_response, verify_response
from specpool.protocol.rounds import Verdict
from specpool.rpc.server.callers import client_of
from specpool.v1 import target_worker_pb2 as pb
from specpool.v1 import target_worker_pb2_grpc
from specpool.worker.servicer import WorkerServicer
from target_worker.verifier import Verifier


class TargetWorkerServicer(WorkerServicer, target_worker_pb2_grpc.TargetWorkerServiceServicer):
    """Servicer of `specpool.v1.TargetWorkerService`."""

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        """Realigns, extends and verifies one round."""
        response: pb.VerifyResponse = await self._traced("verify", request, self._verify)
        return response

    async def _verify(self, request: pb.VerifyRequest) -> pb.VerifyResponse:
        require_coordinator(request.coordinator_id)
        name = f"Verify (round {request.round_id}, {len(request.items)} sequences)"

        def verify(verifier: Verifier) -> tuple[list[Verdict], dict[str, int]]:
            items = read_verify_items(request, verifier.limits(request.coordinator_id))
            return self._host.timed(verifier, lambda: verifier.verify(request.coordinator_id, request.round_id, items))

        return verify_response(request.round_id, *await self._host.run(verify, request.coordinator_id, name))

    async def VerifyStream(
        self, requests: AsyncIterator[pb.VerifyRequest], context: Any
    ) -> AsyncIterator[pb.VerifyResponse]:
        """Answers a stream of rounds."""
        async for response in self._host.streams.each(
            requests, lambda request: self.Verify(request, context), client_of(context)
        ):
            yield response

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        """Sends the target's tokenizer."""
        return tokenizer_response(self._host.backend.tokenizer())
