"""Beginnings of dialogues. No data is needed.

After the header of a user turn, the target writes a question (as in Magpie, Xu et al. 2024). Then it answers greedily,
as in speculative decoding.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Number of most probable tokens to sample from when the target writes a question.
QUESTION_TOP = 64
# Half of the questions that are not tasks begin with one of these. Otherwise the target would mostly ask for facts.
OPENINGS = (
    "Write a", "Write an email", "Write a short story about", "Write a Python function that", "Write a poem about",
    "Explain", "Explain how", "Explain the difference between", "What is", "What are the", "What would happen if",
    "How do I", "How does", "How can", "Why", "Why do", "Who", "When did", "Where", "Which", "Can you", "Could you",
    "Translate", "Translate the following sentence from German to English:", "Summarize", "Summarize the following",
    "Give me", "List", "Name", "Describe", "Compare", "Solve", "Calculate", "If", "A train", "There are", "In a",
    "Imagine", "I have", "I need", "My", "Tell me about", "Help me", "Suggest", "Create", "Compose", "Rewrite",
    "Classify", "Based on the following text, answer the question:", "Please", "Is it", "Do", "Are", "Should",
)  # fmt: skip
# Some questions are tasks on an earlier answer: without them, the target rarely quotes a text.
TASKS = (
    "Summarize the following text:", "Summarize the following text in one sentence:", "Shorten the following text:",
    "Rewrite the following text in simple words:", "What is the following text about?", "Continue the following text:",
    "List the main points of the following text:", "Find all names in the following text:",
    "Correct the mistakes in the following text:", "Write a title for the following text:",
    "Translate the following text to French:", "What questions does the following text answer?",
    "Is the following text true? Explain.", "Turn the following text into a list:",
)  # fmt: skip
TASK_SHARE, OPENING_SHARE = 0.25, 0.5
NUM_TEXTS = 2048
"""Recent answers that tasks choose from."""
TEXTS_OF_A_TASK = (1, 1, 1, 2, 3)
MAX_TEXT, MAX_TEXTS = 220, 440
"""Maximum tokens of a text, and of all texts of a task."""
PLACEHOLDER = "QUESTION-OF-THE-USER"


class Limits(NamedTuple):
    """Lengths in tokens. Questions below `min_question` or from `max_question` are discarded; answers are truncated."""

    min_question: int = 3
    max_question: int = 96
    max_answer: int = 224


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
class Beginning:
    """The known tokens of a new dialogue."""

    token_ids: list[int]
    question_start: int
    noise_seed: int
    """Seed of the question's sampled tokens."""
    answer_start: int | None = None
    """Where the answer starts; None: the target completes the question first."""


class Questions:
    """Begins dialogues: with a question that the target completes, or with a task on its earlier answers.

    A beginning depends only on the seed, the number of the dialogue, and answers of dialogues with lower numbers.
    """

    def __init__(self, template: ChatTemplate, seed: int, limits: Limits | None = None) -> None:
        self.template, self.limits = template, limits or Limits()
        self._seed = seed
        self._texts: dict[int, array[int]] = {}
        """By number of the dialogue."""
        self._openings = [template.encode(opening) for opening in OPENINGS]
        self._tasks = [template.encode(f"{task}\n\n") for task in TASKS]
        self._separator = template.encode("\n\n")

    @property
    def max_length(self) -> int:
        """Maximum tokens of a dialogue."""
        question = max(self.limits.max_question, max(map(len, self._tasks)) + MAX_TEXTS)
        turns = len(self.template.before_question) + question + len(self.template.before_answer)
        return turns + self.limits.max_answer

    def begin(self, number: int, attempt: int, num_answered: int) -> Beginning:
        """Begin a dialogue. `attempt`: earlier questions were too short or too long.

        `num_answered`: tasks refer to answers of the dialogues before this one, which must be known.
        """
        rng = random.Random(f"{self._seed} {number} {attempt}")
        tokens, noise_seed = list(self.template.before_question), rng.getrandbits(32)
        question_start = len(tokens)
        texts = range(max(0, num_answered - NUM_TEXTS), max(0, num_answered))
        if texts and rng.random() < TASK_SHARE:
            tokens += [*rng.choice(self._tasks), *self._some_texts(texts, rng), *self.template.before_answer]
            return Beginning(tokens, question_start, noise_seed, len(tokens))
        if rng.random() < OPENING_SHARE:
            tokens += rng.choice(self._openings)
        return Beginning(tokens, question_start, noise_seed)

    def take_answer(self, number: int, token_ids: Sequence[int]) -> None:
        """Keep an answer as a text for tasks."""
        text = [token for token in token_ids if token not in self.template.ends]
        self._texts[number] = array("I", text[:MAX_TEXT])

    def _some_texts(self, numbers: range, rng: random.Random) -> list[int]:
        count = rng.choice(TEXTS_OF_A_TASK)
        joined: list[int] = []
        for number in rng.sample(numbers, min(count, len(numbers))):
            text = self._texts[number]
            joined += [*self._separator, *text] if joined else text
        return joined[:MAX_TEXTS]
