"""Step times are measured up to the maximum rows of a round, while passes are short."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_models import load_engine

from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.engine.startup import step_times
from specpool.engine.startup.step_times import measure_step_times
from specpool.protocol.rounds import MAX_DRAFT_TOKENS


@pytest.fixture
def engine(tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Engine:
    return load_engine(tiny_pair[0], max_sequences=6)


def played(monkeypatch: pytest.MonkeyPatch, seconds_per_row: float) -> list[Sequence[Span]]:
    """Record measured passes, each with a fake time of `seconds_per_row` per row."""
    passes: list[Sequence[Span]] = []

    def seconds(engine: Engine, spans: Sequence[Span]) -> float:
        passes.append(spans)
        return seconds_per_row * sum(len(span.token_ids) for span in spans)

    monkeypatch.setattr(step_times, "_seconds", seconds)
    return passes


@pytest.mark.parametrize(
    ("slots", "limit", "rows"),
    [
        (6, 512, [1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 64, 6 * (1 + MAX_DRAFT_TOKENS)]),
        (6, 40, [1, 2, 4, 8, 9, 12, 16, 17, 24, 40]),
        (6, 64, [1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 64]),
        (1, 512, [1, 2, 4, 8, 9, 1 + MAX_DRAFT_TOKENS]),
        (1, 1, [1, 2]),
    ],
)
def test_passes_are_measured_up_to_the_maximum_rows_of_a_round(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, slots: int, limit: int, rows: list[int]
) -> None:
    """Rows beyond one pass need not be measured."""
    monkeypatch.setattr(engine.slots, "total", slots)
    monkeypatch.setattr(engine, "max_num_batched_tokens", limit)
    times = measure_step_times(engine)
    assert list(times) == rows
    assert all(0 < seconds < 60 for seconds in times.values())
    assert engine.slots.in_use == 0
    assert engine.info().max_rows == limit


def test_rows_are_spread_over_all_slots(tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    many = load_engine(tiny_pair[0], max_sequences=80)
    passes = played(monkeypatch, 1e-6)
    assert max(measure_step_times(many)) == 512
    for spans in passes:
        counts = [len(span.token_ids) for span in spans]
        assert len(counts) == min(64, sum(counts))
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == 1 or len({token for span in spans for token in span.token_ids}) > 1
        assert {span.start for span in spans} == {step_times.STEP_CACHED}


def test_long_passes_are_repeated_once_and_end_the_measurement(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = played(monkeypatch, 0.01)
    assert list(measure_step_times(engine)) == [1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 64]
    counts = [sum(len(span.token_ids) for span in spans) for spans in passes]
    assert [counts.count(rows) for rows in (1, 2, 4, 8, 16, 32, 64)] == [3, 3, 3, 2, 2, 2, 2]


def test_requested_row_counts_are_all_measured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, 1.0)
    assert measure_step_times(engine, [1, 80, 90]) == {1: 1, 80: 80, 90: 90}
