"""Files of dialogues that a target generated, with its most probable tokens at every position of an answer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specpool.distill.examples import Example


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
        """Concatenate dialogues."""
        return cls(
            token_ids=torch.cat([example.token_ids.int() for example in examples]),
            lengths=torch.tensor([len(example.token_ids) for example in examples], dtype=torch.int32),
            answer_starts=torch.tensor([example.answer_start for example in examples], dtype=torch.int32),
            top_ids=torch.cat([example.top_ids.int() for example in examples]),
            top_logprobs=torch.cat([example.top_logprobs.half() for example in examples]),
        )

    def examples(self) -> list[Example]:
        """The dialogues, one by one."""
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
