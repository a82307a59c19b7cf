"""Properties that published batch speculative decoders violate, under every policy."""

import asyncio

import pytest
from serving import Serving, make_request, serving

from coordinator.scheduling.grouping import POLICIES
from specpool.testing import EOS_TOKEN_ID

pytestmark = pytest.mark.parametrize("policy", sorted(POLICIES))


async def join(served: Serving) -> None:
    """Sequences join others that have been generating for a while."""
    first = [asyncio.create_task(served.expect(make_request([i] * 9, 60, k=3))) for i in range(3)]
    await served.until(lambda info: info.counters.completion_tokens > 10)
    for i in range(3, 6):
        await served.expect(make_request([i] * 40, 5, k=3))
    await asyncio.gather(*first)


async def test_new_sequences_cause_no_cache_misses(policy: str) -> None:
    async with serving(policy=policy, max_batch_size=3, max_num_seqs=6, prefill_tokens=16) as served:
        await join(served)
        for worker in (served.target, served.draft):
            items = [item for request in worker.requests for item in request.items]
            starts = [item.sequence_id for item in items if item.base_length == 0 and item.token_ids]
            assert len(starts) == len(set(starts)) == 6, "a sequence was sent from its start again"
        assert (await served.info()).counters.cache_misses == 0
        # After the prompt, the draft gets at most its own last token and the bonus token per round.
        lags = [len(item.token_ids) for r in served.draft.requests for item in r.items if item.num_draft_tokens]
        assert sum(lag > 2 for lag in lags) <= 6, "more than the last chunk of each prompt"


async def test_eos_tokens_in_the_prompt_do_not_stop_generation(policy: str) -> None:
    prompts = [[EOS_TOKEN_ID, 5, EOS_TOKEN_ID], [7, EOS_TOKEN_ID], [1, 2, 3]]
    async with serving(policy=policy) as served:
        responses = await asyncio.gather(*(served.expect(make_request(prompt, 20, k=4)) for prompt in prompts))
        assert [response.finish_reason for response in responses] == ["length"] * 3
        assert all(len(response.token_ids) == 20 for response in responses)
