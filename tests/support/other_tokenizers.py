"""Tokenizers of various kinds and sizes, trained on a small text, and models with a permuted vocabulary."""

import json
import random
import shutil
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

from benchmarks.pair import save_tokenizer, tiny_config
from draft_worker.translation.sample import SAMPLE
from draft_worker.translation.vocabulary import BYTE_TOKENS, Vocabulary
from specpool.protocol.tokenizer import TokenizerFiles

TEXTS = [SAMPLE, (Path(__file__).parents[2] / "docs" / "api.md").read_text()]
METASPACE_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
METASPACE_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}


@cache
def byte_level(size: int) -> Tokenizer:
    """Return a tokenizer like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@cache
def sentence_piece(size: int, kind: str = "bpe") -> Tokenizer:
    """Return a tokenizer like Llama 2's ("bpe") or T5's ("unigram"), with byte fallback."""
    first = ["<unk>", "<s>", "<eos>", *BYTE_TOKENS]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True) if kind == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    options = {"vocab_size": size, "show_progress": False, "special_tokens": first}
    if kind == "bpe":
        tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(**options))
    else:
        tokenizer.train_from_iterator(TEXTS, trainers.UnigramTrainer(**options, unk_token="<unk>"))
    description = json.loads(tokenizer.to_str())
    description["decoder"] = METASPACE_DECODER
    description["model"]["byte_fallback"] = True
    if kind == "unigram":
        description["model"]["vocab"][: len(first)] = [[token, -1000.0] for token in first]
    else:
        description["pre_tokenizer"], description["normalizer"] = None, METASPACE_NORMALIZER
    description["added_tokens"] = [each for each in description["added_tokens"] if each["content"] not in BYTE_TOKENS]
    return Tokenizer.from_str(json.dumps(description))


def files_of(tokenizer: Tokenizer) -> TokenizerFiles:
    """Return a tokenizer's files."""
    special = {"eos_token": "<eos>"} | ({"bos_token": "<s>"} if tokenizer.token_to_id("<s>") is not None else {})
    return TokenizerFiles(tokenizer.to_str().encode(), "", special, (tokenizer.token_to_id("<eos>"),))


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.read(files_of(tokenizer), tokenizer.get_vocab_size())


def permute_vocabulary(source: Path, folder: Path) -> Path:
    """Save a copy of a model with permuted token ids. Return the folder."""
    shutil.copytree(source, folder)
    configs = {name: json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")}
    order = [*range(configs["config.json"]["vocab_size"])]
    random.Random(0).shuffle(order)
    for name, values in configs.items():
        ends = {key: order[values[key]] for key in ("bos_token_id", "eos_token_id") if isinstance(values.get(key), int)}
        (folder / name).write_text(json.dumps(values | ends))
    weights = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            permuted = torch.empty_like(weights[name])
            permuted[order] = weights[name]
            weights[name] = permuted
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    description = json.loads((source / "tokenizer.json").read_text())
    for token in description["added_tokens"]:
        token["id"] = order[token["id"]]
    vocab = {token: order[token_id] for token, token_id in description["model"]["vocab"].items()}
    # Added tokens keep their ids only if the vocabulary has them as well.
    description["model"]["vocab"] = vocab | {token["content"]: token["id"] for token in description["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return folder


def save_tiny(folder: Path, tokenizer: Tokenizer) -> Path:
    """Save a random tiny model with this tokenizer. Return the folder."""
    torch.manual_seed(tokenizer.get_vocab_size())
    eos = tokenizer.token_to_id("<eos>")
    model = LlamaForCausalLM(tiny_config(vocab_size=tokenizer.get_vocab_size(), eos_token_id=eos))
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.dim() > 1):
            weight.normal_(std=0.12)
    model.save_pretrained(folder)
    save_tokenizer(folder, tokenizer)
    return folder
