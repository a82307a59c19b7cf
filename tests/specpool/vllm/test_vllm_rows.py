"""Rows of vLLM's batch become sequences by their tokens, in a time that does not grow with their length."""

from typing import Any

import numpy as np
import pytest

from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.vllm.rows import MARKS, Batch, Rows

LONG = 4000


class Counted:
    """An array that counts the numbers that are read of it."""

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
    return Sequence(sequence_id, GenerationRequest("", tuple(tokens), 100, frozenset(), 4))


def rows_of(*contexts: list[int]) -> tuple[Rows, list[Sequence]]:
    rows, sequences = Rows(), [sequence_of(at, tokens) for at, tokens in enumerate(contexts)]
    rows.keep(sequences)
    return rows, sequences


def test_a_row_that_stays_is_told_by_few_tokens() -> None:
    contexts = [[at, *range(LONG)] for at in range(3)]
    rows, sequences = rows_of(*contexts)
    batch, tokens = batch_of([[*context, 7, 8] for context in contexts], gained=2)
    assert rows.match(batch) == (sequences, [])
    assert tokens.read <= 3 * (3 * MARKS)


def test_rows_that_move_leave_and_come() -> None:
    contexts = [[at, 5, 6, at] for at in range(4)]
    rows, sequences = rows_of(*contexts)
    batch, _ = batch_of([[*contexts[3], 9], [77, 78], [*contexts[0], 9]])
    assert rows.match(batch) == ([sequences[3], None, sequences[0]], [sequences[1], sequences[2]])


@pytest.mark.parametrize("changed", [0, LONG // 2, LONG - 1])
def test_a_row_with_another_beginning_middle_or_end_is_new(changed: int) -> None:
    """In another place; in its own place, tokens between the marks are not looked at."""
    context = [*range(LONG)]
    rows, sequences = rows_of([1], context)
    context[changed] += 1
    assert rows.match(batch_of([[*context, 5]])[0]) == ([None], sequences)


def test_a_row_that_became_shorter_or_skipped_a_step_is_new() -> None:
    rows, sequences = rows_of([1, 2, 3])
    assert rows.match(batch_of([[1, 2, 3]])[0]) == ([None], sequences)
    assert rows.match(batch_of([[1, 2, 3, 4, 5]])[0]) == ([None], sequences)


def test_equal_rows_are_each_matched_once() -> None:
    rows, sequences = rows_of([9], [1, 2], [1, 2])
    found, gone = rows.match(batch_of([[1, 2, 3], [1, 2, 3]])[0])
    assert sorted(its.sequence_id for its in found if its is not None) == [1, 2]
    assert gone == [sequences[0]]


def test_an_empty_batch_frees_all() -> None:
    rows, sequences = rows_of([1], [2])
    assert rows.match(batch_of([])[0]) == ([], sequences)


def test_rows_are_told_after_steps_that_were_not_looked_at() -> None:
    contexts = [[at, 5, 6, at] for at in range(3)]
    rows, sequences = rows_of(*contexts)
    batch, _ = batch_of([[*contexts[0], 9, 8, 7], [*contexts[2], 4, 3], [1, 2, 3, 4, 5, 6]])
    assert rows.match(batch, skipped=True) == ([sequences[0], None, None], [sequences[1], sequences[2]])
