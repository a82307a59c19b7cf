"""Untrusted descriptions of tokenizers: usual decoders decode as in the library, all others are refused."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import BYTES, FALLBACK, described
from tokenizers import Tokenizer, decoders, models

from coordinator.prompts.description import TokenizerError, read_description
from coordinator.prompts.detokenizer import MAX_GROWTH, read_decoder
from coordinator.prompts.tokenizer import TargetTokenizer
from specpool.protocol.tokenizer import TokenizerFiles

FILES = TokenizerFiles(BYTES.to_str().encode(), "", {}, ())
GOOD = TargetTokenizer(FILES).describe()
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
USUAL = [
    decoders.ByteLevel(),
    decoders.Metaspace(),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.WordPiece("##", True),
    decoders.BPEDecoder("</w>"),
    decoders.CTC(),
    decoders.Sequence(LLAMA),
    decoders.Sequence([decoders.Sequence([decoders.Replace("▁", "")]), decoders.Metaspace()]),
]
TOKEN = st.sampled_from(["a", "▁", "▁b", "##c", "d</w>", "<0xE2>", "<0x82>", "<0xAC>", "|", "<pad>", "Ġe", "é", ","])


@given(tokens=st.lists(TOKEN, max_size=12))
@pytest.mark.parametrize("decoder", USUAL, ids=lambda decoder: type(decoder).__name__)
def test_rebuilt_decoders_decode_as_the_library_does(decoder: Any, tokens: list[str]) -> None:
    text = read_decoder(json.loads(decoder.__getstate__()))(tokens)
    assert text == decoder.decode(tokens)
    assert len(text.encode()) <= MAX_GROWTH * len("".join(tokens).encode())


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
def test_texts_are_those_of_the_library(tokenizer: Tokenizer) -> None:
    vocabulary = described(tokenizer).vocabulary
    ids = random.Random(1).choices(range(tokenizer.get_vocab_size()), k=500)
    tokens = [vocabulary.tokens[token_id] for token_id in ids]
    assert vocabulary.decode(tokens) == tokenizer.decode(ids, skip_special_tokens=False)
    plain = [token for token_id, token in zip(ids, tokens, strict=True) if token_id not in vocabulary.special_ids]
    assert vocabulary.decode(plain) == tokenizer.decode(ids)


def test_tokens_without_a_decoder_are_joined_by_spaces() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7}, "a"))
    assert described(tokenizer).detokenizer().feed([0, 7, 3, 0]) == "a b a" == tokenizer.decode([0, 7, 3, 0])


def nested(levels: int) -> Any:
    return {"type": "Sequence", "decoders": [nested(levels - 1)]} if levels else {"type": "Fuse"}


def replace(pattern: Any, content: Any) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    "decoder",
    [
        [],
        "ByteLevel",
        {},
        {"type": None},
        {"type": "Unknown"},
        {"type": "x" * 10_000},
        {"type": "Sequence"},
        {"type": "Sequence", "decoders": [None]},
        nested(9),
        {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 33},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}] * 2},
        {"type": "Sequence", "decoders": [{"type": "WordPiece", "prefix": "#", "cleanup": False}] * 4},
        replace({"String": ""}, "x"),
        replace({"String": "x"}, "x" * 9),
        replace({"String": "x"}, "\ud800"),
        replace({"String": 1}, "x"),
        replace({"Regex": "x"}, "x"),
        replace(None, "x"),
        {"type": "Strip", "content": "ab", "start": 1, "stop": 0},
        {"type": "Strip", "content": " ", "start": -1, "stop": 0},
        {"type": "Strip", "content": " ", "start": 2**70, "stop": 0},
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "Metaspace", "replacement": "ab"},
        {"type": "Metaspace", "other": 1},
        {"type": "WordPiece", "prefix": 1, "cleanup": True},
    ],
)
def test_decoders_that_could_make_texts_long_or_slow_are_refused(decoder: Any) -> None:
    with pytest.raises(TokenizerError, match="decoder") as caught:
        read_description(json.dumps({**GOOD, "decoder": decoder}).encode(), FILES)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"ids": []},
        {"ids": None},
        {"ids": [], "tokens": []},
        {"ids": ["0"] * len(GOOD["ids"])},
        {"ids": [math.nan] * len(GOOD["ids"])},
        {"tokens": [None] * len(GOOD["ids"])},
        {"tokens": ["x" * 4097] * len(GOOD["ids"])},
        {"tokens": ["\ud800"] * len(GOOD["ids"])},
        {"special_ids": 1},
        {"special_ids": [[]]},
        {"templates": []},
        {"templates": [None]},
        {"templates": [[True], None]},
        {"templates": [[True, ["x"] * 1025], None]},
        {"templates": [[True, ["x" * 257]], None]},
        {"templates": [[True, [1]], None]},
        {"reasoning": []},
        {"reasoning": ["a", "b", [1], [2], []]},
        {"reasoning": ["a", None, [1], [2], [], []]},
        {"reasoning": ["a", "b" * 257, [1], [2], [], []]},
        {"reasoning": ["a", "b", [], [2], [], []]},
        {"reasoning": ["a", "b", [1], [-1], [], []]},
        {"reasoning": ["a", "b", [1], ["2"], [], []]},
        {"reasoning": ["a", "b", [1], [2] * 65, [], []]},
    ],
)
def test_malformed_descriptions_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError):
        read_description(json.dumps({**GOOD, **change}).encode(), FILES)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"\xff", b"[" * 10**6, b"{}", b"1"])
def test_bodies_that_are_no_description_are_refused(body: bytes) -> None:
    with pytest.raises(TokenizerError):
        read_description(body, FILES)
