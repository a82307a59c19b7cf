"""What cannot be divided is refused in one line, before anything is started or loaded."""

import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_models import load_engine, save_model, save_output_head, small_config
from torch import distributed

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.loading import load_model
from specpool.engine.sharding.group import Group
from specpool.engine.sharding.shares import Share, shard


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3}, "cannot be sharded: tensor_parallel 3 is more than its 2 KV heads"),
        ({"tensor_parallel": 2, "device": "cpu,cpu,cpu"}, "device names 3 devices for 2 ranks: cpu,cpu,cpu"),
        ({"tensor_parallel": 2, "device": "cuda"}, "tensor_parallel: 2 ranks need 2 GPUs, but this machine has 0"),
        ({"tensor_parallel": 2, "device": "cuda:0"}, "device cuda:0 is one GPU for 2 ranks: name one for each"),
        ({"tensor_parallel": 2, "device": "cpu,gpu"}, "device gpu cannot be used"),
    ],
)
def test_options_that_no_ranks_can_have(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("llama"))
    with mock.patch.object(subprocess, "Popen") as popen, pytest.raises(UnsupportedModelError, match=message):
        load_engine(folder, **{"device": "cpu", **options})
    popen.assert_not_called()


def test_models_that_are_not_divided(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be sharded: gemma2 is none of the families"):
        load_engine(save_model(tmp_path / "gemma2", small_config("gemma2")), device="cpu", tensor_parallel=2)
    folder = save_model(tmp_path / "llama", small_config("llama"))
    save_output_head(folder, [3, 9])
    with pytest.raises(UnsupportedModelError, match="cannot be sharded: its output head has rows for some tokens only"):
        load_engine(folder, device="cpu", tensor_parallel=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 3, "nnodes": 2, "master_addr": "a"}, "tensor_parallel 3 is no multiple of nnodes 2"),
        ({"tensor_parallel": 2, "nnodes": 2}, "master_addr must be given if nnodes is above 1"),
        ({"tensor_parallel": 2, "master_addr": "a"}, "master_addr must be given if nnodes is above 1, and only then"),
        ({"tensor_parallel": 2, "nnodes": 2, "node_rank": 2, "master_addr": "a"}, "node_rank must be below nnodes"),
        ({"tensor_parallel": 2, "nnodes": 2, "master_addr": " "}, "master_addr\n.*should match pattern"),
        ({"tensor_parallel": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineOptions(model="m", **options)


def test_a_weight_of_another_shape_is_not_cut(tmp_path: Path) -> None:
    config = small_config("llama")
    folder = save_model(tmp_path, config)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = torch.cat([weights[name], weights[name]])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    options = EngineOptions(model=str(folder), device="cpu")
    with pytest.raises(UnsupportedModelError, match=f"its files lack 1 of the weights that it needs: {name}"):
        load_model(options, Share(shard(config, 2, "whole"), 1))


def test_a_network_that_ranks_cannot_use() -> None:
    failure = RuntimeError("Unable to find address for: none0\nmore")
    sharding = shard(small_config("llama"), 2, "whole")
    with (
        mock.patch.object(distributed, "init_process_group", side_effect=failure),  # a real one would leave traces
        pytest.raises(OSError, match=r"ranks cannot reach each other: Unable to find address for: none0$"),
    ):
        Group(0, sharding, None, torch.device("cpu"))
