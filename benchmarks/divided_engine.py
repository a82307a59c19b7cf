"""An engine, alone or divided among ranks, in a process of its own, and what is measured of it there.

A process can have only one divided engine; in processes of their own, several engines can be measured in turns.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Self, TypeVar

import psutil
from transformers.utils.logging import disable_progress_bar

from benchmarks.engine_answers import Answers, by_drafts, one_by_one
from benchmarks.report import seconds_of
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.run.engine import Engine
from specpool.engine.sharding.shares import Sums
from specpool.engine.startup.loading import load_engine

MAX_MODEL_LEN, MAX_SEQUENCES = 320, 16
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """A number of ranks, how they sum, and the threads of each."""

    ranks: int
    sums: Sums | None
    """None: not divided."""
    threads: int

    def options(self, model: str) -> EngineOptions:
        """The options of such an engine."""
        return EngineOptions(
            model=model,
            device="cpu",
            threads=self.threads,
            tensor_parallel=self.ranks,
            tensor_parallel_sums=self.sums or "auto",
            max_model_len=MAX_MODEL_LEN,
            max_sequences=MAX_SEQUENCES,
        )


@dataclass(frozen=True)
class Pass:
    """A forward pass: new tokens of some sequences after `cached` positions of each."""

    sequences: int
    tokens: int
    cached: int

    def spans(self) -> list[Span]:
        """Of the first slots; the last token of each sequence gets logits."""
        return [Span(slot, self.cached, [5] * self.tokens, 1) for slot in range(self.sequences)]


@dataclass(frozen=True)
class Timing:
    """What a pass took, and its collectives as rank 0 saw them: with its waiting for ranks that are slower."""

    seconds: float
    collectives: int
    collective_seconds: float


@dataclass(frozen=True)
class Memory:
    """Bytes of each rank: its weights, and the memory that its process shares with no other."""

    weights: list[int]
    resident: list[int]


@dataclass(frozen=True)
class Start:
    """How an engine was loaded."""

    seconds: float
    bitwise: bool
    """Whether the engine proved that its results are exact."""
    before: int
    """Bytes that its process had for itself alone before, by imports."""


class MeasuredEngine:
    """An engine in a process of its own. A context manager: at its end all ranks have ended.

    Every method raises BrokenProcessPool, a RuntimeError, if the process has ended.
    """

    def __init__(self, model: str, kind: Kind) -> None:
        """Loads the engine. UnsupportedModelError."""
        self.kind = kind
        self._processes = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            self.start = self._ask(_load, kind.options(model))
        except BaseException:
            self._processes.shutdown()
            raise

    def fastest(self, shape: Pass, times: int) -> Timing:
        """The fastest of some passes, after one that is not counted."""
        return self._ask(_fastest, shape, times)

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[Answers, Answers]:
        """Greedy answers of `tokens` tokens: one token at a time, and by verifying drafts."""
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


# The engine of this process, once it is loaded: an engine cannot be sent between processes.
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
