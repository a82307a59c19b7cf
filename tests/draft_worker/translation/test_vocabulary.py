"""Tokens as bytes and encoding of bytes, for every kind of tokenizer."""

import base64
import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_tokenizers import byte_level, files_of, sentence_piece, vocabulary_of
from tiny_tokenizers import WORDPIECE
from tokenizers import Tokenizer

from draft_worker.translation.sample import SAMPLE
from draft_worker.translation.vocabulary import UnsupportedTokenizerError, Vocabulary, num_incomplete
from specpool.protocol.tokenizer import TokenizerFiles

TOKENIZERS = [byte_level(300), byte_level(900), sentence_piece(700), sentence_piece(900, "unigram")]
PIECES = st.sampled_from(["a", " the", "  ", "\n", "é", "👍🏽", "e\u0301", "東京", " 12", "<eos>", "ß", "f():"])

_vocabulary = cache(vocabulary_of)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["small", "large", "bpe", "unigram"])
@settings(deadline=None, max_examples=40)
@given(pieces=st.lists(PIECES, max_size=12), cut=st.integers(0, 3))
def test_encoding_preserves_all_bytes(tokenizer: Tokenizer, pieces: list[str], cut: int) -> None:
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


def test_tokens_outside_the_models_vocabulary_are_not_used() -> None:
    files = replace(files_of(sentence_piece(700)), eos_token_ids=(2, 99_999))
    vocabulary = Vocabulary.read(files, 290)
    token_ids = vocabulary.encode(SAMPLE.encode())
    assert token_ids
    known = [*token_ids, *vocabulary.texts, *vocabulary.special_ids.values(), *vocabulary.byte_ids.values()]
    assert max(known) < 290
    assert vocabulary.eos_token_ids == (2,)


def test_padding_does_not_become_a_prefix() -> None:
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padded = description(padding=padding | {"pad_type_id": 0, "pad_token": "<eos>"})
    assert Vocabulary.read(TokenizerFiles(padded, "", {"bos_token": "<eos>"}, ()), 300).prefix == ()


def test_a_text_that_the_tokenizer_rejects_becomes_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    vocabulary = Vocabulary.read(TokenizerFiles(description(pre_tokenizer=split), "", {}, ()), 300)
    assert vocabulary.encode(b"a" * 40) == [vocabulary.byte_ids[ord("a")]] * 40
    assert "retry-limit" in capfd.readouterr().err  # the library panics


def description(**changes: object) -> bytes:
    return json.dumps(json.loads(files_of(byte_level(300)).tokenizer_json) | changes).encode()


def nested(levels: int) -> object:
    decoder: object = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    for _ in range(levels):
        decoder = {"type": "Sequence", "decoders": [decoder]}
    return decoder


def replacing(pattern: object, content: str, count: int = 1) -> object:
    steps = count * [{"type": "Replace", "pattern": pattern, "content": content}]
    return {"type": "Sequence", "normalizers": steps}


def charsmap(size: int) -> str:
    """Return a SentencePiece map with an empty trie and one normalized text of `size` bytes."""
    return base64.b64encode(bytes(4) + b"a" * size + b"\0").decode()


@pytest.mark.parametrize(
    ("tokenizer_json", "reason"),
    [
        (b"\xff", "it cannot be read"),
        (description(model={"vocab": {}, "merges": [[]] * 2**20 + [[]]}), "it has 1048577 tokens and merges, more"),
        (description(normalizer=replacing({"String": "a"}, "a" * 257)), "make a text 257 times longer, more than 256"),
        (description(normalizer=replacing({"Regex": ""}, "a", 9)), "make a text 512 times longer, more than 256"),
        (description(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap(300)}), "a text 300 times"),
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
        Vocabulary.read(TokenizerFiles(tokenizer_json, "", {}, ()), 1000)
