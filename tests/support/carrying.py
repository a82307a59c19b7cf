"""A fake target worker that carries a draft."""

import asyncio
import random
import time
from typing import Any

from serving import RecordingTarget

from specpool.v1 import common_pb2, target_worker_pb2

Key = tuple[str, int]
Draft = tuple[int, list[int]]
"""Number of tokens before the draft, and the draft tokens."""


class CarryingTarget(RecordingTarget):
    """Drafts the target's choice with probability `acceptance`, and another token otherwise."""

    def __init__(self, acceptance: float = 0.7, step_seconds: float | None = None, **knobs: Any) -> None:
        """`step_seconds`: duration of a draft step; None: no delay."""
        super().__init__(**knobs)
        self.acceptance, self.step_seconds = acceptance, step_seconds
        self.draft_fingerprint = self.fingerprint
        self._rng = random.Random(0)
        self.drafts: dict[Key, Draft] = {}
        self._found: dict[Key, tuple[int, Draft]] = {}
        """The last round of each sequence, and the draft that it found. A repeated round finds the same draft."""
        self._rows: list[int] = []
        """Rows of each draft step in the running round."""

    def forget(self) -> None:
        super().forget()
        self.drafts.clear()
        self._found.clear()

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        info, draft = [await super(CarryingTarget, self).GetWorkerInfo(request, context) for _ in range(2)]
        info.draft.CopyFrom(draft)
        info.draft.model.model, info.draft.model.tokenizer_fingerprint = "carried", self.draft_fingerprint
        info.draft.ClearField("costs")
        if self.step_seconds is not None:
            info.draft.costs.rows.extend([1, 64])
            info.draft.costs.seconds.extend([self.step_seconds] * 2)
        return info

    async def Verify(self, request: target_worker_pb2.VerifyRequest, context: Any) -> target_worker_pb2.VerifyResponse:
        self._rows = []
        response = await super().Verify(request, context)
        if self._rows:
            began = time.perf_counter_ns()
            await asyncio.sleep((self.step_seconds or 0.0) * len(self._rows))
            response.draft_ns = time.perf_counter_ns() - began
            response.draft_rows.extend(self._rows)
        return response

    def _verify(self, key: Key, item: target_worker_pb2.VerifyItem, round_id: int) -> target_worker_pb2.VerifyResult:
        if not item.HasField("own_draft"):
            return super()._verify(key, item, round_id)
        drafted = self._drafted(key, item, round_id)
        verified = drafted[: item.own_draft.max_verified]
        verifying = target_worker_pb2.VerifyItem()
        verifying.CopyFrom(item)
        if verified:
            verifying.ClearField("branches")
            verifying.draft_token_ids[:] = verified
        result = super()._verify(key, verifying, round_id)
        result.own_draft.status = result.status
        if result.status == common_pb2.ITEM_STATUS_OK:
            result.own_draft.draft_token_ids[:] = drafted
            result.own_draft.num_verified, result.own_draft.cached_length = len(verified), len(self.caches[key])
            self._draft(key, item, [*self.caches[key], *result.token_ids[-1:]])
        return result

    def _drafted(self, key: Key, item: target_worker_pb2.VerifyItem, round_id: int) -> list[int]:
        """Return the draft that begins where the item ends."""
        last, found = self._found.get(key, (None, (0, [])))
        if last != round_id:
            found = self.drafts.get(key, (0, []))
        self._found[key] = round_id, found
        if item.HasField("after_round_id"):
            begin = len(self.caches[key]) + 1 if self._continues(key, item) else 0
        else:
            begin = item.base_length + 1 if len(item.token_ids) == 1 and not item.prefill_only else 0
        return found[1] if found[0] == begin else []

    def _draft(self, key: Key, item: target_worker_pb2.VerifyItem, context: list[int]) -> None:
        """Draft for the next round."""
        limit = min(item.own_draft.num_draft_tokens, item.own_draft.max_length - len(context))
        drafted: list[int] = []
        while not item.prefill_only and len(drafted) < limit:
            right = self.choose([*context, *drafted])
            drafted.append(right if self._rng.random() < self.acceptance else (right + 1) % 200)
        self._rows += [0] * (len(drafted) - len(self._rows))
        for step in range(len(drafted)):
            self._rows[step] += 1
        self.drafts[key] = len(context), drafted
