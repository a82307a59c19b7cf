"""Generates dialogues in all slots of an engine at once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

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
    num_cached_tokens: int = 0
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_logprobs: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, beginning: Beginning) -> "_Dialogue":
        return cls(beginning.token_ids, beginning.question_start, beginning.answer_start)

    def finished(self) -> Example:
        assert self.answer_start is not None
        tokens = torch.tensor(self.token_ids)
        return Example(tokens, self.answer_start, torch.stack(self.top_ids), torch.stack(self.top_logprobs))


class Writer:
    """Generates dialogues with an engine, which needs `questions.max_length` positions for each."""

    def __init__(self, engine: Engine, questions: Questions, seed: int) -> None:
        self._engine, self._questions = engine, questions
        self._template, self._limits = questions.template, questions.limits
        self._rng = torch.Generator().manual_seed(seed)
        self._running: dict[int, _Dialogue] = {}
        self._finished = self._run(map(_Dialogue.of, iter(questions.begin, None)))

    def write(self, dialogues: int) -> Iterator[Example]:
        """Generate this number of dialogues; yield each when it ends."""
        return islice(self._finished, dialogues)

    def answer(self, prompts: Iterable[Sequence[int]]) -> Iterator[Example]:
        """Answer prompts, each given as all tokens before its answer; yield each dialogue when it ends."""
        return self._run(_Dialogue(list(tokens), 0, len(tokens)) for tokens in prompts)

    def _run(self, waiting: Iterator[_Dialogue]) -> Iterator[Example]:
        while True:
            free = [slot for slot in range(self._engine.slots.total) if slot not in self._running]
            self._running.update(zip(free, waiting, strict=False))
            if not self._running:
                return
            yield from self._step()

    @torch.inference_mode()
    def _step(self) -> Iterator[Example]:
        """Append a token to every dialogue; yield the dialogues with a complete answer."""
        dialogues = self._running
        spans = [
            Span(slot, d.num_cached_tokens, d.token_ids[d.num_cached_tokens :], 1) for slot, d in dialogues.items()
        ]
        logits = self._engine.head.over_vocabulary(self._engine.forward(spans)).cpu()
        asking = torch.tensor([dialogue.answer_start is None for dialogue in dialogues.values()])
        sampled = iter(self._sample(logits[asking]) if asking.any() else [])
        top_logits, top_ids = logits[~asking].topk(TOP)
        top_logprobs = top_logits - logits[~asking].logsumexp(-1, keepdim=True)
        candidates = iter(zip(top_ids.int(), top_logprobs.half(), top_ids[:, 0].tolist(), strict=True))
        for slot, dialogue in list(dialogues.items()):
            dialogue.num_cached_tokens = len(dialogue.token_ids)
            if dialogue.answer_start is None:
                if not self._extend_question(dialogue, next(sampled)):
                    del dialogues[slot]
                continue
            ids, logprobs, token = next(candidates)
            dialogue.top_ids.append(ids)
            dialogue.top_logprobs.append(logprobs)
            dialogue.token_ids.append(token)
            if token in self._template.ends or len(dialogue.top_ids) == self._limits.max_answer:
                del dialogues[slot]
                self._questions.take_answer(dialogue.token_ids[dialogue.answer_start :])
                yield dialogue.finished()

    def _extend_question(self, dialogue: _Dialogue, token: int) -> bool:
        """Append a token to a question, or begin the answer. Return False if the question is too short or too long."""
        length = len(dialogue.token_ids) - dialogue.question_start
        if token not in self._template.ends:
            dialogue.token_ids.append(token)
            return length + 1 < self._limits.max_question
        dialogue.token_ids += self._template.before_answer
        dialogue.answer_start = len(dialogue.token_ids)
        return length >= self._limits.min_question

    def _sample(self, logits: torch.Tensor) -> list[int]:
        best, ids = logits.topk(QUESTION_TOP)
        noise = -torch.empty_like(best).exponential_(generator=self._rng).log()
        sampled: list[int] = ids.gather(1, (best + noise).argmax(-1, keepdim=True))[:, 0].tolist()
        return sampled
