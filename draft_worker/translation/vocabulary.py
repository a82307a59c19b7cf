"""A tokenizer's tokens as bytes, and encoding of text in the middle of a sequence.

Tokens are bytes rather than text, because a character may span several tokens.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from specpool.protocol.tokenizer import TokenizerFiles

MAX_DEPTH = 8
"""Maximum depth of nested decoders, normalizers and pre-tokenizers."""
MAX_TOKEN_BYTES = 1024
MAX_ENTRIES = 2**20
"""Maximum number of tokens and merges. Reading more blocks all threads for seconds."""
MAX_GROWTH = 256
"""Maximum factor by which normalizers may lengthen a text."""
METASPACE = "▁"
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
"""The alphabet of byte-level BPE."""
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(0x100)}
"""The tokens of SentencePiece's byte fallback."""


class UnsupportedTokenizerError(ValueError):
    """The tokenizer cannot be used for translation."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer that are in the model's vocabulary."""

    vocab_size: int
    """Vocabulary size of the model, which may differ from the tokenizer's."""
    texts: dict[int, bytes]
    """Bytes of each token, except special tokens."""
    special_ids: dict[str, int]
    """Special tokens by text."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    prefix: tuple[int, ...]
    """Tokens that the tokenizer adds before a text, such as a beginning-of-sequence token."""
    byte_ids: dict[int, int]
    """Token id of each single byte."""
    tokenizer: Tokenizer

    @classmethod
    def read(cls, files: TokenizerFiles, vocab_size: int) -> "Vocabulary":
        """Read a tokenizer. Takes about a second. Raises UnsupportedTokenizerError."""
        tokenizer, kinds, prefix = _load(files.tokenizer_json)
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        texts = dict[int, bytes]()
        byte_ids = dict[int, int]()
        for token, token_id in tokenizer.get_vocab().items():
            if token_id >= vocab_size:
                continue
            if token_id in added:
                text = added[token_id].content.encode(errors="replace")
            else:
                text = _bytes_of(token, kinds)
                if len(text) == 1 and (token in BYTE_TOKENS or text[0] not in byte_ids):
                    byte_ids[text[0]] = token_id
            if len(text) > MAX_TOKEN_BYTES:
                reason = f"it has a token of {len(text)} bytes, more than {MAX_TOKEN_BYTES}"
                raise UnsupportedTokenizerError(reason)
            if text and token not in special:
                texts[token_id] = text
        special = {text: token_id for text, token_id in special.items() if token_id < vocab_size}
        eos = tuple(token_id for token_id in files.eos_token_ids if token_id < vocab_size)
        bos = special.get(files.special_tokens.get("bos_token", ""))
        known_prefix = tuple(prefix) if set(prefix) <= {bos} else ()
        return cls(vocab_size, texts, special, eos, bos, known_prefix, byte_ids, tokenizer)

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text that continues another one.

        Invalid UTF-8 and text that the tokenizer rejects become single-byte tokens.
        """
        token_ids: list[int] = []
        for valid, invalid in _pieces(text):
            if valid:
                token_ids += self._encode(valid)
            token_ids += self._single(invalid)
        return token_ids

    def _encode(self, text: str) -> list[int]:
        try:
            token_ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException:  # panics of the tokenizers library do not derive from Exception
            return self._single(text.encode())
        return [token_id for token_id in token_ids if token_id < self.vocab_size]

    def _single(self, text: bytes) -> list[int]:
        return [self.byte_ids[byte] for byte in text if byte in self.byte_ids]


def _load(tokenizer_json: bytes) -> tuple[Tokenizer, list[str], list[int]]:
    """Return the tokenizer without additions to texts, the kinds of its decoders, and the tokens it puts before texts.

    Raises UnsupportedTokenizerError.
    """
    try:
        description = json.loads(tokenizer_json)
        kinds = [step["type"] for step in _steps(description["decoder"], "decoders")]
        _check_size(description["model"])
        _check_growth(_steps(description["normalizer"], "normalizers"))
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        prefix: list[int] = tokenizer.encode("").ids
        _drop_prefix(tokenizer, description)
    except UnsupportedTokenizerError:
        raise
    except RecursionError:
        raise UnsupportedTokenizerError("it is nested too deeply") from None
    except MemoryError:
        raise UnsupportedTokenizerError("it takes too much memory") from None
    except Exception as error:  # the tokenizers library raises bare Exception, and the file may contain anything
        raise UnsupportedTokenizerError(f"it cannot be read: {error}") from None
    return tokenizer, kinds, prefix


def num_incomplete(text: bytes | bytearray) -> int:
    """Return the number of bytes of an incomplete UTF-8 character at the end of a text."""
    for count in range(1, min(3, len(text)) + 1):
        byte = text[-count]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return count if count < needed else 0
        if byte < 0x80:
            break
    return 0


def _pieces(text: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield each valid part of a text with the invalid bytes that follow it."""
    while text:
        try:
            yield text.decode(), b""
            return
        except UnicodeDecodeError as error:
            yield text[: error.start].decode(), text[error.start : error.end]
            text = text[error.end :]


def _steps(description: Any, members: str, levels: int = MAX_DEPTH) -> list[dict[str, Any]]:
    """Flatten nested sequences of steps. `members`: key of a sequence's steps."""
    if description is None:
        return []
    if not levels:
        raise RecursionError
    if description["type"] != "Sequence":
        return [description]
    return [step for member in description[members] for step in _steps(member, members, levels - 1)]


def _bytes_of(token: str, kinds: list[str]) -> bytes:
    """Return the bytes of a token. `kinds`: types of the decoder's steps."""
    if "ByteLevel" in kinds:
        return bytes(map(BYTE_OF_CHARACTER.__getitem__, token)) if BYTE_OF_CHARACTER.keys() >= {*token} else b""
    if "ByteFallback" in kinds and token in BYTE_TOKENS:
        return bytes([BYTE_TOKENS[token]])
    if "Metaspace" in kinds or "Replace" in kinds:
        return token.replace(METASPACE, " ").encode(errors="replace")
    raise UnsupportedTokenizerError(f"its decoder ({', '.join(kinds) or 'none'}) does not map tokens to bytes")


def _check_size(model: dict[str, Any]) -> None:
    if (size := len(model["vocab"]) + len(model.get("merges", ()))) > MAX_ENTRIES:
        raise UnsupportedTokenizerError(f"it has {size} tokens and merges, more than {MAX_ENTRIES}")


def _check_growth(normalizers: list[dict[str, Any]]) -> None:
    """Raise UnsupportedTokenizerError if normalizers may lengthen a text so much that it fills the memory."""
    growth = 1
    for step in normalizers:
        if step["type"] == "Replace":
            replaced = step["pattern"].get("String")
            growth *= max(1, len(step["content"]) + (not replaced))  # other patterns also match between characters
        elif step["type"] == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
            texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
            growth *= max(map(len, texts.split(b"\0")))
    if growth > MAX_GROWTH:
        reason = f"its normalizers may make a text {growth} times longer, more than {MAX_GROWTH}"
        raise UnsupportedTokenizerError(reason)


def _drop_prefix(tokenizer: Tokenizer, description: dict[str, Any]) -> None:
    """Stop a tokenizer from adding a leading space and special tokens. Encode special tokens as plain text."""
    normalizers = [step for step in _steps(description["normalizer"], "normalizers") if step["type"] != "Prepend"]
    never: dict[str, Any] = {"prepend_scheme": "never"}
    changes = {"Metaspace": never, "ByteLevel": {"add_prefix_space": False}}
    splits = [step | changes.get(step["type"], {}) for step in _steps(description["pre_tokenizer"], "pretokenizers")]
    empty = dict.fromkeys(description) | {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    changed = Tokenizer.from_str(json.dumps(empty))  # without a vocabulary, which is slow to load
    tokenizer.normalizer = changed.normalizer if normalizers else None
    tokenizer.pre_tokenizer = changed.pre_tokenizer if splits else None
    tokenizer.post_processor = None
    tokenizer.encode_special_tokens = True
