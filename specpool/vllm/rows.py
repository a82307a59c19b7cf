"""Mapping of the rows of vLLM's batch to sequences. Pure.

vLLM does not name requests, so rows are identified by their tokens. A row keeps its place between steps, and moves only
when another row leaves. A few tokens therefore suffice to recognize the row in the same place. Only moved rows are
compared token by token: a step takes O(new tokens), however long the sequences are. Confusing equal rows is harmless.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from coordinator.scheduling.sequence import Sequence

# Tokens compared for a row in the same place: this many at the end, and as many spread over the whole row.
NUM_MARKS = 16


class Batch:
    """The rows of a step, as vLLM passes them."""

    def __init__(self, sampled_token_ids: Items[Items[int]], num_tokens: Any, token_ids: Any) -> None:
        """`num_tokens[i]`: tokens of row i, including those just sampled. `token_ids[i]`: these tokens, then padding.

        Both are numpy arrays, which may have more rows. IndexError, TypeError for invalid arguments.
        """
        self.sampled = [len(tokens) for tokens in sampled_token_ids]
        """Tokens gained by each row in this step; 0 during prefill."""
        self.lengths: list[int] = num_tokens[: len(self.sampled)].tolist()
        """Tokens of each row, including those gained."""
        self._token_ids = token_ids
        if len(self.lengths) < len(self.sampled):
            raise IndexError(f"{len(self.sampled)} rows have tokens, but only {len(self.lengths)} have a length")

    def __len__(self) -> int:
        return len(self.sampled)

    def previous_length(self, row: int) -> int:
        """Tokens of the row before this step."""
        return self.lengths[row] - self.sampled[row]

    def read(self, row: int, start: int, end: int) -> list[int]:
        """Tokens of a row in [start, end)."""
        tokens: list[int] = self._token_ids[row, start:end].tolist()
        return tokens

    def pick(self, row: int, positions: list[int]) -> list[int]:
        """Tokens of a row at these positions."""
        tokens: list[int] = self._token_ids[row, positions].tolist()
        return tokens


@dataclass
class TrackedRow:
    """A sequence, with the tokens that identify its row."""

    sequence: Sequence
    _positions: list[int] = field(default_factory=list)
    _marks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokens = self.sequence.token_ids
        self._positions = [*range(0, len(tokens), max(1, len(tokens) // NUM_MARKS))]
        self._marks = [tokens[position] for position in self._positions]

    @property
    def key(self) -> tuple[int, ...]:
        """Length and last tokens, to look up a moved row."""
        tokens = self.sequence.token_ids
        return len(tokens), *tokens[-NUM_MARKS:]

    def is_in_place(self, batch: Batch, row: int, skipped: bool) -> bool:
        """Whether this row continues the sequence."""
        tokens, length = self.sequence.token_ids, len(self.sequence.token_ids)
        before = batch.previous_length(row)
        if before < length or (before > length and not skipped):
            return False
        start = max(0, length - NUM_MARKS)
        return batch.read(row, start, length) == tokens[start:] and batch.pick(row, self._positions) == self._marks

    def equals(self, batch: Batch, row: int) -> bool:
        """Whether the row begins with all tokens of the sequence."""
        return batch.read(row, 0, len(self.sequence.token_ids)) == self.sequence.token_ids


class Rows:
    """The sequences of vLLM's rows, from step to step."""

    def __init__(self) -> None:
        self._tracked: list[TrackedRow] = []

    def match(self, batch: Batch, skipped: bool = False) -> tuple[list[Sequence | None], list[Sequence]]:
        """Return the sequence of each row (None for a new row), and the sequences without a row.

        `skipped`: whether steps before this one were not observed. Moved rows then count as new, because they have
        gained more tokens than the last step reports.
        """
        matched: list[TrackedRow | None] = [None] * len(batch)
        moved: dict[tuple[int, ...], list[TrackedRow]] = {}
        for row, tracked in enumerate(self._tracked):
            if row < len(batch) and tracked.is_in_place(batch, row, skipped):
                matched[row] = tracked
            else:
                moved.setdefault(tracked.key, []).append(tracked)
        if moved:
            matched = [tracked or _take_moved(moved, batch, row) for row, tracked in enumerate(matched)]
        gone = [tracked.sequence for group in moved.values() for tracked in group]
        return [tracked.sequence if tracked is not None else None for tracked in matched], gone

    def keep(self, sequences: Items[Sequence]) -> None:
        """Set the sequences of all rows, including the tokens of this step."""
        known = {id(tracked.sequence): tracked for tracked in self._tracked}
        self._tracked = [known.get(id(sequence)) or TrackedRow(sequence) for sequence in sequences]


def _take_moved(moved: dict[tuple[int, ...], list[TrackedRow]], batch: Batch, row: int) -> TrackedRow | None:
    """Remove and return the sequence of a moved row; None for a new row."""
    before = batch.previous_length(row)
    candidates = moved.get((before, *batch.read(row, max(0, before - NUM_MARKS), before)), [])
    tracked = next((candidate for candidate in candidates if candidate.equals(batch, row)), None)
    if tracked is not None:
        candidates.remove(tracked)
    return tracked
