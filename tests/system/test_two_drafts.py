"""Two real draft workers, with the same draft or another: moves and shared prefixes change no token."""

import asyncio
import random
from pathlib import Path

import pytest
from pair_service import serving_coordinator, serving_draft, serving_pair
from serving import make_request

from specpool.v1 import generation_pb2 as pb

SLOTS = 6
SHARED = [7 + i % 40 for i in range(48)]


def requests(k: int) -> list[pb.GenerateRequest]:
    """Half of the prompts begin alike."""
    chance = random.Random(3)
    return [
        make_request(SHARED[: 48 * (i % 2)] + [chance.randrange(5, 60) for _ in range(12)], 24, k, ignore_eos=True)
        for i in range(12)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("is_canary", [False, True], ids=["same", "another"])
async def test_tokens_equal_plain_decoding(tiny_pair: tuple[Path, Path], is_canary: bool) -> None:
    second, slots = (tiny_pair[0], SLOTS) if is_canary else (tiny_pair[1], 2)
    worker = {"max_sequences": SLOTS}
    async with (
        serving_pair(*tiny_pair, worker=worker, max_num_seqs=SLOTS) as pair,
        serving_draft(second, threads=1, port=0, max_sequences=slots) as (address, other),
    ):
        plain = [list((await pair.client.stub.Generate(request)).token_ids) for request in requests(0)]
        both = f"current={pair.draft_link.address},{'new' if is_canary else 'current'}={address}"
        target = pair.process.coordinator.target.address
        async with serving_coordinator(target, both, max_num_seqs=SLOTS, prefill_tokens=32) as (client, process):
            assert process.coordinator.lanes.first.draft is not None
            for link in process.coordinator.lanes.first.draft.links:
                await link.wait_ready()
            assert pair.draft is not None
            for forgetful in (None, other, pair.draft):
                calls = asyncio.gather(*(client.stub.Generate(request) for request in requests(4)))
                if forgetful is not None:
                    await asyncio.sleep(0.1)
                    await pair.forget(forgetful)
                responses = await calls
                assert [list(response.token_ids) for response in responses] == plain
            drafted = sum(response.speculative_decoding.num_draft_tokens for response in responses)
            assert drafted > 0
            info = await client.server_info()
            assert [worker.state for worker in info.draft_workers] == ["ready", "ready"]
            assert [draft.name for draft in info.drafts] == ["current", "new"][: 1 + is_canary]
            assert all(draft.draft_tokens for draft in info.drafts)
            await pair.wait_idle()
            while await other.run(lambda backend: backend.info().slots_in_use):  # noqa: ASYNC110 - polls a worker
                await asyncio.sleep(0.01)
