"""Tokens that make no text, or never a whole character: bounded time and memory, and no word lost around them."""

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BYTES, FALLBACK, REPLACEMENT, make_tokenizer, pieces_of

from coordinator.prompts.detokenizer import MOST_PENDING, Detokenizer
from specpool.testing import EOS_TOKEN_ID

# Ids of the tokens for the bytes of "€", for bytes that continue a character, and for two letters.
EURO, CONTINUATIONS, LETTERS = BYTES.encode("€").ids, BYTES.encode("€é").ids[1::2], BYTES.encode("ab").ids
UNFINISHED = CONTINUATIONS[0]


@settings(deadline=None)
@given(st.lists(st.sampled_from([*EURO, *CONTINUATIONS, *CONTINUATIONS, LETTERS[0]]), max_size=150))
def test_pieces_of_long_runs_of_broken_characters_join_to_what_decoding_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTES, [[token] for token in ids])) == BYTES.decode(ids)


@settings(deadline=None)
@given(
    ids=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xAC, 0xF0]), min_size=MOST_PENDING + 1, max_size=100),
    words=st.lists(st.sampled_from([258, 260, 261]), min_size=1),
)
def test_words_before_and_after_broken_bytes_keep_their_spaces(ids: list[int], words: list[int]) -> None:
    """With byte fallback: how the broken bytes look depends on when they are shown, and that is all."""
    text = "".join(pieces_of(FALLBACK, [[token] for token in [*words, *ids, *words]]))
    assert text.startswith(FALLBACK.decode(words))
    after = FALLBACK.decode([258, *words])[1:]  # with the space before the first word
    assert text.endswith(after)


def test_text_that_never_completes_a_character_is_shown_all_the_same() -> None:
    detokenizer = Detokenizer(BYTES)
    shown = [detokenizer.feed([UNFINISHED]) for _ in range(1000)]
    assert "".join(shown) in [REPLACEMENT * count for count in range(1000 - MOST_PENDING, 1001)]
    assert max(map(len, shown)) <= MOST_PENDING
    assert "".join([*shown, detokenizer.flush()]) == BYTES.decode([UNFINISHED] * 1000)


def test_a_character_that_ends_such_a_run_is_whole() -> None:
    for length in range(3 * MOST_PENDING):
        ids = [UNFINISHED] * length + EURO
        assert "".join(pieces_of(BYTES, [[token] for token in ids])) == REPLACEMENT * length + "€"


def test_special_tokens_cost_nothing_and_change_nothing() -> None:
    """However many: a stream that keeps them would decode all of them again with each of them."""
    detokenizer = make_tokenizer().detokenizer()
    ids = [EURO[0], *[EOS_TOKEN_ID] * 1000, EURO[1], *[EOS_TOKEN_ID] * 1000, EURO[2]]
    assert [detokenizer.feed([token]) for token in ids] == [""] * (len(ids) - 1) + ["€"]


class PanicException(BaseException):
    """As the library's: no `Exception`."""


class Broken:
    """A tokenizer that panics at each token of its own, and knows no stream."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        if 13 in token_ids:
            raise PanicException("index out of bounds")
        return "".join(map(chr, token_ids))


def test_tokens_that_the_library_cannot_decode_do_not_end_the_request(caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = Broken()
    detokenizer = Detokenizer(broken)
    with caplog.at_level(logging.WARNING):
        assert detokenizer.feed([65, 13, 66, 13]) == f"A{REPLACEMENT}B{REPLACEMENT}"
    assert [record.getMessage() for record in caplog.records] == ["the tokenizer cannot decode some tokens: PanicError"]


class Interrupted:
    """A tokenizer during which the process is told to stop."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        raise KeyboardInterrupt


def test_a_signal_is_no_panic() -> None:
    interrupted: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        Detokenizer(interrupted).feed([65])
