"""How byte-level GGUF tokenizers split text before merging, by the kind that `tokenizer.ggml.pre` names.

Source: the table of kinds in llama.cpp's src/llama-vocab.cpp. Where llama.cpp simplifies an expression for its own
engine and quotes the original, this table has the original ("tekken", "gpt-4o"). Files are refused if their kind needs
code or raw UTF-8 merges ("kimi-k2", "afmoe", "gemma4", "sarvam-moe"), or belongs to an encoder.
"""
# ruff: noqa: RUF001 - the expressions name ambiguous characters

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT = "default"
"""The kind of files that lack the key."""


@dataclass(frozen=True)
class PreTokenizer:
    """A kind of pre-tokenizer."""

    splits: tuple[str, ...]
    """Regular expressions (Oniguruma). Each isolates its matches within the pieces left by the previous one."""
    ignores_merges: bool = False
    """Whether a piece that is itself a token skips merging."""
    adds_bos: bool = False
    """Whether texts begin with the beginning-of-sequence token unless `tokenizer.ggml.add_bos_token` is set."""


_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TITLE, _CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PATHS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_ASCII_SYMBOLS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}{_SYMBOLS}{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{_SYMBOLS}{_SPACES}"
_CASED = rf"{_TITLE}{_CONTRACTIONS}?|{_CAPITALS}{_CONTRACTIONS}?|"
_GPT4O = rf"{_CASED}\p{{N}}{{1,3}}{_PATHS}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HAN_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_WORDS = rf"{_ASCII_SYMBOLS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_JAIS_SPACES = (
    "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
)
_CASED_SCRIPTS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ"
    "-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-"
    "ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

_GROUPS = {
    DEFAULT: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_LLAMA3,), ignores_merges=True, adds_bos=True
    ),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignores_merges=True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+{_SYMBOLS}{_SPACES}"), ignores_merges=True
    ),
    "jais-2": PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}{_SYMBOLS}|\s*[\r\n]+{_JAIS_SPACES}",)),
    "qwen2 deepseek-r1-qwen stablelm2 megrez kormo f2llmv2 hunyuan grok-2 solar-open": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}",
        )
    ),
    "ufakzeka": PreTokenizer((rf"{_WORDS}|\p{{N}}{_SYMBOLS}{_SPACES}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}",)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}{_SYMBOLS}"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": PreTokenizer((rf"{_TITLE}|{_CAPITALS}|\p{{N}}{_PATHS}",), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "youtu": PreTokenizer(
        (f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_HAN_KANA}", rf"{_CASED}\p{{N}}{_PATHS}"),
        ignores_merges=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_SCRIPTS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": PreTokenizer(
        (r"\p{N}{1,3}", _HAN_KANA, rf"{_DEEPSEEK_WORDS}[\r\n]*{_SPACES}")
    ),
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
}

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {kind: each for kinds, each in _GROUPS.items() for kind in kinds.split()}
