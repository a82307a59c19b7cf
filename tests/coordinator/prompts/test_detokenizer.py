"""Incremental detokenization: whole characters, no lost text, bounded time and memory for invalid bytes."""

import logging
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_tokenizers import (
    BYTES,
    FALLBACK,
    METASPACE,
    REPLACEMENT,
    WORD_ENDS,
    WORDPIECE,
    described,
    detokenizer_of,
    pieces_of,
)
from tokenizers import Tokenizer

from coordinator.prompts.detokenizer import MAX_PENDING, Detokenizer, Vocabulary
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE

# Ids of the bytes of "€", of bytes that continue a character, and of two letters.
EURO, CONTINUATIONS, LETTERS = BYTES.encode("€").ids, BYTES.encode("€é").ids[1::2], BYTES.encode("ab").ids
INVALID = CONTINUATIONS[0]


def random_groups(ids: list[int], seed: int) -> list[list[int]]:
    """Split ids into groups of zero to four."""
    rng, groups, start = random.Random(seed), [], 0
    while start < len(ids):
        end = start + rng.randint(0, 4)
        groups.append(ids[start:end])
        start = end
    return groups


@given(text=st.text(max_size=60), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["bytes", "byte fallback"])
def test_pieces_join_to_the_text_and_hold_whole_characters(tokenizer: Tokenizer, text: str, seed: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    decoded = tokenizer.decode(ids)
    pieces = pieces_of(tokenizer, random_groups(ids, seed))
    assert "".join(pieces) == decoded
    if REPLACEMENT not in decoded:
        assert pieces[-1] == ""
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60), seed=st.integers(0, 2**32))
def test_pieces_of_arbitrary_bytes_join_to_their_decoding(ids: list[int], seed: int) -> None:
    pieces = pieces_of(BYTES, random_groups(ids, seed))
    assert "".join(pieces) == BYTES.decode(ids)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces[:-1])


@given(ids=st.lists(st.sampled_from([0xC3, 0xA9, 0xE2, 0x82, 0xAC, 256, 257, 258, 260]), max_size=30))
@example(ids=[0xC3, 0xA9, 0xE2, 258])  # "é" is out before the next byte turns it into replacement characters
def test_byte_fallback_loses_no_words_around_invalid_bytes(ids: list[int]) -> None:
    text = "".join(pieces_of(FALLBACK, [[token] for token in ids]))
    assert [c for c in text if c in "ab"] == [c for c in FALLBACK.decode(ids) if c in "ab"]


@given(
    ids=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xAC, 0xF0]), min_size=1, max_size=100),
    words=st.lists(st.sampled_from([258, 260, 261]), min_size=1),
)
def test_byte_fallback_keeps_spaces_around_invalid_bytes(ids: list[int], words: list[int]) -> None:
    text = "".join(pieces_of(FALLBACK, [[token] for token in [*words, *ids, *words]]))
    assert text.startswith(FALLBACK.decode(words))
    with_space = FALLBACK.decode([258, *words])[1:]
    assert text.endswith(with_space)


def added_text(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> str:
    """Return the text that tokens add to a prompt, whose last character may be incomplete."""
    prompt, whole = tokenizer.decode(prompt_ids), tokenizer.decode([*prompt_ids, *ids])
    return whole.removeprefix(prompt if whole.startswith(prompt) else whole_characters(tokenizer, prompt_ids))


def whole_characters(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of the tokens without trailing ones that form no whole character."""
    return next(text for end in range(len(ids), -1, -1) if REPLACEMENT not in (text := tokenizer.decode(ids[:end])))


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=40)
    | st.text("ab é€", max_size=40),
    at=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["bytes", "byte fallback"])
def test_pieces_continue_the_text_of_the_prompt(tokenizer: Tokenizer, text: str, at: float, seed: int) -> None:
    """A character that is split between the prompt and the answer belongs to the answer."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    prompt_ids, rest = ids[: round(at * len(ids))], ids[round(at * len(ids)) :]
    pieces = pieces_of(tokenizer, random_groups(rest, seed), prompt_ids)
    assert "".join(pieces) == added_text(tokenizer, prompt_ids, rest)
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(data=st.data(), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("tokenizer", [METASPACE, WORDPIECE, WORD_ENDS], ids=["metaspace", "wordpiece", "word ends"])
def test_pieces_of_words_continue_the_text_of_the_prompt(tokenizer: Tokenizer, data: st.DataObject, seed: int) -> None:
    some_ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30)
    prompt_ids, ids = data.draw(some_ids), data.draw(some_ids)
    pieces = pieces_of(tokenizer, random_groups(ids, seed), prompt_ids)
    assert "".join(pieces) == added_text(tokenizer, prompt_ids, ids)


def test_a_completion_keeps_the_space_before_its_first_word() -> None:
    ids = FALLBACK.encode("a b").ids
    assert detokenizer_of(FALLBACK).feed(ids[-1:]) == "b"
    assert described(FALLBACK).detokenizer(ids[:-1]).feed(ids[-1:]) == " b"


def test_token_texts_are_those_in_the_middle_of_a_text() -> None:
    texts = described(FALLBACK).token_texts
    assert [texts[token] for token in FALLBACK.encode("a b").ids] == [" a", " b"]
    assert texts[FALLBACK.token_to_id("<s>")] == "<s>"
    assert [described(BYTES).token_texts[token] for token in EURO] == [REPLACEMENT] * 3


@pytest.mark.parametrize("special", [0, 100])
def test_special_tokens_at_the_end_of_a_prompt_are_not_its_context(special: int) -> None:
    prompt_ids = [*FALLBACK.encode("a").ids, *[256] * special]
    assert described(FALLBACK).detokenizer(prompt_ids).feed([261]) == " b"
    assert described(FALLBACK).detokenizer([256] * special).feed([261]) == "b"


@given(st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), min_size=1, max_size=20))
def test_every_character_is_emitted_as_soon_as_it_is_complete(text: str) -> None:
    detokenizer = detokenizer_of(BYTES)
    for character in text:
        ids = BYTES.encode(character).ids
        assert [detokenizer.feed([token]) for token in ids] == [""] * (len(ids) - 1) + [character]


def test_incomplete_characters_are_flushed_once() -> None:
    detokenizer = detokenizer_of(BYTES)
    assert detokenizer.feed(BYTES.encode("a€").ids[:-1]) == "a"
    assert [detokenizer.flush(), detokenizer.flush()] == [REPLACEMENT, ""]


def test_endless_invalid_bytes_are_emitted_in_bounded_pieces() -> None:
    detokenizer = detokenizer_of(BYTES)
    pieces = [detokenizer.feed([INVALID]) for _ in range(1000)]
    assert len("".join(pieces)) >= 1000 - MAX_PENDING
    assert max(map(len, pieces)) <= MAX_PENDING
    assert "".join([*pieces, detokenizer.flush()]) == BYTES.decode([INVALID] * 1000)


def test_special_tokens_have_no_text_and_no_cost() -> None:
    """A stream that kept them would decode all of them again for each of them."""
    detokenizer = detokenizer_of(BYTES)
    ids = [EURO[0], *[EOS_TOKEN_ID] * 1000, EURO[1], *[EOS_TOKEN_ID] * 1000, EURO[2]]
    assert [detokenizer.feed([token]) for token in ids] == [""] * (len(ids) - 1) + ["€"]


@given(data=st.data(), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("tokenizer", [BYTES, METASPACE, WORDPIECE, WORD_ENDS])
def test_special_tokens_can_be_kept(tokenizer: Tokenizer, data: st.DataObject, seed: int) -> None:
    special = max(tokenizer.get_added_tokens_decoder())
    ids = data.draw(st.lists(st.just(special) | st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))
    pieces = pieces_of(tokenizer, random_groups(ids, seed), skip_special_tokens=False)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces[:-1])


def test_a_kept_special_token_ends_an_incomplete_character() -> None:
    detokenizer = described(BYTES).detokenizer(skip_special_tokens=False)
    assert [detokenizer.feed([token]) for token in (*EURO[:2], EOS_TOKEN_ID, *EURO)] == [
        *["", "", f"{REPLACEMENT}<eos>"], *["", "", "€"],
    ]  # fmt: skip


class PanicException(BaseException):
    """Like the library's, not an `Exception`."""


def broken(error: BaseException) -> Detokenizer:
    """Return a detokenizer whose decoder fails on the character 13."""

    def decode(tokens: list[str]) -> str:
        if chr(13) in tokens:
            raise error
        return "".join(tokens)

    return Detokenizer(Vocabulary({number: chr(number) for number in range(128)}, frozenset(), decode))


def test_undecodable_tokens_do_not_fail_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert broken(PanicException("out of bounds")).feed([65, 13, 66, 13]) == f"A{REPLACEMENT}B{REPLACEMENT}"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["the tokenizer cannot decode some tokens: PanicException"]


def test_signals_are_not_panics() -> None:
    with pytest.raises(KeyboardInterrupt):
        broken(KeyboardInterrupt()).feed([13])
