"""The ledger: methods pause while they measurably lose time, and retries and trials cost little."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate.machine import Conditions, Machine
from benchmarks.simulate.runs import MAX_DRAFT_TOKENS, Adaptive, Fixed, drawn, seconds_of_run, steady
from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.drafting.draft_lengths import DraftLengths
from specpool.drafting.ledger import FREE_TRIALS, SHARE, Ledger, Part
from specpool.drafting.plain_times import MIN_PLAIN, PlainTimes
from specpool.drafting.plans import DraftMethod

MODEL, NGRAM = DraftMethod.MODEL, DraftMethod.NGRAM
PLAIN = 0.02
Seconds = Callable[[float], float]
"""Seconds of a round by the time when it begins."""


def costs(draft: float = 0.003, verify: float = 0.02, row: float = 0.001) -> RoundCosts:
    lines = [StepTimes({n: first + more * (n - 1) for n in (1, 8, 64)}) for first, more in ((draft, 0), (verify, row))]
    return RoundCosts(*lines, exchange=0.001)


@dataclass
class Driven:
    """Rounds of a server that drafts whenever it may."""

    ledger: Ledger = field(default_factory=lambda: Ledger(costs()))
    sequences: int = 4
    now: float = 0.0
    gained: float = 0.0
    """Time that plain rounds would have needed for all tokens."""
    drafted: int = 0

    def run(self, rounds: int, plain: Seconds, drafted: Seconds, tokens: float, noise: float = 0.0) -> int:
        """Run rounds with `tokens` per sequence and draft. Return the number of rounds that drafted."""
        rng, before = random.Random(0), self.drafted
        for _ in range(rounds):
            drafts = self.ledger.may_draft(MODEL, self.sequences) and not self.ledger.is_plain_due(self.sequences)
            seconds = (drafted if drafts else plain)(self.now) * rng.lognormvariate(0, noise)
            gained = round(tokens * self.sequences) if drafts else self.sequences
            self.gained += gained / self.sequences * plain(self.now)
            self.now += seconds
            self.ledger.observe(self.sequences, gained, seconds, MODEL if drafts else None)
            self.drafted += drafts
        return self.drafted - before


def always(seconds: float) -> Seconds:
    return lambda now: seconds


# --- Pauses


@pytest.mark.parametrize(("seconds", "most"), [(0.2, 2), (0.06, 5), (0.044, 20)])
def test_larger_losses_pause_drafting_sooner(seconds: float, most: int) -> None:
    """Rounds of two tokens that take 10, 3 and 2.2 times as long as a plain one."""
    driven = Driven()
    assert 0 < driven.run(200, always(0.02), always(seconds), tokens=2) <= most


@pytest.mark.slow
@given(slowdown=st.floats(1.05, 20), tokens=st.sampled_from([1, 1.5, 2, 4]), sequences=st.sampled_from([1, 4, 64]))
@settings(max_examples=15)
def test_a_losing_draft_costs_at_most_one_percent_in_the_long_run(
    slowdown: float, tokens: float, sequences: int
) -> None:
    driven = Driven(sequences=sequences)
    tokens = round(tokens * sequences) / sequences
    driven.run(10_000, always(0.02), always(0.02 * tokens * slowdown), tokens)
    lost = driven.now - driven.gained
    assert lost <= 0.01 * driven.now + 20 * 0.02 * slowdown


def test_pauses_grow_while_drafting_keeps_losing() -> None:
    driven = Driven()
    counts = [driven.run(3000, always(0.02), always(0.05), tokens=2) for _ in range(6)]
    assert counts[0] > sum(counts[-2:]) > 0


@pytest.mark.parametrize("sequences", [1, 16])
def test_a_profitable_draft_hardly_ever_pauses(sequences: int) -> None:
    driven = Driven(sequences=sequences)
    drafted = driven.run(10_000, always(0.02), always(0.036), tokens=2, noise=0.1)
    assert drafted > 9_800


def test_a_draft_that_becomes_profitable_is_used_again() -> None:
    driven = Driven()
    driven.run(2000, always(0.02), always(0.08), tokens=2)
    driven.run(5000, always(0.02), always(0.03), tokens=2)
    assert driven.run(1000, always(0.02), always(0.03), tokens=2) > 950


def test_one_stalled_round_causes_no_long_pause() -> None:
    driven = Driven()
    driven.run(500, always(0.02), always(0.03), tokens=2)
    assert driven.run(1, always(30.0), always(30.0), tokens=2) in (0, 1)
    assert driven.run(500, always(0.02), always(0.03), tokens=2) > 480


def test_a_stalled_round_does_not_pause_long_drafts_at_another_batch_size() -> None:
    """Rounds take as long as five plain ones and gain eight tokens. The first at this size stalls for eight more."""
    driven, long = Driven(), always(5 * PLAIN)
    driven.run(500, always(PLAIN), long, tokens=8)
    driven.sequences = 8
    driven.run(2, always(PLAIN), always(13 * PLAIN), tokens=8)
    assert driven.run(500, always(PLAIN), long, tokens=8) > 480


def test_a_slow_target_is_not_held_against_the_draft() -> None:
    """All rounds suddenly take three times as long, so that drafting seems to lose against earlier plain rounds."""
    driven = Driven()
    driven.run(1000, always(0.02), always(0.03), tokens=2)
    assert driven.run(400, always(0.06), always(0.09), tokens=2) > 360


def test_draft_methods_and_batch_sizes_pause_separately() -> None:
    ledger = Ledger(costs())
    for sequences in (2, 16, 2, 16, 2, 16):
        ledger.observe(sequences, sequences, 0.02, None)
    for _ in range(2):
        for sequences, method in ((2, MODEL), (16, NGRAM)):
            ledger.observe(sequences, sequences * 2, 0.03, method)
        ledger.observe(16, 16, 0.1, MODEL)
    assert not ledger.may_draft(MODEL, 16)
    assert ledger.may_draft(NGRAM, 16)
    assert ledger.may_draft(MODEL, 2)


def test_a_loss_goes_on_at_batch_sizes_that_come_later() -> None:
    ledger = Ledger(costs())
    for sequences in (1, 2, 4, 8, 16):
        assert ledger.may_draft(MODEL, sequences)
        ledger.observe(sequences, sequences, 0.02, None)
    for _ in range(2):
        ledger.observe(16, 16, 0.1, MODEL)
    assert not any(ledger.may_draft(MODEL, sequences) for sequences in (16, 64, 256))


# --- Trials


def measured() -> Ledger:
    """A ledger that knows the time of plain rounds of one sequence, `PLAIN`."""
    ledger = Ledger(costs())
    for _ in range(MIN_PLAIN):
        ledger.observe(1, 1, PLAIN, None)
    return ledger


def rounds_until_next(ledger: Ledger) -> int:
    """Plain rounds until a trial that takes half a round longer and gains nothing."""
    rounds = 1
    while not ledger.may_try(MODEL, 1, 0.5, 0.0):
        ledger.observe(1, 1, PLAIN, None)
        rounds += 1
    return rounds


def after_losses(count: int) -> Ledger:
    ledger = measured()
    for _ in range(count):
        rounds_until_next(ledger)
        ledger.observe(1, 1, 1.5 * PLAIN, MODEL, is_trial=True)
    return ledger


def test_trials_that_lose_become_rarer_up_to_a_limit() -> None:
    first, later, last = (rounds_until_next(after_losses(count)) for count in (FREE_TRIALS + 1, FREE_TRIALS + 4, 40))
    assert first < later < last
    assert last == pytest.approx(rounds_until_next(after_losses(80)), rel=0.02)
    assert 0.5 / last < SHARE / 4


def test_trials_that_gain_make_trials_frequent_again() -> None:
    often, ledger = rounds_until_next(after_losses(FREE_TRIALS + 1)), after_losses(40)
    for _ in range(6):
        ledger.observe(1, 2, PLAIN, MODEL, is_trial=True)
    assert rounds_until_next(ledger) <= often


def test_a_stalled_trial_is_paid_for_at_the_full_rate() -> None:
    ledger = after_losses(40)
    rounds_until_next(ledger)
    ledger.observe(1, 1, 5 * PLAIN, MODEL, is_trial=True)
    assert rounds_until_next(ledger) < 1.1 * 4 / SHARE + rounds_until_next(after_losses(40))


def test_unobserved_rounds_count() -> None:
    ledger, rounds = after_losses(40), rounds_until_next(after_losses(40))
    ledger.observe(1, 1, PLAIN, None, skipped=rounds)
    assert ledger.may_try(MODEL, 1, 0.5, 0.0)


# --- Plain rounds


@given(
    times=st.lists(st.floats(0.01, 0.03), min_size=MIN_PLAIN, max_size=40),
    wrong=st.floats(0.2, 5),
    sequences=st.integers(1, 64),
)
def test_measured_plain_rounds_count_whatever_is_believed(times: list[float], wrong: float, sequences: int) -> None:
    plain, right = PlainTimes(costs(verify=0.02 * wrong)), PlainTimes(costs())
    for now, seconds in enumerate(times):
        plain.observe(now, sequences, seconds)
        right.observe(now, sequences, seconds)
    found = plain.seconds(sequences)
    assert found == pytest.approx(right.seconds(sequences))
    assert found is not None
    assert min(times) / 1.01 <= found <= 2 * max(times)


def test_rare_outliers_count_with_their_share() -> None:
    plain = PlainTimes(costs())
    for now in range(2000):
        plain.observe(now / 50, 4, 0.06 if now % 20 == 0 else 0.02)
    assert plain.seconds(4) == pytest.approx(0.022, rel=0.04)


def test_a_new_speed_counts_soon_and_is_no_outlier() -> None:
    plain = PlainTimes(costs())
    for now in range(100):
        plain.observe(now / 50, 4, 0.02)
    for now in range(100, 110):
        plain.observe(now / 50, 4, 0.06)
    assert plain.seconds(4) == pytest.approx(0.06, rel=0.02)


def test_plain_rounds_are_needed_at_new_sizes_and_after_a_while() -> None:
    plain = PlainTimes(costs())
    for now in range(MIN_PLAIN):
        assert plain.needs_round(now, 16)
        plain.observe(now, 16, 0.03)
    assert not plain.needs_round(MIN_PLAIN, 17)
    assert plain.needs_round(MIN_PLAIN, 4)
    assert plain.needs_round(1000, 16)


# --- Together with draft lengths


@pytest.mark.slow
@given(
    draft=st.floats(0.0005, 0.03),
    row=st.floats(0.00001, 0.005),
    believed=st.tuples(st.sampled_from([0.2, 0.5, 1, 2, 5]), st.sampled_from([0.2, 0.5, 1, 2, 5])),
    unseen=st.sampled_from([1.0, 1.2, 2.0]),
    rate=st.floats(0, 0.95),
    batch=st.sampled_from([1, 3, 8]),
)
@settings(max_examples=25)
def test_a_run_is_never_much_slower_than_plain_decoding(
    draft: float, row: float, believed: tuple[float, float], unseen: float, rate: float, batch: int
) -> None:
    true, answers = costs(draft, row=row), drawn(steady(rate), 10 * batch)
    conditions = Conditions(believed, unseen=unseen)
    guess = costs(draft * believed[0], 0.02 * believed[1], row * believed[1])
    adaptive = Adaptive(DraftLengths(guess, MAX_DRAFT_TOKENS))
    seconds = seconds_of_run(Machine(true, conditions), batch, answers, adaptive)
    plain = seconds_of_run(Machine(true, conditions), batch, answers, Fixed(0))
    assert seconds <= plain / 0.98 + 8 * true.seconds(batch, [])


# --- Rounds of several methods


def test_methods_that_share_rounds_are_judged_separately() -> None:
    """Each method drafts 4 tokens for one of 2 sequences. Rounds take 40% longer, and only one method is right."""
    ledger = Ledger(costs())
    for _ in range(MIN_PLAIN):
        ledger.observe(2, 2, PLAIN, None)
    for _ in range(20):
        parts = {NGRAM: Part(0.5, 4.0), DraftMethod.PREDICTION: Part(0.5, 0.0)}
        ledger.observe(2, 6, 1.4 * PLAIN, NGRAM, parts=parts)
    assert ledger.may_draft(NGRAM, 2)
    assert not ledger.may_draft(DraftMethod.PREDICTION, 2)


def test_the_recent_speed_follows_the_last_rounds() -> None:
    ledger = Ledger(costs())
    assert ledger.speed(2) is None
    for tokens in (2, 6):
        for _ in range(100):
            ledger.observe(2, tokens, PLAIN, None if tokens == 2 else NGRAM)
        assert ledger.speed(3) == pytest.approx(tokens / PLAIN, rel=0.01)
    assert ledger.speed(4) is None, "another class of batch sizes"
