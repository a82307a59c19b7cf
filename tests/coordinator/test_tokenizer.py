"""Text to tokens and back, and the pieces in which text is streamed."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from coordinator.tokenizer import ChatTemplateError, Detokenizer, TargetTokenizer
from protocol.tokenizer import TokenizerFiles
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

BYTES = byte_tokenizer()
REPLACEMENT = "\ufffd"


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer as Llama 2 and its kin have them: bytes are tokens only where no other token fits."""
    words = ["<s>", "▁", "a", "b", "▁a", "▁b"]
    vocab = {word: i for i, word in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


def make_tokenizer(chat_template: str = CHAT_TEMPLATE, **special_tokens: str) -> TargetTokenizer:
    return TargetTokenizer(
        TokenizerFiles(BYTES.to_str().encode(), chat_template, special_tokens, eos_token_ids=(EOS_TOKEN_ID,))
    )


def cut(ids: list[int], seed: int) -> list[list[int]]:
    """The ids in pieces of zero to four."""
    rng, pieces, start = random.Random(seed), [], 0
    while start < len(ids):
        end = start + rng.randint(0, 4)
        pieces.append(ids[start:end])
        start = end
    return pieces


def pieces_of(tokenizer: Tokenizer, groups: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(group) for group in groups), detokenizer.flush()]


@settings(deadline=None)
@given(text=st.text(max_size=60), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["bytes", "byte fallback"])
def test_pieces_of_a_text_join_to_it_and_hold_whole_characters(tokenizer: Tokenizer, text: str, seed: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    pieces = pieces_of(tokenizer, cut(ids, seed))
    assert "".join(pieces) == whole
    assert pieces[-1] == ""
    if REPLACEMENT not in whole:
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


@given(st.text(min_size=1, max_size=20))
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
