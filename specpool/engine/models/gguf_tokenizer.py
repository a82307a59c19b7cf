"""Builds the tokenizer that a GGUF file describes. Every key that changes tokens is applied, or the file is refused.

Sources: ggml's docs/gguf.md for the keys, llama.cpp's src/llama-vocab.cpp for their meaning. The conversion in
transformers drops some keys, so it is not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specpool.engine.models.gguf_header import GgufError
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.gguf_vocabulary import (
    DEFAULT,
    KEYS,
    PRE_TOKENIZERS,
    PreTokenizer,
    correct_types,
    end_tokens,
)

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
"""The supported values of `tokenizer.ggml.model`."""
PREFIX, GGML, TEMPLATE = "tokenizer.", "tokenizer.ggml.", "tokenizer.chat_template"
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
"""Names of special tokens in transformers, and of their ids in the file."""
APPLIED = frozenset(
    [TEMPLATE, "tokenizer.chat_templates"]
    + [f"{GGML}{name}" for name in ("model", "pre", "tokens", "token_type", "scores", "merges")]
    + [f"{GGML}{name}" for name in ("add_bos_token", "add_eos_token", "add_space_prefix")]
    + [f"{GGML}{name}_token_id" for name in (*SPECIAL.values(), *KEYS)]
)
"""Keys that affect tokens. Named chat templates have further keys: TEMPLATE, a dot, and the name."""
WITHOUT_EFFECT = frozenset(
    ["tokenizer.huggingface.json"]  # the same tokenizer in another format
    + [f"{GGML}{name}" for name in ("token_type_count", "add_sep_token", "cls_token_id")]  # for encoders
    # Clients write these tokens into prompts as text.
    + [f"{GGML}{name}_token_id" for name in ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")]
)
"""Keys that do not affect the tokens of texts or chats."""
END_IDS = "end_of_generation_ids"
"""Tokenizer setting with the ids that end generation."""
SPACE = "▁"
STRIPPED_BY, NOT_STRIPPING = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
"""Names of models whose special tokens absorb the spaces after them, and their tokens that do not."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file."""

    tokens: list[str]
    ids: Mapping[str, int]
    types: list[int]  # TokenType
    ends: frozenset[str]
    """Texts of the tokens that end generation."""


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file. Raises GgufError, which names the key."""
    _check_keys(file)
    kind = file.metadata.get(f"{GGML}model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise GgufError(f"{GGML}model {kind!r} is not supported; {BYTE_LEVEL!r} and {SENTENCEPIECE!r} are")
    ids = _token_ids(file, kind)
    vocabulary = _vocabulary(file, ids)
    if kind == BYTE_LEVEL:
        pre = _pre_tokenizer(file)
        tokenizer, adds_bos = _byte_level(file, vocabulary.ids, pre), pre.adds_bos
    else:
        tokenizer, adds_bos = _sentencepiece(file, vocabulary, ids), True
    tokenizer.add_special_tokens(_added(file, vocabulary, (TokenType.CONTROL, TokenType.UNKNOWN)))
    tokenizer.add_tokens(_added(file, vocabulary, (TokenType.USER_DEFINED,)))
    around = {"bos": _flag(file, "add_bos_token", adds_bos), "eos": _flag(file, "add_eos_token", False)}
    tokenizer.post_processor = _template([name for name, wanted in around.items() if wanted], vocabulary, ids)
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    texts = {name: vocabulary.tokens[ids[name]] for name in SPECIAL if name in ids}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_chat_templates(file),
        clean_up_tokenization_spaces=False,
        **{END_IDS: sorted(vocabulary.ids[text] for text in vocabulary.ends)},
        **{f"{name}_token": added.get(text, text) for name, text in texts.items()},
    )


def _check_keys(file: GgufFile) -> None:
    """Refuse unsupported keys, unless their value is false or empty and so has no effect."""
    for key, value in file.metadata.items():
        if not key.startswith(PREFIX) or key in APPLIED | WITHOUT_EFFECT or key.startswith(f"{TEMPLATE}."):
            continue
        if value if value is not None else file.arrays[key].count:
            raise GgufError(f"{key} is not supported; serve the model from a folder with a tokenizer.json instead")


def _token_ids(file: GgufFile, kind: str) -> dict[str, int]:
    """Return the file's ids by name in SPECIAL or KEYS. SentencePiece files get llama.cpp's defaults."""
    ids = {"bos": 1, "eos": 2, "unk": 0} if kind == SENTENCEPIECE else {}
    for name in {**SPECIAL, **dict.fromkeys(KEYS)}:
        key = f"{GGML}{SPECIAL.get(name, name)}_token_id"
        if key in file.metadata:
            ids[name] = file.metadata[key]
    return ids


def _vocabulary(file: GgufFile, given: Mapping[str, int]) -> Vocabulary:
    texts = _elements(file, "tokens", str)
    tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(texts)]
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    if len(ids) < len(tokens):
        repeated = next(text for token_id, text in enumerate(tokens) if ids[text] != token_id)
        raise GgufError(f"{GGML}tokens has {repeated!r} twice")
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is not None and len(tokens) > embeddings.shape[0]:
        raise GgufError(f"{GGML}tokens has {len(tokens):,} tokens, but the model has only {embeddings.shape[0]:,}")
    for name, token_id in given.items():
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            key = f"{GGML}{SPECIAL.get(name, name)}_token_id"
            raise GgufError(f"{key} is {token_id!r}, not one of the {len(tokens):,} tokens")
    types = [TokenType.NORMAL] * len(tokens)
    if f"{GGML}token_type" in file.metadata:
        types = _elements(file, "token_type", int, len(tokens))
    ends = end_tokens(ids, {name: given[name] for name in KEYS if name in given})
    return Vocabulary(tokens, ids, correct_types(types, ids, ends), ends)


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    kind = file.metadata.get(f"{GGML}pre") or DEFAULT
    if kind not in PRE_TOKENIZERS:
        raise GgufError(f"{GGML}pre {kind!r} is not a supported pre-tokenizer; serve the model from a folder instead")
    return PRE_TOKENIZERS[kind]


def _byte_level(file: GgufFile, ids: Mapping[str, int], pre: PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(dict(ids), _merges(file, ids), ignore_merges=pre.ignores_merges))
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(file: GgufFile, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in dict.fromkeys(_elements(file, "merges", str)):  # the first of several duplicates counts
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        for part in (left, right, left + right):
            if part not in ids:
                raise GgufError(f"{GGML}merges has {merge!r}, but {part!r} is not a token")
        pairs.append((left, right))
    return pairs


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary, given: Mapping[str, int]) -> Tokenizer:
    """Build a SentencePiece tokenizer. Scores replace a list of merges: the pair with the best score merges first."""
    scores, ids = _elements(file, "scores", float, len(vocabulary.tokens)), vocabulary.ids
    merges = [
        (-scores[token_id], token_id, text[:cut], text[cut:])
        for text, token_id in ids.items()
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    pairs = [(left, right) for _, _, left, right in sorted(merges)]
    unknown = vocabulary.tokens[given["unk"]]
    tokenizer = Tokenizer(models.BPE(dict(ids), pairs, unk_token=unknown, byte_fallback=True))
    has_prefix = _flag(file, "add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _added(file: GgufFile, vocabulary: Vocabulary, types: tuple[TokenType, ...]) -> list[AddedToken]:
    """Return the tokens of these types. They match their text before any other step."""
    name = str(file.metadata.get("general.name", "")).lower()
    strips = any(part in name for part in STRIPPED_BY)
    return [
        AddedToken(
            text, normalized=False, special=each != TokenType.USER_DEFINED, rstrip=strips and text not in NOT_STRIPPING
        )
        for text, each in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if each in types
    ]


def _template(names: list[str], vocabulary: Vocabulary, given: Mapping[str, int]) -> processors.TemplateProcessing:
    """Put the named special tokens around a text."""
    for name in names:
        if name not in given:
            raise GgufError(f"{GGML}{name}_token_id is missing, but this token is added to every text")
    around = [{"id": name, "ids": [given[name]], "tokens": [vocabulary.tokens[given[name]]]} for name in names]
    before, after = ([name for name in names if name == wanted] for wanted in ("bos", "eos"))
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=around)


def _chat_templates(file: GgufFile) -> str | dict[str, str] | None:
    """Return the template, or all templates by name if the file names some."""
    named = {
        key.removeprefix(f"{TEMPLATE}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    default = file.metadata.get(TEMPLATE)
    for name, template in {"": default or "", **named}.items():
        if not isinstance(template, str):
            raise GgufError(f"{TEMPLATE}{name and f'.{name}'} is not a string")
    return {**({"default": default} if default else {}), **named} if named else default


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"{GGML}{name}", default)
    if not isinstance(value, bool):
        raise GgufError(f"{GGML}{name} is {value!r}, neither true nor false")
    return value


def _elements(file: GgufFile, name: str, kind: type, count: int = 0) -> list[Any]:
    """Return the first `count` elements of an array, or all if `count` is 0. Raises GgufError if they do not exist."""
    key = f"{GGML}{name}"
    if key not in file.metadata:
        raise GgufError(f"{key} is missing")
    elements = file.read_array(key)
    if len(elements) < count:
        raise GgufError(f"{key} has {len(elements):,} elements for {count:,} tokens")
    if elements and not isinstance(elements[0], (kind, int) if kind is float else kind):
        raise GgufError(f"{key} has elements of the wrong type")
    return elements[: count or None]
