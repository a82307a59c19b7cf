"""EAGLE heads in the format of their authors: the same drafts as a plain implementation, and refusals in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import HIDDEN, ROWS, VOCAB, ReferenceHead, save_eagle_head, save_tensors
from feature_drafts import check_kernels, encoded_states, random_states
from interpreted_kernels import choose
from safetensors.torch import load_file
from tiny_models import edited_weights, load_engine, random_tokens, refusal, save_model, small_config
from torch.nn.functional import rms_norm

from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.models.draft_parts import Features
from specpool.engine.passes.fused import FusedModel
from specpool.engine.run import sequences
from specpool.engine.sampling.head import Head
from specpool.protocol.rounds import ProposeItem, ProposeRound

LAYERS = 8
LENGTH = 20
FORMATS: dict[str, dict[str, Any]] = {
    "1": {"version": 1},
    "1, pickled": {"version": 1, "pickled": True},
    "3": {"version": 3},
    "3, pickled": {"version": 3, "pickled": True},
    "3.1, speculator": {
        "version": 3, "speculator": True, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
    },
    "3.1, extended": {"version": 3, "eagle_config": {"fc_norm": True, "norm_output": True}},
}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return save_model(folder, small_config(request.param, num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), small_config("llama", num_hidden_layers=LAYERS))


@pytest.mark.parametrize("name", FORMATS)
def test_heads_draft_like_a_plain_implementation(tmp_path: Path, target: Path, name: str) -> None:
    head = save_eagle_head(tmp_path / "head", **FORMATS[name])
    engine = load_engine(head, exact=False, target_model=str(target))
    assert isinstance(engine.forward_pass, FusedModel)
    layers = (LAYERS,) if FORMATS[name]["version"] == 1 else (2, 4, 5)
    features = engine.loaded.features
    assert features == Features(layers, HIDDEN * len(layers))
    reference, tokens = ReferenceHead(head, target), random_tokens(LENGTH)
    given = random_states(LENGTH, features.width, 0.4)
    states = reference.states(given)
    logits, own = reference(tokens, states)
    rows = engine.forward([Span(0, 0, tokens, LENGTH, states=given)])
    torch.testing.assert_close(engine.head.over_vocabulary(rows), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(engine.own_states, own, atol=1e-4, rtol=1e-4)
    expected = list[int]()
    for _ in range(4):
        expected.append(int(logits[-1].argmax()))
        tokens, states = [*tokens, expected[-1]], torch.cat([states, own[-1:]])
        logits, own = reference(tokens, states)
    item = ProposeItem(1, 0, tuple(tokens[:LENGTH]), num_draft_tokens=4, features=encoded_states(given))
    ((proposal,),) = Proposer(engine).propose([ProposeRound("c", 1, [item])])
    assert proposal.draft_token_ids == tuple(expected)


def test_steps_on_a_gpu_choose_the_same_tokens(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(save_eagle_head(tmp_path / "head", 3), exact=False, target_model=str(llama))
    items = [
        ProposeItem(number, 0, tuple(random_tokens(9, seed=number)), num_draft_tokens=k, min_chance=min_chance)
        for number, (k, min_chance) in enumerate(((4, 0.0), (0, 0.0), (6, 1e-9), (1, 1e-9)))
    ]
    ((*expected,),) = Proposer(engine).propose([ProposeRound("c", 1, items)])
    steps: list[int] = []

    def count_and_choose(logits: torch.Tensor, head: Head) -> torch.Tensor:
        steps.append(len(logits))
        return choose(logits, head)

    monkeypatch.setattr(sequences, "kernel_is_exact", lambda *_: True)
    monkeypatch.setattr(sequences, "choose", count_and_choose)
    ((*actual,),) = Proposer(engine).propose([ProposeRound("d", 1, items)])
    assert steps == [3, 2, 2, 2, 1, 1]
    for one, other in zip(actual, expected, strict=True):
        assert one.draft_token_ids == other.draft_token_ids
        assert one.confidences == pytest.approx(other.confidences)


@pytest.mark.parametrize("name", ["1", "3", "3.1, speculator", "3.1, extended"])
def test_kernels_run_heads(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_kernels(monkeypatch, save_eagle_head(tmp_path / "head", **FORMATS[name]), llama)


def test_a_head_without_embeddings_takes_those_of_its_target(tmp_path: Path, llama: Path) -> None:
    head = save_eagle_head(tmp_path / "head", 1)
    tensors = load_file(head / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_tensors(head, tensors)
    engine, tokens = load_engine(head, exact=False, target_model=str(llama)), random_tokens(5)
    given = random_states(5, HIDDEN, 0.4)
    reference = ReferenceHead(head, llama)
    rows = engine.forward([Span(0, 0, tokens, 5, states=given)])
    torch.testing.assert_close(rows, reference(tokens, reference.states(given))[0], atol=1e-4, rtol=1e-4)


def test_gemma_head_norms_multiply_by_one_plus_weight(tmp_path: Path, llama: Path) -> None:
    logits = []
    for family in ("gemma", "llama"):
        head = save_eagle_head(tmp_path / family, 3, model_type=family, hidden_act="gelu_pytorch_tanh")
        tensors = load_file(head / "model.safetensors")
        if family == "llama":
            save_tensors(head, {name: each + 1 if "norm" in name else each for name, each in tensors.items()})
        engine = load_engine(head, exact=False, target_model=str(llama))
        engine.forward_pass.embedding_scale = HIDDEN**0.5
        states = random_states(5, 3 * HIDDEN, 0.4)
        logits.append(engine.forward([Span(0, 0, random_tokens(5), 5, states=states)]))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_the_final_norm_of_a_gemma_target_multiplies_by_one_plus_weight(tmp_path: Path) -> None:
    target, states = save_model(tmp_path / "target", small_config("gemma")), random_states(3, HIDDEN, 0.4)
    with edited_weights(target) as weights:
        weights["model.norm.weight"] = weight = 0.2 * torch.randn(HIDDEN)
    engine = load_engine(save_eagle_head(tmp_path / "head", 1), exact=False, target_model=str(target))
    expected = rms_norm(states, (HIDDEN,), 1 + weight, engine.loaded.config.rms_norm_eps)
    torch.testing.assert_close(engine.forward_pass.project(states), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("version", [1, 3])
def test_a_head_may_have_its_own_outputs_or_those_of_its_target(tmp_path: Path, llama: Path, version: int) -> None:
    head, other = save_eagle_head(tmp_path / "head", version), save_eagle_head(tmp_path / "other", version)
    tensors = load_file(head / "model.safetensors")
    rows = torch.arange(ROWS) + tensors["d2t"] if version == 3 else torch.arange(VOCAB)
    outputs = load_file(llama / "model.safetensors")["lm_head.weight"][rows]
    save_tensors(head, {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    save_tensors(other, {**tensors, "lm_head.weight": outputs})
    one, same = (load_engine(each, exact=False, target_model=str(llama)) for each in (head, other))
    span = Span(0, 0, random_tokens(5), 5)
    torch.testing.assert_close(one.forward([span]), same.forward([span]), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, llama: Path, name: str) -> None:
    head = save_eagle_head(tmp_path / "head", 3)
    (head / "model.safetensors").unlink()
    torch.save({"fc.weight": Path()}, head / name)
    assert f"it has no tokenizer and is not an EAGLE head: {head / name} cannot be read: " in refusal(
        head, target_model=str(llama)
    )


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (1, 4, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 4, 5)),
        ({"speculator": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
    ],
)
def test_the_configuration_names_the_layers(
    tmp_path: Path, llama: Path, config: dict[str, Any], layers: tuple[int, ...]
) -> None:
    architectures = ["LlamaForCausalLMEagle3"]
    head = save_eagle_head(tmp_path / "head", 3, architectures=architectures, draft_vocab_size=100, **config)
    assert load_engine(head, exact=False, target_model=str(llama)).loaded.features == Features(layers, 3 * HIDDEN)


@pytest.mark.parametrize("version", [1, 3])
def test_a_head_needs_its_target(tmp_path: Path, version: int) -> None:
    assert "needs the embeddings of its target: set target_model" in refusal(
        save_eagle_head(tmp_path / "head", version)
    )


def test_other_models_ignore_the_target(llama: Path) -> None:
    engine = load_engine(llama, exact=False, target_model="unused")
    assert engine.loaded.features is None


@pytest.mark.parametrize(
    ("version", "options", "reason"),
    [
        (3, {"width": 128}, "fc.weight has the shape [64, 384], but this head and its target need [64, 192]"),
        (1, {"vocab_size": VOCAB + 1}, f"its vocabulary has {VOCAB + 1} tokens, but the target's has {VOCAB}"),
        (3, {"vocab_size": VOCAB + 1}, f"its vocabulary has {VOCAB + 1} tokens, but the target's has {VOCAB}"),
        (1, {"hidden_act": "gelu"}, "its activation is gelu, not silu"),
        (1, {"model_type": "youtu"}, "EAGLE heads with latent attention are not supported"),
        (3, {"model_type": "gpt2"}, "EAGLE heads need the fused pass: gpt2 is not one of the families"),
        (1, {"norm_before_residual": True}, "norm_before_residual: only for EAGLE-3 heads"),
        (3, {"norm_output": "yes"}, "norm_output is not true or false: 'yes'"),
        (3, {"norm_output": 0}, "norm_output is not true or false: 0"),
        (3, {"eagle_config": "x"}, "eagle_config is not an object: 'x'"),
        (3, {"speculator": True, "transformer_layer_config": None}, "transformer_layer_config is not an object with"),
        (3, {"rope_theta": -5.0}, "rope_theta is -5.0: Input should be greater than 0"),
        (3, {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf: Input should be a finite number"),
        (3, {"norm_before_fc": True, "fc_norm": True}, "both norm_before_fc and fc_norm are not supported"),
        (3, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False are not supported"),
        (
            3,
            {"speculator": True, "speculators_model_type": "dflash"},
            "speculators_model_type is 'dflash'; only eagle3",
        ),
        (
            3,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 2]}},
            "it reads layers [2, 10, 3] of a target",
        ),
        (3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "is not a list of layers: 'all'"),
        (1, {"num_hidden_layers": 2}, "the files lack 9 of the model's weights"),
        (1, {"intermediate_size": 112}, "the files lack 3 of the model's weights"),
    ],
)
def test_mismatched_heads_are_refused(
    tmp_path: Path, llama: Path, version: int, options: dict[str, Any], reason: str
) -> None:
    head = save_eagle_head(tmp_path / "head", version, **options)
    assert reason in refusal(head, target_model=str(llama))


@pytest.mark.parametrize(
    ("version", "changes", "reason"),
    [
        (3, {"d2t": torch.full((100,), VOCAB)}, "d2t names tokens beyond the vocabulary"),
        (3, {"d2t": torch.zeros(7, dtype=torch.int64)}, "lm_head.weight has the shape [100, 64], but d2t has 7 tokens"),
        (3, {"d2t": None}, "lm_head.weight has the shape [100, 64], but the vocabulary has 257 tokens"),
        (3, {"d2t": torch.zeros(100)}, "d2t has the type torch.float32, not int64 or int32"),
        (3, {"d2t": -torch.arange(100)}, "d2t names a token for several rows"),
        (3, {"lm_head.weight": torch.tensor(1.0)}, "lm_head.weight has the shape [], but d2t has 100 tokens"),
        (3, {"lm_head.weight": torch.zeros(100, 64).char()}, "lm_head.weight has the type torch.int8"),
        (3, {"fc.bias": torch.zeros(3)}, "fc.bias has the shape [3], but this head and its target need [64]"),
        (3, {"embed_tokens.weight": torch.zeros(200, 64)}, "[200, 64], but this head and its target need [257, 64]"),
        (
            3,
            {"midlayer.hidden_norm.weight": None},
            "the files lack 1 of the model's weights: layers.0.hidden_norm.weight",
        ),
        (3, {"fc.weight": None}, "no tokenizer and is not an EAGLE head: "),
        (3, {"norm.weight": None}, "the files lack 1 of the model's weights: norm.weight"),
        (3, {"input_norm.weight": torch.ones(192)}, "the configured model does not use: input_norm.weight"),
        (1, {"extra.weight": torch.zeros(2)}, "the configured model does not use: extra.weight"),
        (1, {"embed_tokens.weight": torch.zeros(VOCAB, 32)}, "[257, 32], but this head and its target need [257, 64]"),
    ],
)
def test_damaged_heads_are_refused(
    tmp_path: Path, llama: Path, version: int, changes: dict[str, torch.Tensor | None], reason: str
) -> None:
    head = save_eagle_head(tmp_path / "head", version)
    tensors = {**load_file(head / "model.safetensors"), **changes}
    save_tensors(head, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    assert reason in refusal(head, target_model=str(llama))


def test_a_norm_that_the_configuration_asks_for_must_exist(tmp_path: Path, llama: Path) -> None:
    head = save_eagle_head(tmp_path / "head", 3, fc_norm=True)
    tensors = load_file(head / "model.safetensors")
    save_tensors(head, {**tensors, "fc_norm.1.weight": torch.ones(3)})
    assert "fc_norm.1.weight has the shape [3], but this head and its target need [64]" in refusal(
        head, target_model=str(llama)
    )


def test_a_target_of_another_size_is_refused(tmp_path: Path) -> None:
    wide = save_model(tmp_path / "target", small_config("llama", hidden_size=128, num_hidden_layers=LAYERS))
    head = save_eagle_head(tmp_path / "head", 1)
    assert "its hidden size is 64, but the target's is 128" in refusal(head, target_model=str(wide))


@pytest.mark.parametrize("options", [{"fused": False}, {"activations": "int8"}])
def test_heads_run_only_on_torch_operations(tmp_path: Path, llama: Path, options: dict[str, Any]) -> None:
    message = refusal(save_eagle_head(tmp_path / "head", 1), target_model=str(llama), **options)
    assert "EAGLE heads" in message
