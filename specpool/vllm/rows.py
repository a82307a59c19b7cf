"""Rows of vLLM's batch and the sequences they are. Pure.

vLLM names no requests: a row is told by its tokens. It keeps its place from step to step, and moves only when another
row leaves, so the row that was in this place is looked at first, by a few tokens. Only a row that has moved is compared
token by token: a step takes O(new tokens), however long the sequences are. Equal rows may be mistaken for each other,
which changes nothing. Where steps were not looked at, rows have gained more tokens than the last step gave them.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from coordinator.scheduling.sequence import Sequence

# Tokens compared of a row that stays in its place: its last ones, and as many from all over its beginning.
MARKS = 16


class Batch:
    """The rows of a step, as vLLM passes them."""

    def __init__(self, sampled_token_ids: Items[Items[int]], num_tokens: Any, token_ids: Any) -> None:
        """`num_tokens[i]`: tokens of row i, with those just sampled. `token_ids[i]`: these tokens, then anything.

        Both are numpy arrays, which may have further rows. IndexError, TypeError: the arguments are of another kind.
        """
        self.sampled = [len(tokens) for tokens in sampled_token_ids]
        """Tokens that each row gained in this step; 0 while its prompt is being prefilled."""
        self.lengths: list[int] = num_tokens[: len(self.sampled)].tolist()
        """Tokens of each row, with those gained."""
        self._token_ids = token_ids
        if len(self.lengths) < len(self.sampled):
            raise IndexError(f"{len(self.sampled)} rows have tokens, but only {len(self.lengths)} have a length")

    def __len__(self) -> int:
        return len(self.sampled)

    def read(self, row: int, start: int, end: int) -> list[int]:
        """The tokens of a row from `start` to before `end`."""
        tokens: list[int] = self._token_ids[row, start:end].tolist()
        return tokens

    def pick(self, row: int, positions: list[int]) -> list[int]:
        """The tokens of a row at some positions."""
        tokens: list[int] = self._token_ids[row, positions].tolist()
        return tokens


@dataclass
class Held:
    """A sequence and how its row is told."""

    sequence: Sequence
    _positions: list[int] = field(default_factory=list)
    _marks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokens = self.sequence.token_ids
        self._positions = [*range(0, len(tokens), max(1, len(tokens) // MARKS))]
        self._marks = [tokens[position] for position in self._positions]

    @property
    def length(self) -> int:
        """Tokens that the row had in the last step."""
        return len(self.sequence.token_ids)

    @property
    def end(self) -> tuple[int, ...]:
        """The length and the last tokens, by which a row that has moved is found."""
        return self.length, *self.sequence.token_ids[-MARKS:]

    def stays(self, batch: Batch, row: int, skipped: bool) -> bool:
        """Whether the row in this place goes on as the sequence."""
        tokens, length = self.sequence.token_ids, self.length
        before = batch.lengths[row] - batch.sampled[row]
        if before < length or (before > length and not skipped):
            return False
        start = max(0, length - MARKS)
        return batch.read(row, start, length) == tokens[start:] and batch.pick(row, self._positions) == self._marks

    def is_row(self, batch: Batch, row: int) -> bool:
        """Whether the row begins with all tokens of the sequence."""
        return batch.read(row, 0, self.length) == self.sequence.token_ids


class Rows:
    """The sequences of vLLM's rows, from step to step."""

    def __init__(self) -> None:
        self._held: list[Held] = []

    def match(self, batch: Batch, skipped: bool = False) -> tuple[list[Sequence | None], list[Sequence]]:
        """The sequence of each row, None for a new one; and the sequences whose rows are gone.

        `skipped`: whether there were steps since the last one looked at. Rows that have moved then count as new.
        """
        found: list[Held | None] = [
            held if row < len(batch) and held.stays(batch, row, skipped) else None
            for row, held in enumerate(self._held)
        ][: len(batch)]
        found += [None] * (len(batch) - len(found))
        stayed = {id(held) for held in found if held is not None}
        moved: dict[tuple[int, ...], list[Held]] = {}
        for held in self._held:
            if id(held) not in stayed:
                moved.setdefault(held.end, []).append(held)
        if moved:
            found = [held or _moved(moved, batch, row) for row, held in enumerate(found)]
        gone = [held.sequence for several in moved.values() for held in several]
        return [held.sequence if held is not None else None for held in found], gone

    def keep(self, sequences: Items[Sequence]) -> None:
        """Notes the sequences of all rows, once they have the tokens of this step."""
        known = {id(held.sequence): held for held in self._held}
        self._held = [known.get(id(sequence)) or Held(sequence) for sequence in sequences]


def _moved(moved: dict[tuple[int, ...], list[Held]], batch: Batch, row: int) -> Held | None:
    """Takes out the sequence of a row that was in another place; None for a new row."""
    before = batch.lengths[row] - batch.sampled[row]
    alike = moved.get((before, *batch.read(row, max(0, before - MARKS), before)), [])
    held = next((held for held in alike if held.is_row(batch, row)), None)
    if held is not None:
        alike.remove(held)
    return held
