"""Stop strings against definitions that are too simple to be wrong."""

import time

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.stop_strings import StopString, failure_table
from coordinator.scheduling.text import TextStream

letters = st.text("ab", max_size=30)
stops = st.text("ab", min_size=1, max_size=6)


def begun(text: str, stop: str) -> int:
    """The number of last characters that are the first ones of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@given(text=letters, stop=stops, cuts=st.lists(st.integers(0, 6)))
def test_it_finds_the_first_occurrence_that_each_piece_completes_and_knows_what_has_begun(
    text: str, stop: str, cuts: list[int]
) -> None:
    search, known = StopString(stop), 0
    for size in [*cuts, len(text)]:
        end = min(len(text), known + size)
        at = text[:end].find(stop, max(0, known - len(stop) + 1))
        assert search.feed(text[known:end]) == (at + len(stop) - known if at >= 0 else 0)
        assert search.matched == begun(text[:end], stop)
        known = end


@given(stop=stops)
def test_failure_table_are_beginnings_that_are_ends_too(stop: str) -> None:
    table = failure_table(stop)
    assert len(table) == len(stop) + 1
    for length in range(1, len(stop) + 1):
        assert table[length] == begun(stop[:length], stop[:length])


class Letters:
    """One character per token."""

    def __init__(self, text: str) -> None:
        self._text = iter(text)

    def feed(self, token_ids: object) -> str:
        return next(self._text)

    def flush(self) -> str:
        return ""


def seconds(text: str, stop: tuple[str, ...]) -> float:
    stream = TextStream(Letters(text), stop)
    began = time.thread_time()
    for token in range(len(text)):
        stream.feed(token)
    return time.thread_time() - began


def test_a_character_costs_no_more_with_stop_strings_that_nearly_match() -> None:
    """Sixteen of the longest ones, all of which begin all the time, and one goes far: a comparison of every beginning
    took 80 times as long. The bound is far above what is measured, and far below that."""
    stop = ("a" * 255 + "!", *("ab" + "a" * 253 + chr(ord("A") + i) for i in range(15)))
    text = "a" * 4000
    assert seconds(text, stop) < 0.3 + 20 * seconds(text, ("!",))
