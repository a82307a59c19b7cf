"""What llama.cpp knows about GGUF vocabularies: how to split text before merging, and which tokens end generation.

Source: llama.cpp's src/llama-vocab.cpp. `tokenizer.ggml.pre` names the kind of pre-tokenizer. Where llama.cpp
simplifies an expression for its own engine and quotes the original, the table here has the original ("tekken",
"gpt-4o"). Files are refused if their kind needs code or raw UTF-8 merges ("kimi-k2", "afmoe", "gemma4", "sarvam-moe"),
or belongs to an encoder. Files name only some of the tokens that end generation, so llama.cpp also recognizes them by
their text. It corrects token types that files get wrong.
"""
# ruff: noqa: RUF001 - expressions and DeepSeek's special tokens have ambiguous characters

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gguf import TokenType

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


KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Names of the ids `tokenizer.ggml.{name}_token_id` that end generation."""
END_TEXTS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
"""Tokens that end generation in every vocabulary that has them."""
FILL_TEXTS: Mapping[str, Sequence[str]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Fill-in-the-middle tokens that end generation unless the file gives an id for their purpose."""
MARK_TEXTS = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
    "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>",
    "▁<MID>", "<|code_middle|>", "<|middle|>",
))  # fmt: skip
"""Control tokens that do not end generation."""
VISIBLE_TEXTS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
"""Tokens that are part of an answer's text, even if the file marks them as control tokens."""
CALLS, CHANNEL_ENDS = frozenset(("<|call|>", "<|calls|>")), frozenset(("<|return|>", "<|flush|>"))
"""If a vocabulary has end tokens from both sets, "<|end|>" ends only part of an answer."""
NORMAL_S = frozenset(("<|tool_response>", "<|plamo:eos|>"))
"""If a vocabulary has one of these end tokens, "</s>" is ordinary text."""


PART_END, SENTENCE_END = "<|end|>", "</s>"


def end_tokens(ids: Mapping[str, int], given: Mapping[str, int]) -> frozenset[str]:
    """Return the texts of the tokens that end generation.

    `ids`: the vocabulary's ids by text. `given`: the file's ids by name in KEYS.
    """
    texts = {token_id: text for text, token_id in ids.items()}
    ends = {texts[given[name]] for name in KEYS if name in given}
    ends |= END_TEXTS & ids.keys()
    for name, fill_texts in FILL_TEXTS.items():
        if name not in given:
            ends |= set(sorted(ids.keys() & set(fill_texts), key=ids.__getitem__)[:1])
    if CALLS & ends and CHANNEL_ENDS & ends:
        ends.discard(PART_END)
    if NORMAL_S & ends:
        ends.discard(SENTENCE_END)
    return frozenset(ends)


def correct_types(types: Sequence[int], ids: Mapping[str, int], ends: frozenset[str]) -> list[int]:
    """Return the TokenType of every token, corrected for special tokens recognized by text.

    `ids`: the vocabulary's ids by text. `ends`: from `end_tokens`.
    """
    fills = {text for texts in FILL_TEXTS.values() for text in texts} & ends
    corrected = dict.fromkeys(END_TEXTS | MARK_TEXTS | fills, TokenType.CONTROL)
    corrected |= dict.fromkeys(VISIBLE_TEXTS, TokenType.USER_DEFINED)
    if PART_END not in ends:
        corrected[PART_END] = TokenType.USER_DEFINED
    if SENTENCE_END not in ends:
        corrected[SENTENCE_END] = TokenType.NORMAL
    result = list(types)
    for text in corrected.keys() & ids.keys():
        result[ids[text]] = corrected[text]
    return result
