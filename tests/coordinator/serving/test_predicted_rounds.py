"""Predictions save rounds, even if rounds overlap, and never change tokens."""

import random
from functools import partial

import pytest
from serving import RecordingTarget, make_request, serving

MAX_TOKENS = 200


long_request = partial(make_request, [1, 2, 3], MAX_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_right_predictions_save_rounds(temperature: float) -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 0.003)
    async with serving(target, with_draft=False, num_speculative_tokens=None) as served:
        plain = await served.stub.Generate(long_request(k=0, temperature=temperature, seed=1))
        answer = list(plain.token_ids)
        answer[100:103] = [5, 6]
        rounds = MAX_TOKENS
        while rounds >= MAX_TOKENS / 6:  # costs are unknown at first, and uncertain on a busy machine
            before = len(target.requests)
            response = await served.expect(long_request(prediction=answer, temperature=temperature, seed=1))
            rounds = len(target.requests) - before
        branches = [branch for each in target.requests for item in each.items for branch in item.branches]
        assert max(len(branch.draft_token_ids) for branch in branches) > 16
        assert response.usage.accepted_prediction_tokens > 0.8 * MAX_TOKENS


@pytest.mark.parametrize("k", [3, None], ids=["fixed", "adaptive"])
async def test_random_predictions_change_no_token(k: int | None) -> None:
    """Includes answers that end inside a draft, at a stop string or the maximum length."""
    rng = random.Random(k)
    async with serving(with_draft=k is not None, num_speculative_tokens=k) as served:
        for number in range(12):
            fields = {"temperature": number % 2, "seed": number}
            response = await served.stub.Generate(long_request(k=0, **fields))
            answer = list(response.token_ids)
            for at in rng.sample(range(MAX_TOKENS), 5):
                answer[at : at + rng.randrange(6)] = rng.choices(range(50), k=rng.randrange(6))
            request = long_request(prediction=answer, **fields)
            if number % 3 == 0:
                request.sampling_params.stop.append(response.text[60:62])
            request.sampling_params.max_tokens -= rng.randrange(60)
            drafted = await served.stub.Generate(request)
            request.speculative.num_speculative_tokens = 0
            assert drafted.token_ids == (await served.stub.Generate(request)).token_ids
