"""A stand-in for vLLM 0.32: calls `RemoteDraft` with the same arguments, and manages its batch the same way."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from specpool.drafting.costs import UNKNOWN_VERIFY, StepTimes
from specpool.drafting.ledger import Ledger
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE, FakeTarget, byte_tokenizer
from specpool.vllm import RemoteDraft
from specpool.vllm.costs import LearnedTimes

MAX_MODEL_LEN, MAX_ROWS = 512, 16
STEP_SECONDS = 0.01
"""Duration of a step. Drafts cannot save time in an instant step."""


def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft in every step. test_vllm_pacing.py tests in virtual time whether drafts pay off."""
    monkeypatch.setattr(LearnedTimes, "__init__", lambda times: StepTimes.__init__(times, UNKNOWN_VERIFY))
    monkeypatch.setattr(Ledger, "is_plain_due", lambda *_: False)
    monkeypatch.setattr(Ledger, "has_free_trial", lambda *_: False)
    monkeypatch.setattr(Ledger, "observe", lambda *_: None)
    monkeypatch.setattr(LearnedTimes, "observe", lambda *_: None)


def save_tokenizer(folder: Path) -> str:
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)
    return str(folder)


def vllm_config(tokenizer: str, num_speculative_tokens: int = 4, rank: int = 0, **changes: Any) -> Any:
    """The parts of a `VllmConfig` that `RemoteDraft` reads, with changes to parallel, scheduler and device settings."""
    parallel = {"world_size": 1, "tensor_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="served",
            tokenizer=tokenizer,
            tokenizer_mode="auto",
            tokenizer_revision=None,
            hf_config=SimpleNamespace(eos_token_id=[EOS_TOKEN_ID]),
            trust_remote_code=False,
            max_model_len=MAX_MODEL_LEN,
            get_vocab_size=lambda: VOCAB_SIZE,
        ),
        parallel_config=SimpleNamespace(
            **{**parallel, "rank": rank, "distributed_executor_backend": "mp", **changes}  # type: ignore[arg-type]
        ),
        scheduler_config=SimpleNamespace(async_scheduling=changes.get("async_scheduling", False)),
        device_config=SimpleNamespace(device_type=changes.get("device_type", "cuda")),
        speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens),
        use_v2_model_runner=False,
    )


@dataclass(eq=False)
class Row:
    """A request in vLLM."""

    tokens: list[int]
    prompt_length: int
    chunks: int = 1
    """Steps of the prefill."""
    drafts: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]


class StandIn:
    """vLLM's batch: rows keep their places, and the last row fills gaps."""

    def __init__(self, remote: RemoteDraft, target: FakeTarget) -> None:
        self.remote, self.target = remote, target
        self.rows: list[Row] = []
        self.token_ids_cpu = np.zeros((MAX_ROWS, MAX_MODEL_LEN), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(MAX_ROWS, dtype=np.int32)

    def add(self, prompt: list[int], chunks: int = 1) -> Row:
        row = Row([*prompt], len(prompt), chunks)
        self.insert(row)
        return row

    def insert(self, row: Row) -> None:
        self.rows.append(row)
        self._write(len(self.rows) - 1)

    def remove(self, row: Row) -> None:
        at = self.rows.index(row)
        last = self.rows.pop()
        if last is not row:
            self.rows[at] = last
            self._write(at)

    def swap(self, one: int, other: int) -> None:
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        self._write(one)
        self._write(other)

    def preempt(self, row: Row) -> None:
        """Remove the row. `insert` resumes it with a new prefill."""
        self.remove(row)
        row.drafts = []

    def step(self) -> None:
        """Verify the drafts of the last step, and ask for new ones."""
        time.sleep(STEP_SECONDS)
        sampled = [self._gain(row) for row in self.rows]
        for at in range(len(self.rows)):
            self._write(at)
        drafts = self.remote.propose(sampled, self.num_tokens_no_spec, self.token_ids_cpu, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        for row, tokens in zip(self.rows, drafts, strict=True):
            assert len(tokens) <= 4
            assert all(type(token) is int for token in tokens)
            row.drafts = tokens
            row.drafted += len(tokens)

    def _gain(self, row: Row) -> list[int]:
        if row.chunks > 1:
            row.chunks -= 1
            return []
        gained: list[int] = []
        for draft in [*row.drafts, None]:
            gained.append(self.target.choose([*row.tokens, *gained]))
            if gained[-1] != draft:
                break
            row.accepted += 1
        row.tokens += gained[: MAX_MODEL_LEN - len(row.tokens)]
        return gained

    def _write(self, at: int) -> None:
        row = self.rows[at]
        self.token_ids_cpu[at, : len(row.tokens)] = row.tokens
        self.num_tokens_no_spec[at] = len(row.tokens)
