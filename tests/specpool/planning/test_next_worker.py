"""Advice on the next worker of a coordinator."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import batches, pairs

from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.planning.next_worker import fleet_speed, next_worker
from specpool.planning.prediction import MeasuredPair, constant_acceptance, predict

MANY = 10**6
workers = st.integers(1, 8)


def pair(draft: float, verify: float, per_row: float = 0.0) -> MeasuredPair:
    """A pair with these seconds of a pass, and of each row of the target."""
    times = StepTimes({1: draft, 64: draft}), StepTimes({1: verify, 64: verify + 63 * per_row})
    return MeasuredPair(RoundCosts(*times, 0.0001), constant_acceptance(0.8, 4).lengths, shared=False, carried=False)


@given(pair=pairs(shared=False), batch=batches)
def test_one_worker_of_each_kind_is_as_fast_as_predicted(pair: MeasuredPair, batch: int) -> None:
    speed = fleet_speed(pair, 1, 1, batch)
    best = max(speed.tokens_per_second for speed in predict(pair, [batch]))
    assert speed.tokens_per_second == pytest.approx(best)


@given(pair=pairs(shared=False), batch=batches, targets=workers, drafts=workers)
def test_busy_shares_never_exceed_one_and_drafts_never_slow_down(
    pair: MeasuredPair, batch: int, targets: int, drafts: int
) -> None:
    speed, more = fleet_speed(pair, targets, drafts, batch), fleet_speed(pair, targets, drafts + 1, batch)
    assert 0 < speed.target_busy <= 1
    assert 0 <= speed.draft_busy <= 1
    assert more.tokens_per_second >= speed.tokens_per_second * 0.999


@given(pair=pairs(shared=False), batch=batches, factor=workers)
def test_twice_the_workers_serve_twice_the_sequences(pair: MeasuredPair, batch: int, factor: int) -> None:
    one, many = fleet_speed(pair, 1, 1, batch), fleet_speed(pair, factor, factor, factor * batch)
    assert many.tokens_per_second == pytest.approx(factor * one.tokens_per_second)


def test_a_slow_target_needs_a_target_and_a_slow_draft_a_draft() -> None:
    slow_target = next_worker(pair(0.0005, 0.02, 0.001), 1, 1, 32, MANY)
    assert (slow_target.best, slow_target.now.bottleneck) == ("target", "target")
    busy_draft = next_worker(pair(0.006, 0.02), 4, 1, 64, MANY)
    assert (busy_draft.best, busy_draft.now.bottleneck) == ("draft", "draft")
    assert busy_draft.gain(busy_draft.add_draft) > busy_draft.gain(busy_draft.add_target)


def test_a_single_request_needs_no_further_worker() -> None:
    assert next_worker(pair(0.001, 0.02), 1, 1, 1, MANY).best is None


def test_another_target_adds_its_cache() -> None:
    flat = pair(0.0001, 0.02)
    full = next_worker(flat, 1, 1, 64, capacity=8)
    assert full.gain(full.add_target) == pytest.approx(2, rel=0.05)
    slow = replace(flat, costs=RoundCosts(flat.costs.draft, flat.costs.verify, exchange=1))
    assert next_worker(slow, 1, 1, 8, MANY).now.bottleneck == "messages"
