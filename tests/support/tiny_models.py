"""Random models of any architecture, and reference logits for engine tests."""

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_pair import MAX_MODEL_LEN
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.pair import save_tokenizer
from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.slots import SlotTable
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.draft_parts import OUTPUT_HEAD
from specpool.engine.run.engine import Engine
from specpool.engine.startup import loading as startup
from specpool.protocol.worker_info import RankMemory
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
}


def small_config(architecture: str, **changes: Any) -> PreTrainedConfig:
    """Return a configuration of a few thousand weights, with the values of `SMALL` that the architecture has."""
    known = AutoConfig.for_model(architecture)
    sizes = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    return AutoConfig.for_model(architecture, **{**sizes, **changes})


def save_model(folder: Path, config: PreTrainedConfig, weight: float = 0.12) -> Path:
    """Save a tokenizer and a random model with this standard deviation."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=weight)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def vary(folder: Path, noise: float = 0.3, routers: str | tuple[str, ...] = ()) -> Path:
    """Add noise with this standard deviation to the norms, biases and other vectors of a saved model.

    `routers`: ends of the names of weights that choose experts, to make them clearly prefer some.
    """
    generator = torch.Generator().manual_seed(1)
    with edited_weights(folder) as weights:
        for name, weight in weights.items():
            if weight.dim() < 2 and weight.is_floating_point():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)
            elif name.endswith(routers):
                weight.copy_(torch.randn(weight.shape, generator=generator) / 2)
    return folder


def noisy_copy(model: Path, folder: Path, noise: float = 0.004) -> Path:
    """Save a draft with nearly the same weights. `noise`: standard deviation of the differences."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(0)
    with edited_weights(folder) as weights:
        for weight in weights.values():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)
    return folder


@contextmanager
def edited_weights(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of a saved model and save them with all changes."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    yield weights
    save_file(weights, file, metadata={"format": "pt"})


def edit_json(folder: Path, file: str = "config.json", **changes: Any) -> Path:
    """Change values in a JSON file of a model folder. Returns the folder."""
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**values, **changes}))
    return folder


def round_weights(folder: Path) -> Path:
    """Round the weights of a saved model to bfloat16."""
    with edited_weights(folder) as weights:
        weights.update({name: weight.bfloat16() for name, weight in weights.items()})
    return folder


def save_output_head(folder: Path, output_ids: list[int], weight: torch.Tensor | None = None) -> None:
    """Give a saved model an output head for some tokens; `weight` defaults to the model's own rows."""
    rows = load_file(folder / "model.safetensors")["lm_head.weight"][output_ids] if weight is None else weight
    save_file({"weight": rows.contiguous(), "output_ids": torch.tensor(output_ids)}, folder / OUTPUT_HEAD)


def load_engine(folder: Path, exact: bool = True, **options: Any) -> Engine:
    """Return an engine on one thread."""
    return startup.load_engine(EngineOptions(model=str(folder), **{"threads": 1, "max_sequences": 8, **options}), exact)


def refusal(model: Path | str, **options: Any) -> str:
    """Return the one-line reason why an engine rejects a model."""
    with pytest.raises(UnsupportedModelError) as caught:
        load_engine(Path(model), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def described_as_sharded(engine: Engine) -> Engine:
    """Make an engine report that its model is sharded over two ranks."""
    info = engine.info()
    ranks = tuple(RankMemory("cpu", info.weight_bytes // 2, info.kv_bytes_total // 2, rank) for rank in range(2))
    engine.info = lambda: replace(  # type: ignore[method-assign]
        Engine.info(engine), tensor_parallel=2, tensor_parallel_sums="whole", ranks=ranks
    )
    return engine


def forget_all(engine: Engine, slots: int) -> None:
    """Leave the engine with this many slots, all free; tests may use further slots for their own spans."""
    engine.forget_all()
    old, arena = engine.slots.tables, engine.layout.arena
    tables = PageTables(len(old.held), old.max_length, old.columns, old.page_size)
    tables.assign = arena.assign
    engine.slots = SlotTable(slots, tables, engine.facts.window, engine.slots.checkpoints)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Return `count` token ids, the same for the same seed."""
    chance = random.Random(seed)
    return [chance.randrange(VOCAB_SIZE) for _ in range(count)]


def decode_alone(engine: Engine, token_ids: Sequence[int], slot: int = 0) -> torch.Tensor:
    """Return logits after each token [T, vocab_size], computed alone with one token per pass."""
    return torch.cat([engine.forward([Span(slot, i, [token], 1)]) for i, token in enumerate(token_ids)])


@torch.inference_mode()
def transformers_logits(folder: Path, token_ids: Sequence[int], attention: str = "eager") -> torch.Tensor:
    """Return logits after each token [T, vocab_size], computed by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()
    logits: torch.Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


def rows_that_differ(engine: Engine, lengths: Sequence[int] = (2, 9, 40, 61), drafts: int = 8) -> int:
    """Count rows of logits of ragged rounds in shuffled slots that differ from decoding alone."""
    chance = random.Random(1)
    sequences = [random_tokens(length + drafts, seed=length) for length in lengths]
    alone = [decode_alone(engine, tokens) for tokens in sequences]
    slots = chance.sample(range(engine.slots.total), len(sequences))
    engine.forward([Span(slot, 0, tokens[:-drafts], 0) for slot, tokens in zip(slots, sequences, strict=True)])
    different = 0
    for size in (1, 2, 3, drafts):  # each round discards the previous one's cache
        counts = [chance.randint(1, size) for _ in sequences]
        spans = [
            Span(slot, len(tokens) - drafts, tokens[-drafts:][:count], count)
            for slot, tokens, count in zip(slots, sequences, counts, strict=True)
        ]
        together = engine.forward(spans).split(counts)
        for rows, truth, count in zip(together, alone, counts, strict=True):
            different += int((rows != truth[-drafts:][:count]).any(-1).sum())
    return different
