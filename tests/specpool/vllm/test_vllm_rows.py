"""Matching rows to sequences by their tokens, in time independent of the length."""

from typing import Any

import numpy as np
import pytest

from specpool.vllm.rows import NUM_MARKS, Batch, Request, Sequence, match

LONG = 4000


class Counted:
    """An array that counts reads."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._array = np.zeros((len(rows), LONG + 100), dtype=np.int32)
        for at, tokens in enumerate(rows):
            self._array[at, : len(tokens)] = tokens
        self.read = 0

    def __getitem__(self, key: Any) -> Any:
        found = self._array[key]
        self.read += found.size
        return found


def batch_of(rows: list[list[int]], gained: int = 1) -> tuple[Batch, Counted]:
    tokens = Counted(rows)
    return Batch([[0] * gained] * len(rows), np.array([len(row) for row in rows]), tokens), tokens


def sequence_of(sequence_id: int, tokens: list[int]) -> Sequence:
    return Sequence(sequence_id, Request(4), list(tokens), LONG + 100)


def rows_of(*contexts: list[int]) -> list[Sequence]:
    return [sequence_of(at, tokens) for at, tokens in enumerate(contexts)]


def test_a_row_in_place_needs_few_reads() -> None:
    contexts = [[at, *range(LONG)] for at in range(3)]
    sequences = rows_of(*contexts)
    batch, tokens = batch_of([[*context, 7, 8] for context in contexts], gained=2)
    assert match(sequences, batch) == (sequences, [])
    assert tokens.read <= 3 * (3 * NUM_MARKS)


def test_rows_move_leave_and_arrive() -> None:
    contexts = [[at, 5, 6, at] for at in range(4)]
    sequences = rows_of(*contexts)
    batch, _ = batch_of([[*contexts[3], 9], [77, 78], [*contexts[0], 9]])
    assert match(sequences, batch) == ([sequences[3], None, sequences[0]], [sequences[1], sequences[2]])


@pytest.mark.parametrize("changed", [0, LONG // 2, LONG - 1])
def test_a_moved_row_with_any_changed_token_is_new(changed: int) -> None:
    context = [*range(LONG)]
    sequences = rows_of([1], context)
    context[changed] += 1
    assert match(sequences, batch_of([[*context, 5]])[0]) == ([None], sequences)


def test_a_row_of_unexpected_length_is_new() -> None:
    sequences = rows_of([1, 2, 3])
    assert match(sequences, batch_of([[1, 2, 3]])[0]) == ([None], sequences)
    assert match(sequences, batch_of([[1, 2, 3, 4, 5]])[0]) == ([None], sequences)


def test_equal_rows_are_each_matched_once() -> None:
    sequences = rows_of([9], [1, 2], [1, 2])
    found, gone = match(sequences, batch_of([[1, 2, 3], [1, 2, 3]])[0])
    assert sorted(sequence.sequence_id for sequence in found if sequence is not None) == [1, 2]
    assert gone == [sequences[0]]


def test_an_empty_batch_releases_all() -> None:
    sequences = rows_of([1], [2])
    assert match(sequences, batch_of([])[0]) == ([], sequences)


def test_rows_match_after_skipped_steps() -> None:
    contexts = [[at, 5, 6, at] for at in range(3)]
    sequences = rows_of(*contexts)
    batch, _ = batch_of([[*contexts[0], 9, 8, 7], [*contexts[2], 4, 3], [1, 2, 3, 4, 5, 6]])
    assert match(sequences, batch, skipped=True) == ([sequences[0], None, None], [sequences[1], sequences[2]])
