"""Loading a target and its draft: both share a memory limit, and drafts that do not fit the target are refused."""

import json
import os
import re
import shutil
import subprocess
from contextlib import closing
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from feature_drafts import save_feature_draft
from pydantic import ValidationError

from specpool.cli.processes import run_module
from specpool.engine.cache import memory
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.config.target_options import TargetOptions
from specpool.engine.models.preflight import InvalidOptionError, check_target
from specpool.engine.run.engine import Engine
from specpool.engine.run.reservation import SmallCacheError
from target_worker.loading import load_pair

Pair = tuple[Path, Path]


def options_of(pair: Pair, **options: Any) -> TargetOptions:
    sizes = {"threads": 1, "max_sequences": 4, "max_model_len": 64, "device": "cpu"}
    return TargetOptions(model=str(pair[0]), draft=str(pair[1]), **{**sizes, **options})


def load(pair: Pair, **options: Any) -> tuple[Engine, Engine]:
    return load_pair(options_of(pair, **options), startup_cache=False, report=lambda phase: None)


def total(engines: tuple[Engine, Engine]) -> int:
    """Return the memory of both models, whose passes take turns."""
    footprints = [engine.footprint for engine in engines]
    return sum(each.weights + each.kv for each in footprints) + max(each.activations for each in footprints)


def columns(engines: tuple[Engine, Engine]) -> list[int]:
    return [engine.slots.tables.columns for engine in engines]


def least(pair: Pair, option: str, **options: Any) -> int:
    """Return the smallest sufficient limit in bytes. The error for a smaller one rounds it up."""
    with pytest.raises(SmallCacheError) as error:
        load(pair, **options, **{option: 1024})
    least = error.value.least
    assert str(error.value).endswith(f"raise --{option.replace('_', '-')} to {ceil(least / 2**20)}MiB")
    return least


def test_a_budget_covers_both_models_and_equally_long_caches(tiny_pair: Pair) -> None:
    limit = least(tiny_pair, "memory_budget", max_sequences=2)
    engines = load(tiny_pair, max_sequences=2, memory_budget=limit)
    assert columns(engines) == [64, 64]
    assert total(engines) == limit
    caches = sum(engine.footprint.kv for engine in engines)
    assert columns(load(tiny_pair, max_sequences=2, memory_budget=limit + caches)) == [128, 128]
    with pytest.raises(UnsupportedModelError, match="of the other model, is too small"):
        load(tiny_pair, max_sequences=2, memory_budget=limit - 1)


def test_draft_kv_memory_limits_only_the_draft_s_cache(tiny_pair: Pair) -> None:
    small = least(tiny_pair, "draft_kv_memory")
    assert columns(load(tiny_pair, draft_kv_memory=small)) == [4 * 64, 64]
    budget = least(tiny_pair, "memory_budget", draft_kv_memory=2 * small)
    engines = load(tiny_pair, draft_kv_memory=2 * small, memory_budget=budget)
    assert columns(engines) == [64, 128]
    assert total(engines) == budget


def test_the_log_names_the_model_that_is_ready(tiny_pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(tiny_pair)
    ready = [message for message in caplog.messages if message.startswith("ready: ")]
    assert [message.removeprefix("ready: ").partition(",")[0] for message in ready] == [*map(str, reversed(tiny_pair))]


def test_kv_memory_sizes_the_target_s_cache(tiny_pair: Pair) -> None:
    engines = load(tiny_pair, kv_memory=3 * least(tiny_pair, "kv_memory"))
    assert columns(engines) == [3 * 64, 3 * 64]


def test_default_caches_divide_a_share_of_free_memory(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, draft = (engine.footprint.kv for engine in load(tiny_pair, max_sequences=1))
    free = SimpleNamespace(available=int(3.5 * (one + draft) / memory.CPU_SHARE))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)
    assert columns(load(tiny_pair, max_sequences=4096)) == [3.5 * 64, 3.5 * 64]
    free.available = int((2 * one + 4 * draft) / memory.CPU_SHARE) + 1
    assert columns(load(tiny_pair, draft_kv_memory=4 * draft)) == [2 * 64, 4 * 64]


def test_rank_0_carries_the_draft_of_a_sharded_target(tiny_pair: Pair) -> None:
    engines = load(tiny_pair, tensor_parallel=2, device="cpu,cpu", kv_memory=least(tiny_pair, "kv_memory"))
    with closing(engines[0]):
        assert [engine.info().tensor_parallel for engine in engines] == [2, 1]
        assert columns(engines) == [128, 128]  # a rank caches half of the heads


def test_a_start_from_a_stored_proof_loads_the_draft_once(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nested start does not wait for the measurements of its own process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    phases: list[str] = []
    for _ in range(2):
        phases.clear()
        load_pair(options_of(tiny_pair), startup_cache=True, report=phases.append)
        assert phases.count("draft: loading weights") == 1
    assert not [phase for phase in phases if "waiting" in phase or "testing" in phase]


# --- Refusals


def test_a_feature_draft_must_fit_the_target(tmp_path: Path, tiny_pair: Pair) -> None:
    draft = save_feature_draft(tmp_path, feature_layers=(1, 3))
    check_target(options_of((tmp_path / "target", draft)))
    config = json.loads((draft / "config.json").read_text())
    other = tmp_path / "other"
    shutil.copytree(draft, other)
    for features, reason in (
        ({"layers": [1, 4], "width": 128}, "after layers 1, 4, but the target .* has 3 layers"),
        ({"layers": [1, 3], "width": 64}, "of 64 numbers, but those of the target .* have 128"),
    ):
        (other / "config.json").write_text(json.dumps(config | {"specpool_features": features}))
        with pytest.raises(InvalidOptionError, match=f"^draft: the draft .* reads hidden states {reason}"):
            check_target(options_of((tmp_path / "target", other)))
    with pytest.raises(InvalidOptionError, match=r"^model: .* is a draft that reads hidden states, not a target"):
        check_target(options_of((draft, tiny_pair[1])))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draft": None, "draft_kv_memory": 2**30}, "draft_kv_memory needs --draft"),
        ({"draft": None, "draft_revision": "main"}, "draft_revision needs --draft"),
        ({"tensor_parallel": 2, "nnodes": 2, "node_rank": 1, "master_addr": "a"}, "draft must be given to node 0 only"),
        ({"draft_activations": "int8", "native": False}, "draft-activations: int8 needs --native"),
    ],
)
def test_draft_settings_that_cannot_work_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TargetOptions(**{"model": "a", "draft": "b", **options})


def test_a_worker_refuses_a_draft_in_one_line(tiny_pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(tiny_pair[1], tmp_path / "other")
    tokenizer = json.loads((tiny_pair[1] / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {"a": 0}
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    command = [*run_module("target_worker.server"), "--model", str(tiny_pair[0]), "--port", "0"]
    done = subprocess.run(
        [*command, "--draft", str(tmp_path / "other")], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 2
    refusal = r"specpool-target-worker: draft: \S+ uses a different tokenizer than \S+; run it in a draft worker, .*\n"
    assert re.fullmatch(refusal, done.stderr), done.stderr
