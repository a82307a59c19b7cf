"""The phases that a start reports."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_hub import model_hub
from tiny_models import save_model, small_config

from specpool.engine.config.options import EngineOptions
from specpool.engine.native import library_cache
from specpool.engine.startup import loading, proofs

# Prints the phases of loading a hub model, which are those of its first and of its second start.
LOAD = """
import sys
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import load_model
load_model(EngineOptions(model=sys.argv[1], device="cpu"), report=print)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), small_config("llama"))


def phases_of(model: Path, exact: bool = True, startup_cache: bool = False, **options: Any) -> list[str]:
    sizes = {"threads": 1, "max_sequences": 2, "max_model_len": 64, "device": "cpu"}
    phases: list[str] = []
    loading.load_engine(EngineOptions(model=str(model), **{**sizes, **options}), exact, startup_cache, phases.append)
    return phases


def test_a_target_is_tested_and_a_draft_is_not(model: Path) -> None:
    assert phases_of(model) == [
        "loading weights", "compiling the forward pass", "testing batch invariance", "measuring step times",
    ]  # fmt: skip
    assert phases_of(model, exact=False) == ["loading weights", "compiling the forward pass", "measuring step times"]


def test_a_second_start_only_loads(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    for module in (proofs, library_cache):
        monkeypatch.setattr(module, "candidate_folders", lambda: [tmp_path])
    monkeypatch.setattr(loading, "OUTDATED_SHARE", 0.0)
    assert "testing batch invariance" in phases_of(model, startup_cache=True)
    assert phases_of(model, startup_cache=True) == ["loading weights", "compiling the forward pass"]


@pytest.mark.slow
def test_a_sharded_start_waits_for_the_other_ranks(model: Path) -> None:
    assert phases_of(model, tensor_parallel=2) == [
        "loading weights", "waiting for the other ranks", "compiling the forward pass", "testing batch invariance",
        "measuring step times",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"], ids=["one file", "shards"])
def test_a_hub_model_is_downloaded_once(model: Path, tmp_path: Path, max_shard_size: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size=max_shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    with model_hub("some/model", folder) as endpoint:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        for phases in (["downloading weights", "loading weights"], ["loading weights"]):
            done = subprocess.run(
                [sys.executable, "-c", LOAD, "some/model"],
                env=environment, capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
            assert done.stdout.splitlines() == phases, done.stderr
