"""Targets that keep the states of recurrent layers after few positions: prefixes are found without a lost round."""

import asyncio
import math
from typing import Any

import pytest
from replicas import replicas
from serving import RecordingTarget, make_request, serving

from specpool.v1 import common_pb2

CHUNK = 48


@pytest.fixture(autouse=True)
def _long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only `prefill_tokens` limit chunks, not the measured times of passes: states are kept where chunks end."""
    monkeypatch.setattr("coordinator.scheduling.prefill.MAX_STEPS", math.inf)


class CountingTarget(RecordingTarget):
    """Counts cache misses and wrongly predicted prefixes, but not the rounds that continue them."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__(is_recurrent=True, **knobs)
        self.misses = 0

    async def Verify(self, request: Any, context: Any) -> Any:
        response = await super().Verify(request, context)
        for item, result in zip(request.items, response.results, strict=True):
            is_miss = result.status == common_pb2.ITEM_STATUS_CACHE_MISS
            self.misses += is_miss and not item.HasField("after_round_id")
        return response


async def test_each_turn_of_a_conversation_continues_after_the_last_states() -> None:
    target, prompt, cached = CountingTarget(), [9] * 100, []
    async with serving(target, with_draft=False, prefill_tokens=CHUNK) as served:
        for turn in range(4):
            response = await served.expect(make_request(prompt, 20, k=0))
            cached.append(response.usage.cached_tokens)
            prompt += [*response.token_ids, turn, turn, turn]
        counters = (await served.until_idle()).counters
    assert cached == [0, 96, 112, 144]
    assert counters.cached_tokens == sum(cached)
    assert target.misses == 0


async def test_samples_share_the_states_of_their_prompt() -> None:
    target = CountingTarget()
    async with serving(target, with_draft=False) as served:
        response = await served.stub.Generate(make_request([7] * 70, 20, k=0, n=4, temperature=1.0))
        assert [each.usage.cached_tokens for each in (response, *response.other_samples)] == [0, 64, 64, 64]
    assert target.misses == 0


async def test_states_are_kept_where_prompts_differ() -> None:
    """The second prompt leaves the states after the system prompt; all later ones use them."""
    target, system = CountingTarget(), [9] * 70
    async with serving(target, with_draft=False, prefill_tokens=200) as served:
        cached = []
        for i in range(4):
            response = await served.expect(make_request([*system, *[i] * 80], 4, k=0))
            cached.append(response.usage.cached_tokens)
        assert cached == [0, 0, 64, 64]
        requests = [make_request([*[5] * 50, *[i] * 80], 4, k=0) for i in range(5)]
        together = await asyncio.gather(*map(served.expect, requests))
    assert sorted(response.usage.cached_tokens for response in together) == [0, 0, 48, 48, 48]
    assert target.misses == 0


async def test_evicted_states_cost_no_lost_round() -> None:
    """The target has states for two prompts, and keeps the pages of all."""
    target = CountingTarget(slots=2)
    async with serving(target, with_draft=False) as served:
        for _ in range(2):
            for i in range(4):
                response = await served.expect(make_request([i] * 70, 4, k=0))
                assert response.usage.cached_tokens == 0
        response = await served.expect(make_request([3] * 70, 4, k=0))
        assert response.usage.cached_tokens == 64
    assert target.misses == 0


async def test_a_lost_state_costs_one_round() -> None:
    target = CountingTarget()
    async with serving(target, with_draft=False) as served:
        await served.expect(make_request([7] * 70, 4, k=0))
        target.lose_states()
        for cached in (0, 64):
            response = await served.expect(make_request([7] * 70, 4, k=0))
            assert response.usage.cached_tokens == cached
    assert target.misses == 1


async def test_a_prefix_is_found_on_the_target_that_keeps_its_states() -> None:
    targets = [CountingTarget(), CountingTarget()]
    async with replicas(targets[1], first=targets[0], with_draft=False, prefill_tokens=280) as served:
        prompts = [[i] * 70 for i in range(4)]  # which may all prefill in one round
        await asyncio.gather(*(served.expect(make_request(prompt, 4, k=0)) for prompt in prompts))
        for prompt in prompts:
            response = await served.expect(make_request([*prompt, 1, 2], 4, k=0))
            assert response.usage.cached_tokens == 64
    assert [target.misses for target in targets] == [0, 0]
