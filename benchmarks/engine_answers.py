"""Greedy answers of an engine, token by token or by verifying drafts, with all logits that their tokens come from."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine

DRAFTED = 3
"""Draft tokens of each sequence in a round."""
WRONG_EVERY = 4
"""Of this many draft tokens one is wrong, so that rounds end at different lengths."""


@dataclass(frozen=True)
class Answers:
    """The tokens of each answer, and a SHA-256 of the logits of all of them."""

    token_ids: list[list[int]]
    logits: str


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Answers:
    """Answers of `tokens` tokens, one token per pass and one sequence at a time."""
    answers, logits = [], []
    for prompt in prompts:
        answer: list[int] = []
        span = Span(0, 0, list(prompt), 1)
        while len(answer) < tokens:
            row = engine.forward([span])
            answer.append(int(row.argmax()))
            logits.append(row)
            span = Span(0, span.end, answer[-1:], 1)
        answers.append(answer)
    return Answers(answers, _digest(logits))


def by_drafts(engine: Engine, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Answers:
    """Answers as long as those expected, of all sequences together; drafts are the expected tokens, some of them wrong.

    A round verifies the drafts of all sequences in one pass, and keeps what the engine would have chosen itself.
    """
    ends = [len(answer) for answer in expected]
    first = engine.forward([Span(slot, 0, list(prompt), 1) for slot, prompt in enumerate(prompts)])
    answers = [[int(row.argmax())] for row in first]
    logits = [[row[None]] for row in first]
    while unfinished := [slot for slot, end in enumerate(ends) if len(answers[slot]) < end]:
        drafts = {slot: _draft(expected[slot], len(answers[slot]), engine.vocab_size) for slot in unfinished}
        spans = [
            Span(slot, len(prompts[slot]) + len(answers[slot]) - 1, [answers[slot][-1], *draft], 1 + len(draft))
            for slot, draft in drafts.items()
        ]
        rows = engine.forward(spans).split([span.num_logits for span in spans])
        for (slot, draft), own in zip(drafts.items(), rows, strict=True):
            chosen = own.argmax(-1).tolist()
            kept = 1 + next((i for i, token in enumerate(draft) if token != chosen[i]), len(draft))
            answers[slot] += chosen[:kept]
            logits[slot].append(own[:kept])
    return Answers(answers, _digest([rows for its in logits for rows in its]))


def _draft(expected: Sequence[int], done: int, vocab_size: int) -> list[int]:
    """Tokens after the first `done` ones; the last token of the answer is never drafted."""
    positions = range(done, min(done + DRAFTED, len(expected) - 1))
    return [(expected[i] + (i % WRONG_EVERY == 0)) % vocab_size for i in positions]


def _digest(logits: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for rows in logits:
        found.update(rows.float().cpu().numpy().tobytes())
    return found.hexdigest()
