"""Small tokenizers of the common kinds."""

import json
import string
from collections.abc import Sequence
from itertools import islice, product
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from coordinator.prompts.description import TokenizerDescription, read_description
from coordinator.prompts.detokenizer import Detokenizer
from coordinator.prompts.tokenizer import TargetTokenizer
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, byte_tokenizer

BYTES = byte_tokenizer()
REPLACEMENT = "\ufffd"


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's, which falls back to byte tokens."""
    words = ["<s>", "▁", "a", "b", "▁a", "▁b"]
    vocab = {word: i for i, word in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


def word_tokenizer(decoder: Any, *words: str) -> Tokenizer:
    """Return a tokenizer with these tokens, and the special token "<s>"."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


METASPACE = word_tokenizer(decoders.Metaspace(), "▁", "▁a", "b", "▁b▁", "é")
WORDPIECE = word_tokenizer(decoders.WordPiece(), "a", "##b", ",", "don", "é", "'", "##'", "t")
WORD_ENDS = word_tokenizer(decoders.BPEDecoder(suffix="</w>"), "a", "b</w>", "é</w>", ",</w>")


def ascii_tokenizer() -> Tokenizer:
    """Return a tokenizer as large as the byte tokenizer whose tokens form ASCII text in any order."""
    characters = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # the last two stand for a space and a newline
    merges = list(islice(product(string.ascii_lowercase, repeat=2), EOS_TOKEN_ID - len(characters)))
    vocab = {token: i for i, token in enumerate([*characters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def make_tokenizer(
    chat_template: str = CHAT_TEMPLATE, tool_chat_template: str = "", **special_tokens: str
) -> TargetTokenizer:
    tokenizer_json = BYTES.to_str().encode()
    return TargetTokenizer(
        TokenizerFiles(tokenizer_json, chat_template, special_tokens, (EOS_TOKEN_ID,), tool_chat_template)
    )


def described(tokenizer: Tokenizer) -> TokenizerDescription:
    """Return a tokenizer as the coordinator sees it."""
    files = TokenizerFiles(tokenizer.to_str().encode(), "", {}, ())
    return read_description(json.dumps(TargetTokenizer(files).describe()).encode(), files)


def detokenizer_of(tokenizer: Tokenizer) -> Detokenizer:
    return described(tokenizer).detokenizer()


def pieces_of(
    tokenizer: Tokenizer, groups: list[list[int]], prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = described(tokenizer).detokenizer(prompt_ids, skip_special_tokens)
    return [*(detokenizer.feed(group) for group in groups), detokenizer.flush()]
