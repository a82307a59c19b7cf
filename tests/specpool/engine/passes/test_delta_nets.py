"""Recurrent layers match transformers, and a row has the same bits however its sequence was computed."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_nets import RECURRENT_MODELS, save_delta_net, save_recurrent
from tiny_models import decode_alone, edited_weights, load_engine, random_tokens, rows_that_differ, transformers_logits

from specpool.engine.cache.spans import Span
from specpool.engine.config.architectures import RECURRENT_LAYERS
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.facts import weights_fingerprint
from specpool.engine.models.loading import load_model
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.fused import FusedModel
from specpool.engine.probes import batch_invariance
from specpool.engine.run.engine import Engine

LENGTH, PROMPT, DRAFTS = 90, 60, 5


def load_torch_engine(folder: Path, dtype: str = "float32", **options: Any) -> Engine:
    engine = load_engine(folder, dtype=dtype, native=False, max_sequences=4, **options)
    assert isinstance(engine.forward_pass, FusedModel)
    return engine


QUICK = {"qwen3_next", "qwen3_5_text", "lfm2, biased", "lfm2_moe"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in RECURRENT_MODELS],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_recurrent(tmp_path_factory.mktemp("recurrent"), request.param)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    return load_torch_engine(folder, request.param)


def test_every_family_is_tested() -> None:
    assert {architecture for architecture, _ in RECURRENT_MODELS.values()} == RECURRENT_LAYERS.keys()


def test_logits_match_transformers(engine: Engine, folder: Path) -> None:
    tokens = random_tokens(LENGTH)
    expected = transformers_logits(folder, tokens)
    difference = (engine.forward([Span(0, 0, tokens, LENGTH)]) - expected).abs().amax(-1) / expected.abs().max()
    assert engine.bitwise
    if engine.facts.dtype == torch.float32:
        assert difference.max() < 5e-5
    else:  # rounding may change the experts of some rows
        assert difference.median() < 0.03


def test_states_reach_across_passes(engine: Engine) -> None:
    """If states did not matter, the other tests of bits would prove little."""
    tokens = random_tokens(LENGTH)
    expected = engine.forward([Span(0, 0, tokens, 1)])
    engine.forward([Span(0, 0, tokens[:-1], 0)])
    arena = engine.layout.arena.recurrent
    assert arena is not None
    for kept in (arena.states, arena.edges, arena.inputs):
        kept.zero_()
    lost = engine.forward([Span(0, LENGTH - 1, tokens[-1:], 1)])
    assert (lost - expected).abs().max() > 0.05 * expected.abs().max()


def test_rows_have_the_bits_of_decoding_alone(engine: Engine) -> None:
    """Prompts in pieces of any size, then ragged rounds of drafts that are rejected, accepted or sent twice."""
    chance = random.Random(2)
    truth = {slot: random_tokens(LENGTH, seed=slot) for slot in range(4)}
    alone = {slot: decode_alone(engine, tokens) for slot, tokens in truth.items()}
    cached = dict.fromkeys(truth, 0)
    rejected = repeated = 0
    while any(length < LENGTH - DRAFTS for length in cached.values()):
        spans, accepted = [], {}
        for slot in chance.sample(sorted(truth), chance.randint(1, 4)):
            begin = cached[slot]
            if begin < PROMPT:
                tokens = truth[slot][begin : min(PROMPT, begin + chance.choice([1, 2, 17, 40]))]
                spans.append(Span(slot, begin, tokens, len(tokens)))
                accepted[slot] = len(tokens)
            elif begin < LENGTH - DRAFTS:
                tokens = truth[slot][begin : begin + 1 + chance.randint(0, DRAFTS)]
                right = chance.randint(1, len(tokens))
                wrong = [token + 1 for token in tokens[right:]]
                spans.append(Span(slot, begin, tokens[:right] + wrong, len(tokens), num_tentative=len(tokens) - 1))
                accepted[slot] = right
                rejected += len(wrong)
        repeats = 1 + (chance.random() < 0.3) if spans else 0
        repeated += repeats > 1
        for _ in range(repeats):
            rows = engine.forward(spans).split([span.num_logits for span in spans])
            for span, logits in zip(spans, rows, strict=True):
                count = accepted[span.slot]
                assert torch.equal(logits[:count], alone[span.slot][span.start : span.start + count])
        for slot, count in accepted.items():
            cached[slot] += count
    assert rejected > 10
    assert repeated > 2


def test_repeated_rounds_have_equal_bits(engine: Engine) -> None:
    assert rows_that_differ(engine, lengths=(2, 9, 40, 61)) == 0


def test_passes_may_have_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs need padding on some processors. It caches the keys and values of the first row again."""
    monkeypatch.setattr(batch_invariance, "ROW_TILES", (Tiles(min_rows=16, row_multiple=16),))
    engine = load_torch_engine(save_delta_net(tmp_path))
    assert engine.bitwise
    assert rows_that_differ(engine) == 0


def test_mtp_layers_are_not_part_of_the_model(tmp_path: Path) -> None:
    options = EngineOptions(model=str(save_delta_net(tmp_path, "qwen3_5_moe_text")), device="cpu")
    expected = weights_fingerprint(load_model(options))
    with edited_weights(tmp_path) as weights:
        for name in [name for name in weights if name.startswith("model.layers.1.")]:
            weights[name.replace("model.layers.1.", "mtp.layers.0.")] = weights[name].clone()
        weights["mtp.fc.weight"] = torch.zeros(64, 128)
    assert weights_fingerprint(load_model(options)) == expected
