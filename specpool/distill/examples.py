"""Examples for training: dialogues, and batches of them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

TOP = 16
"""Number of most probable tokens kept at every position of an answer."""


@dataclass(frozen=True)
class Example:
    """One dialogue, with the target's candidates for each answer token."""

    token_ids: torch.Tensor  # [T] int64
    answer_start: int
    top_ids: torch.Tensor  # [T - answer_start, TOP]
    top_logprobs: torch.Tensor  # [T - answer_start, TOP]
    states: torch.Tensor | None = None  # [T, width] bfloat16: the target's hidden states, for a feature draft


@dataclass(frozen=True)
class Batch:
    """Examples, padded on the right. Candidates at a position predict the token after it."""

    token_ids: torch.Tensor  # [B, T]
    attention_mask: torch.Tensor  # [B, T]
    chosen: torch.Tensor  # [B, T] positions followed by an answer token
    top_ids: torch.Tensor  # [chosen, TOP]
    top_logprobs: torch.Tensor  # [chosen, TOP]
    states: torch.Tensor | None = None  # [B, T, width]

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        moved: dict[str, Any] = {name: None if each is None else each.to(device) for name, each in vars(self).items()}
        return Batch(**moved)


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
    states = [example.states for example in examples if example.states is not None]
    return Batch(
        token_ids,
        (positions < lengths).long(),
        (positions >= starts - 1) & (positions < lengths - 1),
        torch.cat([example.top_ids for example in examples]).long(),
        torch.cat([example.top_logprobs for example in examples]).float(),
        pad_sequence(states, batch_first=True).float() if states else None,
    )
