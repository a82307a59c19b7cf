"""`specpool up` with a draft that has another tokenizer: restart of a killed worker."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from other_tokenizers import permute_vocabulary
from up_process import Pair, address_of, children_of, started, up_command

from specpool.client import AsyncClient


@pytest.mark.slow
async def test_a_killed_worker_gets_the_tokenizer_again(tiny_pair: Pair, tmp_path: Path) -> None:
    """The draft is the target with permuted token ids, so the target accepts all drafts."""
    pair = tiny_pair[0], permute_vocabulary(tiny_pair[0], tmp_path / "draft")
    flags = ["--num-speculative-tokens", "3", "--draft-method", "model"]
    async with started(*up_command(pair, *flags)) as process, AsyncClient(await address_of(process)) as client:
        answer = await client.generate("abc", max_tokens=200, ignore_eos=True, num_speculative_tokens=0)
        plain = list(answer.token_ids)
        await drafted(client, plain)
        [pid] = [pid for pid, line in children_of(process.pid).items() if "draft_worker" in line]
        token_ids = list[int]()
        async for message in client.stream("abc", max_tokens=200, ignore_eos=True):
            token_ids += message.chunk.token_ids
            if pid in children_of(process.pid):
                os.kill(pid, signal.SIGKILL)
        assert token_ids == plain
        await drafted(client, plain)
        [worker] = (await client.server_info()).draft_workers
        assert worker.model.tokenizer_translation == "shared"
        assert pid not in children_of(process.pid)


async def drafted(client: AsyncClient, plain: Sequence[int]) -> None:
    """Generate until the draft worker drafts. Check that all drafts are accepted."""
    while True:
        answer = await client.generate("abc", max_tokens=30, ignore_eos=True)
        assert list(answer.token_ids) == plain[:30]
        if count := answer.speculative_decoding.num_accepted_draft_tokens:
            assert count == answer.speculative_decoding.num_draft_tokens
            return
        await asyncio.sleep(0.1)
