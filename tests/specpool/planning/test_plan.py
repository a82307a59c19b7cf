"""Predictions and recommendations of a plan, and its values for the Helm chart."""

from dataclasses import replace
from math import log10
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import COMPONENTS
from helm_chart import of_kind, template
from hypothesis import assume, given
from hypothesis import strategies as st
from pod_settings import pod_settings
from pydantic import ByteSize, TypeAdapter

from coordinator.config.settings import CoordinatorSettings
from draft_worker.server import DraftWorkerSettings
from specpool.distill.replay import acceptance_by_position, mean_acceptance_length
from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.planning.choosing import SUFFICIENT, Choice, smallest_sufficient
from specpool.planning.plan import HOST_BYTES, Plan, Terms, fit, make_plan, other_sizes, worker_needs
from specpool.planning.prediction import (
    EXPECTED_POSITIONS,
    Acceptance,
    MeasuredPair,
    Memory,
    Model,
    balanced_workers,
    constant_acceptance,
    predict,
)
from specpool.planning.report import as_json, helm_values
from target_worker.server import TargetWorkerSettings

GIB = 2**30
H200 = "cuda:0 (NVIDIA H200)"
counts = st.integers(1, 2**40)
seconds = st.floats(0.0001, 0.1)
batches = st.integers(1, 64)


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    return Memory(
        draw(counts),
        draw(counts),
        kv_per_position=draw(st.integers(1, 2**20)),
        positions=draw(st.integers(0, 10**7)),
        multiple=draw(st.sampled_from([1, 64])),
        max_model_len=draw(st.integers(1, 32_000)),
        state_per_slot=draw(st.sampled_from([0, 2**20])),
    )


@st.composite
def pairs(draw: st.DrawFn, shared: bool | None = None) -> MeasuredPair:
    """A pair with arbitrary costs, and acceptance that never grows with the position."""
    draft, verify = (
        StepTimes({1: first, 64: first + 63 * more})
        for first, more in (draw(st.tuples(seconds, st.floats(0, 0.001))) for _ in range(2))
    )
    shares = sorted(draw(st.lists(st.floats(0, 1), min_size=8, max_size=8)), reverse=True)
    lengths = [1 + sum(shares[:k]) for k in range(len(shares) + 1)]
    costs = RoundCosts(draft, verify, draw(st.floats(0, 0.005)))
    shared = draw(st.booleans()) if shared is None else shared
    return MeasuredPair(costs, lengths, shared, carried=shared)


# --- Prediction


@given(pair=pairs(), batch=batches)
def test_speedup_never_exceeds_the_mean_acceptance_length(pair: MeasuredPair, batch: int) -> None:
    plain, *drafted = predict(pair, [batch])
    assert (plain.k, plain.of_plain, plain.groups) == (0, 1, 1)
    assert all(speed.of_plain <= pair.lengths[speed.k] for speed in drafted)


@given(length=st.floats(1, 9), batch=batches, k=st.integers(1, 8))
def test_a_free_draft_speeds_up_by_the_acceptance_length(length: float, batch: int, k: int) -> None:
    flat, free = StepTimes({1: 0.02, 64: 0.02}), StepTimes({1: 0, 64: 0})
    pair = MeasuredPair(RoundCosts(free, flat, exchange=0), [1.0] * k + [length], shared=False, carried=False)
    assert predict(pair, [batch])[k].of_plain == pytest.approx(length, rel=0.001)


@given(pair=pairs(shared=False), half=st.integers(1, 32), k=st.integers(1, 8))
def test_overlap_at_most_doubles_the_speed_of_half_the_batch(pair: MeasuredPair, half: int, k: int) -> None:
    alone, both = pair.sequential_speed(half, k), pair.overlapped_speed(2 * half, k)
    assert alone * 0.999 <= both <= 2 * alone * 1.001


@given(pair=pairs(shared=True), batch=batches, k=st.integers(0, 8))
def test_groups_do_not_overlap_on_one_device(pair: MeasuredPair, batch: int, k: int) -> None:
    assert pair.overlapped_speed(batch, k) == 0


@given(pair=pairs(shared=True), batch=batches)
def test_a_carried_draft_saves_an_exchange(pair: MeasuredPair, batch: int) -> None:
    plain, *drafted = predict(pair, [batch])
    assert plain.separate == plain.tokens_per_second
    for speed in drafted:
        assert speed.separate is not None
        saved = batch * pair.lengths[speed.k] * (1 / speed.separate - 1 / speed.tokens_per_second)
        assert saved == pytest.approx(pair.costs.exchange, rel=1e-6, abs=1e-9)


def test_step_times_grow_with_sequence_length() -> None:
    target = model("t", 0.01, step_cached=128, seconds_per_cached=1e-6)
    assert target.step_times(4096)(8) > target.step_times(1000)(8) > target.step_times(None)(8)


# --- Acceptance


def test_replay_counts_accepted_tokens_per_round() -> None:
    answer = [True, True, False, True, False, False, True, True]  # with k = 2: 2, 1, 0, 2 accepted
    assert acceptance_by_position([[answer]], 2) == [3 / 4, 2 / 4]
    assert mean_acceptance_length([[answer]], 2) == 1 + 5 / 4
    assert mean_acceptance_length([[answer[:-1]]], 2) == 1 + 3 / 3  # the last round is cut short


def test_acceptance_at_a_constant_rate_is_a_geometric_series() -> None:
    assert constant_acceptance(0.5, 3).lengths == [1, 1.5, 1.75, 1.875]
    assert constant_acceptance(1, 2).by_position == [1, 1]


@given(
    intercept=st.floats(-0.5, 0.5),
    per_decade=st.floats(-0.2, 0.2),
    sizes=st.lists(st.integers(10**5, 10**11), min_size=2, max_size=6, unique=True),
)
def test_the_fit_finds_a_common_line(intercept: float, per_decade: float, sizes: list[int]) -> None:
    assume(log10(max(sizes) / min(sizes)) > 0.1)
    line = fit(sizes, [intercept + per_decade * log10(size) for size in sizes])
    assert line is not None
    assert (line.intercept, line.per_decade) == pytest.approx((intercept, per_decade), abs=1e-6)
    assert all(0 <= line(size) <= 1 for size in (1, 10**6, 10**15))


def test_one_size_gives_no_fit() -> None:
    assert fit([5], [0.5]) is fit([5, 5], [0.5, 0.6]) is None


@given(sizes=st.lists(st.integers(1, 10**9), min_size=1), target=st.integers(1, 10**12))
def test_other_sizes_lie_between_a_small_draft_and_the_target(sizes: list[int], target: int) -> None:
    assert all(min(sizes) / 10 <= size < target for size in other_sizes(sizes, target))


# --- Recommendation


@given(rates=st.dictionaries(batches, st.floats(0.1, 1000), min_size=1))
def test_window_is_the_smallest_sufficient_batch(rates: dict[int, float]) -> None:
    window = smallest_sufficient(Choice(batch, None, 0, rate, 1) for batch, rate in rates.items())
    enough = SUFFICIENT * max(rates.values())
    assert window.tokens_per_second >= enough
    assert all(rate < enough for batch, rate in rates.items() if batch < window.batch)


@given(pair=pairs(shared=False), batch=batches, k=st.integers(1, 8))
def test_draft_workers_keep_up_with_target_workers(pair: MeasuredPair, batch: int, k: int) -> None:
    numbers = balanced_workers(pair, batch, k)
    draft, verify = pair.draft_seconds(batch, k), pair.verify_seconds(batch, k)
    assert draft * numbers.target <= verify * numbers.draft * 1.001
    assert min(numbers.draft, numbers.target) == 1
    assert numbers.target > 1 or verify < 2 * draft * 1.001
    assert numbers.draft == 1 or verify * (numbers.draft - 1) < draft * 1.001


def model(name: str, step: float, device: str = H200, parameters: int = 10**9, fits: int = 64, **more: Any) -> Model:
    memory = Memory(8 * GIB, GIB, 100_000, positions=fits * EXPECTED_POSITIONS, multiple=64, max_model_len=4096)
    return Model(name, device, "bfloat16", parameters, memory, "same", {1: step, 64: 1.5 * step}, **more)


def plan_of(*acceptances: Acceptance, device: str = H200, fits: int = 64, **terms: Any) -> Plan:
    target = model("org/target", 0.02, device, fits=fits, revision="f" * 40)
    drafts = [
        (model("org/draft", 0.001, device, parameters=10 ** (8 + at)), acceptance)
        for at, acceptance in enumerate(acceptances or [constant_acceptance(0.8, 4)])
    ]
    return make_plan(target, drafts, Terms([1, 8, 64], 4, 0.001, shared=False, **terms))


def test_plans_for_one_device_let_the_target_carry_the_draft() -> None:
    target, draft = model("org/target", 0.02), model("org/draft", 0.001)
    plan = make_plan(target, [(draft, constant_acceptance(0.8, 4))], Terms([1, 8], 4, 0.001, shared=None))
    recommended = as_json(plan)["recommended"]
    assert (recommended["colocated"], recommended["draft_workers"]) == (True, 0)
    assert recommended["tokens_per_second"] > recommended["separate_tokens_per_second"] > 0
    assert as_json(plan_of())["recommended"]["separate_tokens_per_second"] is None


PERFECT, USELESS = constant_acceptance(1.0, 4), constant_acceptance(0.0, 4)


def test_plan_uses_maximum_k_for_a_perfect_draft_and_none_for_a_useless_one() -> None:
    plan = plan_of(PERFECT, USELESS)
    first, second = plan.drafts
    assert plan.chosen is first
    assert {batch: speed.k for batch, speed in first.best.items()} == {1: 4, 8: 4, 64: 4}
    assert {speed.k for speed in second.best.values()} == {0}
    assert (plan.window.k, plan.workers.draft) == (4, 1)
    assert plan.scaling is not None
    assert plan.scaling.per_decade == pytest.approx(-1)


def test_plain_decoding_is_recommended_where_drafting_never_pays() -> None:
    plan = plan_of(USELESS)
    assert (plan.window.k, plan.window.of_plain, plan.workers.draft, plan.workers.target) == (0, 1, 0, 1)
    assert yaml.safe_load(helm_values(plan))["draft"]["enabled"] is False


@pytest.mark.parametrize(("fits", "window"), [(64, 64), (63, 8), (3, 1), (0, 1)])
def test_the_window_fits_in_the_target_cache(fits: int, window: int) -> None:
    assert plan_of(PERFECT, fits=fits).window.batch == window


@pytest.mark.parametrize(("throughput", "cells"), [(None, 1), (0.99, 1), (1.01, 2), (2.5, 3)])
def test_cells_reach_the_required_throughput(throughput: float | None, cells: int) -> None:
    one = plan_of().window.tokens_per_second
    assert plan_of(throughput=throughput and throughput * one).capacity.cells == cells


# --- Memory


@given(memory=memories(), slots=st.integers(1, 4096), positions=st.integers(1, 40_000) | st.none())
def test_the_cache_holds_all_slots_and_one_full_length_sequence(
    memory: Memory, slots: int, positions: int | None
) -> None:
    slot = memory.slot_positions(positions)
    assert slot % memory.multiple == 0
    assert min(positions or EXPECTED_POSITIONS, memory.full_slot) <= slot <= memory.full_slot
    held, rest = divmod(memory.kv_bytes(slots, positions) - slots * memory.state_per_slot, memory.kv_per_position)
    assert (held, rest) == (max(slots * slot, memory.full_slot), 0)
    sized = replace(memory, positions=held, slots=slots)
    assert sized.capacity(positions) >= slots
    assert not memory.state_per_slot or sized.capacity(positions) == slots, "each sequence needs states"


@given(memory=memories(), slots=st.integers(1, 64), on_gpu=st.booleans())
def test_pod_memory_covers_the_worker(memory: Memory, slots: int, on_gpu: bool) -> None:
    needs = worker_needs(memory, on_gpu, slots, None)
    assert needs.device_bytes == memory.weights + memory.activations + needs.kv_bytes
    assert needs.request_bytes >= memory.weights + HOST_BYTES
    assert on_gpu or needs.request_bytes >= needs.device_bytes + HOST_BYTES
    assert needs.limit_bytes == needs.request_bytes + memory.weights


def test_shorter_sequences_take_less_memory() -> None:
    short, full = plan_of(positions=1000).capacity, plan_of().capacity
    assert short.target.slot_bytes == 1024 * 100_000
    assert short.target.kv_bytes < full.target.kv_bytes


# --- Values of the Helm chart


@pytest.mark.parametrize("device", ["cpu", H200])
def test_processes_accept_the_values(device: str) -> None:
    plan = plan_of(device=device, positions=2000, throughput=10_000)
    values = yaml.safe_load(helm_values(plan))
    assert values["cells"] == plan.capacity.cells > 1
    coordinator = CoordinatorSettings(**values["coordinator"]["settings"])
    assert coordinator.draft_method == plan.method
    assert coordinator.max_num_seqs == coordinator.max_batch_size == plan.window.batch
    for role, kind in (("target", TargetWorkerSettings), ("draft", DraftWorkerSettings)):
        settings = kind(**values[role]["settings"], model=values[role]["model"])
        needs, resources = getattr(plan.capacity, role), values[role]["resources"]
        assert (settings.max_sequences, settings.max_model_len) == (plan.window.batch, 4096)
        assert settings.dtype == "bfloat16"
        assert 0 <= settings.kv_memory - needs.kv_bytes < 2**20
        assert values[role]["gpus"] == (device != "cpu")
        assert int(resources["requests"]["memory"].removesuffix("Mi")) * 2**20 >= needs.request_bytes
        assert TypeAdapter(ByteSize).validate_python(resources["limits"]["memory"] + "B") >= needs.limit_bytes
    assert (values["target"]["revision"], values["draft"]["revision"]) == ("f" * 40, "")
    assert values["draft"]["enabled"] is True


def test_values_say_which_target_has_the_mtp_layer() -> None:
    target, drafts = model("org/target", 0.01, revision="f" * 40), [(model("mtp", 0.001), constant_acceptance(0.8, 4))]
    values = yaml.safe_load(helm_values(make_plan(target, drafts, Terms([1, 8], 4, 0.001, shared=False))))
    settings = DraftWorkerSettings(**values["draft"]["settings"], model="mtp", revision=values["draft"]["revision"])
    assert (settings.target_model, settings.revision) == ("org/target", "f" * 40)


def test_values_let_the_target_carry_a_draft_on_its_device(tmp_path: Path) -> None:
    models = (model(name, seconds, H200) for name, seconds in (("org/target", 0.01), ("org/draft", 0.001)))
    target, draft = models
    plan = make_plan(target, [(draft, constant_acceptance(0.8, 4))], Terms([1, 8], 4, 0.001, shared=True))
    file = tmp_path / "values.yaml"
    file.write_text(helm_values(plan))
    values = yaml.safe_load(file.read_text())
    assert (values["draft"]["colocated"], values["draft"]["model"]) == (True, "org/draft")
    settings = TargetWorkerSettings(**values["target"]["settings"], model="org/target", draft="org/draft")
    assert settings.draft_kv_memory is not None
    assert 0 <= settings.draft_kv_memory - plan.capacity.draft.kv_bytes < 2**20
    memory = int(values["target"]["resources"]["requests"]["memory"].removesuffix("Mi")) * 2**20
    assert memory >= plan.capacity.target.request_bytes + plan.capacity.draft.request_bytes
    manifests = template("--values", str(file))
    assert len(of_kind(manifests, "StatefulSet")) + len(of_kind(manifests, "Deployment")) == 2


@pytest.mark.parametrize(
    ("device", "activations", "expected"),
    [("cpu", "int8", "int8"), ("cpu", "float32", "float32"), ("cpu", "", None), (H200, "bfloat16", None),
     ("cpu", "bfloat16", None)],
)  # fmt: skip
def test_values_have_the_measured_activations(device: str, activations: str, expected: str | None) -> None:
    target, draft = (model(name, 0.01, device, activations=activations) for name in ("org/target", "org/draft"))
    plan = make_plan(target, [(draft, constant_acceptance(0.8, 4))], Terms([1, 8], 4, 0.001, shared=False))
    values = yaml.safe_load(helm_values(plan))
    assert [values[role]["settings"].get("activations") for role in ("target", "draft")] == [expected] * 2
    assert as_json(plan)["target"]["activations"] == activations


@pytest.mark.parametrize("device", ["cpu", H200])
def test_the_chart_passes_the_values_to_each_process(device: str, tmp_path: Path) -> None:
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
