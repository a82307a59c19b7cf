"""Verification over shared, scattered, evicted and truncated pages gives the tokens of plain decoding."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import forget_all, load_engine, random_tokens

from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import ItemStatus, VerifyItem, VerifyRound
from target_worker.verifier import Verifier

SEQUENCES, POSITIONS, MAX_LENGTH = 6, 256, 120
PROMPTS = [tuple(random_tokens(20) + random_tokens(length, seed=length)) for length in (2, 15, 40)]


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Engine:
    per_token = load_engine(tiny_pair[0], max_sequences=1).info().kv_bytes_per_token
    return load_engine(tiny_pair[0], max_model_len=MAX_LENGTH, kv_memory=POSITIONS * per_token)


@pytest.fixture(scope="module")
def plain(tiny_pair: tuple[Path, Path]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Each prompt with its answer, decoded alone with a fresh cache."""
    alone = load_engine(tiny_pair[0], max_model_len=MAX_LENGTH)

    @cache
    def answer(prompt: tuple[int, ...]) -> tuple[int, ...]:
        tokens, logits = [*prompt], alone.forward([Span(0, 0, prompt, 1)])
        while len(tokens) < MAX_LENGTH:
            tokens.append(int(logits.argmax()))
            logits = alone.forward([Span(0, len(tokens) - 1, tokens[-1:], 1)])
        return tuple(tokens)

    yield tuple(map(answer, PROMPTS))


class Coordinator:
    """Sends rounds for some sequences, and knows the right tokens."""

    def __init__(self, engine: Engine, answers: tuple[tuple[int, ...], ...], chance: random.Random) -> None:
        self._verifier, self._answers, self._chance = Verifier(engine), answers, chance
        self._slots, self._round = engine.slots, 0
        self.cached: dict[int, int] = {}
        """Tokens that the worker has cached, by sequence; the next one is known, too."""

    def run(self) -> None:
        """Verify drafts of some sequences, right and wrong; new and cut ones, too."""
        self._round += 1
        chosen = self._chance.sample(range(SEQUENCES), self._chance.randint(1, SEQUENCES))
        items = [self._item(sequence) for sequence in chosen]
        (verdicts,) = self._verifier.verify([VerifyRound("c", self._round, items)])
        self._slots.check_integrity()
        for sequence, verdict in zip(chosen, verdicts, strict=True):
            answer = self._answers[sequence % len(PROMPTS)]
            if verdict.status is ItemStatus.OK:
                end = verdict.num_cached_tokens + 1
                assert answer[end - len(verdict.token_ids) : end] == verdict.token_ids[: MAX_LENGTH - end + 1]
                self.cached[sequence] = end - 1
            elif verdict.status is ItemStatus.CACHE_MISS:
                del self.cached[sequence]
            if end_of(answer, self.cached.get(sequence, 0)):
                self.release(sequence)

    def _item(self, sequence: int) -> VerifyItem:
        answer, prompt = self._answers[sequence % len(PROMPTS)], PROMPTS[sequence % len(PROMPTS)]
        cached = self.cached.get(sequence, 0)
        base = max(0, cached - self._chance.choice((0, 0, 0, 1, 20)))
        end = max(len(prompt), cached + 1)
        right = answer[end : min(end + self._chance.randint(0, 6), MAX_LENGTH - 3)]
        wrong = tuple(self._chance.randrange(200) for _ in range(self._chance.randint(0, 2)))
        namespace = self._chance.choice((b"x", b"x", b"y", None)) if base == 0 else None
        return VerifyItem(sequence, base, answer[base:end], draft_token_ids=right + wrong, cache_namespace=namespace)

    def release(self, sequence: int) -> None:
        self._verifier.release("c", [sequence])
        self.cached.pop(sequence, None)


def end_of(answer: tuple[int, ...], cached: int) -> bool:
    return cached >= len(answer) - 12


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_pages_change_no_token(engine: Engine, plain: tuple[tuple[int, ...], ...], seed: int) -> None:
    chance = random.Random(seed)
    forget_all(engine, SEQUENCES)
    coordinator = Coordinator(engine, plain, chance)
    for _ in range(30):
        coordinator.run()
        if coordinator.cached and chance.random() < 0.2:
            coordinator.release(chance.choice([*coordinator.cached]))
    assert engine.slots.hits > 0
