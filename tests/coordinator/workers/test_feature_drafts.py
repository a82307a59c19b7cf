"""Drafts that read the target's hidden states are used only with a target that returns these."""

import logging
from typing import Any

import pytest
from serving import RecordingTarget, make_request, serving

from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import common_pb2


class StatefulTarget(RecordingTarget):
    """Has 30 layers, and returns features of any size."""

    returns_features = True
    features = b""

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        info = await super().GetWorkerInfo(request, context)
        info.model.hidden_size, info.model.num_layers = 8, 30
        info.load.returns_features = self.returns_features
        return info

    async def Verify(self, request: Any, context: Any) -> Any:
        response = await super().Verify(request, context)
        for result in response.results:
            result.features = self.features
        return response


class FeatureDraft(FakeDraft):
    """Reads hidden states."""

    layers: tuple[int, ...] = (10, 30)
    width = 16

    def __init__(self, target: FakeTarget) -> None:
        super().__init__(target)
        self.features: list[bytes] = []

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        info = await super().GetWorkerInfo(request, context)
        info.model.feature_layers[:], info.model.feature_width = self.layers, self.width
        return info

    async def Propose(self, request: Any, context: Any) -> Any:
        self.features += [item.features for item in request.items]
        return await super().Propose(request, context)


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("returns_features", False, "reads hidden states, which the target fake does not return"),
        ("layers", (10, 31), "reads hidden states after layers 10, 31, but the target fake has 30 layers"),
        ("width", 24, "reads hidden states of 24 numbers, but those of the target fake have 16"),
    ],
)
async def test_drafts_for_other_targets_are_refused_by_name(attribute: str, value: Any, reason: str) -> None:
    target = StatefulTarget()
    draft = FeatureDraft(target)
    setattr(target if attribute == "returns_features" else draft, attribute, value)
    async with serving(target, draft, wait_for_draft=False) as served:
        info = await served.until(lambda info: info.draft.state == "refused")
        assert info.draft.reason == f"the draft fake {reason}"
        await served.expect(make_request())
        assert not any(request.feature_layers for request in target.requests)


async def test_features_of_a_wrong_size_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    target = StatefulTarget()
    target.features = b"odd"
    draft = FeatureDraft(target)
    with caplog.at_level(logging.WARNING):
        async with serving(target, draft) as served:
            for _ in range(3):
                await served.expect(make_request())
    assert any(item.want_features for request in target.requests for item in request.items)
    assert draft.features
    assert not any(draft.features)
    assert [record.message for record in caplog.records if "features" in record.message] == [
        f"ignoring features of the worker at {served.target_address}: their size is wrong"
    ]
