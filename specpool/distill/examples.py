"""Examples for training: dialogues with hidden states of the target, their files, and batches of them."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

TOP = 16
"""Number of most probable tokens kept at every position of an answer."""

AT_ONCE = 16
"""Examples of a forward pass."""


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


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It replaces `path` at the end, so that readers never see a partial file."""
    partial = path.with_suffix(".part")
    yield partial
    partial.rename(path)


@dataclass(frozen=True)
class Dialogues:
    """Concatenated dialogues. Candidates at a position predict the token after it."""

    token_ids: torch.Tensor  # [tokens] int32
    lengths: torch.Tensor  # [dialogues] int32
    answer_starts: torch.Tensor  # [dialogues] int32: positions before the answer's first token
    top_ids: torch.Tensor  # [answer tokens, TOP] int32, most probable first: the target's own choice
    top_logprobs: torch.Tensor  # [answer tokens, TOP] float16

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Dialogues":
        return cls(
            token_ids=torch.cat([example.token_ids.int() for example in examples]),
            lengths=torch.tensor([len(example.token_ids) for example in examples], dtype=torch.int32),
            answer_starts=torch.tensor([example.answer_start for example in examples], dtype=torch.int32),
            top_ids=torch.cat([example.top_ids.int() for example in examples]),
            top_logprobs=torch.cat([example.top_logprobs.half() for example in examples]),
        )

    def examples(self) -> list[Example]:
        lengths, starts = self.lengths.tolist(), self.answer_starts.tolist()
        answers = [length - start for length, start in zip(lengths, starts, strict=True)]
        parts = zip(
            self.token_ids.long().split(lengths),
            starts,
            self.top_ids.split(answers),
            self.top_logprobs.split(answers),
            strict=True,
        )
        return [Example(*part) for part in parts]

    def save(self, path: Path) -> None:
        """Write a safetensors file, atomically."""
        with atomic_write(path) as partial:
            save_file(vars(self), partial)

    @classmethod
    def load(cls, path: Path) -> "Dialogues":
        """Read a file written by `save`."""
        return cls(**load_file(path))


class TargetStates:
    """Adds hidden states of the target to batches and examples. `layers`: numbers of layers; if empty, adds none."""

    def __init__(self, model: PreTrainedModel, layers: list[int], in_bfloat16: bool = False) -> None:
        """`in_bfloat16`: compute matrix products in bfloat16."""
        source: Any = model
        self._body, self._device, self.layers = source.model, model.device, layers
        self._in_bfloat16 = in_bfloat16

    @torch.no_grad()
    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """States [B, T, layers * hidden] at tokens [B, T] that are padded on the right, as precise as on the wire."""
        found: dict[int, torch.Tensor] = {}

        def keep(number: int, layer: Any, inputs: Any, output: Any) -> None:
            found[number] = output[0] if isinstance(output, tuple) else output

        hooks = [self._body.layers[number - 1].register_forward_hook(partial(keep, number)) for number in self.layers]
        try:
            with torch.autocast(self._device.type, torch.bfloat16, self._in_bfloat16):
                self._body(token_ids.to(self._device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[number] for number in self.layers], -1).bfloat16()

    def with_states(self, batch: Batch) -> Batch:
        return replace(batch, states=self.of(batch.token_ids).float()) if self.layers else batch

    def examples(self, examples: Sequence[Example]) -> list[Example]:
        if not self.layers:
            return list(examples)
        added = []
        for group in (examples[i : i + AT_ONCE] for i in range(0, len(examples), AT_ONCE)):
            states = self.of(pad_sequence([example.token_ids for example in group], batch_first=True))
            added += [
                replace(example, states=own[: len(example.token_ids)].cpu())
                for example, own in zip(group, states, strict=True)
            ]
        return added
