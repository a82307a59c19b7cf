"""A draft with another tokenizer: tokens equal plain decoding, and correct translations are accepted."""

import asyncio
import random
from pathlib import Path

import pytest
from other_tokenizers import byte_level, permute_vocabulary, save_tiny, sentence_piece
from pair_service import serving_pair
from serving import make_request

from draft_worker.translation import building
from draft_worker.translation.sample import SAMPLE
from specpool.v1 import generation_pb2 as pb


def requests(k: int, **params: float) -> list[pb.GenerateRequest]:
    chance = random.Random(5)
    prompts = [[chance.randrange(256) for _ in range(chance.randrange(3, 40))] for _ in range(6)]
    return [
        make_request(prompt, 32, k, method=pb.DRAFT_METHOD_MODEL if k else None, ignore_eos=True, **params)
        for prompt in prompts
    ]


@pytest.mark.parametrize("method", ["shared", "retokenized"])
async def test_permuted_vocabulary_is_fully_accepted(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(building, "EQUAL_COVERAGE", 2)
    monkeypatch.setattr(building, "fidelity", lambda translation: float(translation.method == method))
    draft = permute_vocabulary(tiny_pair[0], tmp_path / "draft")
    async with serving_pair(tiny_pair[0], draft, max_num_seqs=4) as pair:
        plain = [list((await pair.client.stub.Generate(request)).token_ids) for request in requests(0)]
        responses = await asyncio.gather(*(pair.client.stub.Generate(request) for request in requests(4)))
        assert [list(response.token_ids) for response in responses] == plain
        statistics = [response.speculative_decoding for response in responses]
        drafted = sum(each.num_draft_tokens for each in statistics)
        accepted = sum(each.num_accepted_draft_tokens for each in statistics)
        assert 0 < accepted == drafted
        model = (await pair.client.server_info()).draft_workers[0].model
        assert (model.tokenizer_translation, model.vocabulary_coverage) == (method, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
async def test_tokens_equal_plain_decoding(tmp_path: Path, kind: str) -> None:
    target, draft = byte_level(900), sentence_piece(700, kind)
    folders = save_tiny(tmp_path / "target", target), save_tiny(tmp_path / "draft", draft)
    prompts = [
        target.encode(text).ids for text in ("see you 👍🏽 on Friday! 🎉", "e\u0301 東京", SAMPLE[:700], "def f(")
    ]

    def texts(k: int) -> list[pb.GenerateRequest]:
        method = pb.DRAFT_METHOD_MODEL if k else None
        return [
            make_request(prompt, 24, k, method=method, temperature=temperature, seed=7, ignore_eos=True)
            for prompt in prompts
            for temperature in (0.0, 0.8)
        ]

    async with serving_pair(*folders, max_num_seqs=4, prefill_tokens=64) as pair:
        assert pair.draft is not None
        plain = [list((await pair.client.stub.Generate(request)).token_ids) for request in texts(0)]
        instance_id = pair.draft_link.instance_id
        for loses in ("nothing", "caches", "translations"):
            calls = asyncio.gather(*(pair.client.stub.Generate(request) for request in texts(4)))
            await asyncio.sleep(0.1)
            if loses == "caches":
                await pair.forget(pair.draft)
            elif loses == "translations":  # the coordinator sends the tokenizer again
                pair.draft.backend.translations._entries.clear()
            responses = await calls
            assert [list(response.token_ids) for response in responses] == plain
        await pair.draft_link.wait_ready()
        assert pair.draft_link.instance_id == instance_id
        responses = await asyncio.gather(*(pair.client.stub.Generate(request) for request in texts(4)))
        assert [list(response.token_ids) for response in responses] == plain
        assert sum(response.speculative_decoding.num_draft_tokens for response in responses) > 0
        assert len(pair.draft.backend.translations._entries) == 1
        await pair.wait_idle()
        await pair.draft.run(lambda backend: backend.engine.slots.check_integrity())
