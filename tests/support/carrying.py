"""A fake target worker that says that it carries a draft, but never drafts."""

from typing import Any

from serving import RecordingTarget

from specpool.v1 import common_pb2, target_worker_pb2


class CarryingTarget(RecordingTarget):
    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        """Describe the target, and a draft with the same numbers."""
        info = await super().GetWorkerInfo(request, context)
        draft = common_pb2.GetWorkerInfoResponse()
        draft.CopyFrom(info)
        info.draft.CopyFrom(draft)
        return info

    async def Verify(self, request: target_worker_pb2.VerifyRequest, context: Any) -> target_worker_pb2.VerifyResponse:
        """Claim that the draft took a microsecond."""
        response = await super().Verify(request, context)
        response.draft_ns = 1000
        return response
