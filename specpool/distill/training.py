"""Training of a student on the candidates of its target for every answer token, in one causal pass per batch."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax

from specpool.distill.corpus import Dialogues
from specpool.distill.files import in_one_step
from specpool.distill.student import Student


@dataclass(frozen=True)
class Example:
    """One dialogue, with the target's candidates for each answer token."""

    token_ids: torch.Tensor  # [T] int64
    answer_start: int
    top_ids: torch.Tensor  # [T - answer_start, TOP]
    top_logprobs: torch.Tensor  # likewise


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right. A position's candidates are those of the token after it."""

    token_ids: torch.Tensor  # [B, T]
    attention_mask: torch.Tensor  # [B, T]
    chosen: torch.Tensor  # [B, T] positions that are followed by an answer token
    top_ids: torch.Tensor  # [chosen, TOP]
    top_logprobs: torch.Tensor  # [chosen, TOP]

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def examples_of(dialogues: Dialogues) -> list[Example]:
    """Splits dialogues into examples."""
    examples = []
    at = learned = 0
    for length, start in zip(dialogues.lengths.tolist(), dialogues.answer_starts.tolist(), strict=True):
        count = length - start
        examples.append(
            Example(
                dialogues.token_ids[at : at + length].long(),
                start,
                dialogues.top_ids[learned : learned + count].long(),
                dialogues.top_logprobs[learned : learned + count].float(),
            )
        )
        at, learned = at + length, learned + count
    return examples


def batches(examples: Sequence[Example], tokens: int, rng: random.Random) -> Iterator[Batch]:
    """All examples once, in batches of about `tokens` tokens and of about equal lengths, in random order."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].token_ids) + 8 * rng.random())
    groups: list[list[Example]] = [[]]
    for example in (examples[i] for i in order):
        longest = max(len(other.token_ids) for other in [*groups[-1], example])
        if groups[-1] and (len(groups[-1]) + 1) * longest > tokens:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    yield from map(collate, groups)


def collate(examples: Sequence[Example]) -> Batch:
    """Pads examples to the longest of them."""
    longest = max(len(example.token_ids) for example in examples)
    token_ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask, chosen = torch.zeros_like(token_ids), torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        length = len(example.token_ids)
        token_ids[row, :length], mask[row, :length] = example.token_ids, 1
        chosen[row, example.answer_start - 1 : length - 1] = True
    return Batch(
        token_ids,
        mask,
        chosen,
        torch.cat([example.top_ids for example in examples]),
        torch.cat([example.top_logprobs for example in examples]),
    )


def loss_of(student: Student, batch: Batch) -> torch.Tensor:
    """Cross-entropy with the target's most probable tokens, among those in the student's head."""
    batch = batch.to(student.head.device)
    logits = student(batch.token_ids, batch.attention_mask, batch.chosen)
    rows = student.row_of[batch.top_ids]  # [chosen, TOP], -1: not in the head
    known = rows >= 0
    weights = (batch.top_logprobs.exp() * known).clamp_min(0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)
    scores = log_softmax(logits, -1).gather(1, rows.clamp_min(0))
    return -(weights * scores).sum(-1).mean()


@torch.inference_mode()
def agreement(student: Student, examples: Sequence[Example]) -> list[list[bool]]:
    """Whether the student's choice is the target's, at each position of each answer."""
    found = []
    for group in (examples[i : i + 16] for i in range(0, len(examples), 16)):
        batch = collate(group).to(student.head.device)
        choice = student.output_ids[student(batch.token_ids, batch.attention_mask, batch.chosen).argmax(-1)]
        same = (choice == batch.top_ids[:, 0]).split([len(example.top_ids) for example in group])
        found += [one.tolist() for one in same]
    return found


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up, then a cosine to a twentieth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass
class Checkpoint:
    """The state with which training resumes where it stopped."""

    path: Path
    began: dict[str, Any]
    """The settings that the student was made with: a checkpoint of another student is refused."""

    def check(self) -> None:
        """ValueError if there is a checkpoint of another student."""
        if self.path.is_file():
            began = torch.load(self.path, weights_only=True, mmap=True).get("began", {})
            other = [name for name, value in self.began.items() if began.get(name) != value]
            if other:
                was = ", ".join(f"{name} was {began.get(name, 'not kept')}" for name in other)
                raise ValueError(f"{self.path} is of another draft ({was}): remove it, or choose another folder")

    def save(self, student: Student, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Saves the state in one step."""
        with in_one_step(self.path) as scratch:
            state = {"student": student.trained(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**state, "began": self.began}, scratch)

    def load(self, student: Student, optimizer: torch.optim.Optimizer) -> int:
        """Restores student and optimizer; returns the next step, 0 without a checkpoint."""
        if not self.path.is_file():
            return 0
        state: dict[str, Any] = torch.load(self.path, weights_only=True)
        student.learn(state["student"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
