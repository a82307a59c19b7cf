"""Finds the tokens of a GGUF vocabulary that end generation, and corrects token types that files get wrong.

Source: llama.cpp's src/llama-vocab.cpp. Files name only some of these tokens, so llama.cpp also recognizes them by
their text.
"""
# ruff: noqa: RUF001 - DeepSeek's special tokens have ambiguous characters

from collections.abc import Mapping, Sequence

from gguf import TokenType

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
