"""Dialogues that a target generates by itself, with its most probable tokens at every position of an answer.

No data is needed: after the header of a user turn, the target writes a question (as in Magpie, Xu et al. 2024). Then it
answers greedily, as it does when a draft proposes tokens.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine

# Number of most probable tokens: kept at every position of an answer, and sampled from in questions.
TOP, QUESTION_TOP = 16, 64
MAX_QUESTION, MAX_ANSWER = 96, 224
MIN_QUESTION = 3
# Half of all questions begin with one of these. Otherwise the target would ask for little but facts.
OPENINGS = (
    "Write a", "Write an email", "Write a short story about", "Write a Python function that", "Write a poem about",
    "Explain", "Explain how", "Explain the difference between", "What is", "What are the", "What would happen if",
    "How do I", "How does", "How can", "Why", "Why do", "Who", "When did", "Where", "Which", "Can you", "Could you",
    "Translate", "Translate the following sentence from German to English:", "Summarize", "Summarize the following",
    "Give me", "List", "Name", "Describe", "Compare", "Solve", "Calculate", "If", "A train", "There are", "In a",
    "Imagine", "I have", "I need", "My", "Tell me about", "Help me", "Suggest", "Create", "Compose", "Rewrite",
    "Classify", "Based on the following text, answer the question:", "Please", "Is it", "Do", "Are", "Should",
)  # fmt: skip
# Some questions are tasks on an earlier answer, because the target rarely quotes a text by itself.
TASKS = (
    "Summarize the following text:", "Summarize the following text in one sentence:", "Shorten the following text:",
    "Rewrite the following text in simple words:", "What is the following text about?", "Continue the following text:",
    "List the main points of the following text:", "Find all names in the following text:",
    "Correct the mistakes in the following text:", "Write a title for the following text:",
    "Translate the following text to French:", "What questions does the following text answer?",
    "Is the following text true? Explain.", "Turn the following text into a list:",
)  # fmt: skip
TASK_SHARE, NUM_TEXTS, MAX_TEXT = 0.25, 256, 160
PLACEHOLDER = "QUESTION-OF-THE-USER"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It replaces `path` at the end, so that readers never see a partial file."""
    partial = path.with_suffix(".part")
    yield partial
    partial.rename(path)


@dataclass(frozen=True)
class ChatTemplate:
    """Tokens around a question and its answer in a target's chat template."""

    before_question: tuple[int, ...]
    before_answer: tuple[int, ...]
    ends: frozenset[int]
    """Tokens that end a question or an answer."""
    tokenizer: Any

    @classmethod
    def of(cls, tokenizer: Any, ends: frozenset[int]) -> "ChatTemplate":
        """The template of a transformers tokenizer. ValueError if it does not consist of turns."""
        messages = [{"role": "user", "content": PLACEHOLDER}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if text.count(PLACEHOLDER) != 1:
            raise ValueError("the chat template must contain the user's message exactly once")
        before, after = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in text.split(PLACEHOLDER))
        return cls(before, after, ends, tokenizer)

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


@dataclass(frozen=True)
class Dialogues:
    """Dialogues, concatenated. Candidates at a position are predictions of the token after it."""

    token_ids: torch.Tensor  # [tokens] int32
    lengths: torch.Tensor  # [dialogues] int32
    answer_starts: torch.Tensor  # [dialogues] int32: positions before the answer's first token
    top_ids: torch.Tensor  # [answer tokens, TOP] int32, most probable first: the target's own choice
    top_logprobs: torch.Tensor  # [answer tokens, TOP] float16

    def save(self, path: Path) -> None:
        """Write a safetensors file, atomically."""
        with atomic_write(path) as partial:
            save_file(vars(self), partial)

    @classmethod
    def load(cls, path: Path) -> "Dialogues":
        """Read a file written by `save`."""
        return cls(**load_file(path))


@dataclass
class _Dialogue:
    """A dialogue in progress."""

    token_ids: list[int]
    num_cached_tokens: int = 0
    answer_start: int | None = None
    question_start: int = 0
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_logprobs: list[torch.Tensor] = field(default_factory=list)


class Writer:
    """Generates dialogues in all slots of an engine at once."""

    def __init__(self, engine: Engine, template: ChatTemplate, seed: int) -> None:
        self._engine, self._template = engine, template
        self._rng, self._torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
        self._running: dict[int, _Dialogue] = {}
        self._texts: deque[list[int]] = deque(maxlen=NUM_TEXTS)
        """Recent answers, for tasks."""

    def write(self, dialogues: int) -> Iterator[_Dialogue]:
        """Generate this number of dialogues; yield them in the order in which they end."""
        return islice(self._run(iter(self._new_dialogue, None)), dialogues)

    def answer(self, questions: Iterable[Sequence[int]]) -> Iterator[_Dialogue]:
        """Answer questions, each given as all tokens before its answer; yield dialogues in the order they end."""
        return self._run(_Dialogue(list(tokens), answer_start=len(tokens)) for tokens in questions)

    def _run(self, waiting: Iterator[_Dialogue]) -> Iterator[_Dialogue]:
        while True:
            free = [slot for slot in range(self._engine.slots.total) if slot not in self._running]
            self._running.update(zip(free, waiting, strict=False))
            if not self._running:
                return
            yield from self._step()

    def _new_dialogue(self) -> _Dialogue:
        tokens = list(self._template.before_question)
        question_start = len(tokens)
        if self._texts and self._rng.random() < TASK_SHARE:
            tokens += self._template.encode(f"{self._rng.choice(TASKS)}\n\n")
            tokens += [*self._rng.choice(self._texts), *self._template.before_answer]
            return _Dialogue(tokens, answer_start=len(tokens))
        if self._rng.random() < 0.5:
            tokens += self._template.encode(self._rng.choice(OPENINGS))
        return _Dialogue(tokens, question_start=question_start)

    @torch.inference_mode()
    def _step(self) -> Iterator[_Dialogue]:
        """Append a token to every dialogue; yield the dialogues with a complete answer."""
        dialogues = self._running
        spans = [
            Span(slot, d.num_cached_tokens, d.token_ids[d.num_cached_tokens :], 1) for slot, d in dialogues.items()
        ]
        logits = self._engine.over_vocabulary(self._engine.forward(spans)).cpu()
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
            if token in self._template.ends or len(dialogue.top_ids) == MAX_ANSWER:
                del dialogues[slot]
                answer = dialogue.token_ids[dialogue.answer_start :]
                self._texts.append([token for token in answer if token not in self._template.ends][:MAX_TEXT])
                yield dialogue

    def _extend_question(self, dialogue: _Dialogue, token: int) -> bool:
        """Append a token to a question, or begin the answer. False if the question is too short or too long."""
        length = len(dialogue.token_ids) - dialogue.question_start
        if token not in self._template.ends:
            dialogue.token_ids.append(token)
            return length + 1 < MAX_QUESTION
        dialogue.token_ids += self._template.before_answer
        dialogue.answer_start = len(dialogue.token_ids)
        return length >= MIN_QUESTION

    def _sample(self, logits: torch.Tensor) -> list[int]:
        best, ids = logits.topk(QUESTION_TOP)
        noise = -torch.empty_like(best).exponential_(generator=self._torch_rng).log()
        sampled: list[int] = ids.gather(1, (best + noise).argmax(-1, keepdim=True))[:, 0].tolist()
        return sampled


def packed(dialogues: list[_Dialogue]) -> Dialogues:
    """Concatenate finished dialogues."""
    tokens = [token for dialogue in dialogues for token in dialogue.token_ids]
    return Dialogues(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        lengths=torch.tensor([len(dialogue.token_ids) for dialogue in dialogues], dtype=torch.int32),
        answer_starts=torch.tensor([dialogue.answer_start for dialogue in dialogues], dtype=torch.int32),
        top_ids=torch.stack([ids for dialogue in dialogues for ids in dialogue.top_ids]),
        top_logprobs=torch.stack([logprobs for dialogue in dialogues for logprobs in dialogue.top_logprobs]),
    )
