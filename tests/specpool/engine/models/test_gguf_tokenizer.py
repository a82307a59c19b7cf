"""Tokenizers of GGUF files: every key that changes tokens is applied, or the file is refused by name.

The expected tokens come from llama.cpp (xllamacpp 2026.10 on PyPI).
"""
# ruff: noqa: RUF001 - DeepSeek's special tokens have ambiguous characters

from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import byte_level_values, save_gguf, save_tokenizer_gguf, sentencepiece_values
from tiny_models import save_model, small_config
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.models.gguf_tokenizer import APPLIED, END_IDS, WITHOUT_EFFECT
from specpool.engine.models.loading import load_model
from specpool.engine.models.tokenizer import load_tokenizer

MERGES = ["Ġ Ġ", "Ċ Ċ", "1 2", "12 3", "123 4", "Ġ =", "Ġ x", "x y", "' s", "' S", "Ċ Ġ", "! !", "!! Ċ", "1 x", "x 1"]
TEXTS = ["x =  5", "x1234", "a\n\n  b", "it's 'S", "!!\n", "xy1", "1 2"]
SPLIT_LIKE_QWEN = ["x Ġ= Ġ Ġ 5", "x 1 2 3 4", "a ĊĊ Ġ Ġ b", "i t 's Ġ ' S", "!!Ċ", "xy 1", "1 Ġ 2"]
SPLIT_LIKE_SMOLLM = ["x Ġ= ĠĠ 5", "x 1 2 3 4", "a ĊĊ Ġ Ġ b", "i t 's Ġ ' S", "!! Ċ", "xy 1", "1 Ġ 2"]
TOKENS: dict[str | None, list[str]] = {
    None: ["x Ġ = Ġ Ġ 5", "x 123 4", "a ĊĊ Ġ Ġ b", "i t ' s Ġ ' S", "!! Ċ", "xy 1", "1 Ġ 2"],
    "smollm": SPLIT_LIKE_SMOLLM,
    "starcoder": SPLIT_LIKE_SMOLLM,
    "qwen2": SPLIT_LIKE_QWEN,
    "deepseek-r1-qwen": SPLIT_LIKE_QWEN,
    "tekken": [f"<eos> {tokens}" for tokens in SPLIT_LIKE_QWEN],
    "llama-bpe": [
        "<eos> x Ġ= Ġ Ġ 5", "<eos> x 123 4", "<eos> a ĊĊ Ġ Ġ b", "<eos> i t 's Ġ ' S", "<eos> !!Ċ", "<eos> xy 1",
        "<eos> 1 Ġ 2",
    ],
    "gpt-4o": ["x Ġ= Ġ Ġ 5", "x 123 4", "a ĊĊ Ġ Ġ b", "i t 's Ġ ' S", "!!Ċ", "xy 1", "1 Ġ 2"],
    "gpt-2": ["x Ġ= Ġ Ġ 5", "x 1234", "a ĊĊ Ġ Ġ b", "i t 's Ġ ' S", "!! Ċ", "xy 1", "1 Ġ 2"],
    "falcon": ["x Ġ = Ġ Ġ 5", "x 123 4", "a ĊĊ Ġ Ġ b", "i t ' s Ġ ' S", "!! Ċ", "xy 1", "1 Ġ 2"],
    "deepseek-llm": ["x Ġ= ĠĠ 5", "x 1234", "a Ċ Ċ Ġ Ġ b", "i t ' s Ġ ' S", "!! Ċ", "xy 1", "1 Ġ 2"],
    "deepseek-v3": ["x Ġ= ĠĠ 5", "x 123 4", "a ĊĊ Ġ Ġ b", "i t 's Ġ ' S", "!!Ċ", "xy 1", "1 Ġ 2"],
}  # fmt: skip
KEYS = [key for name, key in vars(gguf.constants.Keys.Tokenizer).items() if not name.startswith("_") and "{" not in key]
LLAMA_CPP_KEYS = ["suppress_tokens", "normalizer.lowercase", "normalizer.strip_accents"]
"""Further keys below "tokenizer.ggml." that appear only in llama.cpp's source."""


def read(folder: Path, values: dict[str, Any], **others: Any) -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(str(save_tokenizer_gguf(folder / "model.gguf", values, **others)))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def tokens_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """Return the tokens of a text, including special ones."""
    backend = tokenizer.backend_tokenizer
    return [backend.id_to_token(token_id) for token_id in backend.encode(text).ids]


def reason_for_refusal(folder: Path, values: dict[str, Any], **others: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read(folder, values, **others)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Byte-level vocabularies


@pytest.mark.parametrize("kind", TOKENS)
def test_text_is_split_as_the_pre_tokenizer_says(tmp_path: Path, kind: str | None) -> None:
    eos = 256 + len(MERGES)
    tokenizer = read(tmp_path, byte_level_values(MERGES, pre=kind, bos_token_id=eos))
    assert [" ".join(tokens_of(tokenizer, text)) for text in TEXTS] == TOKENS[kind]
    assert [tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) for text in TEXTS] == TEXTS


@pytest.mark.parametrize("kind", ["kimi-k2", "made-up"])
def test_unsupported_pre_tokenizers_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    assert f"tokenizer.ggml.pre '{kind}' is not a supported" in reason_for_refusal(
        tmp_path, byte_level_values(pre=kind)
    )


def test_a_piece_that_is_a_token_skips_merging(tmp_path: Path) -> None:
    values = byte_level_values(["a b"], special=["abc", "<eos>"])
    values["token_type"][-2] = gguf.TokenType.NORMAL
    assert tokens_of(read(tmp_path, {**values, "pre": "glm4"}), "abc") == ["abc"]
    assert tokens_of(read(tmp_path, {**values, "pre": "gpt-2"}), "abc") == ["ab", "c"]


def test_special_tokens_may_contain_any_characters(tmp_path: Path) -> None:
    special = ["<｜User｜>", "<｜end▁of▁sentence｜>", "日", "<eos>"]
    values = byte_level_values(special=special)
    values["token_type"][258:260] = [gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED]
    tokenizer = read(tmp_path, values)
    text = "<｜User｜>Hi 日<｜end▁of▁sentence｜>"
    assert tokens_of(tokenizer, text) == ["<｜User｜>", "H", "i", "Ġ", "日", "<｜end▁of▁sentence｜>"]
    assert len(tokenizer) == 261
    assert set(tokenizer.all_special_tokens) == {"<eos>"}
    assert tokenizer.init_kwargs[END_IDS] == [258, 260]


# --- SentencePiece vocabularies


def test_the_space_before_a_text_can_be_turned_off(tmp_path: Path) -> None:
    values = sentencepiece_values("▁hi", "hi", "▁h", "h", "i", "▁")
    assert tokens_of(read(tmp_path, values), "hi") == ["<s>", "▁hi"]
    tokenizer = read(tmp_path, {**values, "add_space_prefix": False})
    assert tokens_of(tokenizer, "hi") == ["<s>", "hi"]
    assert tokenizer.decode(tokenizer.encode(" hi"), skip_special_tokens=True) == " hi"


def test_pairs_with_better_scores_merge_first_and_unknown_characters_become_bytes(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, sentencepiece_values("bc", "ab", "▁", "a", "b", "c", add_space_prefix=False))
    assert tokens_of(tokenizer, "abc é</s>") == ["<s>", "a", "bc", "▁", "<0xC3>", "<0xA9>", "</s>"]


def test_phi_3_strips_spaces_after_special_tokens(tmp_path: Path) -> None:
    values = sentencepiece_values("a", "▁", "<|end|>", add_space_prefix=False)
    values["token_type"][-1] = gguf.TokenType.CONTROL
    plain, stripping = read(tmp_path, values), read(tmp_path, values, general__name="Phi-3 mini")
    assert tokens_of(plain, "<|end|> a<s> a") == ["<s>", "<|end|>", "▁", "a", "<s>", "▁", "a"]
    assert tokens_of(stripping, "<|end|> a<s> a") == ["<s>", "<|end|>", "a", "<s>", "▁", "a"]


# --- Special tokens


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, "t"),
        ({"cls_token_id": 257}, "t"),
        ({"add_bos_token": True}, "<bos> t"),
        ({"add_eos_token": True}, "t <eos>"),
        ({"pre": "llama-bpe"}, "<bos> t"),
        ({"pre": "llama-bpe", "add_bos_token": False}, "t"),
    ],
)
def test_texts_get_the_special_tokens_that_the_file_asks_for(tmp_path: Path, changes: Any, tokens: str) -> None:
    values = byte_level_values(special=["<bos>", "<eos>"], bos_token_id=257, **changes)
    tokenizer = read(tmp_path, values)
    assert tokens_of(tokenizer, "t") == tokens.split()
    assert tokenizer.bos_token == "<bos>"
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    ("special", "changes", "ends"),
    [
        (["<a>", "<e>"], {}, ["<e>"]),
        (["<a>", "<e>"], {"eot_token_id": 257}, ["<a>", "<e>"]),
        (["<a>", "<e>"], {"eom_token_id": 257}, ["<a>", "<e>"]),
        (["<a>", "<e>"], {"fim_pad_token_id": 257}, ["<a>", "<e>"]),
        (["<a>", "<e>"], {"fim_pre_token_id": 257}, ["<e>"]),
        (
            ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<e>"],
            {},
            ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<e>"],
        ),
        (["<|repo_name|>", "<|file_sep|>", "<e>"], {"fim_rep_token_id": 258}, ["<|file_sep|>", "<e>"]),
        (["<|end|>", "<|call|>", "<|return|>"], {}, ["<|call|>", "<|return|>"]),
        (["<|end|>", "<|calls|>", "<e>"], {}, ["<|end|>", "<|calls|>", "<e>"]),
        (["</s>", "<|tool_response>"], {}, ["<|tool_response>"]),
    ],
)
def test_a_generation_ends_with_the_tokens_that_llama_cpp_knows(
    tmp_path: Path, special: list[str], changes: dict[str, int], ends: list[str]
) -> None:
    tokenizer = read(tmp_path, byte_level_values(special=special, **changes))
    assert tokenizer.convert_ids_to_tokens(tokenizer.init_kwargs[END_IDS]) == ends


def test_a_served_file_ends_turns_with_its_end_of_turn_token(tmp_path: Path) -> None:
    saved = save_model(tmp_path / "saved", small_config("llama", vocab_size=258, hidden_size=64))
    file = save_gguf(saved, tmp_path / "model.gguf", eot_token_id=10)
    assert load_model(EngineOptions(model=str(file))).tokenizer.eos_token_ids == (10, 257)


def test_a_files_end_tokens_replace_those_of_its_architectures_class(tmp_path: Path) -> None:
    saved = save_model(tmp_path / "saved", small_config("llama", vocab_size=258, hidden_size=64))
    file = save_gguf(saved, tmp_path / "model.gguf", special=["<|end|>"], eos_token_id=None)
    assert load_model(EngineOptions(model=str(file))).tokenizer.eos_token_ids == (257,)  # LlamaConfig has 2


def test_chat_templates_and_special_tokens_are_read(tmp_path: Path) -> None:
    values = byte_level_values(special=["<pad>", "<eos>"], padding_token_id=257, unknown_token_id=0)
    one = read(tmp_path, values, tokenizer__chat_template="a")
    assert one.chat_template == "a"
    assert (one.pad_token, one.eos_token, one.unk_token) == ("<pad>", "<eos>", "!")
    both = read(tmp_path, values, tokenizer__chat_template="a", tokenizer__chat_template__tool_use="b")
    assert both.chat_template == {"default": "a", "tool_use": "b"}


# --- Refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported; 'gpt2' and 'llama' are"),
        ({"model": None}, "tokenizer.ggml.model None is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 elements for 258 tokens"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b"]}, "tokenizer.ggml.merges has 'a b', but 'ab' is not a token"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges has elements of the wrong type"),
        ({"eos_token_id": 258}, "tokenizer.ggml.eos_token_id is 258, not one of the 258 tokens"),
        ({"eot_token_id": "a"}, "tokenizer.ggml.eot_token_id is 'a', not one of"),
        ({"add_bos_token": True}, "tokenizer.ggml.bos_token_id is missing, but this token is added to every text"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, neither true nor false"),
        ({"precompiled_charsmap": [1]}, "tokenizer.ggml.precompiled_charsmap is not supported"),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces is not supported"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    values = {**byte_level_values(), **changes}
    assert f"its tokenizer cannot be read: {reason}" in reason_for_refusal(tmp_path, values)


@pytest.mark.parametrize("kind", ["bert", "rwkv", "plamo2", "gemma4"])
def test_unsupported_vocabularies_are_refused(tmp_path: Path, kind: str) -> None:
    assert f"tokenizer.ggml.model '{kind}' is not supported" in reason_for_refusal(
        tmp_path, byte_level_values(model=kind)
    )


@pytest.mark.parametrize("key", [*KEYS, *(f"tokenizer.ggml.{name}" for name in LLAMA_CPP_KEYS), "tokenizer.ggml.new"])
def test_each_key_is_applied_has_no_effect_or_is_refused(tmp_path: Path, key: str) -> None:
    if key in APPLIED | WITHOUT_EFFECT:
        assert not APPLIED & WITHOUT_EFFECT
        return
    others: dict[str, Any] = {key.replace(".", "__"): "text"}
    assert f"{key} is not supported" in reason_for_refusal(tmp_path, byte_level_values(), **others)


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    saved = save_model(tmp_path / "saved", small_config("llama", vocab_size=200, hidden_size=64))
    file = save_gguf(saved, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="tokens has 258 tokens, but the model has only 200"):
        load_tokenizer(str(file))


# --- Embedded pair


@pytest.mark.slow
@pytest.mark.real_pair
def test_the_embedded_pair_splits_digits_and_ends_turns_like_its_file() -> None:
    for folder in (embedded_pair().target, embedded_pair().draft):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.tokenize("x =  5") == ["x", "Ġ=", "ĠĠ", "5"]
        assert len(tokenizer.tokenize("Steps:\n\n1. Mix\n\n2. Bake")) == 10
        assert tokenizer.convert_ids_to_tokens(tokenizer.init_kwargs[END_IDS]) == [
            "<|endoftext|>", "<|im_end|>", "<reponame>",
        ]  # fmt: skip
