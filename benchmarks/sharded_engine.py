"""An engine in a child process, sharded among ranks or not.

A process can have only one sharded engine, so each of several engines needs its own process.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Self, TypeVar

import psutil
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.report import seconds_of
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.run.engine import Engine
from specpool.engine.sharding.shares import Sums
from specpool.engine.startup.loading import load_engine

MAX_MODEL_LEN, MAX_SEQUENCES = 320, 16
NUM_DRAFT_TOKENS = 3
WRONG_EVERY = 4
"""Every fourth draft token is wrong, so rounds end at different lengths."""
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """Number of ranks, kind of sums (None: not sharded), and threads per rank."""

    ranks: int
    sums: Sums | None
    threads: int

    def options(self, model: str) -> EngineOptions:
        """The options of such an engine."""
        return EngineOptions(
            model=model, device="cpu", threads=self.threads, tensor_parallel=self.ranks,
            tensor_parallel_sums=self.sums or "auto", max_model_len=MAX_MODEL_LEN, max_sequences=MAX_SEQUENCES,
        )  # fmt: skip


@dataclass(frozen=True)
class Pass:
    """A forward pass: `tokens` new tokens of each of some sequences, after `cached` positions."""

    sequences: int
    tokens: int
    cached: int

    def spans(self) -> list[Span]:
        """Spans of the first slots; the last token of each sequence gets logits."""
        return [Span(slot, self.cached, [5] * self.tokens, 1) for slot in range(self.sequences)]


@dataclass(frozen=True)
class Timing:
    """Time of a pass, and of its collectives as rank 0 sees them, waiting included."""

    seconds: float
    collectives: int
    collective_seconds: float


@dataclass(frozen=True)
class Answers:
    """The tokens of each answer, and a SHA-256 of all logits behind them."""

    token_ids: list[list[int]]
    logits: str


@dataclass(frozen=True)
class Memory:
    """Bytes of each rank: weights, and private memory of the process."""

    weights: list[int]
    resident: list[int]


@dataclass(frozen=True)
class Start:
    """The start of an engine. `before`: private bytes of the process before loading."""

    seconds: float
    bitwise: bool
    before: int


class MeasuredEngine:
    """An engine in a child process; a context manager that ends all ranks.

    Every method raises BrokenProcessPool, a RuntimeError, if the process has ended.
    """

    def __init__(self, model: str, kind: Kind) -> None:
        """Load the engine. UnsupportedModelError."""
        self.kind = kind
        self._processes = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            self.start = self._ask(_load, kind.options(model))
        except BaseException:
            self._processes.shutdown()
            raise

    def fastest(self, shape: Pass, times: int) -> Timing:
        """The fastest of some passes, after a warm-up."""
        return self._ask(_fastest, shape, times)

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[Answers, Answers]:
        """Greedy answers of `tokens` tokens: token by token, and by verifying drafts."""
        return self._ask(_answers, prompts, tokens)

    def memory(self) -> Memory:
        """The memory of all ranks now."""
        return self._ask(_memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask(_close)
        finally:
            self._processes.shutdown()

    def _ask(self, function: Callable[..., T], *arguments: Any) -> T:
        return self._processes.submit(function, *arguments).result()


# The engine of this process: it cannot be sent between processes.
_engines: list[Engine] = []


def _load(options: EngineOptions) -> Start:
    disable_progress_bar()
    before = psutil.Process().memory_full_info().uss
    seconds = seconds_of(lambda: _engines.append(load_engine(options, exact=True)))
    return Start(seconds, _engines[0].bitwise, before)


def _fastest(shape: Pass, times: int) -> Timing:
    spans = shape.spans()
    _engines[0].forward(spans)
    return min((_timing(_engines[0], spans) for _ in range(times)), key=lambda timing: timing.seconds)


def _timing(engine: Engine, spans: list[Span]) -> Timing:
    if engine.leader is None:
        return Timing(seconds_of(lambda: engine.forward(spans)), 0, 0.0)
    group: Any = engine.forward_pass.group
    collectives, spent = group.collectives, group.collective_ns
    seconds = seconds_of(lambda: engine.forward(spans))
    return Timing(seconds, group.collectives - collectives, (group.collective_ns - spent) / 1e9)


def _answers(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[Answers, Answers]:
    plain = one_by_one(_engines[0], prompts, tokens)
    return plain, by_drafts(_engines[0], prompts, plain.token_ids)


def _memory() -> Memory:
    engine = _engines[0]
    others = [] if engine.leader is None else [report.weight_bytes for report in engine.leader.reports]
    own = psutil.Process()
    processes = [own, *sorted(own.children(), key=psutil.Process.create_time)]
    return Memory([engine.footprint.weights, *others], [process.memory_full_info().uss for process in processes])


def _close() -> None:
    _engines.pop().close()


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Answers:
    """Answers of `tokens` tokens, one sequence at a time and one token per pass."""
    answers, logits = [], []
    for prompt in prompts:
        answer: list[int] = []
        span = Span(0, 0, list(prompt), 1)
        while len(answer) < tokens:
            row = engine.forward([span])
            answer.append(int(row.argmax()))
            logits.append(row)
            span = Span(0, span.end, answer[-1:], 1)
        answers.append(answer)
    return Answers(answers, _digest(logits))


def by_drafts(engine: Engine, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Answers:
    """Answers of all sequences together, in rounds that verify drafts.

    Drafts are the expected tokens, some of them wrong. Answers are as long as the expected ones.
    """
    first = engine.forward([Span(slot, 0, list(prompt), 1) for slot, prompt in enumerate(prompts)])
    answers = [[int(row.argmax())] for row in first]
    logits = [[row[None]] for row in first]
    while unfinished := [slot for slot, answer in enumerate(answers) if len(answer) < len(expected[slot])]:
        drafts = {slot: _draft(expected[slot], len(answers[slot]), engine.vocab_size) for slot in unfinished}
        spans = [
            Span(slot, len(prompts[slot]) + len(answers[slot]) - 1, [answers[slot][-1], *draft], 1 + len(draft))
            for slot, draft in drafts.items()
        ]
        rows = engine.forward(spans).split([span.num_logits for span in spans])
        for (slot, draft), own in zip(drafts.items(), rows, strict=True):
            chosen = own.argmax(-1).tolist()
            gained = 1 + next((i for i, token in enumerate(draft) if token != chosen[i]), len(draft))
            answers[slot] += chosen[:gained]
            logits[slot].append(own[:gained])
    return Answers(answers, _digest([rows for sequence in logits for rows in sequence]))


def _draft(expected: Sequence[int], done: int, vocab_size: int) -> list[int]:
    """Tokens after the first `done`; the last token of an answer is never drafted."""
    positions = range(done, min(done + NUM_DRAFT_TOKENS, len(expected) - 1))
    return [(expected[i] + (i % WRONG_EVERY == 0)) % vocab_size for i in positions]


def _digest(logits: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for rows in logits:
        digest.update(rows.float().cpu().numpy().tobytes())
    return digest.hexdigest()
