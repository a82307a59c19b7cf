"""What a plan predicts and recommends, by its properties; and one of a tiny pair, measured as a user would."""

import json
import os
import subprocess
import sys
from math import log10
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.drafting.costs import RoundCosts, StepTimes
from specpool.distill.replay import acceptance_by_position, mean_acceptance_length
from specpool.planning import main as command
from specpool.planning import settings as plan_settings
from specpool.planning.capacity import Memory
from specpool.planning.models import MOST_ROWS, powers_of_two
from specpool.planning.plan import Model, Plan, Terms, make_plan, replayed
from specpool.planning.prediction import ENOUGH, MeasuredPair, Speed, enough, predict, workers
from specpool.planning.scaling import fit, other_sizes

seconds = st.floats(0.0001, 0.1)
batches = st.integers(1, 64)


@st.composite
def pairs(draw: st.DrawFn, shared: bool | None = None) -> MeasuredPair:
    """Of any costs, and an acceptance that never grows with the position."""
    draft, verify = (
        StepTimes({1: first, 64: first + 63 * more})
        for first, more in (draw(st.tuples(seconds, st.floats(0, 0.001))) for _ in range(2))
    )
    shares = sorted(draw(st.lists(st.floats(0, 1), min_size=8, max_size=8)), reverse=True)
    lengths = [1 + sum(shares[:k]) for k in range(len(shares) + 1)]
    costs = RoundCosts(draft, verify, draw(st.floats(0, 0.005)))
    return MeasuredPair(costs, lengths, draw(st.booleans()) if shared is None else shared)


# --- What is predicted


@given(pair=pairs(), batch=batches)
def test_no_speed_up_exceeds_the_mean_acceptance_length(pair: MeasuredPair, batch: int) -> None:
    plain, *drafted = predict(pair, [batch])
    assert (plain.k, plain.of_plain, plain.groups) == (0, 1, 1)
    assert all(speed.of_plain <= pair.lengths[speed.k] for speed in drafted)


@given(length=st.floats(1, 9), batch=batches, k=st.integers(1, 8))
def test_a_draft_that_costs_nothing_gains_what_it_gets_accepted(length: float, batch: int, k: int) -> None:
    flat, free = StepTimes({1: 0.02, 64: 0.02}), StepTimes({1: 0, 64: 0})
    pair = MeasuredPair(RoundCosts(free, flat, exchange=0), [1.0] * k + [length], shared=False)
    assert predict(pair, [batch])[k].of_plain == pytest.approx(length, rel=0.001)


@given(pair=pairs(shared=False), half=st.integers(1, 32), k=st.integers(1, 8))
def test_two_groups_gain_at_most_what_two_pairs_of_workers_would(pair: MeasuredPair, half: int, k: int) -> None:
    alone, both = pair.in_turn(half, k), pair.in_halves(2 * half, k)
    assert alone * 0.999 <= both <= 2 * alone * 1.001


@given(pair=pairs(shared=True), batch=batches, k=st.integers(0, 8))
def test_on_one_device_nothing_overlaps(pair: MeasuredPair, batch: int, k: int) -> None:
    assert pair.in_halves(batch, k) == 0


# --- What is recommended


@given(rates=st.dictionaries(batches, st.floats(0.1, 1000), min_size=1))
def test_the_window_is_the_smallest_batch_that_is_nearly_as_fast_as_any(rates: dict[int, float]) -> None:
    found = enough(Speed(batch, 0, rate, 1, None) for batch, rate in rates.items())
    assert found.tokens_per_second >= ENOUGH * max(rates.values())
    assert all(rate < ENOUGH * max(rates.values()) for batch, rate in rates.items() if batch < found.batch)


@given(pair=pairs(shared=False), batch=batches, k=st.integers(1, 8))
def test_draft_workers_can_feed_their_target_workers(pair: MeasuredPair, batch: int, k: int) -> None:
    found = workers(pair, batch, k)
    draft, verify = pair.draft_seconds(batch, k), pair.verify_seconds(batch, k)
    assert draft * found.target <= verify * found.draft * 1.001
    assert min(found.draft, found.target) == 1
    assert found.target > 1 or verify < 2 * draft * 1.001
    assert found.draft == 1 or verify * (found.draft - 1) < draft * 1.001


def model(name: str, step: float, parameters: int = 10**6, room: int = 32) -> Model:
    memory = Memory(10**6, 10**5, 64, positions=room * 512, multiple=64, max_model_len=512)
    return Model(name, "cpu", "float32", parameters, memory, "same", {1: step, 64: 2 * step})


def plan_of(*agreed: bool, room: int = 32, longest: int = 4) -> Plan:
    """Of two drafts of which the second never agrees."""
    target, first, second = model("target", 0.02, room=room), model("first", 0.001), model("second", 0.001, 10**7)
    drafts = [(first, replayed([list(agreed)], longest)), (second, replayed([[False] * len(agreed)], longest))]
    return make_plan(target, drafts, Terms([1, 8, 32], longest, exchange_seconds=0.001, shared=False))


def test_a_perfect_draft_drafts_as_much_as_it_may_and_a_useless_one_nothing() -> None:
    plan = plan_of(*[True] * 40)
    first, second = plan.drafts
    assert plan.chosen is first
    assert {batch: speed.k for batch, speed in first.best.items()} == {1: 4, 8: 4, 32: 4}
    assert {speed.k for speed in second.best.values()} == {0}
    assert (plan.window.k, plan.workers.draft) == (4, 1)
    assert plan.scaling is not None
    assert plan.scaling.per_decade == pytest.approx(-1)


def test_where_nothing_pays_plain_decoding_is_recommended() -> None:
    plan = plan_of(*[False] * 40)
    assert (plan.window.k, plan.window.of_plain, plan.workers.draft, plan.workers.target) == (0, 1, 0, 1)


@pytest.mark.parametrize(("room", "window"), [(32, 32), (31, 8), (3, 1), (0, 1)])
def test_the_window_fits_in_the_targets_cache(room: int, window: int) -> None:
    assert plan_of(*[True] * 40, room=room).window.batch == window


# --- What is known of acceptance


def test_rounds_are_replayed_on_the_targets_text() -> None:
    answer = [True, True, False, True, False, False, True, True]  # with k = 2: 2, 1, 0, 2 accepted
    assert acceptance_by_position([answer], 2) == [3 / 4, 2 / 4]
    assert mean_acceptance_length([answer], 2) == 1 + 5 / 4
    assert mean_acceptance_length([answer[:-1]], 2) == 1 + 3 / 3  # the last round is cut short


@given(
    intercept=st.floats(-0.5, 0.5),
    per_decade=st.floats(-0.2, 0.2),
    sizes=st.lists(st.integers(10**5, 10**11), min_size=2, max_size=6, unique=True),
)
def test_the_fit_finds_the_line_on_which_all_drafts_lie(intercept: float, per_decade: float, sizes: list[int]) -> None:
    assume(log10(max(sizes) / min(sizes)) > 0.1)
    line = fit(sizes, [intercept + per_decade * log10(size) for size in sizes])
    assert line is not None
    assert (line.intercept, line.per_decade) == pytest.approx((intercept, per_decade), abs=1e-6)
    assert all(0 <= line(size) <= 1 for size in (1, 10**6, 10**15))


def test_one_size_gives_no_line() -> None:
    assert fit([5], [0.5]) is fit([5, 5], [0.5, 0.6]) is None


@given(sizes=st.lists(st.integers(1, 10**9), min_size=1), target=st.integers(1, 10**12))
def test_other_sizes_lie_between_a_small_draft_and_the_target(sizes: list[int], target: int) -> None:
    assert all(min(sizes) / 10 <= size < target for size in other_sizes(sizes, target))


@given(most=st.integers(1, 10_000))
def test_measured_rows_reach_as_far_as_is_predicted_or_as_is_measured_at_all(most: int) -> None:
    rows = powers_of_two(most)
    assert len(rows) > 1
    assert min(most, MOST_ROWS) <= rows[-1] < max(3, 2 * most)


# --- The command


SMALL = ["--num-prompts", "4", "--max-tokens", "24", "--longest", "3", "--threads", "1"]


def test_a_tiny_pair_is_measured_and_planned(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, tiny_pair)
    # The target as its own draft agrees with itself.
    models = ["--target", target, "--draft", f"{draft},{target}"]
    arguments = ["plan", *SMALL, "--batches", "1,2,4", *models, "--output", str(tmp_path / "plan")]
    done = subprocess.run(
        [sys.executable, "-m", "specpool.cli.main", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    first, second = result["drafts"]
    assert (result["target"]["name"], first["name"], second["name"]) == (target, draft, target)
    assert 0.3 < first["agreement"] < 1
    assert second["agreement"] == 1
    assert second["mean_acceptance_length"] == [2, 3, 4]
    assert first["acceptance_by_position"] == sorted(first["acceptance_by_position"], reverse=True)
    assert {int(rows) for rows in result["target"]["step_seconds"]} == {1, 2, 4, 8, 16}
    assert [(speed["batch"], speed["k"]) for speed in first["speeds"]] == [(b, k) for b in (1, 2, 4) for k in range(4)]
    assert all(speed["groups"] == 1 for speed in first["speeds"])  # both are on the CPU
    recommended = result["recommended"]
    assert recommended["k"].keys() == {"1", "2", "4"}
    assert recommended["window"] in (1, 2, 4)
    assert result["scaling"] is None  # both are of one size
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == result
    assert (tmp_path / "plan" / "plan.png").stat().st_size > 1000
    assert "mean acceptance length" in done.stderr
    assert f"window {recommended['window']}" in done.stderr


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said on stderr when the command ends with status 2."""
    monkeypatch.setattr(sys, "argv", ["plan", *SMALL, *arguments])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batches", "0,x"], "batches.0: Input should be greater than or equal to 1"),
        (["--batches", "0,x"], "batches.1: Input should be a valid integer"),
        (["--draft", "/nowhere"], "draft: /nowhere: no such file or folder"),
        (["--prompts", "/nowhere"], "prompts: [Errno 2]"),
        (["--max-tokens", "511"], "prompts: prompt "),
        (["--max-model-len", "9999"], "target: max_model_len 9999 exceeds the model's 512 positions"),
    ],
)
def test_what_cannot_be_planned_is_said_by_setting(
    tiny_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    pair = ["--target", str(tiny_pair[0]), *([] if "--draft" in arguments else ["--draft", str(tiny_pair[1])])]
    assert f"specpool plan: {says}" in refusal(monkeypatch, capsys, *pair, *arguments)


def test_a_target_of_ones_own_needs_a_draft(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "draft: name one" in refusal(monkeypatch, capsys, "--target", str(tiny_pair[0]))


def test_a_plot_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_settings, "find_spec", lambda name: None)
    assert "specpool[bench]" in refusal(monkeypatch, capsys, "--output", str(tmp_path))
