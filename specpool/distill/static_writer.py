"""Generates dialogues on a GPU, thousands at a time.

A step reads and writes only tensors on the device. The host replays steps, takes finished dialogues, and begins others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specpool.distill.agenda import Agenda, exponential_noise
from specpool.distill.examples import TOP, Example
from specpool.distill.questions import QUESTION_TOP, Beginning, Questions
from specpool.distill.static_decoder import StaticDecoder
from specpool.engine.passes.gpu.graphs import CudaGraphs

STEPS = 8
"""Steps before the host looks for finished dialogues."""
RUNNING, FINISHED, DISCARDED = 0, 1, 2
ASKING = 0
"""Start of an answer while the question is being written."""


class StaticWriter:
    """Generates dialogues in a fixed number of sequences."""

    def __init__(self, model: PreTrainedModel, questions: Questions, sequences: int) -> None:
        """RuntimeError: the device has too little memory, or a graph cannot hold the step."""
        self._questions, self._limits = questions, questions.limits
        length, answer, device = questions.max_length, questions.limits.max_answer, model.device
        self._decoder = StaticDecoder(model, sequences, length)
        self._before_answer = torch.tensor(questions.template.before_answer, device=device)
        self._is_end = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)
        self._is_end[list(questions.template.ends)] = True

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(sequences, *shape, dtype=dtype, device=device)

        # The last position of these is written by sequences that have nothing to store.
        self._token_ids = zeros(length + 1)
        self._top_ids, self._top_logprobs = (
            zeros(answer + 1, TOP, dtype=dtype) for dtype in (torch.int32, torch.float16)
        )
        self._position, self._known, self._question_start, self._answer_start, self._state = (zeros() for _ in range(5))
        """Position of the input token, number of known tokens, starts of question and answer, and status."""
        self._noise_seed = zeros()
        self._graphs: CudaGraphs | None = None
        self._replay: Callable[[], object] = self._step
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._step()  # compiles kernels
                self._graphs = CudaGraphs()
                self._replay, _ = self._graphs(self._step)
        self._state.fill_(DISCARDED)

    def write(self, numbers: Iterable[int], lag: int) -> Iterator[tuple[int, Example]]:
        """See `Writer.write`."""
        agenda = Agenda(numbers, lag)
        running: dict[int, tuple[int, int]] = {}
        """By row: number and attempt of its dialogue."""
        while True:
            states = self._state.tolist()
            begun = {row: (running[row][0], running[row][1] + 1) for row in running if states[row] == DISCARDED}
            if finished := [row for row in running if states[row] == FINISHED]:
                for row, example in zip(finished, self._take(finished), strict=True):
                    number, _ = running.pop(row)
                    self._questions.take_answer(number, example.token_ids[example.answer_start :].tolist())
                    agenda.end(number)
                    yield number, example
            for row in (row for row in range(len(states)) if row not in running):
                if (following := agenda.take()) is None:
                    break
                begun[row] = following, 0
            running |= begun
            if not running:
                return
            if begun:
                self._begin([*begun], [self._questions.begin(*each, each[0] - lag) for each in begun.values()])
            for _ in range(STEPS):
                self._replay()

    def _take(self, rows: list[int]) -> Iterator[Example]:
        """The finished dialogues in these rows."""
        tensors = (self._token_ids, self._top_ids, self._top_logprobs, self._known, self._answer_start)
        rows_of_each = [each[rows].cpu() for each in tensors]
        for token_ids, top_ids, top_logprobs, length, start in zip(*rows_of_each, strict=True):
            tokens, answer = token_ids[:length].clone(), slice(int(length - start))
            yield Example(tokens, int(start), top_ids[answer].clone(), top_logprobs[answer].clone())
        self._state[rows] = DISCARDED

    def _begin(self, rows: list[int], beginnings: Sequence[Beginning]) -> None:
        """Begin a dialogue in each of these rows."""
        tokens = pad_sequence([torch.tensor(each.token_ids) for each in beginnings], batch_first=True)
        at, device = torch.tensor(rows), self._token_ids.device
        self._token_ids[at, : tokens.shape[1]] = tokens.to(device)
        self._known[at] = torch.tensor([len(each.token_ids) for each in beginnings], device=device)
        self._question_start[at] = torch.tensor([each.question_start for each in beginnings], device=device)
        self._answer_start[at] = torch.tensor([each.answer_start or ASKING for each in beginnings], device=device)
        self._noise_seed[at] = torch.tensor([each.noise_seed for each in beginnings], device=device)
        self._position[at], self._state[at] = 0, RUNNING

    @torch.no_grad()
    def _step(self) -> torch.Tensor:
        """Feed the next token of every sequence to the model. After the last known token, append a new one."""
        limits, position, next_position = self._limits, self._position, self._position + 1
        token_ids = self._token_ids.gather(1, position[:, None])[:, 0]
        logits = self._decoder.step(token_ids, position).float()
        best, ids = logits.topk(QUESTION_TOP)
        asking = self._answer_start == ASKING
        noise = exponential_noise(self._noise_seed, next_position, QUESTION_TOP)
        sampled = ids.gather(1, (best - noise.log()).argmax(-1, keepdim=True))[:, 0]
        chosen = torch.where(asking, sampled, ids[:, 0])
        ends, appends = self._is_end[chosen], (self._state == RUNNING) & (next_position == self._known)
        asks, answers = appends & asking, appends & ~asking
        begins_answer = asks & ends
        self._store(appends & ~begins_answer, next_position, chosen)
        self._store_header(begins_answer, next_position)
        self._store_candidates(answers, next_position, ids[:, :TOP], best[:, :TOP] - logits.logsumexp(-1, keepdim=True))
        length = next_position - self._question_start
        is_short = begins_answer & (length < limits.min_question)
        is_long = asks & ~ends & (length + 1 >= limits.max_question)
        is_complete = answers & (ends | (next_position + 1 - self._answer_start >= limits.max_answer))
        after_header = next_position + len(self._before_answer)
        self._state.masked_fill_(is_short | is_long, DISCARDED).masked_fill_(is_complete, FINISHED)
        self._known.add_(appends.long() * torch.where(begins_answer, len(self._before_answer), 1))
        self._answer_start.copy_(torch.where(begins_answer, after_header, self._answer_start))
        return self._position.add_((self._state == RUNNING).long())

    def _store(self, where: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        spare = self._token_ids.shape[1] - 1
        self._token_ids.scatter_(1, torch.where(where, positions, spare)[:, None], token_ids[:, None])

    def _store_header(self, where: torch.Tensor, positions: torch.Tensor) -> None:
        """Append the tokens before an answer."""
        spare, header = self._token_ids.shape[1] - 1, self._before_answer
        at = positions[:, None] + torch.arange(len(header), device=header.device)
        at = torch.where(where[:, None], at, spare)
        self._token_ids.scatter_(1, at, header.expand_as(at))

    def _store_candidates(
        self, where: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        """Keep the most probable tokens at a position of an answer."""
        at = torch.where(where, positions - self._answer_start, self._limits.max_answer)[:, None, None]
        self._top_ids.scatter_(1, at.expand(-1, 1, TOP), ids[:, None].int())
        self._top_logprobs.scatter_(1, at.expand(-1, 1, TOP), logprobs[:, None].half())
