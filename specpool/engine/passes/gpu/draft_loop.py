"""The draft loop on the device: each step feeds the next one, and the host reads all tokens at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.checkpoints import Segment
from specpool.engine.cache.spans import Span
from specpool.engine.numerics.uploads import upload
from specpool.engine.passes.drafts import Draft, DraftRound, drafts_of, extend_drafts, read_choices
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.gpu.choice import BEGINS, LOGIT_ROWS, REMAINING, SEGMENTS, SIZES, choose, no_numbers
from specpool.engine.passes.gpu.graphs import Capture, CapturedGraphs, Run
from specpool.engine.passes.packing import INPUT_IDS, OFFSETS, POSITIONS, PREFIX_LENGTHS, SLOTS, PackedBatch, Shape
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.kernel import FIELDS, numbers_of_row
from specpool.engine.sampling.ranking_kernel import rank_greedy
from specpool.engine.sampling.sampler import kernel_is_exact

GRAPH_STEPS = (4, 2, 1)
"""Steps of a captured graph. Any number is a sum of these."""
SAMPLED_STEPS = (1,)
"""Steps of a captured graph that samples."""


class StepKey(NamedTuple):
    """Identifies the work of a graph."""

    rows: int  # padded number of sequences
    steps: int
    samples: bool = False


@dataclass(frozen=True)
class StepMemory:
    """Memory that all steps of a number of rows share. The device computes everything that changes between steps."""

    numbers: torch.Tensor  # [numbers, rows], see `no_numbers`
    rules: torch.Tensor  # [rows, FIELDS] sampling rules and context length of each row, as int32
    results: torch.Tensor  # [steps of the longest graph, 2, rows] chosen tokens and their probabilities, as float64
    states: torch.Tensor | None  # [1 + steps, rows, hidden] own states of a feature draft: each is the next one's input


class GpuDraftLoop:
    """The draft loop of passes without an attention plan. It runs all steps of each draft."""

    min_draft_tokens, passes_in_progress = 1, 0

    def __init__(self, model: ForwardPass, arena: KVArena, head: Head, capture: Capture | None) -> None:
        """`capture`: captures steps; None: they run eagerly."""
        self._model, self._arena, self._head, self._recurs = model, arena, head, arena.recurrent is not None
        self.graphs: CapturedGraphs[StepKey, int] = CapturedGraphs(capture)
        """Captured steps. The input of a graph is the maximum number of positions of a sequence."""
        self._memory: dict[int, StepMemory] = {}
        """Memory by padded number of sequences."""
        self._states: torch.Tensor | None = None
        """Memory for own states that all numbers of rows share."""
        # Test the kernels now, not while a graph is captured.
        self._samples = kernel_is_exact(arena.device, model.compute_dtype, head.vocab_size)

    def can_draft(self, draft: Draft) -> bool:
        """Whether the loop can choose the tokens of a draft. See `DraftLoop`."""
        rules = draft.rules
        return rules is None or (self._samples and rules.leaves_logits(draft.context, draft.prefix_length))

    def capture_graphs(self, lengths: Mapping[int, int]) -> None:
        """Capture steps. `lengths`: maximum positions of a sequence by padded number of sequences, largest first."""

        def prepare(key: StepKey) -> tuple[int, Run]:
            max_length = lengths[key.rows]
            return max_length, lambda: self._run_eagerly(key, max_length)

        kinds = [(steps, False) for steps in GRAPH_STEPS]
        if self._samples:
            kinds += [(steps, True) for steps in SAMPLED_STEPS]
        self.graphs.capture_all([StepKey(rows, *kind) for rows in lengths for kind in kinds], prepare)
        # Compile the choice of the first tokens, and their ranking, which no graph holds.
        logits = torch.zeros(1, self._head.outputs, dtype=self._model.compute_dtype, device=self._arena.device)
        for samples in {samples for _, samples in kinds}:
            choose(logits, self._head, rules=self._memory_of(self._padded(1)).rules if samples else None)
        rank_greedy(logits, self._head, count=2)

    def __call__(
        self,
        logits: torch.Tensor,
        rounds: Sequence[DraftRound],
        own_states: torch.Tensor | None = None,
    ) -> tuple[int, int]:
        """Extend the drafts; see `DraftLoop`."""
        drafts = drafts_of(rounds)
        spans, remaining = [draft.span for draft in drafts], [draft.num_draft_tokens - 1 for draft in drafts]
        rules = self._rules(drafts) if any(draft.rules is not None for draft in drafts) else None
        chosen = choose(logits, self._head, rules=rules)
        segments = [draft.segment for draft in drafts if draft.segment is not None]
        chosen, states = self._run(chosen, spans, remaining, segments, own_states, rules)
        found = dict(zip(drafts, chosen.permute(2, 1, 0).tolist(), strict=True))  # tokens, then probabilities
        extend_drafts(rounds, read_choices(found))
        for draft, span, own in zip(drafts, spans, [] if states is None else states.unbind(1), strict=False):
            num_run = draft.span.end - span.end
            draft.own_states = [own[: num_run + 1]]
        return max(remaining), sum(remaining)

    def _run(
        self,
        chosen: torch.Tensor,
        spans: Sequence[Span],
        remaining: Sequence[int],
        segments: Sequence[Segment],
        own_states: torch.Tensor | None,
        rules: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Continue from the choices [2, n] and own states [n, hidden] after n spans.

        Return all choices [1 + steps, 2, n], and all own states [1 + steps, n, hidden]. `remaining`: further tokens of
        each span; after that, the loop caches nothing for it. `segments`: see `numbers`.
        """
        if not any(remaining):
            return chosen[None], None if own_states is None else own_states[None]
        max_length = max(span.end + steps for span, steps in zip(spans, remaining, strict=True))
        numbers = self.numbers(spans, remaining, segments)
        return self.run_steps(numbers, chosen, max_length, max(remaining), own_states, rules)

    def run_steps(
        self,
        numbers: torch.Tensor,
        chosen: torch.Tensor,
        max_length: int,
        steps: int,
        own_states: torch.Tensor | None = None,
        rules: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run steps after the choices [2, n] of n sequences, and own states [n, hidden] of a feature draft.

        Everything is on the device, and the host does not wait. `numbers`: of the first step, [numbers, rows]; row
        i is sequence i, rows after n are padding, and input ids are unset. `max_length`: positions of the longest
        sequence after all steps. `rules`: of all rows, see `choose`; None: all sequences are greedy. Return all
        choices [1 + steps, 2, n], and all own states [1 + steps, n, hidden].
        """
        count, rows = chosen.shape[1], numbers.shape[1]
        memory = self._memory_of(rows)
        memory.numbers.copy_(numbers)
        memory.numbers[INPUT_IDS, :count] = chosen[0]
        if rules is not None:
            memory.rules.copy_(rules)
        choices, states = chosen.new_empty(1 + steps, 2, count), None
        choices[0] = chosen
        if memory.states is not None and own_states is not None:
            states = own_states.new_empty(1 + steps, *own_states.shape)
            states[0] = memory.states[0, :count] = own_states
        done = 0
        while done < steps:
            key, run = self._next_steps(StepKey(rows, steps - done, rules is not None), max_length)
            run()
            begin, done = done + 1, done + key.steps
            choices[begin : done + 1] = memory.results[: key.steps, :, :count]
            if memory.states is not None and states is not None:
                states[begin : done + 1] = memory.states[1 : key.steps + 1, :count]
                if done < steps:
                    memory.states[0] = memory.states[key.steps]
        return choices, states

    def numbers(
        self, spans: Sequence[Span], remaining: Sequence[int], segments: Sequence[Segment] = ()
    ) -> torch.Tensor:
        """The numbers of the first step after these spans, on the device, without input ids.

        `remaining`: further tokens of each span. `segments`: how recurrent layers run them, if there are such layers.
        """
        count = len(spans)
        rows = self._padded(count)
        numbers = no_numbers(rows, self._recurs)
        numbers[BEGINS] = numbers[LOGIT_ROWS] = torch.arange(rows)
        numbers[PREFIX_LENGTHS, :count] = torch.tensor([span.prefix_length for span in spans])
        numbers[OFFSETS, :count] = torch.tensor([span.offset for span in spans])
        numbers[REMAINING, :count] = torch.tensor(remaining)
        numbers[SIZES] = alive = numbers[REMAINING] > 0
        numbers[SLOTS, alive] = torch.tensor([span.slot for span in spans])[alive[:count]]
        numbers[POSITIONS, alive] = torch.tensor([span.end for span in spans])[alive[:count]]
        if segments:
            of_rows = [own._replace(first_row=row, num_rows=1) for row, own in enumerate(segments)]
            numbers[SEGMENTS:REMAINING].view(rows, -1)[alive] = torch.tensor(of_rows)[alive[:count]]
        return upload(numbers, self._arena.device)

    def _rules(self, drafts: Sequence[Draft]) -> torch.Tensor:
        """The sampling rules of all rows after the spans of the drafts, [rows, FIELDS], on the device."""
        rules = torch.zeros(self._padded(len(drafts)), FIELDS, dtype=torch.int32)
        of_drafts = [numbers_of_row(draft.rows.params, draft.span.end, self._head.outputs) for draft in drafts]
        rules[: len(drafts)] = torch.tensor(of_drafts, dtype=torch.int32)
        return upload(rules, self._arena.device)

    def _padded(self, count: int) -> int:
        return self._model.padded_shape(Shape(count, count, count)).rows

    def _next_steps(self, needed: StepKey, max_length: int) -> tuple[StepKey, Callable[[], object]]:
        """The largest number of needed steps that can run at once, and the function that runs them."""
        sizes = SAMPLED_STEPS if needed.samples else GRAPH_STEPS
        keys = [needed._replace(steps=size) for size in sizes if size <= needed.steps]
        for key in keys:
            graph = self.graphs.find(key)
            if graph is not None and max_length <= graph.input:
                return key, graph.replay
        return keys[0], lambda: self._run_eagerly(keys[0], max_length)

    def _run_eagerly(self, key: StepKey, max_length: int) -> torch.Tensor:
        """Run steps on the memory of their rows. Return the choices [steps, 2, rows]."""
        rows, memory = key.rows, self._memory_of(key.rows)
        for step in range(key.steps):
            batch = PackedBatch(
                self._arena, rows, rows, rows, max_length, rows, memory.numbers[:REMAINING].view(-1),
                input_states=None if memory.states is None else memory.states[step],
                own_states=None if memory.states is None else memory.states[step + 1], logits_in_order=True,
                num_segments=rows * self._recurs,
            )  # fmt: skip
            rules = memory.rules if key.samples else None
            choose(self._model(batch), self._head, memory.numbers, rules, memory.results[step])
        return memory.results[: key.steps]

    def _memory_of(self, rows: int) -> StepMemory:
        if rows not in self._memory:
            self._memory[rows] = self._new_memory(rows)
        return self._memory[rows]

    def _new_memory(self, rows: int) -> StepMemory:
        device, size, steps = self._arena.device, self._model.state_size, max(GRAPH_STEPS)
        numbers = no_numbers(rows, self._recurs, device)
        if size and (self._states is None or self._states.shape[1] < rows):
            self._states = torch.zeros(1 + steps, rows, size, dtype=self._model.compute_dtype, device=device)
        results = torch.zeros(steps, 2, rows, dtype=torch.float64, device=device)
        rules = torch.zeros(rows, FIELDS, dtype=torch.int32, device=device)
        return StepMemory(numbers, rules, results, None if self._states is None else self._states[:, :rows])
