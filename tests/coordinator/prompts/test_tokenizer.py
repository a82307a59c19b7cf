"""The target's tokenizer: encoding text and chats, broken files, and limits on long prompts."""

from functools import partial
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import BYTES, make_tokenizer
from tokenizers import Tokenizer, models

from coordinator.prompts import tokenizer as module
from coordinator.prompts.templates import Chat
from coordinator.prompts.tokenizer import EncodingError, TargetTokenizer, TokenizerError, WorkLimits
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import VOCAB_SIZE, byte_tokenizer


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    files = TokenizerFiles(tokenizer.to_str().encode(), "", {}, ())
    assert TargetTokenizer(files).encode_text("hello") == BYTES.encode("hello").ids


def files(tokenizer_json: bytes = BYTES.to_str().encode(), template: str = "", eos: int = 0) -> TokenizerFiles:
    return TokenizerFiles(tokenizer_json, template, {}, eos_token_ids=(eos,))


def words(vocab: dict[str, int], unk_token: str = "a") -> bytes:
    return Tokenizer(models.WordLevel(vocab, unk_token)).to_str().encode()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (files(b""), "tokenizer.json is broken"),
        (files(b"\xff\xfe"), "tokenizer.json is broken"),
        (files(b'{"model": {"vocab": {}}}'), "tokenizer.json is broken"),
        (files(b"[" * 100_000), "tokenizer.json is broken"),
        (files(BYTES.to_str().encode()[:-2]), "tokenizer.json is broken"),
        (files(Tokenizer(models.BPE()).to_str().encode()), "no vocabulary"),
        (files(words({"a": VOCAB_SIZE})), "token id 257 exceeds the model's vocabulary size 257"),
        (files(eos=VOCAB_SIZE), "token id 257 exceeds the model's vocabulary size 257"),
        (files(template="{% for %}"), "the chat template does not compile"),
    ],
)
def test_broken_files_are_rejected_with_a_reason(broken: TokenizerFiles, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        TargetTokenizer(broken, VOCAB_SIZE)


def test_errors_of_the_library_reject_the_prompt() -> None:
    tokenizer = TargetTokenizer(files(words({"a": 0}, unk_token="<unk>")))  # <unk> is not in the vocabulary
    assert tokenizer.encode_text("a") == [0]
    with pytest.raises(EncodingError, match="the tokenizer rejects it"):
        tokenizer.encode_text("b")
    with pytest.raises(EncodingError):
        make_tokenizer("{{ '\\ud800' }}").encode_chat(Chat([message("user", "hi")]))


def test_panics_of_the_library_reject_the_prompt() -> None:
    class PanicException(BaseException):
        """Like the library's, not an `Exception`."""

    tokenizer = make_tokenizer()
    with (
        mock.patch.object(tokenizer, "_tokenizer", **{"encode_batch_fast.side_effect": PanicException("overflow")}),
        pytest.raises(EncodingError, match="overflow"),
    ):
        tokenizer.encode_text("a")
    assert tokenizer.encode_text("a") == BYTES.encode("a").ids


@given(text=st.text(max_size=200), maximum=st.integers(1, 100), piece=st.integers(1, 50))
def test_prompts_that_fit_are_never_rejected(text: str, maximum: int, piece: int) -> None:
    """Even if they are counted in pieces first."""
    ids = BYTES.encode(text).ids
    with mock.patch.multiple(module, BYTES_PER_TOKEN=0, PIECE_CHARACTERS=piece):
        encode = partial(make_tokenizer().encode_text, text, WorkLimits(tokens=maximum))
        if len(ids) <= maximum:
            assert encode() == ids
        elif len(text) <= piece:
            with pytest.raises(EncodingError, match=f"more than {maximum} tokens"):
                encode()


def test_far_too_long_prompts_are_rejected_early() -> None:
    tokenizer, tokenized = make_tokenizer(), 0
    tokenize = tokenizer._tokenize

    def count(text: str, add_special_tokens: bool) -> list[int]:
        nonlocal tokenized
        tokenized += len(text)
        return tokenize(text, add_special_tokens)

    with (
        mock.patch.object(tokenizer, "_tokenize", count),
        pytest.raises(EncodingError, match="more than 20000 tokens"),
    ):
        tokenizer.encode_text("x" * 1_000_000, WorkLimits(tokens=20_000))
    assert tokenized < 50_000
