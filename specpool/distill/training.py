"""Trains a student on the target's most probable tokens at every answer position, in one causal pass per batch."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax, smooth_l1_loss

from specpool.distill.examples import Batch, Example, atomic_write, collate
from specpool.distill.replay import Agreed
from specpool.distill.student import Student

DEPTH_DECAY = 0.8
"""Weight of a draft step's loss, relative to that of the step before."""
STATE_WEIGHT = 0.1
"""Weight of the smooth L1 loss of a feature draft's own states, in units of the states' median, relative to the
cross-entropy."""
DROPPED_SHARE = 0.1
"""Share of dialogues whose first states are dropped, so that a draft without states still works."""


def distillation_loss(student: Student, batch: Batch, steps: int = 1) -> torch.Tensor:
    """Cross-entropy with the target's most probable tokens, restricted to the student's output tokens.

    `steps`: draft steps of a feature draft to unroll. The smooth L1 loss brings its own states close to the target's.
    """
    batch = batch.to(student.head.device)
    rows = student.row_of[batch.top_ids]  # [chosen, TOP], -1: not in the head
    known = rows >= 0
    weights = (batch.top_logprobs.exp() * known).clamp_min(0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)
    total, total_weight = torch.zeros((), device=student.head.device), 0.0
    for depth, step in enumerate(student.unroll(batch, steps)):
        scores = log_softmax(step.logits.float(), -1).gather(1, rows.clamp_min(0))
        loss = -(weights * scores).sum(-1).mean()
        if step.states is not None and step.expected is not None:
            own, expected = step.states[batch.chosen].float(), step.expected[batch.chosen].float()
            unit = expected.abs().median().clamp_min(1e-6)
            loss = loss + STATE_WEIGHT * smooth_l1_loss(own / unit, expected / unit)
        total, total_weight = total + DEPTH_DECAY**depth * loss, total_weight + DEPTH_DECAY**depth
    return total / total_weight


def drop_states(batch: Batch, rng: random.Random, share: float = DROPPED_SHARE) -> Batch:
    """The batch without the first states of a share of the dialogues."""
    if batch.states is None:
        return batch
    states = batch.states.clone()
    for dialogue in states:
        if rng.random() < share:
            dialogue[: rng.randrange(len(dialogue))] = 0
    return replace(batch, states=states)


@torch.inference_mode()
def agreement(student: Student, examples: Sequence[Example], steps: int = 1) -> Agreed:
    """Whether the student predicts the target's token, by draft step, answer and position."""
    agreed: list[list[list[bool]]] = []
    for group in (examples[i : i + 16] for i in range(0, len(examples), 16)):
        batch, sizes = collate(group).to(student.head.device), [len(example.top_ids) for example in group]
        for depth, step in enumerate(student.unroll(batch, steps)):
            equal = (student.output_ids[step.logits.argmax(-1)] == batch.top_ids[:, 0]).split(sizes)
            agreed += [[]] * (depth == len(agreed))
            agreed[depth] = [*agreed[depth], *(answer.tolist() for answer in equal)]
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
