"""`RemoteDraft` without a draft worker: lookups in a row's own tokens and in earlier answers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from vllm_stand_in import StandIn, always_draft, save_tokenizer, vllm_config

from specpool.testing import FakeTarget
from specpool.vllm import RemoteDraft

PERIOD = 7
PROMPTS = [[9, 8, 7 + i] for i in range(3)]


class PeriodicTarget(FakeTarget):
    """A target that repeats its last tokens."""

    def choose(self, context: Sequence[int]) -> int:
        return context[-PERIOD] if len(context) >= 2 * PERIOD else super().choose(context)


@pytest.fixture(autouse=True)
def _drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path)


def answers(vllm: StandIn, prompts: list[list[int]], steps: int = 40) -> int:
    """Generate, and compare with plain decoding. Return the number of accepted draft tokens."""
    rows = [vllm.add(prompt) for prompt in prompts]
    for _ in range(steps):
        vllm.step()
    for row, prompt in zip(rows, prompts, strict=True):
        vllm.remove(row)
        assert row.output == vllm.target.continuation(prompt, len(row.output))
    return sum(row.accepted for row in rows)


@pytest.mark.parametrize("method", ["ngram", "suffix", "best"])
def test_a_row_drafts_from_its_own_tokens(method: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPOOL_DRAFT_METHOD", method)
    assert answers(StandIn(RemoteDraft(vllm_config(tokenizer)), PeriodicTarget()), PROMPTS) > 100


@pytest.mark.parametrize("store_tokens", ["0", "4096"])
def test_rows_share_earlier_answers_only_on_request(
    store_tokens: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_LOOKUP_STORE_TOKENS", store_tokens)
    vllm = StandIn(RemoteDraft(vllm_config(tokenizer)), FakeTarget())
    first = answers(vllm, PROMPTS)
    repeated = answers(vllm, PROMPTS)
    assert (repeated > first + 50) == (store_tokens != "0")


def test_lookups_need_neither_a_draft_worker_nor_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vllm.specpool"):
        RemoteDraft(vllm_config(str(tmp_path)))
    assert any("set SPECPOOL_DRAFT_ADDRESS to add a draft worker" in message for message in caplog.messages)
