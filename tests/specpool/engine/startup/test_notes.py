"""Notes for the operator: once in the log, and in the description of the engine."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_models import load_engine, save_model, small_config
from transformers import PreTrainedConfig

from specpool.engine.passes.families import FAMILIES as FUSED
from specpool.engine.passes.families import why_not_fusable
from specpool.protocol.codec import worker_info_response

THETA = {"rope_theta": 10_000.0}
FAMILIES = ", ".join(sorted(FUSED))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of a ready engine. The self-test warns earlier."""
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelno) == ("specpool.engine.startup.loading", logging.WARNING)
    ]


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("gpt2", {}, f"gpt2 is not one of the families {FAMILIES}"),
        ("olmoe", {}, f"olmoe is not one of the families {FAMILIES}"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu, not silu or gelu_pytorch_tanh"),
        (
            "llama",
            {"rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 2.0}},
            "its rotary embedding has the type dynamic",
        ),
        ("llama", {}, None),
        ("mistral", {"sliding_window": 48}, None),
        ("gemma3_text", {}, None),
    ],
)
def test_why_a_model_has_no_fused_pass(architecture: str, changes: dict[str, Any], reason: str | None) -> None:
    config = small_config(architecture, **changes)
    assert why_not_fusable(config) == reason


def test_a_rotary_embedding_without_theta_is_not_fused() -> None:
    config: PreTrainedConfig = small_config("llama")
    config.rope_parameters = None  # type: ignore[attr-defined]
    assert why_not_fusable(config) == "its rotary embedding has no rope_theta"


def test_a_fast_model_has_no_notes(tiny_pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    engine = load_engine(tiny_pair[0], device="cpu")
    assert engine.notes == []
    assert engine.info().notes == ()
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("gpt2", {}, f"gpt2 is not one of the families {FAMILIES}"),
        ("llama", {"fused": False}, "the fused pass is switched off"),
    ],
)
def test_a_model_on_library_modules_has_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, options: dict[str, Any], reason: str
) -> None:
    changes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128} if architecture == "gpt2" else {}
    folder = save_model(tmp_path, small_config(architecture, **changes))
    engine = load_engine(folder, device="cpu", **options)
    note = f"runs slowly on the modules of transformers, because {reason}"
    assert engine.info().notes == (note,)
    assert warnings(caplog) == [f"{folder}: {note}"]
    assert list(worker_info_response(engine.info()).model.notes) == [note]
