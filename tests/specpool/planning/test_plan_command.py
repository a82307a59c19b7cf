"""`specpool plan`: measuring a pair, planning for running workers, and invalid arguments."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from eagle_heads import HIDDEN, save_eagle_head
from feature_drafts import save_pair_draft
from hypothesis import given
from hypothesis import strategies as st
from mtp_models import make_alike, save_mtp_target
from tiny_models import load_engine, save_model
from tiny_pair import tiny_config
from worker_service import DRAFT, TARGET, serving

from specpool.engine.run.engine import Engine
from specpool.engine.startup.step_times import timed_passes
from specpool.environment.extras import install_command
from specpool.planning import main as command
from specpool.planning import measuring
from specpool.planning.measuring import MAX_ROWS, powers_of_two
from specpool.testing import FakeDraft, FakeTarget

Refusal = Callable[..., str]
SMALL = ["--num-prompts", "4", "--max-tokens", "24", "--max-num-speculative-tokens", "3", "--threads", "1"]


@pytest.fixture
def run() -> Callable[..., None]:
    """Run `specpool plan` with arguments, in this process."""
    return lambda *arguments: command.main([*arguments])


@pytest.fixture
def refusal(run: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run a command that fails with status 2; return its stderr."""

    def run_refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            run(*arguments)
        assert caught.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines()[-1].startswith("specpool plan: ")
        assert "Traceback" not in captured.err
        return captured.err

    return run_refused


@given(maximum=st.integers(1, 10_000))
def test_measured_rows_cover_all_predicted_batches(maximum: int) -> None:
    rows = powers_of_two(maximum)
    assert len(rows) > 1
    assert min(maximum, MAX_ROWS) <= rows[-1] < max(3, 2 * maximum)


@pytest.fixture
def passes_take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], None]:
    """Let passes take these seconds, by rows, instead of measuring them."""

    def set_times(seconds: Callable[[int], float]) -> None:
        @contextmanager
        def timed_passes(engine: Engine, row_counts: Sequence[int]) -> Iterator[dict[int, Callable[[], float]]]:
            yield {rows: partial(seconds, rows) for rows in row_counts}

        monkeypatch.setattr(measuring, "timed_passes", timed_passes)

    return set_times


def test_a_busy_machine_gets_no_recommendation(
    run: Any, passes_take: Any, tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passes_take(lambda rows: 0.82 if rows == 1 else 0.1 + 0.02 * rows)
    models = ["--target", str(tiny_pair[0]), "--draft", str(tiny_pair[1])]
    with pytest.raises(SystemExit) as caught:
        run(*SMALL, "--batches", "1,2", *models, "--output", str(tmp_path / "values.yaml"))
    assert str(caught.value) == (
        "specpool plan: no recommendation, because measured times contradict each other: "
        "target: 1 row took 820.0 ms, but 2 rows took 140.0 ms. "
        "Other programs keep this machine busy: stop them, reduce --threads, or try again later"
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line for line in captured.err.splitlines() if "/6 " in line] == [
        "1/6 loading target",
        "2/6 measuring its passes",
    ]
    assert not list(tmp_path.iterdir())


def test_measured_times_of_passes_are_real(tiny_pair: tuple[Path, Path]) -> None:
    engine = load_engine(tiny_pair[0], max_sequences=2)
    free = engine.slots.tables.free
    with timed_passes(engine, [1, 2, 4, 10**6]) as passes:
        assert list(passes) == [1, 2, 4]  # the last one exceeds the cache
        assert all(seconds() > 0 for seconds in passes.values())
    assert engine.tokens >= 7
    assert engine.slots.tables.free == free


def test_measures_and_plans_a_tiny_pair(
    run: Any, passes_take: Any, tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passes_take(lambda rows: 0.01 + 0.0001 * rows)
    target, draft = map(str, tiny_pair)
    models = ["--target", target, "--draft", f"{draft},{target}"]  # the target agrees with itself
    run(*SMALL, "--batches", "1,2,4", *models, "--output", str(tmp_path / "plan"))
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    first, second = result["drafts"]
    assert (result["target"]["name"], first["name"], second["name"]) == (target, draft, target)
    assert 0.3 < first["agreement"] < 1 == second["agreement"]
    assert second["mean_acceptance_length"] == [2, 3, 4]
    assert first["acceptance_by_position"] == sorted(first["acceptance_by_position"], reverse=True)
    assert {int(rows) for rows in result["target"]["step_seconds"]} == {1, 2, 4, 8, 16}
    assert [(speed["batch"], speed["k"]) for speed in first["speeds"]] == [(b, k) for b in (1, 2, 4) for k in range(4)]
    assert all(speed["groups"] == 1 for speed in first["speeds"])  # both are on the CPU
    recommended = result["recommended"]
    assert recommended["k"].keys() == {"1", "2", "4"}
    assert result["scaling"] is None  # the models have one size
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == result
    assert (tmp_path / "plan" / "plan.png").stat().st_size > 1000
    assert "tokens per round" in captured.err
    assert "9/9 comparing its predictions with the answers" in captured.err
    assert f"window {recommended['window']}" in captured.err


@pytest.mark.slow
def test_drafts_that_read_hidden_states(
    run: Any, passes_take: Any, refusal: Refusal, tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    passes_take(lambda rows: 0.01 + 0.0001 * rows)
    target, draft = map(str, tiny_pair)
    reading = save_pair_draft(tmp_path / "reading", *tiny_pair, (1, 2))
    run(*SMALL, "--batches", "1", "--target", target, "--draft", f"{draft},{reading}")
    _, second = json.loads(capsys.readouterr().out)["drafts"]
    assert 0.3 < second["agreement"] < 1
    assert 1 < second["mean_acceptance_length"][0] <= second["mean_acceptance_length"][-1] <= 4
    config = reading / "config.json"
    for change, reason in [
        ({"layers": [1, 9]}, "target: a draft reads the states after layer 9 of 3"),
        ({"layers": [1]}, "reads states of 192 numbers; the target's have 96"),
    ]:
        values = json.loads(config.read_text())
        values["specpool_features"] |= change
        config.write_text(json.dumps(values))
        assert reason in refusal(*SMALL, "--target", target, "--draft", str(reading))


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_eagle_heads_can_be_planned(
    run: Any, passes_take: Any, refusal: Refusal, tmp_path: Path, capsys: Any, version: int
) -> None:  # fmt: skip
    passes_take(lambda rows: 0.01 + 0.0001 * rows)
    target = save_model(
        tmp_path / "target",
        tiny_config(hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=8),
    )
    head = save_eagle_head(tmp_path / "head", version)
    run(*SMALL, "--batches", "1", "--target", str(target), "--draft", str(head))
    (draft,) = json.loads(capsys.readouterr().out)["drafts"]
    assert 0 <= draft["agreement"] < 1
    wide = save_model(tmp_path / "wide", tiny_config(num_hidden_layers=8))
    assert "draft: " in refusal(*SMALL, "--target", str(wide), "--draft", str(head))


def test_mtp_layers_can_be_planned(run: Any, passes_take: Any, refusal: Refusal, tmp_path: Path, capsys: Any) -> None:
    passes_take(lambda rows: 0.01 + 0.0001 * rows)
    target = save_mtp_target(tmp_path, "glm4_moe", max_position_embeddings=512)
    make_alike(target)
    run(*SMALL, "--batches", "1", "--target", str(target), "--draft", "mtp")
    (draft,) = json.loads(capsys.readouterr().out)["drafts"]
    assert 0 < draft["agreement"] < 1
    other = save_model(tmp_path / "other", tiny_config())
    assert "draft: mtp: MTP layers are supported for " in refusal(*SMALL, "--target", str(other), "--draft", "mtp")


PAIR = ["--target", "TARGET", "--draft", "DRAFT"]
ADDRESSES = ["--target-address", "127.0.0.1:1", "--draft-address", "127.0.0.1:1", "--acceptance", "0.7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PAIR, "--batches", "0,x"], "batches.0: Input should be greater than or equal to 1"),
        ([*PAIR, "--batches", "0,x"], "batches.1: Input should be a valid integer"),
        ([*PAIR[:2], "--draft", "/nowhere"], "draft: /nowhere: no such file or folder"),
        (PAIR[:2], "draft: required with a target"),
        (["--target", "mtp", "--draft", "mtp"], "target: mtp is a draft"),
        ([*PAIR, "--prompts", "/nowhere"], "prompts: /nowhere: No such file or directory"),
        ([*PAIR, "--max-tokens", "511"], "prompts: prompt "),
        ([*PAIR, "--max-model-len", "9999"], "max-model-len: 9999 exceeds the 512 positions of "),
        ([*PAIR, "--device", "tpu"], "device: tpu cannot be used: it must be"),
        ([*PAIR, "--draft-device", "tpu"], "draft-device: tpu cannot be used: it must be"),
        ([*PAIR, "--activations", "int8", "--dtype", "bfloat16"], "activations: int8 needs --dtype float32; set"),
        ([*PAIR, "--draft-activations", "int8", "--draft-device", "cuda"], "int8 needs --draft-device cpu; set"),
        ([*PAIR, "--activations", "int8"], "target: activations: int8 needs a trained draft, or a GGUF file"),
        (["--target", "", "--draft", "DRAFT"], "target: must not be empty"),
        ([*PAIR[:2], "--draft", "OTHER"], "uses a different tokenizer than"),
        (ADDRESSES, "target-address: 127.0.0.1:1: UNAVAILABLE: "),
        (ADDRESSES[:4], "acceptance: must be given with target-address"),
        (ADDRESSES[4:], "target-address: must be given with acceptance"),
        ([*ADDRESSES, *PAIR], "give models or the addresses of running workers, not both"),
        ([*ADDRESSES[:5], "-0.1"], "acceptance: Input should be greater than or equal to 0"),
        ([*ADDRESSES, "--throughput", "-5"], "throughput: Input should be greater than 0"),
        ([*ADDRESSES, "--throughput", "inf"], "throughput: Input should be a finite number"),
        ([*ADDRESSES, "--sequence-positions", "0"], "sequence-positions: Input should be greater than or equal to 1"),
        ([*ADDRESSES, "--tls-ca", "/nowhere"], "tls-ca: "),
        (["--output", "FOLDER/there.yaml"], "there.yaml exists; --force replaces it"),
        (["--output", "FOLDER/folder.yaml"], "folder.yaml is a folder"),
        (["--output", "FOLDER/nowhere/values.yaml"], "nowhere is not a folder"),
        (["--output", "FOLDER/there.yaml/values.yml", "--force"], "there.yaml is not a folder"),
    ],
)
def test_invalid_arguments_are_refused_by_name(
    refusal: Refusal, tiny_pair: tuple[Path, Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "folder.yaml").mkdir()
    words = {"TARGET": tiny_pair[0], "DRAFT": tiny_pair[1], "FOLDER": tmp_path, "OTHER": tmp_path / "other"}
    shutil.copytree(tiny_pair[1], words["OTHER"])
    tokenizer = json.loads((words["OTHER"] / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {"a": 0}
    (words["OTHER"] / "tokenizer.json").write_text(json.dumps(tokenizer))
    for word, path in words.items():
        arguments = [argument.replace(word, str(path)) for argument in arguments]
    assert message in refusal("--threads", "1", *arguments)
    assert (tmp_path / "there.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["values.yaml", ""])
def test_unwritable_output_is_refused_before_measuring(
    name: str, monkeypatch: pytest.MonkeyPatch, refusal: Refusal, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert f"{tmp_path / name} is not writable" in refusal("--output", str(tmp_path / name))


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, refusal: Refusal, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert f"needs matplotlib: {install_command('bench')}" in refusal("--output", str(tmp_path))


# --- Running workers


async def test_busy_workers_get_no_recommendation(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    target = FakeTarget(pass_seconds=lambda rows: 0.82 if rows == 1 else 0.19)
    draft = FakeDraft(target, pass_seconds=lambda rows: 0.01)
    addresses = ["--target-address", await target.start(), "--draft-address", await draft.start()]
    try:
        with pytest.raises(
            SystemExit, match=r"fake: 1 row took 820.0 ms.*restart it with --no-startup-cache when idle"
        ):
            await asyncio.to_thread(run, *addresses, "--acceptance", "0.7")
    finally:
        await asyncio.gather(target.stop(), draft.stop())
    assert capsys.readouterr().out == ""


async def test_planning_for_running_workers_needs_no_torch(tmp_path: Path) -> None:
    """Nor anything else that only workers need."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules |= dict.fromkeys(['torch', 'transformers', 'tokenizers', 'numpy', 'psutil'])"
    )
    target = FakeTarget(pass_seconds=lambda rows: 0.01)
    draft = FakeDraft(target, pass_seconds=lambda rows: 0.001, fingerprint="another tokenizer")
    addresses = ["--target-address", await target.start(), "--draft-address", await draft.start()]
    command_line = [sys.executable, "-m", "specpool.cli.main", "plan", *addresses, "--acceptance", "0.7"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    try:
        done = await asyncio.to_thread(
            subprocess.run, command_line, env=environment, capture_output=True, text=True, check=False
        )
    finally:
        await asyncio.gather(target.stop(), draft.stop())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recommended"]["draft"] == "fake"


def test_planning_for_models_names_the_missing_torch(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=rf"^specpool plan: needs torch: {re.escape(install_command('worker'))};"):
        run()


async def test_plans_for_running_workers(
    tiny_pair: tuple[Path, Path], run: Any, refusal: Refusal, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, draft = map(load_engine, tiny_pair)
    for engine in (target, draft):  # as on an idle machine
        engine.step_seconds = {rows: 0.001 + 0.0001 * rows for rows in engine.step_seconds}
    file = tmp_path / "values.yaml"
    options = ["--batches", "1,2", "--sequence-positions", "100", "--output", str(file), "--acceptance", "0.7"]
    async with serving(TARGET, target) as first, serving(DRAFT, draft) as second:
        addresses = ["--target-address", first.address, "--draft-address", second.address]
        await asyncio.to_thread(run, *options, *addresses)
        captured = capsys.readouterr()
        result = json.loads(captured.out)
        assert result["target"]["step_seconds"].keys() == {str(rows) for rows in target.step_seconds}
        assert result["target"]["memory"]["kv_per_position"] == target.info().kv_bytes_per_token
        assert result["target"]["parameters"] == target.info().parameters  # as in GetModelInfo
        settings = yaml.safe_load(file.read_text())["target"]["settings"]
        assert settings["max_sequences"] == result["recommended"]["window"]
        assert "a cell: one target and one draft worker" in " ".join(captured.err.split())
        swapped = ["--target-address", second.address, "--draft-address", first.address, "--acceptance", "0.7"]
        assert "target-address: 127.0.0.1:" in await asyncio.to_thread(refusal, *swapped)
        before = file.read_text()
        assert "exists" in await asyncio.to_thread(refusal, *options, *addresses)
        await asyncio.to_thread(run, *options, *addresses, "--force", "--throughput", "1e6")
        assert yaml.safe_load(file.read_text())["cells"] > yaml.safe_load(before)["cells"] == 1
    assert load_engine(tiny_pair[0], **settings).slots.tables.columns >= 100 * settings["max_sequences"]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({}, "the worker has not measured its passes"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"pass_seconds": lambda rows: 0.01, "rank_devices": ["cuda:0", "cuda:1"]}, "sharded over 2 ranks"),
    ],
)
async def test_unsuitable_workers_are_refused_by_name(refusal: Refusal, knobs: dict[str, Any], message: str) -> None:
    target = FakeTarget(pass_seconds=lambda rows: 0.01)
    draft = FakeDraft(target, **knobs)
    addresses = ["--target-address", await target.start(), "--draft-address", await draft.start()]
    try:
        text = await asyncio.to_thread(refusal, *addresses, "--acceptance", "0.7")
    finally:
        await asyncio.gather(target.stop(), draft.stop())
    assert "draft-address: " in text
    assert message in text
    assert text.count("\n") == 1


async def test_a_target_without_a_draft_needs_a_draft_address(refusal: Refusal) -> None:
    target = FakeTarget(pass_seconds=lambda rows: 0.01)
    try:
        text = await asyncio.to_thread(refusal, "--target-address", await target.start(), "--acceptance", "0.7")
    finally:
        await target.stop()
    assert "carries no draft; give the address of a draft worker" in text
