"""Dialogues that a target writes by itself, questions and answers, with its candidates for every token of an answer.

Nothing but the target is needed: after the header of a user's turn it writes what a user might ask (as in Magpie, Xu et
al. 2024), and then it answers greedily, as it does when a draft proposes its tokens.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specpool.distill.files import in_one_step
from specpool.distill.template import ChatTemplate
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine

# Candidates that a draft learns from at every position, and those that questions are drawn from.
TOP, QUESTION_TOP = 16, 64
LONGEST_QUESTION, LONGEST_ANSWER = 96, 224
SHORTEST_QUESTION = 3
# Half of all questions begin with one of these, or the target would ask for little but facts.
OPENINGS = (
    "Write a", "Write an email", "Write a short story about", "Write a Python function that", "Write a poem about",
    "Explain", "Explain how", "Explain the difference between", "What is", "What are the", "What would happen if",
    "How do I", "How does", "How can", "Why", "Why do", "Who", "When did", "Where", "Which", "Can you", "Could you",
    "Translate", "Translate the following sentence from German to English:", "Summarize", "Summarize the following",
    "Give me", "List", "Name", "Describe", "Compare", "Solve", "Calculate", "If", "A train", "There are", "In a",
    "Imagine", "I have", "I need", "My", "Tell me about", "Help me", "Suggest", "Create", "Compose", "Rewrite",
    "Classify", "Based on the following text, answer the question:", "Please", "Is it", "Do", "Are", "Should",
)  # fmt: skip
# Some questions are one of these tasks on a text, an earlier answer: by itself the target hardly ever quotes one.
TASKS = (
    "Summarize the following text:", "Summarize the following text in one sentence:", "Shorten the following text:",
    "Rewrite the following text in simple words:", "What is the following text about?", "Continue the following text:",
    "List the main points of the following text:", "Find all names in the following text:",
    "Correct the mistakes in the following text:", "Write a title for the following text:",
    "Translate the following text to French:", "What questions does the following text answer?",
    "Is the following text true? Explain.", "Turn the following text into a list:",
)  # fmt: skip
SHARE_OF_TASKS, TEXTS, LONGEST_TEXT = 0.25, 256, 160


@dataclass(frozen=True)
class Dialogues:
    """Dialogues in one row, end to end. A position's candidates are those for the token that follows it."""

    token_ids: torch.Tensor  # [tokens] int32
    lengths: torch.Tensor  # [dialogues] int32
    answer_starts: torch.Tensor  # [dialogues] int32: positions before the answer's first token
    top_ids: torch.Tensor  # [answer tokens, TOP] int32, most probable first: that one was taken
    top_logprobs: torch.Tensor  # [answer tokens, TOP] float16

    def save(self, path: Path) -> None:
        """Writes a file in one step, so that it is never incomplete."""
        with in_one_step(path) as scratch:
            save_file(vars(self), scratch)

    @classmethod
    def load(cls, path: Path) -> "Dialogues":
        """Reads what `save` wrote."""
        return cls(**load_file(path))


@dataclass
class _Writing:
    """A dialogue that is being written in a slot."""

    token_ids: list[int]
    cached: int = 0
    answer_start: int | None = None
    question_start: int = 0
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_logprobs: list[torch.Tensor] = field(default_factory=list)


class Writer:
    """A target that writes dialogues in all slots of its engine at once."""

    def __init__(self, engine: Engine, template: ChatTemplate, seed: int) -> None:
        self._engine, self._template = engine, template
        self._rng, self._torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
        self._writing: dict[int, _Writing] = {}
        self._texts: deque[list[int]] = deque(maxlen=TEXTS)
        """Recent answers, for tasks."""

    def write(self, dialogues: int) -> Iterator[_Writing]:
        """Writes a number of dialogues; yields them in the order in which they end."""
        return islice(self._finished(iter(self._begun, None)), dialogues)

    def answer(self, questions: Iterable[Sequence[int]]) -> Iterator[_Writing]:
        """Answers questions, each given as all tokens before its answer; yields the dialogues in the order they end."""
        return self._finished(_Writing(list(tokens), answer_start=len(tokens)) for tokens in questions)

    def _finished(self, begun: Iterator[_Writing]) -> Iterator[_Writing]:
        while True:
            free = [slot for slot in range(self._engine.slots.total) if slot not in self._writing]
            self._writing.update(zip(free, begun, strict=False))
            if not self._writing:
                return
            yield from self._step()

    def _begun(self) -> _Writing:
        tokens = list(self._template.before_question)
        question_start = len(tokens)
        if self._texts and self._rng.random() < SHARE_OF_TASKS:
            tokens += self._template.encode(f"{self._rng.choice(TASKS)}\n\n")
            tokens += [*self._rng.choice(self._texts), *self._template.before_answer]
            return _Writing(tokens, answer_start=len(tokens))
        if self._rng.random() < 0.5:
            tokens += self._template.encode(self._rng.choice(OPENINGS))
        return _Writing(tokens, question_start=question_start)

    @torch.inference_mode()
    def _step(self) -> Iterator[_Writing]:
        """Adds a token to every dialogue; yields the dialogues whose answer is complete."""
        spans = [Span(slot, w.cached, w.token_ids[w.cached :], 1) for slot, w in self._writing.items()]
        logits = self._engine.over_vocabulary(self._engine.forward(spans)).cpu()
        asking = torch.tensor([w.answer_start is None for w in self._writing.values()])
        drawn = iter(self._drawn(logits[asking]) if asking.any() else [])
        answering = logits[~asking]
        top_logits, top_ids = answering.topk(TOP)
        top_logprobs = top_logits - answering.logsumexp(-1, keepdim=True)
        candidates = iter(zip(top_ids.int(), top_logprobs.half(), top_ids[:, 0].tolist(), strict=True))
        for slot, writing in list(self._writing.items()):
            writing.cached = len(writing.token_ids)
            if writing.answer_start is None:
                kept = self._ask(writing, next(drawn))
                if not kept:
                    del self._writing[slot]
                continue
            ids, logprobs, token = next(candidates)
            writing.top_ids.append(ids)
            writing.top_logprobs.append(logprobs)
            writing.token_ids.append(token)
            if token in self._template.ends or len(writing.top_ids) == LONGEST_ANSWER:
                del self._writing[slot]
                answer = [
                    token for token in writing.token_ids[writing.answer_start :] if token not in self._template.ends
                ]
                self._texts.append(answer[:LONGEST_TEXT])
                yield writing

    def _ask(self, writing: _Writing, token: int) -> bool:
        """Adds a token to a question, and begins the answer at its end. False if the question is too short or long."""
        length = len(writing.token_ids) - writing.question_start
        if token not in self._template.ends:
            writing.token_ids.append(token)
            return length + 1 < LONGEST_QUESTION
        writing.token_ids += self._template.before_answer
        writing.answer_start = len(writing.token_ids)
        return length >= SHORTEST_QUESTION

    def _drawn(self, logits: torch.Tensor) -> list[int]:
        best, ids = logits.topk(QUESTION_TOP)
        noise = -torch.empty_like(best).exponential_(generator=self._torch_rng).log()
        drawn: list[int] = ids.gather(1, (best + noise).argmax(-1, keepdim=True))[:, 0].tolist()
        return drawn


def gathered(dialogues: list[_Writing]) -> Dialogues:
    """Packs finished dialogues."""
    tokens = [token for dialogue in dialogues for token in dialogue.token_ids]
    return Dialogues(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        lengths=torch.tensor([len(dialogue.token_ids) for dialogue in dialogues], dtype=torch.int32),
        answer_starts=torch.tensor([dialogue.answer_start for dialogue in dialogues], dtype=torch.int32),
        top_ids=torch.stack([ids for dialogue in dialogues for ids in dialogue.top_ids]),
        top_logprobs=torch.stack([found for dialogue in dialogues for found in dialogue.top_logprobs]),
    )
