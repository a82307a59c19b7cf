"""Tokens as bytes, for every kind of tokenizer, and the encoding of bytes."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_tokenizers import byte_level, files_of, sentence_piece, vocabulary_of
from tiny_tokenizers import WORDPIECE
from tokenizers import Tokenizer

from draft_worker.translation.vocabulary import UnsupportedTokenizerError, Vocabulary, num_incomplete
from specpool.protocol.tokenizer import TokenizerFiles

TOKENIZERS = [byte_level(300), byte_level(900), sentence_piece(700), sentence_piece(900, "unigram")]
PIECES = st.sampled_from(["a", " the", "  ", "\n", "é", "👍🏽", "e\u0301", "東京", " 12", "<eos>", "ß", "f():"])

_vocabulary = cache(vocabulary_of)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["small", "large", "bpe", "unigram"])
@settings(deadline=None, max_examples=40)
@given(pieces=st.lists(PIECES, max_size=12), cut=st.integers(0, 3))
def test_tokens_of_any_bytes_have_these_bytes(tokenizer: Tokenizer, pieces: list[str], cut: int) -> None:
    vocabulary, text = _vocabulary(tokenizer), "".join(pieces).encode()
    text = text[: max(0, len(text) - cut)]
    token_ids = vocabulary.encode(text)
    assert b"".join(vocabulary.texts[token_id] for token_id in token_ids) == text


def test_special_tokens_have_no_bytes() -> None:
    vocabulary = vocabulary_of(sentence_piece(700))
    assert {"<s>", "<eos>", "<unk>"} <= vocabulary.special_ids.keys()
    assert not {*vocabulary.special_ids.values()} & vocabulary.texts.keys()
    assert vocabulary.bos_token_id == vocabulary.special_ids["<s>"]


@given(st.text(max_size=3), st.integers(0, 3))
def test_incomplete_characters_are_counted(text: str, cut: int) -> None:
    encoded = text.encode(errors="replace")
    kept = encoded[: max(0, len(encoded) - cut)]
    complete = kept[: len(kept) - num_incomplete(kept)]
    assert encoded.startswith(complete)
    assert complete.decode() in text.encode(errors="replace").decode()


def description(**changes: object) -> bytes:
    return json.dumps(json.loads(files_of(byte_level(300)).tokenizer_json) | changes).encode()


def nested(levels: int) -> object:
    decoder: object = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    for _ in range(levels):
        decoder = {"type": "Sequence", "decoders": [decoder]}
    return decoder


@pytest.mark.parametrize(
    ("tokenizer_json", "reason"),
    [
        (b"\xff", "it cannot be read"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"{}", "it cannot be read"),
        (WORDPIECE.to_str().encode(), r"its decoder \(WordPiece\) does not map tokens to bytes"),
        (description(decoder=nested(20)), "it is nested too deeply"),
        (description(decoder={"type": "Sequence", "decoders": 3}), "it cannot be read"),
        (description(added_tokens=[dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
                                   | {"id": 0, "content": "a" * 2000}]), "it has a token of 2000 bytes"),
    ],
)  # fmt: skip
def test_unusable_tokenizers_are_refused(tokenizer_json: bytes, reason: str) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=reason):
        Vocabulary.read(TokenizerFiles(tokenizer_json, "", {}, ()), 300)
