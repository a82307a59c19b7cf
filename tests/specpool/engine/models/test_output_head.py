"""Output heads with rows for some tokens only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import load_engine, random_tokens, refusal, save_model, save_output_head
from tiny_pair import tiny_config

from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.models.draft_parts import OUTPUT_HEAD
from specpool.protocol.rounds import ProposeItem, ProposeRound, VerifyItem, VerifyRound
from specpool.protocol.sampling import SamplingParams
from target_worker.verifier import Verifier

HEAD_TOKENS = [3, 200, 7, 255, 90]


@pytest.mark.parametrize("options", [{}, {"native": False}, {"fused": False}], ids=["native", "fused", "library"])
def test_tokens_without_an_output_row_are_never_chosen(tmp_path: Path, options: dict[str, Any]) -> None:
    folder, tokens = save_model(tmp_path, tiny_config()), random_tokens(30)
    full = load_engine(folder).forward([Span(0, 0, tokens, 30)])
    save_output_head(folder, HEAD_TOKENS)
    engine = load_engine(folder, **options)
    assert engine.vocab_size == full.shape[1]
    assert engine.bitwise
    rows = engine.forward([Span(0, 0, tokens, 30)])
    assert set(engine.head.token_ids(rows.argmax(-1)).tolist()) <= set(HEAD_TOKENS)
    logits = engine.head.over_vocabulary(rows)
    torch.testing.assert_close(logits[:, HEAD_TOKENS], full[:, HEAD_TOKENS], atol=1e-4, rtol=1e-4)
    others = [token for token in range(engine.vocab_size) if token not in HEAD_TOKENS]
    assert (logits[:, others] == -torch.inf).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_workers_choose_only_tokens_of_a_partial_head(tmp_path: Path, temperature: float) -> None:
    folder, prompt = save_model(tmp_path, tiny_config()), tuple(random_tokens(30))
    save_output_head(folder, HEAD_TOKENS)
    sampling = SamplingParams(temperature=temperature, seed=5)
    draft, target = Proposer(load_engine(folder)), Verifier(load_engine(folder))
    propose_item = ProposeItem(1, 0, prompt, sampling=sampling, num_draft_tokens=4)
    (proposal,) = draft.propose([ProposeRound("c", 1, [propose_item])])[0]
    assert len(proposal.draft_token_ids) == 4
    assert set(proposal.draft_token_ids) <= set(HEAD_TOKENS)
    verify_item = VerifyItem(1, 0, prompt, sampling=sampling, draft_token_ids=proposal.draft_token_ids, logprobs=2)
    (verdict,) = target.verify([VerifyRound("c", 1, [verify_item])])[0]
    assert verdict.token_ids[:-1] == proposal.draft_token_ids
    for token, logprobs in zip(verdict.token_ids, verdict.logprobs, strict=True):
        assert logprobs.logprob > -10
        assert set(logprobs.top_token_ids) <= set(HEAD_TOKENS)
        assert temperature or (logprobs.top_token_ids[0], logprobs.top_logprobs[0]) == (token, logprobs.logprob)
    propose_item = ProposeItem(2, 0, prompt, sampling=sampling, num_draft_tokens=0)
    (nothing,) = draft.propose([ProposeRound("c", 2, [propose_item])])[0]
    assert (nothing.draft_token_ids, nothing.num_cached_tokens) == ((), 30)


@pytest.mark.parametrize(
    ("output_ids", "shape"), [([3, 257], (2, 96)), ([3, -1], (2, 96)), ([3, 4], (3, 96)), ([3, 4], (2, 32))]
)
def test_mismatched_output_heads_are_refused(tmp_path: Path, output_ids: list[int], shape: tuple[int, int]) -> None:
    folder = save_model(tmp_path, tiny_config(hidden_size=96))
    save_output_head(folder, output_ids, torch.zeros(shape))
    assert f"{OUTPUT_HEAD} has a head of {shape} for 2 tokens" in refusal(folder)


@pytest.mark.parametrize(
    ("output_ids", "weight", "reason"),
    [
        ([3, 3], torch.zeros(2, 96), "has several rows for a token"),
        ([3.5, 4.5], torch.zeros(2, 96), "has output_ids of the type torch.float32, not int32 or int64"),
        ([3, 4], torch.zeros(2, 96, dtype=torch.int32), "has a weight of the type torch.int32, which is not a float"),
    ],
)
def test_output_heads_of_wrong_types_are_refused(
    tmp_path: Path, output_ids: list[float], weight: torch.Tensor, reason: str
) -> None:
    folder = save_model(tmp_path, tiny_config(hidden_size=96))
    save_file({"weight": weight, "output_ids": torch.tensor(output_ids)}, folder / OUTPUT_HEAD)
    assert f"{OUTPUT_HEAD} {reason}" in refusal(folder)
