"""Passes that other processes slow down are reported once."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import load_engine

from specpool.engine.cache.spans import Span
from specpool.engine.run.contention import WINDOW_SECONDS, ContentionMonitor, contention, seconds_waited
from specpool.engine.run.engine import STEP_CACHED

Pair = tuple[Path, Path]


@pytest.mark.parametrize(
    ("spent", "expected", "waited", "elapsed", "is_reported"),
    [
        (6.0, 1.0, 3.0, 6.0, True),
        (6.0, 1.0, 12.0, 6.0, True),  # two threads waited
        (6.0, 1.0, 1.0, 6.0, False),  # slow for another reason
        (6.0, 1.0, 3.0, 600.0, False),  # waits between passes
        (2.0, 1.0, 2.0, 2.0, False),  # a fair share of the cores
        (1.0, 1.0, 0.0, 1.0, False),
    ],
)
def test_only_slow_passes_that_waited_for_cores_are_reported(
    spent: float, expected: float, waited: float, elapsed: float, is_reported: bool
) -> None:
    assert (contention(spent, expected, waited, elapsed) is not None) == is_reported


class Waiting:
    """Seconds waited so far."""

    def __init__(self, seconds: float | None = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float | None:
        return self.seconds


def run_passes(monitor: ContentionMonitor, rows: int, seconds: float, total: float = WINDOW_SECONDS) -> list[str]:
    found = [monitor.add(rows, seconds) for _ in range(round(total / seconds) + 1)]
    return [sentence for sentence in found if sentence is not None]


def test_passes_are_compared_with_the_best_of_as_many_rows() -> None:
    waiting = Waiting()
    monitor = ContentionMonitor({}, "do this", waiting)
    assert run_passes(monitor, 1, 0.01) == run_passes(monitor, 16, 0.06) == []
    waiting.seconds = 4.0
    (sentence,) = run_passes(monitor, 1, 0.0625)
    assert "6.2 times their best time" in sentence
    assert "waited 4.0 s" in sentence
    assert sentence.endswith("; do this")


def test_times_measured_at_the_start_count_as_the_best() -> None:
    """A row count between two measured ones has the time of the next larger one."""
    waiting = Waiting()
    monitor = ContentionMonitor({1: 0.01, 4: 0.02}, "", waiting)
    waiting.seconds = 10.0
    (sentence,) = run_passes(monitor, 3, 0.1)
    assert "5.0 times" in sentence
    assert run_passes(monitor, 100, 0.1) == []


def test_waiting_before_the_window_does_not_count() -> None:
    waiting = Waiting(100.0)
    monitor = ContentionMonitor({1: 0.01}, "", waiting)
    assert run_passes(monitor, 1, 0.1) == []


def test_short_waits_between_rare_passes_do_not_count() -> None:
    """A worker that is mostly idle fills a window of 5 s within an hour."""
    waiting, hours = Waiting(), iter([0.0, 3600.0, 7200.0])
    monitor = ContentionMonitor({1: 0.01}, "", waiting, lambda: next(hours))
    waiting.seconds = 20.0
    assert run_passes(monitor, 1, 0.1) == []


def test_attention_to_long_sequences_is_not_contention() -> None:
    waiting = Waiting()
    monitor = ContentionMonitor({1: 0.01}, "", waiting)
    waiting.seconds = 10.0
    found = [monitor.add(1, 0.04, attention_seconds=0.03) for _ in range(130)]
    assert not any(found)


def test_an_engine_knows_how_long_its_sequences_are(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens, added = load_engine(tiny_pair[0]), [1] * (STEP_CACHED + 5), list[tuple[int, float]]()
    engine.contention, engine.seconds_per_cached = ContentionMonitor({}, ""), 0.5
    monkeypatch.setattr(ContentionMonitor, "add", lambda _, rows, __, attention: added.append((rows, attention)))
    engine.forward([Span(1, 0, tokens[:-2], 1)])
    engine.forward([Span(1, STEP_CACHED + 3, tokens[-2:], 1), Span(2, 0, [1], 1)])
    assert [rows for rows, _ in added] == [STEP_CACHED + 3, 3]
    assert [attention for _, attention in added] == [0.0, 0.5 * 2 * 3]


def test_without_the_systems_figures_nothing_is_reported() -> None:
    monitor = ContentionMonitor({1: 0.01}, "", Waiting(None))
    assert run_passes(monitor, 1, 0.1, 3 * WINDOW_SECONDS) == []


def test_the_system_counts_the_time_without_a_core(tmp_path: Path) -> None:
    assert seconds_waited(tmp_path) is None
    for thread, text in {"1": "5 1500000000 2", "2": "7 500000000 3", "3": ""}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    assert seconds_waited(tmp_path) == 2.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count this time")
def test_a_process_that_shares_its_core_has_waited() -> None:
    code = (
        "import os, time; from specpool.engine.run.contention import seconds_waited\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); child = os.fork()\n"
        "end = time.monotonic() + 0.3\n"
        "while time.monotonic() < end: pass\n"
        "if not child: os._exit(0)\n"
        "print(seconds_waited())"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert float(found) > 0


def test_an_engine_warns_once(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_engine(tiny_pair[0])
    monkeypatch.setattr(ContentionMonitor, "add", lambda *_: "the CPU is shared")
    engine.contention = ContentionMonitor({}, "")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            engine.forward([Span(1, 0, [1, 2], 1)])
    assert caplog.text.count("the CPU is shared") == 1
