"""Tokenizer files and their fingerprints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tiny_models import edit_json, save_model
from tiny_pair import tiny_config
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import load_model
from specpool.engine.models.tokenizer import tokenizer_files
from specpool.engine.sampling.grammars import Grammars
from specpool.protocol.codec import tokenizer_response
from specpool.protocol.responses import read_tokenizer
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, byte_tokenizer


def files_of(tokenizer: Tokenizer, **changes: Any) -> TokenizerFiles:
    return dataclasses.replace(TokenizerFiles(tokenizer.to_str().encode(), "", {}, ()), **changes)


def test_a_folder_gives_its_tokenizer(tiny_pair: tuple[Path, Path]) -> None:
    files, draft = (load_model(EngineOptions(model=str(folder))).tokenizer for folder in tiny_pair)
    assert Tokenizer.from_buffer(files.tokenizer_json).encode("Zoë").ids == byte_tokenizer().encode("Zoë").ids
    assert files.chat_template == CHAT_TEMPLATE
    assert files.eos_token_ids == (EOS_TOKEN_ID,)
    assert files.special_tokens == {"eos_token": "<eos>"}
    assert files.fingerprint == draft.fingerprint
    assert len(files.fingerprint) == 64


@pytest.mark.parametrize(
    ("templates", "sent"),
    [
        ({"default": "a", "tool_use": "b", "rag": "c"}, ("a", "b")),
        ({"tool_use": "b"}, ("", "b")),
        ({"rag": "c"}, ("", "")),
    ],
)
def test_named_templates_are_sent(
    templates: dict[str, str], sent: tuple[str, str], tiny_pair: tuple[Path, Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair[0])
    tokenizer.chat_template = templates
    files = tokenizer_files(tokenizer, AutoModelForCausalLM.from_pretrained(tiny_pair[0]))
    files = read_tokenizer(tokenizer_response(files, ""))
    assert (files.chat_template, files.tool_chat_template) == sent


def test_padded_heads_and_further_end_tokens_keep_the_fingerprint(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    """Target and draft often pad their heads differently, which must not change the fingerprint."""
    folder = save_model(tmp_path, tiny_config(vocab_size=320, eos_token_id=[3, EOS_TOKEN_ID, 7]))
    padded, plain = (load_model(EngineOptions(model=str(model))) for model in (folder, tiny_pair[0]))
    assert padded.tokenizer.eos_token_ids == (3, 7, EOS_TOKEN_ID)
    assert (padded.vocab_size, plain.vocab_size) == (320, 257)
    assert padded.tokenizer.fingerprint == plain.tokenizer.fingerprint


@pytest.mark.parametrize(("eos_token", "expected"), [("<eos>", (EOS_TOKEN_ID,)), (None, ())])
def test_a_configuration_may_lack_an_end_token(
    tmp_path: Path, eos_token: str | None, expected: tuple[int, ...]
) -> None:
    folder = save_model(tmp_path, tiny_config(eos_token_id=None))
    edit_json(folder, "tokenizer_config.json", eos_token=eos_token)
    assert load_model(EngineOptions(model=str(folder))).tokenizer.eos_token_ids == expected


def test_a_draft_may_have_a_smaller_vocabulary_than_its_tokenizer(tmp_path: Path) -> None:
    """The coordinator refuses such a target."""
    loaded = load_model(EngineOptions(model=str(save_model(tmp_path, tiny_config(vocab_size=200)))))
    assert loaded.tokenizer.eos_token_ids == (EOS_TOKEN_ID,)
    assert "vocab size too small" in Grammars(loaded.tokenizer, loaded.vocab_size, 2**25).error_of("start: /x/")


def test_fingerprint_depends_only_on_token_ids() -> None:
    plain = files_of(byte_tokenizer())
    assert files_of(byte_tokenizer(), chat_template="x", eos_token_ids=(1,)).fingerprint == plain.fingerprint
    truncating = byte_tokenizer()
    truncating.enable_truncation(8)
    assert files_of(truncating).fingerprint == plain.fingerprint


def test_different_vocabularies_have_different_fingerprints() -> None:
    special, added = byte_tokenizer(), byte_tokenizer()
    special.add_special_tokens(["<pad>"])
    added.add_tokens(["<pad>"])
    tokenizers = [
        byte_tokenizer(),
        special,
        Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")),
        Tokenizer(models.WordLevel({"a": 1, "b": 0}, unk_token="a")),
        Tokenizer(models.WordLevel({"a": 0, "c": 1}, unk_token="a")),
        Tokenizer(models.Unigram([("a", 0.0), ("b", 0.0)])),
    ]
    assert len({files_of(tokenizer).fingerprint for tokenizer in tokenizers}) == len(tokenizers)
    assert files_of(special).fingerprint == files_of(added).fingerprint
