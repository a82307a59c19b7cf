"""Stop strings against naive definitions."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.text import StopString

letters = st.text("ab", max_size=30)
stops = st.text("ab", min_size=1, max_size=6)


def matched(text: str, stop: str) -> int:
    """Length of the longest proper prefix of the stop string that the text ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@given(text=letters, stop=stops, cuts=st.lists(st.integers(0, 6)))
def test_the_automaton_finds_the_first_occurrence_in_each_piece(text: str, stop: str, cuts: list[int]) -> None:
    search, fed = StopString(stop), 0
    for size in [*cuts, len(text)]:
        end = min(len(text), fed + size)
        at = text[:end].find(stop, max(0, fed - len(stop) + 1))
        assert search.feed(text[fed:end]) == (at + len(stop) - fed if at >= 0 else 0)
        assert search.matched == matched(text[:end], stop)
        fed = end


def test_stop_strings_that_nearly_match_cost_constant_time_per_character() -> None:
    """Count comparisons: a search that starts anew at every character would need 255 times as many."""
    compared = 0

    class Counted(str):
        def __getitem__(self, at: object) -> str:
            nonlocal compared
            compared += 1
            return str.__getitem__(self, at)  # type: ignore[index]

    search = StopString("a" * 255 + "!")
    search.text = Counted(search.text)
    for _ in range(4000):
        search.feed("a")
    assert compared <= 4 * 4000
