"""Recurrent layers of the compiled pass: near transformers, with equal bits in any batch, round and processor."""

import platform
import random
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gguf_files import quantized
from tiny_models import (
    decode_alone,
    load_engine,
    random_tokens,
    round_weights,
    rows_that_differ,
    save_model,
    small_config,
    transformers_logits,
    vary,
)
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import nn
from transformers import AutoModelForCausalLM

from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import LoadedModel
from specpool.engine.native import compiler
from specpool.engine.passes.attention import PACKED_ATTENTION
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.native.panels import PART
from specpool.engine.run.engine import Engine
from specpool.engine.startup import loading
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized, QuantizedLinear
from specpool.protocol.tokenizer import TokenizerFiles

pytestmark = [pytest.mark.cpus, pytest.mark.thorough]
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
    "linear_value_head_dim": 80,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
SHORT_CONVS = {"layer_types": ["conv", "full_attention", "conv", "conv"], "hidden_size": 192, "block_multiple_of": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_next": EXPERTS,
    "qwen3_5_moe_text": EXPERTS,
    "lfm2": SHORT_CONVS | {"conv_bias": True},
    "lfm2_moe": SHORT_CONVS | EXPERTS | {"num_dense_layers": 1},
}
LENGTH = 90
TOKENIZER = TokenizerFiles(Tokenizer(BPE()).to_str().encode(), "", {}, ())


def save_hybrid(folder: Path, family: str = "qwen3_5_text", **changes: Any) -> Path:
    """Save a random model with three recurrent layers and one that attends, of distinct heads, norms and taps."""
    return vary(save_model(folder, small_config(family, **SIZES, **CHANGES[family], **changes)))


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("hybrid"), request.param)


def load_hybrid(folder: Path, **options: object) -> Engine:
    engine = load_engine(folder, **options)
    assert isinstance(engine.forward_pass, NativeModel)
    return engine


@pytest.mark.parametrize("family", CHANGES)
def test_logits_are_near_those_of_transformers_and_of_torch(tmp_path: Path, family: str) -> None:
    save_hybrid(tmp_path, family)
    tokens, engine = random_tokens(LENGTH), load_hybrid(tmp_path)
    logits = decode_alone(engine, tokens)
    torch.testing.assert_close(logits, transformers_logits(tmp_path, tokens), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(logits, decode_alone(load_engine(tmp_path, native=False), tokens), atol=2e-4, rtol=2e-4)
    assert rows_that_differ(engine) == 0


def test_a_prompt_cut_anywhere_has_the_same_bits(hybrid: Path) -> None:
    engine, tokens, chance = load_hybrid(hybrid), random_tokens(LENGTH), random.Random(0)
    alone = decode_alone(engine, tokens)
    for slot in range(1, 8):
        cuts = sorted({0, *chance.sample(range(1, LENGTH), chance.randint(0, 6)), LENGTH})
        parts = [engine.forward([Span(slot, a, tokens[a:b], b - a)]) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), alone)


def test_rejected_drafts_and_repeated_rounds_change_no_bit(hybrid: Path) -> None:
    engine, chance = load_hybrid(hybrid), random.Random(1)
    texts = [random_tokens(LENGTH, seed) for seed in range(5)]
    alone = [decode_alone(engine, text) for text in texts]
    ends = [chance.randint(1, 50) for _ in texts]
    engine.forward([Span(slot, 0, text[:end], 0) for slot, (text, end) in enumerate(zip(texts, ends, strict=True))])
    for _ in range(20):
        spans, rights = [], []
        for slot in chance.sample(range(len(texts)), chance.randint(1, len(texts))):
            start = ends[slot]
            committed, drafts = chance.randint(1, 3), chance.randint(0, 6)
            right = chance.randint(0, drafts)  # the others are rejected
            tokens = texts[slot][start : start + committed + right]
            rights.append(len(tokens))
            tokens += random_tokens(drafts - right, seed=start + 1)
            spans.append(Span(slot, start, tokens, len(tokens), num_tentative=drafts))
        for _ in range(chance.randint(1, 2)):
            logits = engine.forward(spans).split([span.num_logits for span in spans])
            for span, rows, right in zip(spans, logits, rights, strict=True):
                assert torch.equal(rows[:right], alone[span.slot][span.start : span.start + right])
        for span, right in zip(spans, rights, strict=True):
            ends[span.slot] = span.start + right if span.start + right < LENGTH - 9 else chance.randint(1, 3)
            if ends[span.slot] <= 3:  # a new sequence
                engine.forward([Span(span.slot, 0, texts[span.slot][: ends[span.slot]], 0)])


def test_thread_counts_change_no_bit(hybrid: Path) -> None:
    engine, tokens = load_hybrid(hybrid), random_tokens(LENGTH)
    logits = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        logits.append(engine.forward([Span(1, 0, tokens, LENGTH), Span(2, 0, tokens[:3], 1)]))
    assert all(torch.equal(logits[0], others) for others in logits[1:])


@pytest.mark.parametrize("processor", ["-march=x86-64", pytest.param("-march=x86-64-v3", marks=pytest.mark.slow)])
def test_the_pass_is_batch_invariant_on_other_processors(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("flags of another kind of processor")
    here, tokens = load_hybrid(hybrid), random_tokens(LENGTH)
    monkeypatch.setitem(compiler.NATIVE, "x86_64", processor)
    there = load_hybrid(hybrid)
    torch.testing.assert_close(decode_alone(there, tokens), decode_alone(here, tokens), atol=1e-4, rtol=1e-4)
    assert there.bitwise
    assert rows_that_differ(there) == 0


def test_bfloat16_weights_stay_bfloat16(tmp_path: Path) -> None:
    engine = load_hybrid(round_weights(save_hybrid(tmp_path)))
    assert engine.forward_pass.weight_kinds.keys() == {"bfloat16"}
    tokens = random_tokens(LENGTH)
    torch.testing.assert_close(
        decode_alone(engine, tokens), transformers_logits(tmp_path, tokens), atol=2e-4, rtol=2e-4
    )


def quantized_hybrid(folder: Path) -> Any:
    """The saved model with Q8_0 weights, which transformers can run."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED_ATTENTION).eval()
    for module in [*model.model.layers.modules()]:
        for name, linear in module.named_children():
            if isinstance(linear, nn.Linear) and linear.out_features > SIZES["linear_num_value_heads"]:
                data = torch.from_numpy(quantized(linear.weight.detach().numpy(), "Q8_0", 0))
                setattr(module, name, QuantizedLinear([Quantized(QUANTIZATION_TYPES["Q8_0"], data)]))
    return model


def round_parts(linear: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Round the inputs of a layer to 8 bits, in parts that share a scale."""
    parts = inputs[0].unflatten(-1, (-1, PART))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / scale).round() * scale).flatten(-2)


@torch.inference_mode()
def test_int8_activations_round_the_inputs_of_quantized_weights(hybrid: Path) -> None:
    loaded = LoadedModel("hybrid", quantized_hybrid(hybrid), TOKENIZER, max_model_len=512)
    options = EngineOptions(model="hybrid", max_model_len=512, max_sequences=8, threads=1, activations="int8")
    with mock.patch.object(loading, "refuse_other_logits"):  # rounding changes the logits of so small a model too much
        engine = loading.start_engine(loaded, options, exact=True, fingerprint="random")
    assert engine.forward_pass.activations == "int8"
    peer, tokens = quantized_hybrid(hybrid), random_tokens(LENGTH)
    peer.set_attn_implementation("eager")
    for module in peer.modules():
        if isinstance(module, QuantizedLinear):
            module.register_forward_pre_hook(round_parts)
    differences = decode_alone(engine, tokens) - peer(torch.tensor([tokens])).logits[0]
    assert differences[: LENGTH // 3].abs().median() < 1e-5  # in later rows, an input rounds to another code
    assert engine.bitwise
    assert rows_that_differ(engine) == 0
