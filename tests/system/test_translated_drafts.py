"""A draft with another tokenizer: every token equals plain decoding, and correct translations are accepted."""

import asyncio
import random
from pathlib import Path

import pytest
from other_tokenizers import permute_vocabulary
from pair_service import serving_pair
from serving import make_request

from draft_worker.translation import building
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
