"""Streamed text with stop strings, against a naive reference."""

from collections.abc import Iterable
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import detokenizer_of

from coordinator.scheduling.sequence import FinishReason, GenerationRequest, Sequence
from coordinator.scheduling.text import TextStream
from specpool.protocol.sampling import SamplingParams
from specpool.testing import byte_tokenizer

# Tokens of one or several letters, so that stop strings begin and end within tokens.
PIECES = ("a", "b", "c", "ab", "bca", "", "é", "cab")


class Pieces:
    """Token i is PIECES[i]."""

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(PIECES[token] for token in token_ids)

    def flush(self) -> str:
        return ""


tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=20)
stops = st.lists(st.text("abcé", min_size=1, max_size=5), max_size=4).map(tuple)


def reference(token_ids: list[int], stop: tuple[str, ...], min_tokens: int) -> tuple[str, int, bool]:
    """The text, the number of tokens, and whether a stop string ended it, by searching the whole text every time."""
    free = len("".join(PIECES[token] for token in token_ids[: max(0, min_tokens - 1)]))
    for count in range(len(token_ids) + 1):
        text = "".join(PIECES[token] for token in token_ids[:count])
        begins = {s: text.find(s, max(0, free - len(s) + 1)) for s in stop}
        found = [at for at in begins.values() if at >= 0] if count >= min_tokens else []
        if found:
            return text[: min(found)], count, True
    return "".join(PIECES[token] for token in token_ids), len(token_ids), False


@given(token_ids=tokens, stop=stops, cuts=st.lists(st.integers(1, 5)), min_tokens=st.integers(0, 5), late=st.booleans())
def test_output_ends_where_the_reference_ends(
    token_ids: list[int], stop: tuple[str, ...], cuts: list[int], min_tokens: int, late: bool
) -> None:
    """For any sizes of commits. No part of a stop string is ever shown."""
    request = GenerationRequest("r", (0,), 99, frozenset(), 4, SamplingParams(min_tokens=min_tokens), stop)
    sequence = Sequence(0, request, TextStream(Pieces(), stop))
    text, count, stopped = reference(token_ids, stop, min_tokens)
    shown, kept, pieces = "", [], []
    rest = iter(token_ids)
    for size in [*cuts, *[1] * len(token_ids)]:
        gained, piece = sequence.commit(list(islice(rest, size)))
        kept += gained
        pieces.append(piece)
        if not late:
            shown += pieces.pop()()
        assert text.startswith(shown)
    shown += "".join(piece() for piece in pieces)
    if not stopped:
        assert sequence.finish is None
        assert sequence.text is not None
        shown += sequence.text.flush()
    else:
        assert sequence.finish is not None
        assert sequence.finish.reason is FinishReason.STOP
        assert sequence.finish.matched_stop in stop
        assert sequence.num_generated == count
    assert shown == text
    assert kept[:count] == token_ids[:count]


def found_in(text: str, stop: tuple[str, ...]) -> list[int]:
    return [at for s in stop if (at := text.find(s)) >= 0]


@given(text=st.text("abcé\U0001f600x", max_size=30), stop=stops)
def test_streamed_text_is_the_decoded_text_before_the_stop(text: str, stop: tuple[str, ...]) -> None:
    """With one token per byte, so that characters of several bytes must be held back."""
    tokenizer = byte_tokenizer()
    stream = TextStream(detokenizer_of(tokenizer), stop)
    shown = []
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        shown.append(stream.feed(token))
        if stream.matched is not None:
            break
    else:
        shown.append(stream.flush())
    cut = next((min(ends) for n in range(len(text) + 1) if (ends := found_in(text[:n], stop))), len(text))
    assert "".join(shown) == text[:cut]


def test_the_stop_string_that_begins_first_wins_and_then_the_longest() -> None:
    stream = TextStream(Pieces(), ("c", "bc", "b"))
    assert stream.feed(4) == ""  # "bca"
    assert stream.matched == "bc"
