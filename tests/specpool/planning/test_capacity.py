"""What a plan says about memory and cells, the values that it writes for the chart, and plans from running workers."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import COMPONENTS
from helm_chart import of_kind, template
from hypothesis import given
from hypothesis import strategies as st
from pod_settings import pod_settings
from pydantic import ByteSize, TypeAdapter
from tiny_models import load_engine
from worker_service import DRAFT, TARGET, serving

from coordinator.config.settings import CoordinatorSettings
from draft_worker.server import DraftWorkerSettings
from specpool.planning import main as command
from specpool.planning.capacity import HOST_BYTES, Memory, worker_needs
from specpool.planning.plan import Model, Plan, Terms, constant, make_plan
from specpool.planning.values import helm_values
from specpool.testing import FakeDraft, FakeTarget
from target_worker.server import TargetWorkerSettings

GIB = 2**30
counts = st.integers(1, 2**40)


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    multiple = draw(st.sampled_from([1, 64]))
    longest = draw(st.integers(1, 32_000))
    return Memory(
        draw(counts), draw(counts), draw(st.integers(1, 2**20)), draw(st.integers(0, 10**7)), multiple, longest
    )


# --- Memory


@given(memory=memories(), slots=st.integers(1, 4096), positions=st.integers(1, 40_000) | st.none())
def test_the_cache_has_room_for_the_sequences_and_for_one_of_full_length(
    memory: Memory, slots: int, positions: int | None
) -> None:
    kept = memory.slot_positions(positions)
    assert kept % memory.multiple == 0
    assert min(positions or memory.longest, memory.longest) <= kept <= memory.longest
    held = memory.kv_bytes(slots, positions) // memory.kv_per_position
    assert held >= max(slots * kept, memory.longest)
    assert Memory(0, 0, 1, held, memory.multiple, memory.longest).room(positions) >= slots


@given(memory=memories(), slots=st.integers(1, 64), on_gpu=st.booleans())
def test_a_pod_has_memory_for_what_is_in_it(memory: Memory, slots: int, on_gpu: bool) -> None:
    needs = worker_needs(memory, on_gpu, slots, None)
    assert needs.device_bytes == memory.weights + memory.activations + needs.kv_bytes
    assert needs.request_bytes >= memory.weights + HOST_BYTES
    assert on_gpu or needs.request_bytes >= needs.device_bytes + HOST_BYTES
    assert needs.limit_bytes == needs.request_bytes + memory.weights


# --- Cells and values


def model(name: str, step: float, device: str = "cuda:0 (NVIDIA H200)", **more: Any) -> Model:
    memory = Memory(8 * GIB, GIB, 100_000, positions=64 * 4096, multiple=64, max_model_len=4096)
    return Model(name, device, "bfloat16", 10**9, memory, "same", {1: step, 64: 1.5 * step}, **more)


def plan_of(acceptance: float = 0.8, device: str = "cuda:0 (NVIDIA H200)", **terms: Any) -> Plan:
    target, draft = model("org/target", 0.01, device, revision="f" * 40), model("org/draft", 0.001, device)
    batches = [1, 8, 64]
    return make_plan(target, [(draft, constant(acceptance, 4))], Terms(batches, 4, 0.001, shared=False, **terms))


def test_acceptance_at_a_constant_rate_is_a_geometric_series() -> None:
    assert constant(0.5, 3).lengths == [1, 1.5, 1.75, 1.875]
    assert constant(1, 2).by_position == [1, 1]


@pytest.mark.parametrize(("throughput", "cells"), [(None, 1), (0.99, 1), (1.01, 2), (2.5, 3)])
def test_cells_reach_the_tokens_per_second_that_are_wanted(throughput: float | None, cells: int) -> None:
    of_one = plan_of().window.tokens_per_second
    assert plan_of(throughput=throughput and throughput * of_one).capacity.cells == cells


def test_shorter_sequences_take_less_memory_and_longer_ones_more_time() -> None:
    short, full = plan_of(positions=1000).capacity, plan_of().capacity
    assert short.target.slot_bytes == 1024 * 100_000
    assert short.target.kv_bytes < full.target.kv_bytes
    target = model("t", 0.01, step_cached=128, seconds_per_cached=1e-6)
    assert target.step_times(4096)(8) > target.step_times(1000)(8) > target.step_times(None)(8)


def environment(settings: dict[str, Any], role: dict[str, Any]) -> dict[str, Any]:
    """Settings as the process has them: those of the values, and those that the chart adds."""
    device = "cuda" if role.get("gpus") else "cpu"
    return {**settings, **({"model": role["model"], "device": device} if "model" in role else {})}


@pytest.mark.parametrize("device", ["cpu", "cuda:0 (NVIDIA H200)"])
def test_each_process_accepts_the_values(device: str) -> None:
    plan = plan_of(device=device, positions=2000, throughput=10_000)
    values = yaml.safe_load(helm_values(plan))
    assert values["cells"] == plan.capacity.cells > 1
    coordinator = CoordinatorSettings(**values["coordinator"]["settings"])
    assert coordinator.max_num_seqs == coordinator.max_batch_size == plan.window.batch
    for role, kind in (("target", TargetWorkerSettings), ("draft", DraftWorkerSettings)):
        settings = kind(**environment(values[role]["settings"], values[role]))
        needs = getattr(plan.capacity, role)
        assert (settings.max_sequences, settings.max_model_len) == (plan.window.batch, 4096)
        assert settings.dtype == "bfloat16"
        assert 0 <= settings.kv_memory - needs.kv_bytes < 2**20
        assert values[role]["gpus"] == (device != "cpu")
        resources = values[role]["resources"]
        assert int(resources["requests"]["memory"].removesuffix("Mi")) * 2**20 >= needs.request_bytes
        assert TypeAdapter(ByteSize).validate_python(resources["limits"]["memory"] + "B") >= needs.limit_bytes
    assert (values["target"]["revision"], values["draft"]["revision"]) == ("f" * 40, "")
    assert values["draft"]["enabled"] is True


@pytest.mark.parametrize("device", ["cpu", "cuda:0 (NVIDIA H200)"])
def test_the_chart_takes_the_values_and_starts_each_process_with_them(device: str, tmp_path: Path) -> None:
    plan = plan_of(device=device, positions=2000, throughput=10_000)
    file = tmp_path / "values.yaml"
    file.write_text(helm_values(plan))
    manifests = template("--values", str(file))
    cells = {item["spec"]["replicas"] for item in of_kind(manifests, "StatefulSet").values()}
    assert cells == {plan.capacity.cells}
    coordinator, *workers = (pod_settings(manifests, component) for component in COMPONENTS)
    assert coordinator.max_num_seqs == plan.window.batch
    for worker in workers:
        assert (worker.max_sequences, worker.device) == (plan.window.batch, device[:4].rstrip(":"))
        assert 0 <= worker.kv_memory - plan.capacity.target.kv_bytes < 2**20
    assert [worker.revision for worker in workers] == [None, "f" * 40]


def test_a_draft_that_never_pays_is_left_out() -> None:
    plan = plan_of(acceptance=0)
    assert yaml.safe_load(helm_values(plan))["draft"]["enabled"] is False


# --- The command, with running workers


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    command.main()


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


ADDRESSES = ["--target-address", "127.0.0.1:1", "--draft-address", "127.0.0.1:1", "--acceptance", "0.7"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (ADDRESSES, "target-address: 127.0.0.1:1: UNAVAILABLE: "),
        (ADDRESSES[:4], "acceptance: must be given with target-address"),
        (ADDRESSES[4:], "target-address: must be given with acceptance"),
        ([*ADDRESSES, "--target", "x", "--draft", "y"], "give models or the addresses of running workers, not both"),
        ([*ADDRESSES[:5], "-0.1"], "acceptance: Input should be greater than or equal to 0"),
        ([*ADDRESSES, "--throughput", "-5"], "throughput: Input should be greater than 0"),
        ([*ADDRESSES, "--throughput", "inf"], "throughput: Input should be a finite number"),
        ([*ADDRESSES, "--sequence-positions", "0"], "sequence-positions: Input should be greater than or equal to 1"),
        ([*ADDRESSES, "--tls-ca", "/nowhere"], "tls_ca: "),
        (["--output", "FOLDER/there.yaml"], "there.yaml exists; --force replaces it"),
        (["--output", "FOLDER/folder.yaml"], "folder.yaml is a folder"),
        (["--output", "FOLDER/nowhere/values.yaml"], "nowhere is no folder"),
        (["--output", "FOLDER/there.yaml/values.yml", "--force"], "there.yaml is no folder"),
    ],
)
def test_what_cannot_be_planned_or_written_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "folder.yaml").mkdir()
    said = refusal(monkeypatch, capsys, *(word.replace("FOLDER", str(tmp_path)) for word in arguments))
    assert said.startswith("specpool plan: ")
    assert says in said
    assert (tmp_path / "there.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["values.yaml", ""])
def test_what_nobody_may_write_is_refused_before_measuring(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    said = refusal(monkeypatch, capsys, "--output", str(tmp_path / name))
    assert f"{tmp_path / name} cannot be written" in said


async def test_running_workers_are_planned_by_what_they_measured(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, draft = map(load_engine, tiny_pair)
    file = tmp_path / "values.yaml"
    wanted = ["--batches", "1,2", "--sequence-positions", "100", "--output", str(file), "--acceptance", "0.7"]
    async with serving(TARGET, target) as first, serving(DRAFT, draft) as second:
        addresses = ["--target-address", first.address, "--draft-address", second.address]
        await asyncio.to_thread(run, monkeypatch, *wanted, *addresses)
        said = capsys.readouterr()
        result = json.loads(said.out)
        assert result["target"]["step_seconds"].keys() == {str(rows) for rows in target.step_seconds}
        assert result["target"]["memory"]["kv_per_position"] == target.info().kv_bytes_per_token
        settings = yaml.safe_load(file.read_text())["target"]["settings"]
        assert settings["max_sequences"] == result["recommended"]["window"]
        assert "a cell: one target and one draft worker" in said.err
        exchanged = ["--target-address", second.address, "--draft-address", first.address, "--acceptance", "0.7"]
        assert "target-address: 127.0.0.1:" in await asyncio.to_thread(refusal, monkeypatch, capsys, *exchanged)
        before = file.read_text()
        assert "exists" in await asyncio.to_thread(refusal, monkeypatch, capsys, *wanted, *addresses)
        await asyncio.to_thread(run, monkeypatch, *wanted, *addresses, "--force", "--throughput", "1e6")
        assert yaml.safe_load(file.read_text())["cells"] > yaml.safe_load(before)["cells"] == 1
    assert load_engine(tiny_pair[0], **settings).slots.extents.columns >= 100 * settings["max_sequences"]


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"pass_seconds": lambda rows: 0.01, "fingerprint": "another"}, "has another tokenizer than fake"),
        ({}, "it has not measured its passes"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"pass_seconds": lambda rows: 0.01, "rank_devices": ["cuda:0", "cuda:1"]}, "divided among 2 ranks"),
    ],
)
async def test_a_worker_that_cannot_be_planned_with_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], knobs: dict[str, Any], says: str
) -> None:
    target = FakeTarget(pass_seconds=lambda rows: 0.01)
    draft = FakeDraft(target, **knobs)
    addresses = ["--target-address", await target.start(), "--draft-address", await draft.start()]
    try:
        said = await asyncio.to_thread(refusal, monkeypatch, capsys, *addresses, "--acceptance", "0.7")
    finally:
        await asyncio.gather(target.stop(), draft.stop())
    assert said.startswith("specpool plan: draft-address: ")
    assert says in said
