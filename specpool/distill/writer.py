"""Generates dialogues in all slots of an engine at once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specpool.distill.agenda import Agenda, exponential_noise
from specpool.distill.examples import TOP, Example
from specpool.distill.questions import QUESTION_TOP, Beginning, Questions
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine


@dataclass
class _Dialogue:
    """A dialogue in progress."""

    token_ids: list[int]
    question_start: int
    answer_start: int | None
    noise_seed: int = 0
    number: int = 0
    attempt: int = 0
    num_cached_tokens: int = 0
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_logprobs: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, beginning: Beginning, number: int, attempt: int) -> "_Dialogue":
        starts = beginning.question_start, beginning.answer_start
        return cls(beginning.token_ids, *starts, beginning.noise_seed, number, attempt)

    def finished(self) -> Example:
        assert self.answer_start is not None
        tokens = torch.tensor(self.token_ids)
        return Example(tokens, self.answer_start, torch.stack(self.top_ids), torch.stack(self.top_logprobs))


class Writer:
    """Generates dialogues with an engine, which needs `questions.max_length` positions for each."""

    def __init__(self, engine: Engine, questions: Questions) -> None:
        self._engine, self._questions = engine, questions
        self._template, self._limits = questions.template, questions.limits
        self._lag = 0

    def write(self, numbers: Iterable[int], lag: int) -> Iterator[tuple[int, Example]]:
        """Generate the dialogues with these numbers, ascending; yield each with its number when it ends.

        `lag`: of the agenda. Answers of other dialogues before them must be known.
        """
        agenda, self._lag = Agenda(numbers, lag), lag

        def take() -> _Dialogue | None:
            return None if (number := agenda.take()) is None else self._begin(number)

        for dialogue in self._run(take):
            example, number = dialogue.finished(), dialogue.number
            self._questions.take_answer(number, dialogue.token_ids[example.answer_start :])
            agenda.end(number)
            yield number, example

    def answer(self, prompts: Iterable[Sequence[int]]) -> Iterator[Example]:
        """Answer prompts, each given as all tokens before its answer; yield each dialogue when it ends."""
        waiting = (_Dialogue(list(tokens), 0, len(tokens)) for tokens in prompts)
        for dialogue in self._run(lambda: next(waiting, None)):
            yield dialogue.finished()

    def _begin(self, number: int, attempt: int = 0) -> _Dialogue:
        return _Dialogue.of(self._questions.begin(number, attempt, number - self._lag), number, attempt)

    def _run(self, take: Callable[[], _Dialogue | None]) -> Iterator[_Dialogue]:
        running: dict[int, _Dialogue] = {}
        while True:
            for slot in (slot for slot in range(self._engine.slots.total) if slot not in running):
                if (dialogue := take()) is None:
                    break
                running[slot] = dialogue
            if not running:
                return
            yield from self._step(running)

    @torch.inference_mode()
    def _step(self, dialogues: dict[int, _Dialogue]) -> Iterator[_Dialogue]:
        """Append a token to every dialogue; yield the dialogues with a complete answer. `dialogues`: by slot."""
        spans = [
            Span(slot, d.num_cached_tokens, d.token_ids[d.num_cached_tokens :], 1) for slot, d in dialogues.items()
        ]
        logits = self._engine.head.over_vocabulary(self._engine.forward(spans)).cpu()
        asking = torch.tensor([dialogue.answer_start is None for dialogue in dialogues.values()])
        questions = [dialogue for dialogue in dialogues.values() if dialogue.answer_start is None]
        sampled = iter(self._sample(logits[asking], questions) if questions else [])
        top_logits, top_ids = logits[~asking].topk(TOP)
        top_logprobs = top_logits - logits[~asking].logsumexp(-1, keepdim=True)
        candidates = iter(zip(top_ids.int(), top_logprobs.half(), top_ids[:, 0].tolist(), strict=True))
        for slot, dialogue in list(dialogues.items()):
            dialogue.num_cached_tokens = len(dialogue.token_ids)
            if dialogue.answer_start is None:
                if not self._extend_question(dialogue, next(sampled)):
                    dialogues[slot] = self._begin(dialogue.number, dialogue.attempt + 1)
                continue
            ids, logprobs, token = next(candidates)
            dialogue.top_ids.append(ids)
            dialogue.top_logprobs.append(logprobs)
            dialogue.token_ids.append(token)
            if token in self._template.ends or len(dialogue.top_ids) == self._limits.max_answer:
                del dialogues[slot]
                yield dialogue

    def _extend_question(self, dialogue: _Dialogue, token: int) -> bool:
        """Append a token to a question, or begin the answer. Return False if the question is too short or too long."""
        length = len(dialogue.token_ids) - dialogue.question_start
        if token not in self._template.ends:
            dialogue.token_ids.append(token)
            return length + 1 < self._limits.max_question
        dialogue.token_ids += self._template.before_answer
        dialogue.answer_start = len(dialogue.token_ids)
        return length >= self._limits.min_question

    def _sample(self, logits: torch.Tensor, dialogues: Sequence[_Dialogue]) -> list[int]:
        """The next token of each question, from logits [questions, vocab_size]."""
        best, ids = logits.topk(QUESTION_TOP)
        seeds = torch.tensor([dialogue.noise_seed for dialogue in dialogues])
        noise = exponential_noise(seeds, torch.tensor([len(each.token_ids) for each in dialogues]), QUESTION_TOP)
        sampled: list[int] = ids.gather(1, (best - noise.log()).argmax(-1, keepdim=True))[:, 0].tolist()
        return sampled
