"""The draft loop on the device: each step feeds the next one, and the host reads all tokens at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.passes.drafts import Choice, Draft, DraftRound, drafts_of, extend_drafts
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.gpu.choice import BEGINS, LOGIT_ROWS, REMAINING, SIZES, choose
from specpool.engine.passes.gpu.graphs import Capture, CapturedGraphs, Run
from specpool.engine.passes.packing import INPUT_IDS, OFFSETS, POSITIONS, PREFIX_LENGTHS, SLOTS, PackedBatch, Shape
from specpool.engine.sampling.head import Head


@dataclass(frozen=True)
class Step:
    """A step of one token per span. The device computes everything that changes between steps."""

    max_length: int  # positions of the longest sequence after all steps
    numbers: torch.Tensor  # [REMAINING + 1, rows]
    result: torch.Tensor  # [2, rows] chosen tokens and their probabilities, as float64
    states: torch.Tensor | None  # [rows, hidden] own states of a feature draft: input, then output, of the pass


class GpuDraftLoop:
    """The draft loop of passes without an attention plan. It decodes greedily and runs all steps of each draft."""

    samples, min_draft_tokens, passes_in_progress = False, 1, 0

    def __init__(self, model: ForwardPass, arena: KVArena, head: Head, capture: Capture | None) -> None:
        """`capture`: captures steps; None: they run eagerly."""
        self._model, self._arena, self._head = model, arena, head
        self.graphs: CapturedGraphs[int, Step] = CapturedGraphs(capture)
        """Captured steps by their padded number of sequences."""

    def capture_graphs(self, lengths: Mapping[int, int]) -> None:
        """Capture steps. `lengths`: maximum positions of a sequence by padded number of sequences."""

        def prepare(rows: int) -> tuple[Step, Run]:
            numbers = torch.zeros(REMAINING + 1, rows, dtype=torch.int64, device=self._arena.device)
            numbers[SLOTS] = -1
            return self._prepare(numbers, lengths[rows])

        self.graphs.capture_all(list(lengths), prepare)
        # Compile the choice of the first tokens, which no graph holds.
        logits = torch.zeros(1, self._head.outputs, dtype=self._model.compute_dtype, device=self._arena.device)
        choose(logits, self._head)

    def __call__(
        self,
        logits: torch.Tensor,
        rounds: Sequence[DraftRound],
        own_states: torch.Tensor | None = None,
    ) -> tuple[int, int]:
        """Extend the drafts; see `DraftLoop`."""
        drafts = drafts_of(rounds)
        spans, remaining = [draft.span for draft in drafts], [draft.num_draft_tokens - 1 for draft in drafts]
        chosen, states = self._run(choose(logits, self._head), spans, remaining, own_states)
        found = dict(zip(drafts, chosen.permute(2, 1, 0).tolist(), strict=True))  # tokens, then probabilities

        def read(drafting: Sequence[Draft]) -> list[Choice | None]:
            steps = [(*found[draft], len(draft.token_ids)) for draft in drafting]
            return [Choice(int(tokens[step]), probabilities[step]) for tokens, probabilities, step in steps]

        extend_drafts(rounds, read)
        for draft, span, own in zip(drafts, spans, [] if states is None else states.unbind(1), strict=False):
            num_run = draft.span.end - span.end
            draft.own_states = [own[: num_run + 1]]
        return max(remaining), sum(remaining)

    def _run(
        self,
        chosen: torch.Tensor,
        spans: Sequence[Span],
        remaining: Sequence[int],
        own_states: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Continue from the choices [2, n] and own states [n, hidden] after n spans.

        Return all choices [1 + steps, 2, n], and all own states [1 + steps, n, hidden]. `remaining`: further tokens of
        each span; after that, the loop caches nothing for it.
        """
        count = len(spans)
        if not any(remaining):
            return chosen[None], None if own_states is None else own_states[None]
        numbers = self._numbers(chosen, spans, remaining)
        max_length = max(span.end + steps for span, steps in zip(spans, remaining, strict=True))
        graph = self.graphs.find(numbers.shape[1])
        run_step: Callable[[], object]
        if graph is None or max_length > graph.input.max_length:
            step, run_step = self._prepare(numbers, max_length)
        else:
            step, run_step = graph.input, graph.replay
            step.numbers.copy_(numbers)
        choices, states = [chosen], [] if own_states is None else [own_states]
        if step.states is not None and own_states is not None:
            step.states[:count] = own_states
        for _ in range(max(remaining)):
            run_step()
            choices.append(step.result[:, :count].clone())
            if step.states is not None:
                states.append(step.states[:count].clone())
        return torch.stack(choices), torch.stack(states) if states else None

    def _numbers(self, chosen: torch.Tensor, spans: Sequence[Span], remaining: Sequence[int]) -> torch.Tensor:
        """The numbers of the first step, on the device."""
        count = len(spans)
        rows = self._model.padded_shape(Shape(count, count, count)).rows
        numbers = torch.zeros(REMAINING + 1, rows, dtype=torch.int64)
        numbers[BEGINS] = numbers[LOGIT_ROWS] = torch.arange(rows)
        numbers[POSITIONS, :count] = torch.tensor([span.end for span in spans])
        numbers[PREFIX_LENGTHS, :count] = torch.tensor([span.prefix_length for span in spans])
        numbers[OFFSETS, :count] = torch.tensor([span.offset for span in spans])
        numbers[REMAINING, :count] = torch.tensor(remaining)
        alive = numbers[REMAINING] > 0
        numbers[SIZES] = alive
        numbers[SLOTS] = -1
        numbers[SLOTS, :count] = torch.where(alive[:count], torch.tensor([span.slot for span in spans]), -1)
        if chosen.device.type == "cuda":
            numbers = numbers.pin_memory()
        numbers = numbers.to(chosen.device, non_blocking=True)
        numbers[INPUT_IDS, :count] = chosen[0].long()
        return numbers

    def _prepare(self, numbers: torch.Tensor, max_length: int) -> tuple[Step, Run]:
        """A step with its own memory, and the function that runs it."""
        rows, own, device, size = numbers.shape[1], numbers.clone(), numbers.device, self._model.state_size
        states = torch.zeros(rows, size, dtype=self._model.compute_dtype, device=device) if size else None
        batch = PackedBatch(
            self._arena, rows, rows, rows, max_length, rows, own[:REMAINING].view(-1),
            input_states=states, own_states=states, logits_in_order=True,
        )  # fmt: skip
        step = Step(max_length, own, torch.zeros(2, rows, dtype=torch.float64, device=device), states)

        def run() -> torch.Tensor:
            return step.result.copy_(choose(self._model(batch), self._head, own))

        return step, run
