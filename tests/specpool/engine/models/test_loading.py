"""What is loaded, and what is refused: at start, with a reason, and before any weight is read."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub.constants
import psutil
import pytest
import torch
from gguf_files import save_gguf
from safetensors.torch import load_file, save_file
from tiny_models import (
    decode_alone,
    load_engine,
    random_tokens,
    refusal,
    save_model,
    save_output_head,
    small_config,
    transformers_logits,
)
from tiny_pair import MAX_MODEL_LEN, tiny_config
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from benchmarks.pair import save_tokenizer
from draft_worker.proposer import Proposer
from specpool.engine.cache import memory
from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import OUTPUT_HEAD, load_model
from specpool.engine.passes import attention
from specpool.protocol.rounds import ProposeItem, VerifyItem
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, byte_tokenizer
from target_worker.verifier import Verifier


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def save_config(folder: Path, config: PreTrainedConfig, architecture: str | None) -> Path:
    """Saves what says which model it is, but no weights."""
    config.architectures = [architecture] if architecture else None
    config.save_pretrained(folder)
    return folder


# --- Loaded


def test_a_folder_gives_model_tokenizer_and_limits(tiny_pair: tuple[Path, Path]) -> None:
    loaded = load_model(EngineOptions(model=str(tiny_pair[0])))
    assert loaded.name == str(tiny_pair[0])
    assert loaded.model.dtype == torch.float32
    assert (loaded.vocab_size, loaded.max_model_len) == (257, MAX_MODEL_LEN)
    tokenizer = Tokenizer.from_buffer(loaded.tokenizer.tokenizer_json)
    assert tokenizer.encode("Zoë").ids == byte_tokenizer().encode("Zoë").ids
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.tokenizer.eos_token_ids == (EOS_TOKEN_ID,)
    assert loaded.tokenizer.special_tokens == {"eos_token": "<eos>"}


def test_every_end_of_sequence_token_counts(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_config(eos_token_id=[3, EOS_TOKEN_ID, 7]))
    assert load_model(EngineOptions(model=str(folder))).tokenizer.eos_token_ids == (3, 7, EOS_TOKEN_ID)


def test_the_vocabulary_is_what_the_output_head_has(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    """Heads are often padded beyond the tokenizer, and differently for draft and target."""
    padded = load_engine(save_model(tmp_path, tiny_config(vocab_size=320)))
    plain = load_engine(tiny_pair[0])
    assert (padded.vocab_size, plain.vocab_size) == (320, 257)
    assert padded.info().tokenizer_fingerprint == plain.info().tokenizer_fingerprint


def test_max_model_len_is_the_models_own_limit_but_not_without_end(tmp_path: Path) -> None:
    short = save_model(tmp_path / "short", tiny_config(max_position_embeddings=100))
    long = save_model(tmp_path / "long", tiny_config(max_position_embeddings=100_000))
    assert load_model(EngineOptions(model=str(short))).max_model_len == 100
    assert load_model(EngineOptions(model=str(long))).max_model_len == 4096
    assert load_model(EngineOptions(model=str(long), max_model_len=5000)).max_model_len == 5000


def test_a_pad_token_whose_embedding_is_zero_does_no_harm(tmp_path: Path) -> None:
    """Its keys are zero too, which is how a foreign kind of attention looks."""
    folder = save_model(tmp_path, tiny_config(pad_token_id=0))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][0] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_engine(folder).bitwise


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_the_logits_of_the_folder_it_was_made_from(tmp_path: Path, tied: bool) -> None:
    folder = save_model(tmp_path / "folder", tiny_config(vocab_size=258, tie_word_embeddings=tied))
    engine = load_engine(save_gguf(folder, tmp_path / "model.gguf"))
    tokens = random_tokens(30)
    torch.testing.assert_close(decode_alone(engine, tokens), transformers_logits(folder, tokens), atol=1e-4, rtol=1e-4)
    assert engine.bitwise
    assert engine.info().architecture == "llama"
    assert engine.loaded.tokenizer.eos_token_ids == (257,)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_quantized_gguf_file_gives_the_logits_of_its_weights(tmp_path: Path, kind: str) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    folder = save_model(tmp_path / "folder", tiny_config(vocab_size=258))
    file = save_gguf(folder, tmp_path / "model.gguf", lambda name: kind)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():  # to be rounded in rows, which do not change with their order
        if weight.dim() == 2:
            rounded = gguf.quants.quantize(weight.numpy(), quantized)
            weights[name] = torch.from_numpy(gguf.quants.dequantize(rounded, quantized))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine, tokens = load_engine(file), random_tokens(30)
    assert engine.bitwise
    assert engine.info().dtype == "float32"
    torch.testing.assert_close(decode_alone(engine, tokens), transformers_logits(folder, tokens), atol=1e-4, rtol=1e-4)


# --- Refused for what its configuration says. These folders have no weights: nobody gets so far as to miss them.


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "reason"),
    [
        ("t5", "T5ForConditionalGeneration", {}, "encoder-decoder"),
        ("bert", "BertForMaskedLM", {}, "no causal language-model head"),
        ("roberta", "RobertaForMaskedLM", {}, "no causal language-model head"),
        ("llama", "LlamaForSequenceClassification", {}, "no causal language-model head"),
        ("vit", None, {}, "no causal language-model head"),
        ("mamba", "MambaForCausalLM", {}, "only full attention"),
        ("rwkv", "RwkvForCausalLM", {}, "only full attention"),
        ("qwen3_next", "Qwen3NextForCausalLM", {}, "linear_attention layers"),
        ("llama4_text", "Llama4ForCausalLM", {}, "chunked_attention layers"),
        ("mistral", "MistralForCausalLM", {"sliding_window": 64}, "sliding window of 64 positions"),
        ("gemma2", "Gemma2ForCausalLM", {"sliding_window": 64}, "sliding window of 64 positions"),
    ],
)
def test_a_kind_of_model_that_cannot_be_served_is_refused_before_its_weights_are_read(
    tmp_path: Path, model_type: str, architecture: str | None, changes: dict[str, Any], reason: str
) -> None:
    save_config(tmp_path, AutoConfig.for_model(model_type, **changes), architecture)
    message = refusal(tmp_path)
    assert reason in message
    assert model_type in message


def test_layers_of_linear_attention_are_refused(tmp_path: Path) -> None:
    config = small_config("qwen3", layer_types=["full_attention", "full_attention"])
    save_config(tmp_path, config, "Qwen3ForCausalLM")
    change_config(tmp_path, layer_types=["linear_attention", "full_attention"])
    assert "linear_attention layers" in refusal(tmp_path)


def test_a_sliding_window_is_served_as_far_as_it_reaches(tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("mistral", sliding_window=64))
    assert "max_model_len <= 64" in refusal(folder)
    assert "max_model_len <= 64" in refusal(folder, max_model_len=65)
    engine = load_engine(folder, max_model_len=64)
    tokens = random_tokens(64)
    torch.testing.assert_close(decode_alone(engine, tokens), transformers_logits(folder, tokens), atol=1e-4, rtol=1e-4)


def test_a_sliding_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("qwen2", sliding_window=64, use_sliding_window=False))
    assert load_engine(folder).max_model_len == MAX_MODEL_LEN


def test_a_rotary_embedding_that_changes_with_the_longest_of_a_batch_is_served_as_far_as_it_does_not(
    tmp_path: Path,
) -> None:
    """One long sequence would change the logits of all that share its batch."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    folder = save_model(tmp_path, tiny_config(rope_parameters=rope))
    assert "max_model_len <= 128" in refusal(folder)
    engine = load_engine(folder, max_model_len=128)
    tokens = random_tokens(128)
    torch.testing.assert_close(decode_alone(engine, tokens), transformers_logits(folder, tokens), atol=1e-4, rtol=1e-4)


def test_more_positions_than_the_model_has_are_refused(tiny_pair: tuple[Path, Path]) -> None:
    message = refusal(tiny_pair[0], max_model_len=MAX_MODEL_LEN + 1)
    assert str(MAX_MODEL_LEN + 1) in message
    assert f"{MAX_MODEL_LEN} positions" in message


def test_too_little_memory_is_refused_with_the_numbers(tiny_pair: tuple[Path, Path]) -> None:
    engine = load_engine(tiny_pair[0], max_sequences=1)
    needed = engine.info().kv_bytes_total
    message = refusal(tiny_pair[0], kv_memory=needed - 1)
    assert f"{needed - 1:,} bytes" in message
    assert f"{needed:,} bytes" in message
    assert str(engine.layout.arena.columns) in message
    assert "max_model_len" in message


def with_free_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    """Makes the machine say that it has so many bytes available."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


def test_slots_are_as_many_as_a_share_of_the_free_memory_holds(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = load_engine(tiny_pair[0], max_sequences=1).info().kv_bytes_total
    with_free_memory(monkeypatch, int(3.5 * one / memory.CPU_SHARE))
    assert one <= load_engine(tiny_pair[0], max_sequences=4096).info().kv_bytes_total <= 3.5 * one
    assert "not 4096 sequences of" in caplog.text
    assert load_engine(tiny_pair[0], max_sequences=5, kv_memory=5 * one).info().kv_bytes_total == 5 * one
    with_free_memory(monkeypatch, one)
    assert "holds no sequence" in refusal(tiny_pair[0])


def test_the_limit_of_a_container_counts_too(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", limit)
    limit.write_text("max\n")
    assert load_engine(tiny_pair[0], max_sequences=2).slots.total == 2
    limit.write_text(f"{2**20}\n")  # less than we have already
    assert "holds no sequence" in refusal(tiny_pair[0])


def test_a_budget_is_for_weights_activations_and_cache_together(tiny_pair: tuple[Path, Path]) -> None:
    engine = load_engine(tiny_pair[0], native=False, max_sequences=4)
    one, others = engine.footprint.kv // 4, engine.footprint.weights + engine.footprint.activations
    stored = sum(weight.nbytes for weight in stored_weights(tiny_pair[0]))
    assert stored <= engine.footprint.weights < 1.01 * stored  # rotary frequencies are not stored
    assert (
        load_engine(tiny_pair[0], native=False, max_sequences=4, memory_budget=others + 3 * one).footprint.kv == 3 * one
    )
    assert (
        load_engine(tiny_pair[0], native=False, max_sequences=4, memory_budget=others + 99 * one).footprint.kv
        == 4 * one
    )
    message = refusal(tiny_pair[0], native=False, memory_budget=others + one - 1)
    for number in (others + one - 1, engine.footprint.weights, engine.footprint.activations, one):
        assert f"{number:,}" in message
    assert "raise memory_budget" in message
    assert "holds no sequence" in refusal(tiny_pair[0], native=False, memory_budget=1)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("fused", [True, False])
def test_no_file_of_weights_stays_mapped(tmp_path: Path, fused: bool) -> None:
    engine = load_engine(save_model(tmp_path / "some-model", small_config("llama")), fused=fused)
    assert "some-model" not in Path("/proc/self/maps").read_text()
    assert engine.bitwise


def test_positions_that_were_never_used_take_no_memory() -> None:
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    arena = KVArena(4, 4, 8 * 4096, 128, torch.bfloat16, torch.device("cpu"))
    assert arena.keys[3].shape == (4, 8 * 4096, 128)
    row = torch.ones(1, 4, 128, dtype=torch.bfloat16)
    for layer in range(4):
        arena.write(layer, torch.tensor([20_487]), row, row)
        assert arena.keys[layer].count_nonzero() == row.numel()
    del arena
    arena = KVArena(4, 4, 8 * 4096, 128, torch.bfloat16, torch.device("cpu"))
    arena.write(0, torch.tensor([20_487]), row, row)
    assert process.memory_info().rss - before < 64 * 2**20, "of 512 MiB"


def stored_weights(folder: Path) -> list[torch.Tensor]:
    return [tensor for path in folder.glob("*.safetensors") for tensor in load_file(path).values()]


def test_memory_that_nobody_can_have_is_refused(tmp_path: Path) -> None:
    positions = 10**12
    folder = save_model(tmp_path, tiny_config(max_position_embeddings=positions))
    message = refusal(folder, max_model_len=positions, max_sequences=1, kv_memory=10**18)
    assert "KV cache of 768,000," in message
    assert "cannot be allocated" in message


# --- Refused for what its layers do


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("gemma2", {"sliding_window": MAX_MODEL_LEN}, "softcap"),
        ("gpt_oss", {"sliding_window": MAX_MODEL_LEN, "num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "another kind of attention"),
        ("stablelm", {}, "does not pass keyword arguments on to attention"),
        ("diffllama", {}, "own logits"),  # attends twice in each layer
        ("bert", {}, "own logits"),  # an encoder under the name of a decoder: every token sees all others
        ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "fixed choice of attentions"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "cannot run"),
    ],
)
def test_attention_of_another_kind_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    message = refusal(save_model(tmp_path, small_config(architecture, **changes)), max_model_len=64)
    assert reason in message
    assert architecture in message or "Attention" in message


def test_logits_that_are_not_the_models_own_are_refused(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda q, *rest, **more: real(4 * q, *rest, **more))
    assert "own logits" in refusal(tiny_pair[0], native=False)


# --- Refused because it could run code


def test_a_checkpoint_that_is_a_pickle_is_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pair[0], tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert refusal(folder).endswith("only such files and GGUF files are read, since others, such as .bin, can run code")


def with_code(folder: Path, file: str, **changes: Any) -> Path:
    """Gives a model code of its own, named in one of its files, which leaves a trace when it is run."""
    (folder / "own.py").write_text(f"open({str(folder / 'trace')!r}, 'w')\n")
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**values, **changes}))
    return folder


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}),
    ],
)
def test_a_model_that_needs_code_of_its_own_is_refused(
    tiny_pair: tuple[Path, Path], tmp_path: Path, file: str, changes: dict[str, Any]
) -> None:
    folder = with_code(shutil.copytree(tiny_pair[0], tmp_path / "model"), file, **changes)
    assert refusal(folder).endswith("it needs code that comes with it, and such code is never run")
    assert not (folder / "trace").exists()


def test_a_model_that_could_bring_its_code_is_run_by_the_librarys(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    folder = with_code(shutil.copytree(tiny_pair[0], tmp_path / "model"), "config.json", auto_map=auto_map)
    assert load_model(EngineOptions(model=str(folder))).config.model_type == "llama"
    assert not (folder / "trace").exists()


# --- A revision of a hub's model


def test_a_revision_is_that_of_every_file(tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for library_class in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        load = library_class.from_pretrained

        def from_hub(*own: Any, load: Any = load, **source: Any) -> Any:
            if own:  # the library's own call, once it has a folder
                return load(*own, **source)
            assert source["trust_remote_code"] is False
            asked.append((source.pop("pretrained_model_name_or_path"), source.pop("revision")))
            return load(tiny_pair[0], **source)

        monkeypatch.setattr(library_class, "from_pretrained", from_hub)
    load_model(EngineOptions(model="some/model", revision="0123abc"))
    assert asked == [("some/model", "0123abc")] * 3


def test_a_revision_of_files_on_this_machine_is_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (tiny_pair[0], tmp_path / "model.gguf"):
        assert refusal(model, revision="main") == (
            f"revision main: {model} lies on this machine; only models on a hub have one"
        )


# --- Refused for what is not there or is no model


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such file or folder"


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is not a model folder: it has no config.json"


def test_a_file_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    assert "is not a model folder" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a GGUF file at all" * 100])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    message = refusal(tmp_path / "model.gguf")
    assert str(tmp_path / "model.gguf") in message
    assert "GGUF" in message


def test_a_missing_gguf_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "model.gguf") == f"{tmp_path / 'model.gguf'}: no such file or folder"


@pytest.mark.parametrize("model", ["nobody-at-all/no-such-model", "no-such-model", "not a hub id!", "a/b/c/d"])
def test_a_hub_id_of_nothing_is_refused(model: str) -> None:
    message = refusal(model)
    assert model in message
    assert "not a model folder, GGUF file or hub id" in message


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "no such thing"}', "{}"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert str(tmp_path) in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_config(tmp_path, tiny_config(), "LlamaForCausalLM")
    save_tokenizer(tmp_path)
    message = refusal(tmp_path)
    assert "cannot be loaded" in message
    assert "model.safetensors" in message


def change_config(folder: Path, **changes: Any) -> Path:
    """Changes what the configuration says, and leaves the weights as they are."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_weights_that_are_missing_are_never_made_up(tmp_path: Path) -> None:
    message = refusal(change_config(save_model(tmp_path, tiny_config()), num_hidden_layers=5))
    assert "cannot be loaded" in message
    assert "lack 18 of the weights" in message
    assert "model.layers.3.input_layernorm.weight" in message


def test_weights_of_another_shape_are_never_made_up(tmp_path: Path) -> None:
    message = refusal(change_config(save_model(tmp_path, tiny_config()), intermediate_size=32))
    assert "lack 9 of the weights" in message
    assert "model.layers.0.mlp.down_proj.weight (of shape [96, 32], not [96, 160])" in message


def test_weights_beyond_those_needed_do_no_harm(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_config())
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "reward_head.weight": torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_engine(folder).bitwise


def test_a_head_that_is_missing_is_refused_unless_it_is_tied(tmp_path: Path) -> None:
    tied = save_model(tmp_path, tiny_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    load_model(EngineOptions(model=str(tied)))
    assert "lack 1 of the weights that it needs: lm_head.weight" in refusal(
        change_config(tied, tie_word_embeddings=False)
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", [1]),
        ("architectures", "LlamaForCausalLM"),
        ("layer_types", [1, 2, 3]),
        ("sliding_window", "x"),
        ("max_position_embeddings", "many"),
        ("max_position_embeddings", 0.5),
        ("num_attention_heads", "6"),
        ("rope_parameters", [1]),
    ],
)
def test_a_configuration_with_values_of_another_type_is_refused(tmp_path: Path, key: str, value: object) -> None:
    message = refusal(change_config(save_model(tmp_path, tiny_config()), **{key: value}))
    assert key in message or str(tmp_path) in message


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = save_model(tmp_path, tiny_config())
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in refusal(folder)


@pytest.mark.parametrize("device", ["cuda:99", "no such device"])
def test_a_device_that_is_not_there_is_refused(tiny_pair: tuple[Path, Path], device: str) -> None:
    assert f"device {device} cannot be used" in refusal(tiny_pair[0], device=device)


# --- Tokenizers


def files_of(tokenizer: Tokenizer, **changes: Any) -> TokenizerFiles:
    return dataclasses.replace(TokenizerFiles(tokenizer.to_str().encode(), "", {}, ()), **changes)


def test_equal_vocabularies_have_equal_fingerprints(tiny_pair: tuple[Path, Path]) -> None:
    target, draft = (load_model(EngineOptions(model=str(folder))).tokenizer for folder in tiny_pair)
    assert target.fingerprint == draft.fingerprint
    assert len(target.fingerprint) == 64


def test_a_fingerprint_is_about_ids_alone() -> None:
    plain = files_of(byte_tokenizer())
    assert files_of(byte_tokenizer(), chat_template="x", eos_token_ids=(1,)).fingerprint == plain.fingerprint
    truncating = byte_tokenizer()
    truncating.enable_truncation(8)
    assert files_of(truncating).fingerprint == plain.fingerprint


def test_different_vocabularies_have_different_fingerprints() -> None:
    more = byte_tokenizer()
    more.add_special_tokens(["<pad>"])
    other = byte_tokenizer()
    other.add_tokens(["<pad>"])
    words = {"a": 0, "b": 1}
    tokenizers = [
        byte_tokenizer(),
        more,
        Tokenizer(models.WordLevel(words, unk_token="a")),
        Tokenizer(models.WordLevel({"a": 1, "b": 0}, unk_token="a")),
        Tokenizer(models.WordLevel({"a": 0, "c": 1}, unk_token="a")),
        Tokenizer(models.Unigram([("a", 0.0), ("b", 0.0)])),
    ]
    assert len({files_of(tokenizer).fingerprint for tokenizer in tokenizers}) == len(tokenizers)
    assert files_of(more).fingerprint == files_of(other).fingerprint


# --- Options


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 15},
        {"max_sequences": 0},
        {"max_num_batched_tokens": 0},
        {"threads": 0},
        {"dtype": "int8"},
        {"kv_memory": "much"},
        {"kv_memory": "1MiB", "memory_budget": "1GiB"},
        {"no_such_option": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        EngineOptions(model="m", **changes)


def test_memory_may_be_given_in_units() -> None:
    assert EngineOptions(model="m", kv_memory="2MiB").kv_memory == 2 * 2**20


# --- Output heads with rows for some tokens


@pytest.mark.parametrize("options", [{}, {"native": False}, {"fused": False}], ids=["native", "fused", "library"])
def test_tokens_without_a_row_of_the_head_are_never_chosen(tmp_path: Path, options: dict[str, Any]) -> None:
    folder, tokens, kept = save_model(tmp_path, tiny_config()), random_tokens(30), [3, 200, 7, 255, 90]
    whole = load_engine(folder).forward([Span(0, 0, tokens, 30)])
    save_output_head(folder, kept)
    engine = load_engine(folder, **options)
    assert engine.vocab_size == whole.shape[1]
    assert engine.bitwise
    rows = engine.forward([Span(0, 0, tokens, 30)])
    assert set(engine.token_ids(rows.argmax(-1)).tolist()) <= set(kept)
    logits = engine.over_vocabulary(rows)
    assert logits.shape == whole.shape
    torch.testing.assert_close(logits[:, kept], whole[:, kept], atol=1e-4, rtol=1e-4)
    others = [token for token in range(engine.vocab_size) if token not in kept]
    assert (logits[:, others] == -torch.inf).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_workers_choose_among_the_tokens_that_their_head_has(tmp_path: Path, temperature: float) -> None:
    folder, prompt, kept = save_model(tmp_path, tiny_config()), tuple(random_tokens(30)), [3, 200, 7, 255, 90]
    save_output_head(folder, kept)
    sampling = SamplingParams(temperature=temperature, seed=5)
    draft, target = Proposer(load_engine(folder)), Verifier(load_engine(folder))
    (proposal,) = draft.propose("c", 1, [ProposeItem(1, 0, prompt, sampling=sampling, num_draft_tokens=4)])
    assert len(proposal.draft_token_ids) == 4
    assert set(proposal.draft_token_ids) <= set(kept)
    (verdict,) = target.verify(
        "c", 1, [VerifyItem(1, 0, prompt, sampling=sampling, draft_token_ids=proposal.draft_token_ids, logprobs=2)]
    )
    assert verdict.token_ids[:-1] == proposal.draft_token_ids
    for token, logprobs in zip(verdict.token_ids, verdict.logprobs, strict=True):
        assert logprobs.logprob > -10
        assert {token for token, _ in logprobs.top} <= set(kept)
        assert temperature or logprobs.top[0] == (token, logprobs.logprob)


def test_a_draft_of_no_tokens_chooses_none_whatever_its_head_has(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_config())
    save_output_head(folder, [3, 200, 7])
    draft = Proposer(load_engine(folder))
    item = ProposeItem(1, 0, tuple(random_tokens(30)), sampling=SamplingParams(temperature=1.0), num_draft_tokens=0)
    (proposal,) = draft.propose("c", 1, [item])
    assert (proposal.draft_token_ids, proposal.num_cached_tokens) == ((), 30)


@pytest.mark.parametrize(
    ("output_ids", "rows"), [([3, 257], None), ([3, -1], None), ([3, 4], (3, 64)), ([3, 4], (2, 32))]
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path, output_ids: list[int], rows: tuple[int, int] | None
) -> None:
    folder = save_model(tmp_path, tiny_config())
    save_output_head(folder, output_ids, torch.zeros(rows or (2, tiny_config().hidden_size)))
    assert OUTPUT_HEAD in refusal(folder)
