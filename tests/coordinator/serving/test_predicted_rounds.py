"""Right predictions save rounds, also of rounds that are sent ahead, and never change tokens."""

import random

import pytest
from serving import RecordingTarget, Serving, check_tokens, make_request, serving

from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 200


def predicting(prediction: list[int], **fields: object) -> pb.GenerateRequest:
    request = make_request([1, 2, 3], MAX_TOKENS, ignore_eos=True, **fields)
    request.speculative.prediction.tokenized.input_ids.extend(prediction)
    return request


async def rounds_of(served: Serving, request: pb.GenerateRequest) -> tuple[int, pb.GenerateResponse]:
    """Rounds that the answer took, and the answer."""
    before = len(served.target.requests)  # type: ignore[attr-defined]
    response = await served.stub.Generate(request)
    return len(served.target.requests) - before, response  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_right_predictions_save_rounds(temperature: float) -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 0.003)
    async with serving(target, with_draft=False, num_speculative_tokens=None) as served:
        plain = make_request([1, 2, 3], MAX_TOKENS, ignore_eos=True, k=0, temperature=temperature, seed=1)
        _, response = await rounds_of(served, plain)
        answer = list(response.token_ids)
        answer[100:103] = [5, 6]
        request = predicting(answer, temperature=temperature, seed=1)
        for _ in range(3):  # costs are unknown at first
            rounds, response = await rounds_of(served, request)
            check_tokens(target, request, response)
        assert rounds < MAX_TOKENS / 6
        branches = [branch for each in target.requests for item in each.items for branch in item.branches]
        assert max(len(branch.draft_token_ids) for branch in branches) > 16
        assert response.usage.accepted_prediction_tokens > 0.8 * MAX_TOKENS


@pytest.mark.parametrize("k", [3, None], ids=["fixed", "adaptive"])
async def test_random_predictions_change_no_token(k: int | None) -> None:
    """Also where a stop string or the maximum ends the answer within a draft."""
    rng = random.Random(k)
    async with serving(with_draft=k is not None, num_speculative_tokens=k) as served:
        for number in range(12):
            fields = {"temperature": number % 2, "seed": number}
            plain = make_request([1, 2, 3], MAX_TOKENS, ignore_eos=True, k=0, **fields)
            response = await served.stub.Generate(plain)
            answer = list(response.token_ids)
            for at in rng.sample(range(MAX_TOKENS), 5):
                answer[at : at + rng.randrange(6)] = rng.choices(range(50), k=rng.randrange(6))
            request = predicting(answer, **fields)
            if number % 3 == 0:
                request.sampling_params.stop.append(response.text[60:62])
            request.sampling_params.max_tokens -= rng.randrange(60)
            drafted = await served.stub.Generate(request)
            request.speculative.num_speculative_tokens = 0
            assert drafted.token_ids == (await served.stub.Generate(request)).token_ids
