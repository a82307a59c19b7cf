"""Which format of activations a pass has, and when int8 is refused."""

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import save_random_gguf
from pydantic import ValidationError
from tiny_models import load_engine, refusal, rows_that_differ, save_model, small_config

from specpool.engine.config.options import EngineOptions
from specpool.engine.models import loading
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.native.packed_weights import resolve_activations
from specpool.protocol.codec import worker_info_response


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_gguf(tmp_path_factory.mktemp("quantized"), lambda name: "Q4_1")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("dense"), small_config("llama"))


@pytest.mark.parametrize(
    ("options", "activations"),
    [
        ({}, "int8"),
        ({"activations": "int8"}, "int8"),
        ({"activations": "float32"}, "float32"),
        ({"weights": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "float32"),  # a compiled pass computes in float32
        ({"native": False}, "float32"),
        ({"fused": False, "dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_engine_reports_its_activations(quantized: Path, options: dict[str, Any], activations: str) -> None:
    engine = load_engine(quantized, exact=False, device="cpu", **options)
    assert engine.forward_pass.activations == engine.info().activations == activations
    assert worker_info_response(engine.info()).model.activations == activations


def test_int8_activations_are_batch_invariant(quantized: Path) -> None:
    engine = load_engine(quantized, device="cpu", activations="int8")
    assert isinstance(engine.forward_pass, NativeModel)
    assert engine.bitwise
    assert rows_that_differ(engine) == 0


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for other x86-64 processors")
def test_numerics_are_the_same_on_every_processor(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target may restart on another processor, and its sequences continue."""
    here = load_engine(quantized, device="cpu").numerics_fingerprint
    for processor in ("x86-64", "x86-64-v2"):
        monkeypatch.setenv("DECODER_CFLAGS", f"-march={processor}")
        assert load_engine(quantized, device="cpu").numerics_fingerprint == here


@pytest.mark.parametrize("activations", ["auto", "float32"])
def test_dense_weights_have_float32_activations(dense: Path, activations: str) -> None:
    assert load_engine(dense, device="cpu", activations=activations).forward_pass.activations == "float32"


def test_a_quantized_embedding_needs_no_int8_activations(tmp_path: Path) -> None:
    file = save_random_gguf(tmp_path, lambda name: "Q8_0" if "embed" in name else None)
    engine = load_engine(file, device="cpu")
    assert isinstance(engine.forward_pass, NativeModel)
    assert "Q8_0" in engine.forward_pass.kinds
    assert engine.forward_pass.activations == "float32"


@pytest.mark.parametrize(
    ("kinds", "activations"),
    [
        (set(), "float32"),
        ({"FLOAT32", "BFLOAT16"}, "float32"),
        ({"FLOAT32", "Q4_K"}, "int8"),
        ({"INT8"}, "int8"),
        ({"INT8", "mixed"}, "float32"),
    ],
)
def test_auto_follows_the_weights(kinds: set[str], activations: str) -> None:
    assert resolve_activations("auto", kinds) == activations
    assert resolve_activations("float32", kinds) == "float32"


# --- Refusals


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"native": False}, "--native"),
        ({"fused": False}, "--fused"),
        ({"weights": "float32"}, "--weights auto"),
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({"device": "cuda:1"}, "--device cpu"),
        ({"device": "cuda:0,cuda:1", "tensor_parallel": 2}, "--device cpu"),
    ],
)
def test_conflicting_options_are_refused_by_name(options: dict[str, Any], needed: str) -> None:
    expected = f"activations: int8 needs {needed}; set activations to auto or float32"
    with pytest.raises(ValidationError, match=expected):
        EngineOptions(model="m", activations="int8", **options)
    EngineOptions(model="m", **options)


def test_ranks_always_run_the_fused_pass() -> None:
    EngineOptions(model="m", activations="int8", fused=False, tensor_parallel=2)


def test_models_without_quantized_weights_are_refused(dense: Path) -> None:
    reason = refusal(dense, device="cpu", activations="int8")
    assert reason.startswith("activations: int8 needs a trained draft, or a GGUF file with weights in Q4_0, ")
    assert reason.endswith("; set activations to auto or float32")


def test_panels_of_mixed_types_are_refused(tmp_path: Path) -> None:
    """The query weights have 96 outputs, and the key weights 48."""
    types = {"q_proj": "Q4_1", "k_proj": "Q8_0", "v_proj": "Q4_1"}
    changes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    file = save_random_gguf(
        tmp_path, lambda name: next((types[part] for part in types if part in name), None), **changes
    )
    reason = refusal(file, device="cpu", activations="int8")
    assert reason == (
        "activations: int8 needs weights that share a panel of 32 outputs to have one type, but this model mixes "
        "several there; set activations to auto or float32"
    )
    note = "its activations stay float32, because weights of several types share a panel of 32 outputs"
    for activations, notes in (("auto", [note]), ("float32", [])):
        engine = load_engine(file, device="cpu", exact=False, activations=activations)
        assert engine.forward_pass.activations == "float32"
        assert [text for text in engine.notes if "activations" in text] == notes


@pytest.mark.parametrize(
    ("architecture", "needed"),
    [
        ("gpt2", "the compiled pass, which cannot run this model: gpt2 is not one of"),
        ("mixtral", "a dense model, because experts keep float32 activations; set activations to"),
    ],
)
def test_unsuitable_models_are_refused_before_weights_are_read(tmp_path: Path, architecture: str, needed: str) -> None:
    folder = save_model(tmp_path, small_config(architecture))
    (folder / "model.safetensors").unlink()
    reason = refusal(folder, device="cpu", activations="int8")
    assert reason.startswith(f"activations: int8 needs {needed}")


def test_int8_activations_on_a_gpu_are_refused(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "auto" may be a GPU."""
    monkeypatch.setattr(loading, "use_device", lambda name: torch.device("cuda:0"))
    assert refusal(quantized, activations="int8").startswith(
        "activations: int8 needs a CPU, but the device is cuda:0; set activations to auto or float32"
    )


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"PATH": ""}, "needs a C compiler; install a C compiler, or set"),
        (
            {"CC": "/nonexistent -m64"},
            "needs a C compiler, and $CC (/nonexistent) does not exist; correct or unset CC, or set",
        ),
        ({"CC": ""}, "needs a C compiler, and $CC is empty; correct or unset CC, or set"),
        (
            {"CC": "cc '"},
            "needs a C compiler, and $CC cannot be parsed (no closing quotation); correct or unset CC, or set",
        ),
        ({"CC": "false"}, "failed to compile (see the warning above); set"),
    ],
)
def test_machines_that_cannot_compile_are_refused(
    quantized: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], problem: str
) -> None:
    monkeypatch.delenv("CC", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reason = refusal(quantized, device="cpu", activations="int8")
    assert reason == f"activations: int8 needs the compiled pass, which {problem} activations to auto or float32"
    assert load_engine(quantized, device="cpu", exact=False).forward_pass.activations == "float32"


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"head_dim": 8, "intermediate_size": 104}, "head_dim is 8"),
        ({"intermediate_size": 104}, "intermediate size is 104"),
    ],
)
def test_sizes_that_the_compiled_pass_does_not_support_are_refused(
    tmp_path: Path, changes: dict[str, int], size: str
) -> None:
    folder = save_model(tmp_path, small_config("llama", **changes))
    assert refusal(folder, device="cpu", activations="int8") == (
        "activations: int8 needs the compiled pass, which needs sizes that are multiples of 16, and this model's "
        f"{size}; set activations to auto or float32"
    )
