"""Models that cannot be sharded are refused in one line, before anything starts or loads."""

import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from delta_nets import save_delta_net
from tiny_models import edited_weights, load_engine, refusal, save_model, save_output_head, small_config
from torch import distributed

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.loading import load_model
from specpool.engine.sharding.nccl import NcclExchange
from specpool.engine.sharding.shares import Share, shard


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("llama", {"tensor_parallel": 3}, "--tensor-parallel 3 is more than the 2 KV heads"),
        ("llama", {"device": "cpu,cpu,cpu"}, "device names 3 devices for 2 ranks"),
        ("cohere2", {}, "cohere2 is not one of the families glm, glm4, llama, mistral, qwen2, qwen3$"),
        ("mixtral", {}, "cannot be sharded: mixtral is not one of the families"),
    ],
)
def test_unsupported_models_and_options_are_refused_before_ranks_start(
    architecture: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, small_config(architecture))
    with mock.patch.object(subprocess, "Popen") as popen, pytest.raises(UnsupportedModelError, match=message):
        load_engine(folder, **{"device": "cpu", "tensor_parallel": 2, **options})
    popen.assert_not_called()


def test_partial_output_heads_are_not_sharded(tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("llama"))
    save_output_head(folder, [3, 9])
    with pytest.raises(UnsupportedModelError, match="output head"):
        load_engine(folder, device="cpu", tensor_parallel=2)


def test_recurrent_models_are_not_sharded(tmp_path: Path) -> None:
    message = refusal(save_delta_net(tmp_path), device="cpu", tensor_parallel=2)
    assert "cannot be sharded: qwen3_5_text is not one of the families" in message


def test_misshapen_weights_are_refused(tmp_path: Path) -> None:
    config = small_config("llama")
    folder = save_model(tmp_path, config)
    name = "model.layers.1.mlp.up_proj.weight"
    with edited_weights(folder) as weights:
        weights[name] = weights[name].repeat(2, 1)
    options = EngineOptions(model=str(folder), device="cpu")
    with pytest.raises(UnsupportedModelError, match=f"the files lack 1 of the model's weights: {name}"):
        load_model(options, Share(shard(config, 2, "whole"), 1))


def test_unreachable_ranks_are_reported() -> None:
    failure = RuntimeError("Unable to find address for: none0\nmore")
    with (
        mock.patch.object(distributed, "init_process_group", side_effect=failure),  # a real failure would leave traces
        pytest.raises(OSError, match=r"ranks cannot reach each other: Unable to find address for: none0$"),
    ):
        NcclExchange(0, 2, None, torch.device("cpu"))
