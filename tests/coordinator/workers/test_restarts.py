"""Replaced workers: links check them before use, and release leftover sequences."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from replaced_targets import OtherTarget, ServiceTarget
from serving import PATIENCE_SECONDS, RecordingDraft, RecordingTarget, make_request, serving

from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.workers.draft_link import DraftLink
from coordinator.workers.interface import MismatchError
from coordinator.workers.states import LinkState
from coordinator.workers.target_link import TargetLink
from specpool.rpc.security.channel import Connector
from specpool.testing import FakeDraft, FakeTarget, FakeWorker
from specpool.v1 import common_pb2

NO_PROBE_SECONDS = 3600.0
BITS_OF_ONE = {"weights_fingerprint": "weights", "numerics_fingerprint": "one"}
BITS_OF_TWO = {"weights_fingerprint": "weights", "numerics_fingerprint": "two"}


async def test_target_replaced_while_idle_is_checked_before_use() -> None:
    target, other = ServiceTarget(), OtherTarget(fingerprint="other")
    with pytest.raises(MismatchError, match="fingerprint"):  # noqa: PT012 - raised when the service ends
        async with serving(target, with_draft=False, probe_seconds=NO_PROBE_SECONDS) as served:
            stopped = asyncio.create_task(served.process.wait_stopped())
            await target.replace(other)
            with pytest.raises(grpc.aio.AioRpcError):
                await served.stub.Generate(make_request())
            assert other.requests == []
            await stopped


class DescribedTarget(FakeTarget):
    """A target with changes to its model description."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.change(**changes)

    def change(self, rank_devices: Sequence[str] = (), **changes: Any) -> None:
        self.rank_devices, self.changes = rank_devices, changes

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        response = await super().GetWorkerInfo(request, context)
        for field in self.changes:
            response.model.ClearField(field)
        response.model.MergeFrom(common_pb2.ModelInfo(**self.changes))
        return response


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        ({"device": "cpu"}, {"device": "cuda:0 (NVIDIA H200)"}, r"device was cpu, is cuda \(NVIDIA H200\)"),
        ({"device": "cuda:0 (NVIDIA A100)"}, {"device": "cuda:0 (NVIDIA H200)"}, "device was"),
        ({"device": "cuda:0 (NVIDIA H200)"}, {"device": "cuda:1 (NVIDIA H200)"}, None),
        ({}, {"equivalence": common_pb2.EQUIVALENCE_NUMERIC}, "was bitwise, is numeric"),
        ({"max_model_len": 64}, {"max_model_len": 63}, "max_model_len was 64, is 63"),
        ({"max_model_len": 64}, {"max_model_len": 65}, None),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "dtype was float32, is bfloat16"),
        ({"activations": "int8"}, {"activations": "float32"}, "activations was int8, is float32"),
        ({"activations": "int8"} | BITS_OF_ONE, {"activations": "float32"} | BITS_OF_TWO, "activations was int8"),
        ({"activations": "int8"}, {"activations": "int8"}, None),
        ({"notes": ["fast"]}, {"notes": ["slow"]}, None),
        (BITS_OF_ONE, BITS_OF_ONE | {"rank_devices": ["cpu", "cpu"]}, None),
        (BITS_OF_ONE | {"rank_devices": ["cpu"] * 3}, BITS_OF_ONE | {"rank_devices": ["cpu"] * 2}, None),
        (BITS_OF_ONE | {"rank_devices": ["cpu", "cpu"]}, BITS_OF_ONE, None),
        (BITS_OF_ONE, BITS_OF_TWO | {"rank_devices": ["cpu", "cpu"]}, "numerics_fingerprint was one, is two"),
    ],
)
async def test_restarted_target_must_run_the_same_model(
    before: dict[str, Any], now: dict[str, Any], reason: str | None, tokenizers: TokenizerPool
) -> None:
    target = DescribedTarget(**before)
    link = TargetLink(Connector(await target.start()), "c", PATIENCE_SECONDS, tokenizers)
    try:
        await link._probe()
        target.change(**now)
        link._lost(grpc.StatusCode.UNAVAILABLE, "told to be lost")
        if reason is None:
            await link._probe()
            assert link.is_ready
        else:
            with pytest.raises(MismatchError, match=reason):
                await link._probe()
            assert link.state is LinkState.REFUSED
    finally:
        await link.close()
        await target.stop()


async def test_draft_is_described_after_the_target(tokenizers: TokenizerPool) -> None:
    """An earlier description could be of a draft worker that was since replaced."""
    target = FakeTarget()
    draft = FakeDraft(target, fingerprint="fake")
    target_link = TargetLink(Connector(await target.start()), "c", PATIENCE_SECONDS, tokenizers)
    draft_link = DraftLink(Connector(await draft.start()), "c", PATIENCE_SECONDS, target_link)
    try:
        probing = asyncio.create_task(draft_link._probe())
        await asyncio.sleep(0.2)
        assert (draft_link.state, draft_link.reason) == (LinkState.CONNECTING, "waiting for the target")
        draft.fingerprint = "other"
        await target_link._probe()
        await asyncio.wait_for(probing, PATIENCE_SECONDS)
        assert draft_link.state is LinkState.REFUSED
    finally:
        for link in (draft_link, target_link):
            await link.close()
        for worker in (draft, target):
            await worker.stop()


class SlowToRelease(RecordingDraft):
    """Serves releases only once `may_release` is set."""

    def __init__(self, *arguments: Any, **knobs: Any) -> None:
        super().__init__(*arguments, **knobs)
        self.may_release = asyncio.Event()

    async def Release(self, request: Any, context: Any) -> Any:
        await self.may_release.wait()
        return await super().Release(request, context)


async def test_target_slots_are_freed_without_waiting_for_the_draft() -> None:
    target = RecordingTarget()
    draft = SlowToRelease(target)
    async with serving(target, draft, max_num_seqs=1) as served:
        for _ in range(5):
            await served.expect(make_request())
        await served.until(lambda info: info.target.load.slots_in_use == 0)
        assert (draft.releases, len(draft.caches)) == (0, 5)
        draft.may_release.set()
        await served.until_idle()
        assert draft.releases == 2, "the first sequence, then all others"


async def test_stopping_coordinator_frees_all_slots() -> None:
    unreleased: dict[Any, Any] = {}

    class Counting(FakeWorker):
        async def stop(self) -> None:
            unreleased.update(self.caches)
            await super().stop()

    class CountingTarget(Counting, RecordingTarget): ...

    class CountingDraft(Counting, RecordingDraft): ...

    target = CountingTarget()
    async with serving(target, CountingDraft(target, delay=0.05), drain_seconds=0) as served:
        running = asyncio.ensure_future(served.stub.Generate(make_request(max_tokens=3000)))
        await served.until(lambda info: info.counters.completion_tokens > 5)
    assert unreleased == {}
    with pytest.raises(grpc.aio.AioRpcError):
        await running
