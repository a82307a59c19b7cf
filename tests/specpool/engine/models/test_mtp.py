"""Multi-token prediction (MTP) layers as drafts of their own target: the drafts of a plain implementation; refusals."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_drafts import check_kernels, encoded_states, random_states
from mtp_models import FAMILIES, GLM, ReferenceMtp, save_mtp_target
from packed_checkpoints import FORMATS
from pydantic import ValidationError
from tiny_models import edit_json, edited_weights, load_engine, random_tokens, refusal, save_model, small_config
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.target_options import TargetOptions
from specpool.engine.models.draft_parts import Features
from specpool.engine.models.preflight import InvalidOptionError, check_target
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.model import NativeModel
from specpool.protocol.rounds import ProposeItem, ProposeRound
from target_worker.loading import load_pair

LENGTH, HIDDEN, K = 20, 64, 4


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp_target(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "torch"])
def test_layers_draft_like_a_plain_implementation(target: Path, native: bool) -> None:
    engine = load_engine(Path("mtp"), exact=False, target_model=str(target), native=native)
    assert isinstance(engine.forward_pass, NativeModel if native else FusedModel)
    assert engine.loaded.features == Features((AutoConfig.from_pretrained(target).num_hidden_layers,), HIDDEN)
    reference, tokens = ReferenceMtp(target), random_tokens(LENGTH)
    given = random_states(LENGTH, HIDDEN, 0.4)
    states = reference.states(given)
    logits, own = reference(tokens, states)
    rows = engine.forward([Span(0, 0, tokens, LENGTH, states=given)])
    torch.testing.assert_close(engine.head.over_vocabulary(rows), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(engine.own_states, own, atol=1e-4, rtol=1e-4)
    item = ProposeItem(1, 0, tuple(tokens), num_draft_tokens=K, features=encoded_states(given))
    ((proposal,),) = Proposer(engine).propose([ProposeRound("c", 1, [item])])
    assert proposal.draft_token_ids == tuple(reference.draft(tokens, states, K))


def test_the_plain_implementation_is_that_of_transformers(target: Path) -> None:
    """The order of norms, the states of the target and of later steps, and the names in checkpoints are the same."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(modeling, "MtpModel", None), "forward_layer"):
        pytest.skip("this version of transformers runs no single MTP layer")
    main: Any = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager", dtype=torch.float32)
    layers = main.config.num_hidden_layers
    main._keys_to_ignore_on_load_unexpected = [r"^mtp.*", rf"model\.layers\.{layers}\."]
    layer_types = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}
    main.config.update({"num_mtp_layers": 1, **layer_types})
    layer = modeling.MtpModel.from_pretrained(main)
    reference, tokens = ReferenceMtp(target), torch.tensor([random_tokens(LENGTH)])
    with torch.inference_mode():
        found = main.model(tokens, output_hidden_states=True, use_cache=False)
        span = Span(0, 0, tokens[0].tolist(), 0, num_states=LENGTH)
        read = reference.states(load_engine(target).forward_with_states([span], (layers,))[1].float())
        torch.testing.assert_close(read, found.hidden_states[-1][0], atol=0.02, rtol=0.02)
        states = torch.cat([torch.zeros(1, HIDDEN), found.hidden_states[-1][0, :-1]])[None]
        positions = torch.arange(LENGTH)[None]
        cache = DynamicCache(config=main.config.get_mtp_config())
        own = layer.forward_layer(0, states, positions, cache, input_ids=tokens)
    torch.testing.assert_close(reference(tokens[0].tolist(), states[0])[1], own[0], atol=1e-5, rtol=1e-4)


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    return save_mtp_target(tmp_path, "glm4_moe")


def mtp_refusal(target: Path, **options: Any) -> str:
    return refusal("mtp", target_model=str(target), **options)


def test_a_layer_may_have_its_own_embeddings_and_head(glm: Path) -> None:
    span = Span(0, 0, random_tokens(5), 5)
    expected = load_engine(Path("mtp"), exact=False, target_model=str(glm)).forward([span])
    with edited_weights(glm) as weights:
        own = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        for name, of_target in own.items():
            weights[f"model.layers.2.{name}.weight"] = weights[f"{of_target}.weight"].clone()
            weights[f"{of_target}.weight"].mul_(2)
    found = load_engine(Path("mtp"), exact=False, target_model=str(glm)).forward([span])
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_a_tied_head_is_that_of_the_target(tmp_path: Path) -> None:
    target = save_mtp_target(tmp_path, "glm4_moe", tie_word_embeddings=True)
    engine = load_engine(Path("mtp"), exact=False, target_model=str(target))
    reference, tokens, given = ReferenceMtp(target), random_tokens(5), random_states(5, HIDDEN, 0.4)
    rows = engine.forward([Span(0, 0, tokens, 5, states=given)])
    torch.testing.assert_close(rows, reference(tokens, reference.states(given))[0], atol=1e-4, rtol=1e-4)


def test_names_and_keys_of_qwen_are_applied_or_refused(tmp_path: Path) -> None:
    target, span = save_mtp_target(tmp_path, "qwen3_5_text", tie_word_embeddings=True), Span(0, 0, random_tokens(5), 5)
    expected = load_engine(Path("mtp"), exact=False, target_model=str(target)).forward([span])
    edit_json(target, mtp_use_dedicated_embeddings=True)
    reason = "mtp.embed_tokens.weight is missing, but mtp_use_dedicated_embeddings is True"
    assert reason in mtp_refusal(target)
    with edited_weights(target) as weights:
        weights["mtp.embed_tokens.weight"] = 2 * weights["model.embed_tokens.weight"]  # which the norm undoes
    found = load_engine(Path("mtp"), exact=False, target_model=str(target)).forward([span])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with edited_weights(target) as weights:
        weights |= {name: torch.ones(2, 2) for name in ("mtp.layers.1.other.weight", "mtp.gate.weight")}
    assert "1 weights that the configured model does not use: mtp.gate.weight" in mtp_refusal(target)


def test_text_parts_have_the_layer_of_their_checkpoint(tmp_path: Path) -> None:
    """In a checkpoint of Qwen3.5, the weights of the text part have a prefix, but those of the layer do not."""
    text = save_mtp_target(tmp_path, "qwen3_5_text")
    wrapped, span = tmp_path / "wrapped", Span(0, 0, random_tokens(5), 5)
    shutil.copytree(text, wrapped)
    with edited_weights(wrapped) as weights:
        stored = {re.sub("^model", "model.language_model", name): weight for name, weight in weights.items()}
        weights.clear()
        weights.update(stored)
    config = json.loads((text / "config.json").read_text())
    wrapper = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    (wrapped / "config.json").write_text(json.dumps({**wrapper, "text_config": config, "tie_word_embeddings": True}))
    logits = [
        load_engine(Path("mtp"), exact=False, target_model=str(folder)).forward([span]) for folder in (text, wrapped)
    ]
    torch.testing.assert_close(*logits, atol=0, rtol=0)


def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    target, span = save_mtp_target(tmp_path, "qwen3_5_moe_text"), Span(0, 0, random_tokens(5), 5)
    expected = load_engine(Path("mtp"), exact=False, target_model=str(target)).forward([span])
    with edited_weights(target) as weights:
        experts = "mtp.layers.0.mlp.experts."
        gate, up, down = (
            torch.stack([weights.pop(f"{experts}{index}.{name}_proj.weight") for index in range(8)])
            for name in ("gate", "up", "down")
        )
        weights |= {f"{experts}gate_up_proj": torch.cat([gate, up], 1), f"{experts}down_proj": down}
    together = load_engine(Path("mtp"), exact=False, target_model=str(target)).forward([span])
    torch.testing.assert_close(together, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"eh_proj.weight": None},
            "model.layers.2.eh_proj.weight is missing, but this head and its target",
        ),
        (
            {"enorm.weight": torch.ones(3)},
            "model.layers.2.enorm.weight has the shape [3], but this head",
        ),
        ({"self_attn.q_proj.weight": None}, "lack 1 of the model's weights: model.layers.2.self_attn.q_proj.weight"),
        ({"shared_head.norm.weight": None}, "lack 1 of the model's weights: model.layers.2.shared_head.norm.weight"),
        ({"mlp.gate.weight": torch.ones(4, 3)}, "model.layers.2.mlp.gate.weight (of shape [4, 64], not [4, 3])"),
        ({"extra.weight": torch.ones(3)}, "that the configured model does not use: model.layers.2.extra.weight"),
        (
            {"eh_proj.weight": torch.ones(64, 128).char()},
            "model.layers.2.eh_proj.weight is stored as I8, but config.json names no",
        ),
        (
            {"self_attn.q_proj.weight": torch.ones(64, 64).to(torch.float8_e4m3fn)},
            "model.layers.2.self_attn.q_proj.weight is stored as F8_E4M3, but config.json names no",
        ),
    ],
)
def test_damaged_layers_are_refused(glm: Path, changes: dict[str, torch.Tensor | None], reason: str) -> None:
    with edited_weights(glm) as weights:
        for name, weight in changes.items():
            weights.pop(f"model.layers.2.{name}", None)
            if weight is not None:
                weights[f"model.layers.2.{name}"] = weight
    assert reason in mtp_refusal(glm)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("glm4_moe", {**GLM, "num_nextn_predict_layers": 0}, "the target has no MTP layer: its num_"),
        ("glm4_moe", GLM, "target has no MTP layer: no weights begin with model.layers.2."),
        (
            "llama",
            {},
            "supported for glm4_moe, glm4_moe_lite, deepseek_v3, qwen3_5_moe_text, qwen3_5_text, qwen3_next, not for",
        ),
    ],
)
def test_targets_without_a_layer_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in mtp_refusal(save_model(tmp_path / "target", small_config(family, **changes)))


def test_layers_run_on_one_rank_in_the_fused_pass(glm: Path) -> None:
    for options, reason in (
        ({"target_model": str(glm), "fused": False}, "fused: mtp needs the fused pass"),
        ({"target_model": str(glm), "tensor_parallel": 2}, "tensor_parallel must be 1 with model mtp"),
        ({}, "model mtp needs target_model, the model that has the MTP layer"),
        ({"target_model": "mtp"}, "model mtp needs target_model, the model that has the MTP layer"),
    ):
        with pytest.raises(ValidationError, match=reason):
            EngineOptions.model_validate({"model": "mtp", **options})
    with pytest.raises(ValidationError, match="fused: mtp needs the fused pass"):
        TargetOptions(model=str(glm), draft="mtp", fused=False)


def test_checkpoints_without_the_layer_are_refused_before_loading(glm: Path) -> None:
    check_target(TargetOptions(model=str(glm), draft="mtp"))
    with edited_weights(glm) as weights:
        for name in [name for name in weights if name.startswith("model.layers.2.")]:
            del weights[name]
    reason = "^draft: mtp: .* has no MTP layer: no weights begin with model.layers.2."
    with pytest.raises(InvalidOptionError, match=reason):
        check_target(TargetOptions(model=str(glm), draft="mtp"))
    with pytest.raises(InvalidOptionError, match=reason):
        load_pair(TargetOptions(model=str(glm), draft="mtp"), False, lambda phase: None)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (glm / "model.safetensors").rename(glm / "model-1.safetensors")
    (glm / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidOptionError, match=reason):
        check_target(TargetOptions(model=str(glm), draft="mtp"))


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("glm4_moe", "glm4_moe_lite")), "qwen3_5_text"]
)
def test_int8_activations_are_refused(tmp_path: Path, family: str) -> None:
    assert "activations: int8 needs" in mtp_refusal(save_mtp_target(tmp_path, family), activations="int8")


def test_a_quantized_layer_is_dequantized(tmp_path: Path, glm: Path) -> None:
    packed, stored = FORMATS["fp8-channel"], dict[str, torch.Tensor]()
    with edited_weights(glm) as weights:
        for name, weight in weights.items():
            if name.endswith(("proj.weight", "eh_proj.weight")):
                parts, dense = packed.pack(weight)
                stored |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
                weights[name] = dense.contiguous()
            else:
                stored[name] = weight.clone()
    shutil.copytree(glm, tmp_path / "packed")
    with edited_weights(tmp_path / "packed") as weights:
        weights.clear()
        weights |= {name: part.contiguous() for name, part in stored.items()}
    edit_json(tmp_path / "packed", quantization_config=packed.quantization)
    logits = [
        load_engine(Path("mtp"), exact=False, target_model=str(folder)).forward([Span(0, 0, random_tokens(5), 5)])
        for folder in (glm, tmp_path / "packed")
    ]
    torch.testing.assert_close(*logits, atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # experts compute nothing for padding, and leave memory as it was
@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("glm4_moe", "glm4_moe_lite")), "qwen3_5_text"]
)
def test_kernels_run_layers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels(monkeypatch, Path("mtp"), save_mtp_target(tmp_path, family))
