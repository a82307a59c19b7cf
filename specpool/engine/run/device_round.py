"""A round of greedy sequences on the device: the target's pass, acceptance, then the carried draft's pass and loop.

The host launches everything, then waits once. Launches run ahead of the device, so the device does not idle.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from specpool.engine.cache.spans import Span
from specpool.engine.passes.gpu.accept import accept
from specpool.engine.passes.gpu.choice import choose, no_numbers
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.passes.packing import PackedBatch, Shape
from specpool.engine.run.engine import Engine
from specpool.engine.run.runner import PassResult


@dataclass(slots=True)  # not frozen, like `Span`
class RoundSpan:
    """A sequence's part of a round."""

    span: Span
    """The target's committed token and draft tokens, with logits after each."""
    draft_slot: int = -1
    """The sequence's slot in the draft's cache. It has the same tokens up to the committed one, and pages for the pass
    and all steps. -1: the round does not draft for the sequence."""
    num_draft_tokens: int = 0

    def draft_span(self, states: torch.Tensor | None) -> Span:
        """The draft's span if all draft tokens are accepted. Without a draft, it only takes up rows.

        `states`: of the target after each token of the span.
        """
        token_ids = [0] * len(self.span.token_ids)  # not known yet
        if self.draft_slot < 0:
            return Span(-1, 0, token_ids, 1)
        return Span(self.draft_slot, self.span.start + 1, token_ids, 1, states=states)


class SpanResult(NamedTuple):
    """The results of a round for a sequence."""

    choices: list[int]
    """The target's choice after each token of the span."""
    is_finite: bool
    """Whether the largest logit after each token is finite."""
    drafted: list[list[float]] | None
    """Tokens drafted after the accepted ones, and their probabilities. None without a draft."""
    states: torch.Tensor | None
    """The target's states after the span's last `num_states` tokens; see `PassResult`."""


class DeviceRound:
    """Rounds of a target and the draft that its worker carries, on the kernels of one device."""

    def __init__(self, target: Engine, draft: Engine, loop: GpuDraftLoop) -> None:
        """`loop`: of the draft."""
        self._target, self._draft, self._loop = target, draft, loop
        self.max_rows = min(engine.forward_pass.rows_per_tile for engine in (target, draft))
        """Maximum tokens of a span: the rows of a tile of attention in both models."""
        self.draft_ns = 0
        """Nanoseconds that the device spent on the draft in the last round."""
        self._compile()

    @classmethod
    def of(cls, target: Engine, draft: Engine) -> Self | None:
        """The rounds of a pair; None if a pass does not run on kernels, or the models are on different devices.

        Hybrid models have none: the host plans recurrent layers once it knows which tokens were accepted.
        """
        if not isinstance(target.draft_loop, GpuDraftLoop) or not isinstance(draft.draft_loop, GpuDraftLoop):
            return None
        is_hybrid = any(engine.facts.recurrent is not None for engine in (target, draft))
        return None if is_hybrid or target.facts.device != draft.facts.device else cls(target, draft, draft.draft_loop)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a round."""
        return min(self._target.max_num_batched_tokens, self._draft.max_num_batched_tokens)

    @torch.inference_mode()
    def run(self, parts: Sequence[RoundSpan], state_layers: tuple[int, ...]) -> list[SpanResult]:
        """Run a round of spans with at most `max_rows` tokens each, `max_tokens` together.

        `state_layers`: numbers of layers after which to take the target's states, among them those that the draft
        reads.
        """
        verified = self._target.run_pass([part.span for part in parts], state_layers)
        choices = choose(verified.logits, self._target.head)
        stopwatch = Stopwatch(choices.device)
        drafted = self._launch_draft(parts, verified, choices)
        stopwatch.stop()
        numbers = torch.cat([choices.flatten(), drafted.flatten()]).tolist()  # the host waits
        self.draft_ns = stopwatch.elapsed_ns()
        return _split(parts, verified, numbers)

    def _launch_draft(self, parts: Sequence[RoundSpan], verified: PassResult, choices: torch.Tensor) -> torch.Tensor:
        """Launch the draft after the accepted tokens. Return its choices [1 + steps, 2, parts]."""
        states = _states_of(parts, verified) if self._draft.forward_pass.state_size else [None] * len(parts)
        spans = [part.draft_span(own) for part, own in zip(parts, states, strict=True)]
        batch = self._draft.runner.batch_of(spans)
        remaining = [max(0, part.num_draft_tokens - 1) for part in parts]
        numbers = self._loop.numbers(spans, remaining)
        accept(choices, verified.batch, batch, numbers, len(parts), self.max_rows)
        logits = self._draft.forward_pass(batch)[: len(parts)]
        own_states = None if batch.own_states is None else batch.own_states[: len(parts)]
        max_length = max(span.end + count for span, count in zip(spans, remaining, strict=True))
        steps = max(remaining)
        self._draft.count_passes(1 + steps, batch.tokens + sum(remaining))
        return self._loop.run_steps(numbers, choose(logits, self._draft.head), max_length, steps, own_states)[0]

    def _compile(self) -> None:
        """Compile `accept`, which is not part of any pass, before serving."""
        target, draft = (
            PackedBatch.of_padding(engine.layout.arena, Shape(8, 8, 8), 1) for engine in (self._target, self._draft)
        )
        target.tile_sizes[:] = 1
        numbers = no_numbers(8, recurs=False, device=draft.numbers.device)
        accept(numbers[:2].double(), target, draft, numbers, 1, self.max_rows)


class Stopwatch:
    """Measures the time that a device spends on the work launched between two points."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._began = self._ended = time.perf_counter_ns()

    def stop(self) -> None:
        """Mark the end of the work."""
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter_ns()

    def elapsed_ns(self) -> int:
        """Nanoseconds between the points. The device must have finished the work."""
        if self._events is None:
            return self._ended - self._began
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return round(milliseconds * 1e6)


def _states_of(parts: Sequence[RoundSpan], verified: PassResult) -> list[torch.Tensor | None]:
    """The target's states of each span."""
    if verified.states is None:
        return [None] * len(parts)
    return [*verified.states.split([part.span.num_states for part in parts])]


def _split(parts: Sequence[RoundSpan], verified: PassResult, numbers: list[float]) -> list[SpanResult]:
    """Split the numbers of a round, the target's choices and then the draft's, by sequence."""
    rows, count, begin, results = verified.batch.tokens, len(parts), 0, []
    tokens, probabilities, drafted = numbers[:rows], numbers[rows : 2 * rows], numbers[2 * rows :]
    for index, (part, states) in enumerate(zip(parts, _states_of(parts, verified), strict=True)):
        end = begin + len(part.span.token_ids)
        own = None
        if part.draft_slot >= 0:
            own = [drafted[index + which * count :: 2 * count] for which in range(2)]
        is_finite = all(map(math.isfinite, probabilities[begin:end]))
        results.append(SpanResult([*map(int, tokens[begin:end])], is_finite, own, states))
        begin = end
    return results
