"""Trains a student on the target's most probable tokens at every answer position, in one causal pass per batch."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence

from specpool.distill.corpus import Dialogues, atomic_write
from specpool.distill.student import Student


@dataclass(frozen=True)
class Example:
    """One dialogue, with the target's candidates for each answer token."""

    token_ids: torch.Tensor  # [T] int64
    answer_start: int
    top_ids: torch.Tensor  # [T - answer_start, TOP]
    top_logprobs: torch.Tensor  # [T - answer_start, TOP]


@dataclass(frozen=True)
class Batch:
    """Examples, padded on the right. Candidates at a position predict the token after it."""

    token_ids: torch.Tensor  # [B, T]
    attention_mask: torch.Tensor  # [B, T]
    chosen: torch.Tensor  # [B, T] positions followed by an answer token
    top_ids: torch.Tensor  # [chosen, TOP]
    top_logprobs: torch.Tensor  # [chosen, TOP]

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def split_examples(dialogues: Dialogues) -> list[Example]:
    """Split dialogues into examples."""
    lengths, starts = dialogues.lengths.tolist(), dialogues.answer_starts.tolist()
    answers = [length - start for length, start in zip(lengths, starts, strict=True)]
    parts = zip(
        dialogues.token_ids.long().split(lengths),
        starts,
        dialogues.top_ids.long().split(answers),
        dialogues.top_logprobs.float().split(answers),
        strict=True,
    )
    return [Example(*part) for part in parts]


def batches(examples: Sequence[Example], tokens: int, rng: random.Random) -> Iterator[Batch]:
    """Yield all examples once, in random batches of similar lengths and up to `tokens` tokens."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].token_ids) + 8 * rng.random())
    groups: list[list[Example]] = [[]]
    for example in (examples[i] for i in order):
        length = max(len(other.token_ids) for other in [*groups[-1], example])
        if groups[-1] and (len(groups[-1]) + 1) * length > tokens:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    yield from map(collate, groups)


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples to a common length."""
    token_ids = pad_sequence([example.token_ids for example in examples], batch_first=True)
    lengths = torch.tensor([[len(example.token_ids)] for example in examples])
    starts = torch.tensor([[example.answer_start] for example in examples])
    positions = torch.arange(token_ids.shape[1])[None]
    return Batch(
        token_ids,
        (positions < lengths).long(),
        (positions >= starts - 1) & (positions < lengths - 1),
        torch.cat([example.top_ids for example in examples]),
        torch.cat([example.top_logprobs for example in examples]),
    )


def distillation_loss(student: Student, batch: Batch) -> torch.Tensor:
    """Cross-entropy with the target's most probable tokens, restricted to the student's output tokens."""
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
    """Whether the student predicts the target's token at each position of each answer."""
    agreed = []
    for group in (examples[i : i + 16] for i in range(0, len(examples), 16)):
        batch = collate(group).to(student.head.device)
        choice = student.output_ids[student(batch.token_ids, batch.attention_mask, batch.chosen).argmax(-1)]
        equal = (choice == batch.top_ids[:, 0]).split([len(example.top_ids) for example in group])
        agreed += [answer.tolist() for answer in equal]
    return agreed


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up, then cosine decay to a twentieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass
class Checkpoint:
    """State from which training resumes."""

    path: Path
    began: dict[str, Any]
    """Settings that created the student. A checkpoint with other settings is rejected."""

    def check(self) -> None:
        """ValueError if the checkpoint belongs to another student."""
        if self.path.is_file():
            began = torch.load(self.path, weights_only=True, mmap=True).get("began", {})
            changed = [name for name, value in self.began.items() if began.get(name) != value]
            if changed:
                before = ", ".join(f"{name} was {began.get(name, 'not saved')}" for name in changed)
                raise ValueError(f"{self.path} belongs to another draft ({before}): remove it, or use another folder")

    def save(self, student: Student, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save the state, atomically."""
        with atomic_write(self.path) as partial:
            state = {"student": student.trained(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**state, "began": self.began}, partial)

    def load(self, student: Student, optimizer: torch.optim.Optimizer) -> int:
        """Restore student and optimizer; return the next step, 0 without a checkpoint."""
        if not self.path.is_file():
            return 0
        state: dict[str, Any] = torch.load(self.path, weights_only=True)
        student.learn(state["student"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
