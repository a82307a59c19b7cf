"""A pass that ignores a feature of its model is refused, even if short probes would miss it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import load_engine, refusal, save_model, small_config

from specpool.engine.passes import fused, fused_layers
from specpool.engine.passes.kinds import FULL_ATTENTION
from specpool.engine.passes.rotary import RotaryTables
from specpool.engine.startup import library_logits

WINDOW, THETA = 64, 10_000.0
OTHER_LOGITS = "packed batches do not give this {} model's own logits"


class UnscaledTables(RotaryTables):
    """Rotary tables without scaling."""

    def __init__(self, rotary_embedding: Any, head_dim: int, like: torch.Tensor, layer_type: str | None) -> None:
        unscaled = deepcopy(rotary_embedding)
        unscaled.inv_freq = THETA ** -(torch.arange(0, head_dim, 2) / head_dim)
        super().__init__(unscaled, head_dim, like)


def test_a_pass_that_ignores_a_window_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, small_config("mistral", sliding_window=WINDOW))
    monkeypatch.setattr(fused_layers, "AttentionKind", lambda *_: FULL_ATTENTION)
    assert OTHER_LOGITS.format("mistral") in refusal(folder, max_model_len=2 * WINDOW)
    monkeypatch.setattr(library_logits, "MAX_WINDOW_PROBE_TOKENS", {})  # a few tokens
    assert load_engine(folder, max_model_len=2 * WINDOW)


def test_a_pass_that_ignores_scaled_positions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "original_max_position_embeddings": 400}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 2.0}
    folder = save_model(tmp_path, small_config("llama", rope_parameters=rope))
    assert load_engine(folder).bitwise
    monkeypatch.setattr(fused, "RotaryTables", UnscaledTables)
    assert OTHER_LOGITS.format("llama") in refusal(folder)
    monkeypatch.setattr(library_logits, "MAX_PROBE_TOKENS", {})
    assert load_engine(folder)


def test_the_check_works_with_fewer_positions_than_the_model_has(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
    folder = save_model(tmp_path, small_config("llama", rope_parameters=rope))
    assert load_engine(folder, max_model_len=16).bitwise


@pytest.mark.parametrize(("rows", "is_refused"), [(1, False), (library_logits.COMPARED, True)])
def test_rounding_may_change_the_experts_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, *, is_refused: bool
) -> None:
    folder = save_model(tmp_path, small_config("mixtral"))
    own, offsets = library_logits._logits, torch.zeros(library_logits.COMPARED, 1)
    offsets[:rows] = 100
    monkeypatch.setattr(library_logits, "_logits", lambda *probe: own(*probe) + offsets)
    if is_refused:
        assert OTHER_LOGITS.format("mixtral") in refusal(folder)
    else:
        assert load_engine(folder)
