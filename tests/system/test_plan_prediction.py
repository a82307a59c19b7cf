"""`specpool plan` predicts the speed of the real coordinator and workers in virtual time."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from simulator import network
from simulator.clock import VirtualLoop, virtual_time
from simulator.model import EOS, Context, ToyPair
from simulator.setup import Request, Scenario, WorkerSetup
from simulator.simulation import Simulation

from specpool.distill.replay import Prediction
from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.drafting.plans import DraftMethod
from specpool.planning.prediction import MeasuredPair
from specpool.planning.replaying import Recording
from specpool.planning.rounds import simulate

BATCH, ANSWERS, MAX_TOKENS, PERIOD = 4, 28, 240, 12
ADDRESS, LENGTH = "10.0.0.1:1", 512
DRAFT = WorkerSetup("draft", ADDRESS, BATCH, LENGTH, BATCH * LENGTH, "cuda:0", 0.002, 0.00004)
TARGET = WorkerSetup("target", ADDRESS, BATCH, LENGTH, BATCH * LENGTH, "cuda:0", 0.02, 0.002)
EXCHANGE = 0.0002
TOLERANCE = 0.18
"""Tolerance: the prediction ignores prefill, and lookups that are dropped because a round was sent ahead, as
long ones often are."""


@dataclass(frozen=True)
class RepeatingPair(ToyPair):
    """A target that repeats itself with changes. `repetition`: share of tokens that repeat earlier ones."""

    repetition: float = 0.0

    def choose(self, context: Context) -> int:
        """The target's next token."""
        tokens, choice = context[0], super().choose(context)
        return tokens[-PERIOD] if choice % 100 < 100 * self.repetition else choice


class TimedSimulation(Simulation):
    """Records the time and the number of target passes when a request ends."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ends: list[tuple[float, int]] = []

    def _ended(self, task: asyncio.Task[None]) -> None:
        super()._ended(task)
        self.ends.append((self._loop.time(), self.workers[0].engines[0].passes))


def served(pair: ToyPair, prompts: Sequence[tuple[int, ...]], method: str, k: int | None = None) -> tuple[float, float]:
    """Return tokens per virtual second and per pass of a coordinator with a full window and a colocated draft."""
    requests = [Request(0.0, str(i), prompt, MAX_TOKENS, k=k, method=method) for i, prompt in enumerate(prompts)]
    settings = {"max_num_seqs": BATCH, "max_batch_size": BATCH, "max_num_speculative_tokens": 8}
    scenario = Scenario(1, pair, (replace(TARGET, draft=DRAFT),), settings, tuple(requests))
    loop = VirtualLoop()
    with virtual_time(loop, scenario.seed):
        simulation = TimedSimulation(scenario, loop)
        loop.run_until_complete(simulation.run())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    assert not simulation.result.violations
    (began, passes_before), *others = simulation.ends[BATCH - 1 : -BATCH]
    ended, passes = others[-1]
    tokens = len(others) * MAX_TOKENS
    return tokens / (ended - began), tokens / (passes - passes_before)


def recorded(pair: ToyPair, prompt: tuple[int, ...]) -> Recording:
    answer = pair.answer(prompt, MAX_TOKENS, 0)
    tokens = [*prompt, *answer]
    contexts = (tokens[:end] for end in range(len(prompt), len(tokens)))
    agreed = [pair.draft((context, 0)) == token for context, token in zip(contexts, answer, strict=True)]
    return Recording(prompt, answer, Prediction([agreed], [[pair.agreement] * len(answer)]))


@pytest.mark.parametrize(
    ("method", "agreement", "repetition"),
    [
        pytest.param(DraftMethod.NGRAM, 0.7, 0.9, marks=pytest.mark.slow),
        (DraftMethod.BEST, 0.7, 0.9),
        (DraftMethod.BEST, 0.8, 0.0),
        pytest.param(DraftMethod.BEST, 0.1, 0.0, marks=pytest.mark.slow),
    ],
)
def test_prediction_agrees_with_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, method: DraftMethod, agreement: float, repetition: float
) -> None:
    monkeypatch.setattr(network, "MAX_LATENCY", network.MIN_LATENCY)
    pair, rng = RepeatingPair(agreement, 0.0, repetition), random.Random(1)
    prompts = [tuple(rng.randrange(EOS) for _ in range(PERIOD)) for _ in range(ANSWERS)]
    times = (StepTimes({rows: setup.pass_seconds(rows) for rows in (1, 64)}) for setup in (DRAFT, TARGET))
    measured = MeasuredPair(RoundCosts(*times, EXCHANGE), [1.0], shared=True, carried=True)
    speed = simulate(measured, [recorded(pair, prompt) for prompt in prompts], BATCH, method, 8)
    tokens_per_second, tokens_per_pass = served(pair, prompts, method)
    plain, _ = served(pair, prompts, method, k=0)
    assert BATCH * speed.tokens_per_round == pytest.approx(tokens_per_pass, rel=TOLERANCE)
    assert speed.of_plain == pytest.approx(tokens_per_second / plain, rel=TOLERANCE)
