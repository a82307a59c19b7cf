"""The fakes' tokenizer, and the tokens that a grammar allows or forces. Grammars need llguidance."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specpool.protocol.tokenizer import TokenizerFiles

VOCAB_SIZE = 257
EOS_TOKEN_ID = 256


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def legal_tokens(grammar: str, token_ids: Sequence[int]) -> list[int]:
    """Tokens that a grammar allows after `token_ids`. ValueError if there are none, or if `token_ids` are illegal."""
    matcher = _matcher_after(grammar, token_ids)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return [token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1]


def forced_tokens(grammar: str, token_ids: Sequence[int]) -> list[int]:
    """The forced tokens after `token_ids`, or none if `token_ids` are illegal."""
    matcher = _matcher_after(grammar, token_ids)
    return [] if matcher.is_error() else list(matcher.compute_ff_tokens())


def _matcher_after(grammar: str, token_ids: Sequence[int]) -> Any:
    matcher = _matcher(grammar).deep_copy()
    matcher.consume_tokens(list(token_ids))
    return matcher


@lru_cache
def _matcher(grammar: str) -> Any:
    from specpool.protocol.grammars import compile_grammar

    return compile_grammar(_grammar_tokenizer(), grammar)


@lru_cache
def _grammar_tokenizer() -> Any:
    from specpool.protocol.grammars import load_grammar_tokenizer

    files = TokenizerFiles(byte_tokenizer().to_str().encode(), "", {}, (EOS_TOKEN_ID,))
    return load_grammar_tokenizer(files, VOCAB_SIZE)
