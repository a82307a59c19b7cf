"""Wrong options are refused before torch is imported, with a line that names the option, the value and the reason."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import edit_json

from specpool.engine.config import device_names
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.target_options import TargetOptions
from specpool.engine.models.preflight import InvalidOptionError, check_options, check_same_tokenizer, check_target

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
}  # fmt: skip


def model_folder(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def refusal(model: object, **options: Any) -> str:
    with pytest.raises(InvalidOptionError) as caught:
        check_options(EngineOptions(model=str(model), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_checks_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    program = (
        "import sys; from specpool.engine.config.options import EngineOptions as O\n"
        "from specpool.engine.models.preflight import check_options, check_same_tokenizer\n"
        f"options = O(model={model_folder(tmp_path)!r})\n"
        "check_options(options); check_same_tokenizer(options, options, 'try it')\n"
        "print({'torch', 'transformers', 'huggingface_hub'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


# --- Models


def test_usable_models_are_accepted(tmp_path: Path) -> None:
    memory = 2 * 2 * 2 * 8 * 2 * 64  # of one sequence in two bytes per number
    model = model_folder(tmp_path / "model")
    check_options(EngineOptions(model=model, device="cpu", max_model_len=64, kv_memory=memory))
    check_options(EngineOptions(model=model, tensor_parallel=2, device="cpu, cpu"))
    for partial in ({"architectures": None}, {"architectures": []}, {"num_attention_heads": None}):
        check_options(EngineOptions(model=model_folder(tmp_path / "other", **partial), kv_memory="2GiB"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF and more")
    check_options(EngineOptions(model=str(tmp_path / "model.gguf")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
            "this bert model has no causal language-model head",
        ),
        ({"is_encoder_decoder": True, "model_type": "t5"}, "this t5 model is an encoder-decoder"),
    ],
)
def test_models_of_another_kind_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    assert refusal(model_folder(tmp_path, **changes)).startswith(f"model: {reason}")


def test_paths_without_a_model_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "nowhere.gguf"):
        assert refusal(path) == f"model: {path}: no such file or folder"
    assert refusal(tmp_path) == f"model: {tmp_path} is not a model folder: it has no config.json"
    text, gguf = tmp_path / "model.txt", tmp_path / "model.gguf"
    for file in (text, gguf):
        file.write_text("no model")
    assert refusal(text) == f"model: {text} is neither a model folder nor a .gguf file"
    assert refusal(gguf) == f"model: {gguf} is not a GGUF file"
    gguf.write_bytes(b"")
    assert refusal(gguf) == f"model: {gguf} is not a GGUF file"
    assert refusal(model_folder(tmp_path), revision="main").startswith(f"model: revision main: {tmp_path} is local")


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "is not a JSON file: "), ("[]", "does not contain a JSON object"), ("\xff", "is not a JSON file")],
)
def test_unreadable_configurations_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert refusal(tmp_path).startswith(f"model: {tmp_path / 'config.json'} {reason}")


def test_sizes_beyond_the_model_or_the_memory_are_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    assert refusal(model, max_model_len=65) == f"max-model-len: 65 exceeds the 64 positions of {model}"
    short = "1.0KiB is too small for a sequence of 16 positions, which needs at least 2.0KiB"
    assert refusal(model, kv_memory="1KiB") == f"kv-memory: {short}"
    assert refusal(model, memory_budget="1KiB") == f"memory-budget: {short}"
    assert "of 64 positions, which needs at least 16.0KiB" in refusal(
        model, kv_memory="16383", max_model_len=64, dtype="float32"
    )
    check_options(EngineOptions(model=model, kv_memory="1KiB", tensor_parallel=2, device="cpu"))
    latent = model_folder(tmp_path, kv_lora_rank=16, qk_rope_head_dim=8)  # 24 features of a position instead of 32
    check_options(EngineOptions(model=latent, kv_memory=2 * 24 * 2 * 64, max_model_len=64))
    assert "which needs at least 6.0KiB" in refusal(latent, kv_memory=2 * 24 * 2 * 64 - 1, max_model_len=64)
    hybrid = {"model_type": "qwen3_next", "full_attention_interval": 2}  # one of two layers caches keys and values
    check_options(EngineOptions(model=model_folder(tmp_path, **hybrid), kv_memory="1KiB"))


def test_recurrent_states_are_counted_as_checkpoints_state_them(tmp_path: Path) -> None:
    """A slot of three checkpoints and two tails of 32 rows, in a model with one layer of each kind."""
    linear = {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
    kimi = {"model_type": "kimi_linear", "linear_attn_config": linear, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    state, inputs, gates = 4 * 2 * 8 * 8, 2 * 3 * 2 * 8, 4 * (2 * 8 + 2)
    slot = 3 * (state + 3 * inputs) + 2 * 32 * (inputs + gates)
    least = 16 * 24 * 2 + 4 * slot
    options = {"model": model_folder(tmp_path, **kimi), "max_sequences": 4}
    check_options(EngineOptions(**options, kv_memory=least))
    assert refusal(**options, kv_memory=least - 1).endswith(
        "is too small for a sequence of 16 positions and the recurrent states of 4 sequences, which need at least "
        "52.1KiB"
    )


def test_options_have_the_names_of_the_command(tmp_path: Path) -> None:
    names, model = {"model": "target", "device": "target_device"}, model_folder(tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": "/nowhere"}, "target"),
        ({"model": model, "device": "tpu"}, "target-device"),
        ({"model": model, "max_model_len": 99}, "max-model-len"),
    ]
    for options, name in wrong:
        with pytest.raises(InvalidOptionError, match=f"^{name}: "):
            check_options(EngineOptions(**options), names)


def test_mtp_layers_are_checked_in_the_configuration_of_the_target(tmp_path: Path) -> None:
    glm = model_folder(tmp_path / "glm", model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"])
    memory = 2 * 2 * 8 * 2 * 16  # of one sequence in the only layer
    mtp = EngineOptions(model="mtp", target_model=glm, kv_memory=memory)
    check_options(mtp)
    check_same_tokenizer(EngineOptions(model=glm), mtp, "try it")
    check_target(TargetOptions(model=glm, draft="mtp"))
    with pytest.raises(InvalidOptionError, match=r"^model: mtp is a draft that reads hidden states, not a target"):
        check_target(TargetOptions(model="mtp", target_model=glm))
    assert refusal("MTP", target_model=glm) == 'model: MTP: the MTP layer of a target is called "mtp"'
    (tmp_path / "glm.gguf").write_bytes(b"GGUF and more")
    llama = model_folder(tmp_path / "llama")
    empty = model_folder(tmp_path / "empty", model_type="qwen3_next", mtp_num_hidden_layers=0)
    for target, reason in (
        (llama, "mtp: MTP layers are supported for glm4_moe, "),
        (empty, "mtp: the target has no MTP layer: its mtp_num_hidden_layers is 0"),
        (tmp_path / "glm.gguf", f"mtp: {tmp_path / 'glm.gguf'} is a GGUF file"),
        (tmp_path / "nowhere", f"{tmp_path / 'nowhere'}: no such file or folder"),
    ):
        assert refusal("mtp", target_model=str(target)).startswith(f"model: {reason}")
        with pytest.raises(InvalidOptionError, match=r"^(draft|model): "):
            check_target(TargetOptions(model=str(target), draft="mtp"))


# --- Devices


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:1"])
def test_devices_that_exist_are_accepted(cuda_driver: SimpleNamespace, name: str) -> None:
    device_names.check_device_name(name)


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({}, "cuda:2", "this machine has cuda:0 to cuda:1"),
        ({"count": 1}, "cuda:1", "this machine has cuda:0"),
        ({"count": 0}, "cuda", "this machine has no GPU"),
        ({"status": 100}, "cuda:0", "this machine has no GPU"),
        ({"missing": True}, "cuda", "this machine has no GPU"),
        ({"cuda": None}, "cuda", "torch 2.13.0 was built without support for GPUs"),
        ({}, "tpu", 'it must be "auto", "cpu", "cuda" or "cuda:N"'),
        ({}, "", 'it must be "auto", "cpu", "cuda" or "cuda:N"'),
        ({}, "cuda:-1", 'it must be "auto", "cpu", "cuda" or "cuda:N"'),
    ],
)
def test_devices_that_cannot_exist_are_refused(
    cuda_driver: SimpleNamespace, changes: dict[str, Any], name: str, reason: str
) -> None:
    vars(cuda_driver).update(changes)
    assert refusal("/nowhere", device=name) == f"device: {name} cannot be used: {reason}"


@pytest.mark.parametrize("changes", [{"status": 999}, {"cuda": None, "hip": "7.0", "missing": True}])
def test_torch_decides_where_the_driver_does_not_say(cuda_driver: SimpleNamespace, changes: dict[str, Any]) -> None:
    vars(cuda_driver).update(changes)
    device_names.check_device_name("cuda:7")


def test_each_device_of_a_list_is_checked(cuda_driver: SimpleNamespace) -> None:
    assert refusal("/nowhere", device="cuda:0, cuda:5", tensor_parallel=2).startswith("device: cuda:5 cannot be used")


# --- Tokenizers


def test_drafts_with_another_tokenizer_are_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = (EngineOptions(model=str(folder)) for folder in tiny_pair)
    check_same_tokenizer(target, draft, "try it")
    tokenizer = json.loads((tiny_pair[1] / "tokenizer.json").read_text())
    other = EngineOptions(model=model_folder(tmp_path))
    check_same_tokenizer(target, other, "try it")  # cannot tell before loading
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    check_same_tokenizer(target, other, "try it")
    edit_json(tmp_path, "tokenizer.json", model=tokenizer["model"] | {"vocab": {"a": 0}})
    with pytest.raises(InvalidOptionError, match=f"^draft: {other.model} uses a different tokenizer than "):
        check_same_tokenizer(target, other, "try it")
    (tmp_path / "tokenizer.json").write_text("{")
    check_same_tokenizer(target, other, "try it")
