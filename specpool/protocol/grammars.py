"""Grammars of generated text, compiled by llguidance. Needs the extra `constraints`.

The coordinator and the workers compile with the same limits, so a grammar that the coordinator accepts also compiles in
the workers.
"""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from specpool.protocol.tokenizer import TokenizerFiles

MAX_LEXER_STATES = 32_000
"""Maximum lexer states of a compiled grammar. Each takes up to 600 bytes (measured)."""
COMPILE_FUEL, LARGE_FUEL = 1_000_000, 20_000_000
"""Maximum fuel for compilation, and for a mask whose new lexer must first read a long text."""
STEP_MAX_ITEMS = 2000
"""Maximum parser items per mask."""


class GrammarError(ValueError):
    """A grammar does not compile. The message is llguidance's."""


def load_grammar_tokenizer(files: TokenizerFiles, vocab_size: int) -> LLTokenizer:
    """Load the tokenizer for llguidance, in about half a second. ValueError if llguidance does not support it.

    `vocab_size`: the model's, which sets the size of masks.
    """
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(files.eos_token_ids) or None)


def compile_grammar(
    tokenizer: LLTokenizer,
    grammar: str,
    max_lexer_states: int = MAX_LEXER_STATES,
    compile_fuel: int = COMPILE_FUEL,
    step_fuel: int = LARGE_FUEL,
    step_max_items: int = STEP_MAX_ITEMS,
) -> LLMatcher:
    """Return a matcher at the start of the text. Raises GrammarError. Releases the interpreter lock.

    A mask needs less fuel if the lexer already has its states. The default of `step_fuel` is therefore far above what
    32,000 new states need. `compile_fuel` also limits the tokens that the matcher reads before its first mask.
    """
    limits = LLParserLimits(
        max_grammar_size=200_000,
        step_max_items=step_max_items,
        initial_lexer_fuel=compile_fuel,
        step_lexer_fuel=step_fuel,
        max_lexer_states=max_lexer_states,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
