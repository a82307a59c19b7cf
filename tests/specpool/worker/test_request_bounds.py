"""Limits of a request, and non-finite logits."""

from typing import Any

import grpc
import pytest
import torch
from tiny_pair import MAX_MODEL_LEN, tiny_config
from worker_service import OK, SLOTS, Worker, failure, propose, verify, violated_fields

from specpool.engine.run.engine import Engine
from specpool.engine.run.sequences import ITEMS_PER_SLOT, LOGITS_PER_SLOT
from specpool.protocol import codec
from specpool.v1 import common_pb2

LAYERS, HIDDEN = tiny_config().num_hidden_layers, tiny_config().hidden_size


def sampled(worker: Worker, **sampling: Any) -> Any:
    item = worker.item(1, 0, [5])
    item.sampling.CopyFrom(common_pb2.Sampling(**sampling))
    return item


def wanting(item: Any) -> Any:
    """The item, with a request for features."""
    item.want_features = True
    return item


async def assert_refused(call: Any, field: str) -> None:
    error = await failure(call)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == [field]


async def test_the_length_of_a_coordinator_id_is_bounded(worker: Worker) -> None:
    maximum = codec.MAX_COORDINATOR_ID_LENGTH
    assert await worker.round(coordinator_id="ä" * maximum) == []
    for invalid in ("", "ä" * (maximum + 1)):
        for call in (worker.round(coordinator_id=invalid), worker.release(1, coordinator_id=invalid)):
            await assert_refused(call, "coordinator_id")
    stream = worker.open_stream()
    await stream.write(worker.request(coordinator_id="x" * (maximum + 1)))
    await assert_refused(stream.read(), "coordinator_id")
    assert worker.host.streams._open.total() == len(worker.host.streams._owned) == 0


async def test_the_number_of_items_is_bounded(worker: Worker) -> None:
    maximum = ITEMS_PER_SLOT * SLOTS
    results = await worker.round(*(worker.item(i, 0, [5]) for i in range(maximum)))
    assert [result.status == OK for result in results] == [True] * SLOTS + [False] * (maximum - SLOTS)
    await assert_refused(worker.round(*(worker.item(i, 0, [5]) for i in range(maximum + 1))), "items")


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"stop_token_ids": [1] * (codec.MAX_SAMPLING_TOKENS + 1)}, "items[0].sampling.stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(codec.MAX_SAMPLING_TOKENS + 1), 1.0)}, "items[0].sampling.logit_bias"),
    ],
)
async def test_the_number_of_sampling_tokens_is_bounded(worker: Worker, sampling: Any, field: str) -> None:
    await assert_refused(worker.round(sampled(worker, **sampling)), field)
    (result,) = await worker.round(sampled(worker, stop_token_ids=[1] * codec.MAX_SAMPLING_TOKENS))
    assert result.status == OK


async def test_the_number_of_released_sequences_is_bounded(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_RELEASED", 3)
    assert await worker.release(1, 2, 3) == 0
    await assert_refused(worker.release(1, 2, 3, 4), "sequence_ids")


async def test_the_size_of_a_verification_is_bounded(target: Worker) -> None:
    item = verify(1, 0, [5])
    item.logprobs = codec.MAX_ITEM_LOGPROBS + 1
    await assert_refused(target.round(item), "items[0].logprobs")
    drafts = [5] * (LOGITS_PER_SLOT * LOGITS_PER_SLOT // 12)
    items = [verify(i, 0, [5], drafts[: MAX_MODEL_LEN - 2]) for i in range(ITEMS_PER_SLOT * SLOTS)]
    await assert_refused(target.round(*items), "items")
    too_many = [5] * (codec.MAX_ITEM_DRAFT_TOKENS + 1)
    await assert_refused(target.round(verify(1, 0, [5], too_many)), "items[0].draft_token_ids")
    assert target.engine.slots.in_use == 0


async def test_the_size_of_a_proposal_is_bounded(draft: Worker) -> None:
    request = draft.request(propose(1, 0, [5], 2))
    request.chances[:] = [0.5] * (codec.MAX_CHANCES + 1)
    await assert_refused(draft.stub.Propose(request), "chances")
    too_many = codec.MAX_ITEM_DRAFT_TOKENS + 1
    await assert_refused(draft.round(propose(1, 0, [5], too_many)), "items[0].num_draft_tokens")


# --- Non-finite logits


class broken:
    """Sets one logit of a row to `value`, in passes after the first `sound` ones."""

    def __init__(self, worker: Worker, value: float, row: int = 0, sound: int = 0) -> None:
        self._engine, self._value, self._row, self._left = worker.engine, value, row, sound

    def __enter__(self) -> None:
        forward = self._engine.forward

        def spoil(spans: Any) -> torch.Tensor:
            logits = forward(spans).clone()
            self._left -= 1
            if self._left < 0:
                logits[self._row, 17] = self._value
            return logits

        self._engine.forward = spoil  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        del self._engine.forward  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_target_with_non_finite_logits_returns_no_token(
    target: Worker, value: float, temperature: float
) -> None:
    item = sampled(target, temperature=temperature)
    item.draft_token_ids[:] = [6, 7]
    with broken(target, value, row=0):
        error = await failure(target.round(item))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details() == "sequence 1: the model's logits are not finite"
    item.sequence_id = 2
    (whole,) = await target.round(item)
    item.sequence_id = 1
    (again,) = await target.round(item)
    assert (again.status, again.token_ids) == (OK, whole.token_ids)


@pytest.mark.parametrize("min_chance", [0.0, 1e-30], ids=["tokens only", "with confidences"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_draft_ends_before_non_finite_logits(
    draft: Worker, monkeypatch: pytest.MonkeyPatch, value: float, min_chance: float
) -> None:
    monkeypatch.setattr(Engine, "can_draft", lambda *_: False)
    items = [propose(i, 0, [i, 5], 6) for i in (1, 2)]
    for item in items:
        item.min_chance = min_chance
    whole = await draft.round(*items)
    await draft.release(1, 2)
    with broken(draft, value, sound=2):
        first, second = await draft.round(*items)
    assert first.draft_token_ids == whole[0].draft_token_ids[:2]
    assert first.confidences == whole[0].confidences[:2]
    assert first.status == OK
    assert second.draft_token_ids[:2] == whole[1].draft_token_ids[:2]


@pytest.mark.parametrize(
    ("wanted", "refused"),
    [
        ({"feature_layers": [0], "feature_window": 1}, "feature_layers"),
        ({"feature_layers": [LAYERS + 1], "feature_window": 1}, "feature_layers"),
        ({"feature_layers": [1] * 17, "feature_window": 1}, "feature_layers"),
        ({"feature_window": 1}, "feature_layers"),
        ({"feature_layers": [1]}, "feature_window"),
        ({"feature_layers": [1], "feature_window": 1025}, "feature_window"),
    ],
)
async def test_features_are_bounded(target: Worker, wanted: dict[str, Any], refused: str) -> None:
    item = wanting(verify(1, 0, [5, 6, 7], [8]))
    await assert_refused(target.round(item, **wanted), refused)
    (result,) = await target.round(item, feature_layers=[1, LAYERS], feature_window=2)
    assert len(result.features) == (2 + len(result.token_ids) - 1) * 2 * HIDDEN * 2


async def test_the_bytes_of_features_are_bounded(target: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FEATURE_BYTES", 4 * HIDDEN * 2)
    wanted = {"feature_layers": [1, 2], "feature_window": 2}
    await assert_refused(target.round(wanting(verify(1, 0, [5, 6, 7], [8])), **wanted), "features")
    (result,) = await target.round(wanting(verify(1, 0, [5, 6, 7])), **wanted)
    assert len(result.features) == 4 * HIDDEN * 2
