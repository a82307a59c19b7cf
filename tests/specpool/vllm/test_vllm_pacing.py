"""Drafts are used only where they pay: vLLM simulated in virtual time, with various costs and acceptance rates."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from specpool.drafting.costs import StepTimes, Timed
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem
from specpool.protocol.worker_info import WorkerInfo
from specpool.vllm.costs import LearnedTimes
from specpool.vllm.drafter import Drafter, DraftModel, Limits
from specpool.vllm.rows import Batch

MAX_LEN, VOCAB, MAX_K, WIRE_SECONDS = 256, 60000, 4, 0.001
Seconds = Callable[[float], float]


def flat(tokens: float) -> float:
    """Steps of a GPU, dominated by reading weights."""
    return 0.02 + 2e-5 * tokens


def bent(tokens: float) -> float:
    """Steps of two CPU cores: a few extra tokens are free, then cost grows linearly."""
    return 0.034 + 0.0018 * max(0.0, tokens - 6)


def proportional(tokens: float) -> float:
    """Steps in which draft tokens cost as much as any others."""
    return 0.01 * tokens


def fast_draft(tokens: float) -> float:
    return 0.002 + 2e-5 * tokens


def slow_draft(tokens: float) -> float:
    return 0.03 + 1e-3 * tokens


@dataclass
class Row:
    tokens: list[int]
    left: int
    drafts: list[tuple[int, bool]] = field(default_factory=list)
    """Draft tokens, and whether vLLM accepts them."""
    is_new: bool = True


class VirtualServer:
    """vLLM with changing rows, noisy steps, and a draft whose tokens are accepted at a given rate."""

    def __init__(self, rows: int, step: Seconds, draft: Seconds, rate: float, answer: int = 48) -> None:
        self.now = self.plain_seconds = 0.0
        self.drafter = Drafter(Limits(MAX_K, MAX_LEN, VOCAB, MAX_LEN, 512))
        self._random, self._count, self._step, self._draft = random.Random(rows), rows, step, draft
        self._rate, self._answer, self._new_token = rate, answer, itertools.count(1)
        times = StepTimes({rows: draft(rows) for rows in (1, 4, 16, 64)})
        self._model = DraftModel(WorkerInfo(max_model_len=MAX_LEN, vocab_size=VOCAB, slots_total=64), times)
        self._rows = [self._new_row(left) for left in range(4, 4 + rows)]
        self._token_ids = np.zeros((rows, MAX_LEN), dtype=np.int64)
        self._draft_seconds = 0.0

    def run(self, tokens: int) -> float:
        """Speed over this number of tokens, relative to plain decoding."""
        began, plain, gained = self.now, 0.0, 0
        while gained < tokens:
            prompts = [len(row.tokens) for row in self._rows if row.is_new]
            new = self._one_step()
            gained += new
            # Prompts are prefilled with or without drafts.
            prefill = (
                self._step(self._count - len(prompts) + sum(prompts)) - self._step(self._count) if prompts else 0.0
            )
            plain += new * self._step(self._count) / self._count + prefill
        return plain / (self.now - began)

    def _one_step(self) -> int:
        seconds = self._noisy(self._step(sum(self._tokens_of(row) for row in self._rows)))
        self.now += seconds
        sampled = [self._sample(row) for row in self._rows]
        for at, row in enumerate(self._rows):
            self._token_ids[at, : len(row.tokens)] = row.tokens
        batch = Batch(sampled, np.array([len(row.tokens) for row in self._rows]), self._token_ids)
        began = self.now
        items, _ = self.drafter.begin(batch, self._model, seconds, self._draft_seconds)
        right = self._propose(items) if items else {}
        drafts = self.drafter.drafts()
        self._draft_seconds = self.now - began
        for at, (row, tokens) in enumerate(zip(self._rows, drafts, strict=True)):
            row.drafts = [(token, right.get(token, False)) for token in tokens]
            if row.left <= 0:
                self._rows[at] = self._new_row(self._answer)
        return sum(map(len, sampled))

    def _propose(self, items: list[ProposeItem]) -> dict[int, bool]:
        right: dict[int, bool] = {}
        proposals = []
        for item in items:
            tokens = tuple(self._token() for _ in range(item.num_draft_tokens))
            right |= {token: self._random.random() < self._rate for token in tokens}
            cached = item.base_length + len(item.token_ids) + max(0, len(tokens) - 1)
            proposals.append(
                Proposal(item.sequence_id, ItemStatus.OK, tokens, cached, tuple(self._rate for _ in tokens))
            )
        max_draft_tokens = max(item.num_draft_tokens for item in items)
        seconds = self._noisy(
            self._draft(sum(len(item.token_ids) for item in items))
            + sum(
                self._draft(sum(item.num_draft_tokens > step for item in items)) for step in range(1, max_draft_tokens)
            )
        )
        self.now += seconds + WIRE_SECONDS
        self.drafter.take(items, proposals, Timed(seconds + WIRE_SECONDS, seconds, 0.0))
        return right

    def _sample(self, row: Row) -> list[int]:
        accepted = list(itertools.takewhile(lambda draft: draft[1], row.drafts))
        gained = [token for token, _ in accepted] + [self._token()]
        row.tokens += gained
        row.left -= len(gained)
        row.is_new = False
        return gained

    def _new_row(self, left: int) -> Row:
        return Row([self._token() for _ in range(40)], left)

    def _tokens_of(self, row: Row) -> int:
        return len(row.tokens) if row.is_new else 1 + len(row.drafts)

    def _token(self) -> int:
        return next(self._new_token) % VOCAB

    def _noisy(self, seconds: float) -> float:
        hiccup = 3 if self._random.random() < 0.01 else 1
        return seconds * hiccup * math.exp(self._random.gauss(0, 0.08)) / 1.023


@pytest.mark.parametrize(
    ("rows", "step", "draft", "rate"),
    [
        (4, flat, fast_draft, 0.0),
        pytest.param(4, flat, slow_draft, 0.8, marks=pytest.mark.slow),
        (1, proportional, fast_draft, 0.6),
        pytest.param(8, proportional, fast_draft, 0.8, marks=pytest.mark.slow),
        (4, bent, fast_draft, 0.4),
        (8, bent, slow_draft, 0.6),
        pytest.param(16, bent, fast_draft, 0.5, marks=pytest.mark.slow),
    ],
)
def test_unprofitable_drafts_cost_little(rows: int, step: Seconds, draft: Seconds, rate: float) -> None:
    server = VirtualServer(rows, step, draft, rate)
    assert server.run(150 * rows) > 0.93  # a new server must measure steps first
    assert server.run(1200 * rows) > 0.96


@pytest.mark.parametrize(
    ("rows", "step", "rate", "gain"),
    [(1, flat, 0.7, 1.7), (8, flat, 0.7, 1.5), (1, bent, 0.7, 1.7), (4, bent, 0.8, 1.1)],
)
def test_profitable_drafts_speed_up_decoding(rows: int, step: Seconds, rate: float, gain: float) -> None:
    server = VirtualServer(rows, step, fast_draft, rate)
    server.run(200 * rows)
    assert server.run(600 * rows) > gain


def test_drafts_end_when_they_no_longer_pay() -> None:
    server = VirtualServer(4, flat, fast_draft, 0.8)
    server.run(2000)
    server._draft = slow_draft
    server.run(1000)
    assert server.run(2000) > 0.96


def test_times_follow_observed_steps() -> None:
    times = LearnedTimes()
    assert times.seen(4) == 0
    times.observe(4, 0.03)
    assert times(8) == pytest.approx(0.06)  # the pessimistic assumption
    times.observe(8, 0.04)
    assert [times(4), times(6), times(8)] == pytest.approx([0.03, 0.035, 0.04])
    assert times(16) == pytest.approx(0.06)  # on the line through both
    assert (times.seen(4), times.seen(8), times.seen(16)) == (1, 1, 0)


def test_single_token_steps_count_as_points() -> None:
    times = LearnedTimes()
    times.observe(1, 0.03)
    assert times(8) == pytest.approx(0.24)
    times.observe(8, 0.04)
    assert times(15) == pytest.approx(0.05)


def test_nearby_steps_do_not_determine_a_slope() -> None:
    times = LearnedTimes()
    times.observe(8, 0.04)
    for _ in range(20):
        times.observe(7, 0.04)
    assert times(16) == pytest.approx(0.08, rel=0.2)


def test_one_slow_step_has_little_effect() -> None:
    times = LearnedTimes()
    for _ in range(20):
        times.observe(4, 0.03)
    times.observe(4, 3.0)
    assert times(4) < 0.034


def test_rows_are_rarely_inspected_where_drafts_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """During skipped steps, rows gain several tokens, and some arrive or leave."""
    server = VirtualServer(8, bent, slow_draft, 0.5)
    server.run(1200)
    begin: Callable[..., Any] = server.drafter.begin
    drafts, looks, skipped = server.drafter.drafts, 0, 0

    def sometimes(*arguments: Any) -> Any:
        nonlocal looks, skipped
        if server.drafter.may_skip and skipped < 3:
            skipped += 1
            return [], []
        asked = begin(*arguments, skipped)
        looks, skipped = looks + 1, 0
        return asked

    monkeypatch.setattr(server.drafter, "begin", sometimes)
    monkeypatch.setattr(server.drafter, "drafts", lambda: [[]] * 8 if skipped else drafts())
    steps = 400
    assert server.run(8 * steps) > 0.96
    assert looks < steps / 2
