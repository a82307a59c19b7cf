"""Text to tokens and back, and the pieces in which text is streamed."""

import random
from functools import partial
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BYTES, FALLBACK, REPLACEMENT, make_tokenizer, pieces_of
from tokenizers import Tokenizer, models

from coordinator.prompts import tokenizer as module
from coordinator.prompts.detokenizer import Detokenizer
from coordinator.prompts.templates import ChatTemplateError
from coordinator.prompts.tokenizer import EncodingError, TargetTokenizer, TokenizerError, WorkLimits
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer


def cut(ids: list[int], seed: int) -> list[list[int]]:
    """The ids in pieces of zero to four."""
    rng, pieces, start = random.Random(seed), [], 0
    while start < len(ids):
        end = start + rng.randint(0, 4)
        pieces.append(ids[start:end])
        start = end
    return pieces


@settings(deadline=None)
@given(text=st.text(max_size=60), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["bytes", "byte fallback"])
def test_pieces_of_a_text_join_to_it_and_hold_whole_characters(tokenizer: Tokenizer, text: str, seed: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    pieces = pieces_of(tokenizer, cut(ids, seed))
    assert "".join(pieces) == whole
    if REPLACEMENT not in whole:
        assert pieces[-1] == ""
        assert not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60), seed=st.integers(0, 2**32))
def test_pieces_of_arbitrary_bytes_join_to_what_decoding_gives(ids: list[int], seed: int) -> None:
    pieces = pieces_of(BYTES, cut(ids, seed))
    assert "".join(pieces) == BYTES.decode(ids)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces[:-1])


@settings(deadline=None)
@given(ids=st.lists(st.sampled_from([0xC3, 0xA9, 0xE2, 0x82, 0xAC, 256, 257, 258, 260]), max_size=30))
@example(ids=[0xC3, 0xA9, 0xE2, 258])  # "é" is out before the next byte turns it into replacement characters
def test_bytes_that_make_no_character_lose_no_word_around_them(ids: list[int]) -> None:
    text = "".join(pieces_of(FALLBACK, [[token] for token in ids]))
    assert [c for c in text if c in "ab"] == [c for c in FALLBACK.decode(ids) if c in "ab"]


def test_text_goes_on_with_its_spaces_after_bytes_that_make_no_character() -> None:
    text = "".join(pieces_of(FALLBACK, [[token] for token in [0xC3, 0xA9, 0xE2, 258, 260, 261]]))
    assert text == f"é{REPLACEMENT}a a b"


@given(st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), min_size=1, max_size=20))
def test_every_piece_is_out_as_soon_as_its_character_is_complete(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    for character in text:
        ids = BYTES.encode(character).ids
        assert [detokenizer.feed([token]) for token in ids] == [""] * (len(ids) - 1) + [character]


def test_an_incomplete_character_at_the_end_is_flushed_once() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.feed(BYTES.encode("a€").ids[:-1]) == "a"
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_special_tokens_are_no_text() -> None:
    ids = BYTES.encode("ab").ids
    assert "".join(pieces_of(BYTES, [[ids[0], EOS_TOKEN_ID, ids[1], EOS_TOKEN_ID]])) == "ab"


@given(st.text(max_size=40))
def test_encoding_is_the_tokenizers(text: str) -> None:
    assert make_tokenizer().encode_text(text) == BYTES.encode(text).ids


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    files = TokenizerFiles(tokenizer.to_str().encode(), "", {}, ())
    assert TargetTokenizer(files).encode_text("hello") == BYTES.encode("hello").ids


def test_chat_is_rendered_with_the_template() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode_chat([("system", "be brief"), ("user", "1 < 2 & 'ü'")])
    assert BYTES.decode(ids) == "system: be brief\nuser: 1 < 2 & 'ü'\n"


def test_templates_see_special_tokens_and_are_asked_for_the_assistants_turn() -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    ids = make_tokenizer(template, bos_token="<eos>").encode_chat([("user", "hi")])
    assert ids == [EOS_TOKEN_ID, *BYTES.encode("hi>").ids]


def test_without_a_template_chat_is_refused() -> None:
    tokenizer = make_tokenizer(chat_template="")
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([("user", "hi")])


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ missing.roles_must_alternate }}"]
)
def test_a_template_that_refuses_says_why(template: str) -> None:
    tokenizer = make_tokenizer(template)
    assert tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match=r"roles must alternate|missing"):
        tokenizer.encode_chat([("user", "hi")])


def test_eos_tokens_are_those_of_the_files() -> None:
    assert make_tokenizer().eos_token_ids == (EOS_TOKEN_ID,)


def broken_files(tokenizer_json: bytes = BYTES.to_str().encode(), template: str = "", eos: int = 0) -> TokenizerFiles:
    return TokenizerFiles(tokenizer_json, template, {}, eos_token_ids=(eos,))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (broken_files(b""), "tokenizer.json is broken"),
        (broken_files(b"\xff\xfe"), "tokenizer.json is broken"),
        (broken_files(b"{"), "tokenizer.json is broken"),
        (broken_files(b'{"model": {"vocab": {}}}'), "tokenizer.json is broken"),
        (broken_files(b"[" * 100_000), "tokenizer.json is broken"),
        (broken_files(BYTES.to_str().encode()[:-2]), "tokenizer.json is broken"),
        (broken_files(Tokenizer(models.BPE()).to_str().encode()), "no vocabulary"),
        (
            broken_files(Tokenizer(models.WordLevel({"a": VOCAB_SIZE}, "a")).to_str().encode()),
            "token id 257, not below",
        ),
        (broken_files(eos=VOCAB_SIZE), "token id 257, not below the model's vocabulary size 257"),
        (broken_files(template="{% for %}"), "the chat template does not compile"),
    ],
)
def test_files_that_make_no_tokenizer_are_refused_with_a_reason(files: TokenizerFiles, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        TargetTokenizer(files, VOCAB_SIZE)


def test_a_prompt_that_the_tokenizer_does_not_take_is_an_error_of_its_own() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))  # which the vocabulary lacks
    tokenizer = TargetTokenizer(broken_files(words.to_str().encode()))
    assert tokenizer.encode_text("a") == [0]
    with pytest.raises(EncodingError, match="does not take this prompt"):
        tokenizer.encode_text("b")


def test_a_panic_of_the_library_is_an_error_of_the_prompt() -> None:
    class PanicException(BaseException):
        """As the library's: no `Exception`."""

    tokenizer = make_tokenizer()
    with (
        mock.patch.object(tokenizer, "_tokenizer", **{"encode_batch_fast.side_effect": PanicException("overflow")}),
        pytest.raises(EncodingError, match="overflow"),
    ):
        tokenizer.encode_text("a")
    assert tokenizer.encode_text("a") == BYTES.encode("a").ids


@settings(deadline=None)
@given(text=st.text(max_size=200), most=st.integers(1, 100), piece=st.integers(1, 50))
def test_a_prompt_that_fits_is_never_refused(text: str, most: int, piece: int) -> None:
    """Also where it is counted in pieces first."""
    ids = BYTES.encode(text).ids
    with mock.patch.multiple(module, BYTES_A_TOKEN=0, PIECE_CHARACTERS=piece):
        encode = partial(make_tokenizer().encode_text, text, WorkLimits(tokens=most))
        if len(ids) <= most:
            assert encode() == ids
        elif len(text) <= piece:
            with pytest.raises(EncodingError, match=f"more than {most} tokens"):
                encode()


def test_a_prompt_that_is_far_too_long_is_refused_before_all_of_it_is_tokenized() -> None:
    tokenizer, read = make_tokenizer(), 0
    encoding = tokenizer._encoding

    def count(text: str, add_special_tokens: bool) -> object:
        nonlocal read
        read += len(text)
        return encoding(text, add_special_tokens)

    with (
        mock.patch.object(tokenizer, "_encoding", count),
        pytest.raises(EncodingError, match="more than 20000 tokens"),
    ):
        tokenizer.encode_text("x" * 1_000_000, WorkLimits(tokens=20_000))
    assert read < 50_000


def test_the_longest_token_is_known() -> None:
    assert make_tokenizer().longest_token_bytes == len("<eos>")


def test_what_the_encoder_is_given_that_no_utf8_has_is_refused() -> None:
    with pytest.raises(EncodingError):
        make_tokenizer("{{ '\\ud800' }}").encode_chat([("user", "hi")])
