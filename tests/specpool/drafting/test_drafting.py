"""Draft plans: adaptive and fixed, by the model and by prompt lookup, and learning from rounds."""

import copy
from dataclasses import replace

import pytest
from measured_rounds import confirm_costs

from coordinator.scheduling.commits import Commit
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.drafting.acceptance import FIRST_RATE, Calibration
from specpool.drafting.costs import StepTimes, Timed
from specpool.drafting.draft_lengths import PLAN_ROUNDS, STATES_BEFORE_TRIAL
from specpool.drafting.draft_models import DraftModel
from specpool.drafting.drafting import Drafting
from specpool.drafting.outcome import DraftCall, RoundOutcome, draft_steps
from specpool.drafting.plans import NO_LOOKUP, DraftMethod, DraftPlan, Lookup, max_lookup_tokens
from specpool.drafting.sequences import DraftWorker
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict, VerifyItem
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.worker_info import WorkerInfo

WORKER = DraftWorker(max_model_len=1000, round_id=1)
LOOP = (5, 6, 7, 8) * 4


def make_sequence(prompt: tuple[int, ...] = (1, 2, 3), number: int = 1, k: int = 8, **fields: object) -> Sequence:
    """A decoding sequence: both workers lack only its last token."""
    fields = {"adaptive": True, "method": DraftMethod.BEST, **fields}
    sequence = Sequence(number, GenerationRequest(str(number), prompt, 200, frozenset(), k, **fields))  # type: ignore[arg-type]
    sequence.target.commit(len(prompt) - 1)
    sequence.draft.commit(len(prompt) - 1)
    return sequence


def make_drafting(rate: float | None = None, number: int = 1) -> Drafting:
    """Cheap drafts, after the free trials. `rate`: acceptance rate of a sequence so far."""
    drafting = Drafting(max_num_draft_tokens=8)
    drafting.costs.draft = StepTimes({1: 0.001, 64: 0.002})
    drafting.costs.verify = StepTimes({1: 0.02, 64: 0.04})
    for i in range(200 if rate is not None else 0):
        drafting.lengths.acceptance.add(number, 1, int((i + 1) * rate) - int(i * rate))  # type: ignore[operator]
    confirm_costs(drafting.lengths)
    for _ in range(PLAN_ROUNDS):
        drafting.plan_round([make_sequence(number=number)], WORKER)
    return drafting


def plan_of(drafting: Drafting, sequence: Sequence, worker: DraftWorker | None = WORKER) -> DraftPlan:
    return drafting.plan_round([sequence], worker)[sequence.sequence_id]


def commit_of(
    sequence: Sequence, gained: tuple[int, ...], proposal: Proposal | None = None, lookup: Lookup = NO_LOOKUP
) -> Commit:
    """The commit of a round that adds these tokens. The given sequence does not change."""
    sequence = copy.copy(sequence)
    sequence.token_ids = [*sequence.token_ids, *gained]
    drafted = len(proposal.draft_token_ids) if proposal else 0
    return Commit(sequence, gained, str, (), drafted, len(gained) - 1, DraftMethod.MODEL, proposal, lookup)


def proposal_of(sequence: Sequence, tokens: tuple[int, ...], confidences: tuple[float, ...] = ()) -> Proposal:
    return Proposal(sequence.sequence_id, ItemStatus.OK, tokens, len(sequence.token_ids), confidences)


def test_a_good_model_drafts_while_its_tokens_are_likely() -> None:
    plan = plan_of(make_drafting(rate=0.8), make_sequence())
    assert plan.num_draft_tokens == 8
    assert 0 < plan.min_chance < plan.next_chance < 1


def test_unlikely_tokens_end_a_draft_even_if_verification_is_free() -> None:
    drafting, sequence = make_drafting(rate=0.8), make_sequence()
    drafting.costs.verify = StepTimes({1: 0.02, 64: 0.02}, cached=500, per_cached=1e-5)
    for _ in range(2 * PLAN_ROUNDS):
        plan = plan_of(drafting, sequence)
    assert plan.num_draft_tokens == 8
    assert 0 < plan.min_chance < 0.1


def test_prompt_lookup_is_preferred_after_correct_lookups() -> None:
    drafting, sequence = make_drafting(rate=0.5), make_sequence(LOOP)
    for _ in range(50):
        plan = plan_of(drafting, sequence)
        drafting.observe(commit_of(sequence, (5, 6, 7, 8, 5), lookup=plan.lookup))
    assert plan.num_draft_tokens == 0
    assert len(plan.lookup_ids) == 16, "twice the limit for the model"


def test_prompt_lookup_learns_from_tokens_that_were_not_verified() -> None:
    drafting, sequence = make_drafting(), make_sequence(LOOP)
    rates = drafting.sources.sequence.rates
    before = rates.by_length()
    for _ in range(20):
        plan = plan_of(drafting, sequence)
        drafting.observe(commit_of(sequence, (9,), lookup=plan.lookup))
    assert len(plan.lookup_ids) < 8
    assert any(rate < before[length] / 2 for length, rate in rates.by_length().items())


@pytest.mark.parametrize("method", [DraftMethod.MODEL, DraftMethod.NGRAM])
def test_requests_choose_the_draft_method(method: DraftMethod) -> None:
    plan = plan_of(make_drafting(rate=0.9), make_sequence(LOOP, method=method))
    assert (plan.num_draft_tokens > 0) is (method is DraftMethod.MODEL)
    assert bool(plan.lookup_ids) is (method is DraftMethod.NGRAM)


def test_states_are_read_for_sequences_that_the_model_can_draft_for() -> None:
    worker = replace(WORKER, max_model_len=100, reads_states=True)

    def reads_states(rate: float, prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> bool:
        return plan_of(make_drafting(rate), make_sequence(prompt, **fields), worker).reads_states

    assert reads_states(0.9)
    assert not reads_states(0.01)  # decodes plainly
    assert reads_states(0.01, adaptive=False, method=DraftMethod.MODEL)
    assert not reads_states(0.9, adaptive=False, method=DraftMethod.NGRAM)
    assert not reads_states(0.9, (1,) * 100)  # longer than the draft's maximum


@pytest.mark.parametrize("method", [DraftMethod.MODEL, DraftMethod.NGRAM])
@pytest.mark.parametrize("rate", [0.01, 0.9])
def test_fixed_lengths_are_limited_beside_adaptive_ones(method: DraftMethod, rate: float) -> None:
    drafting = make_drafting(rate)
    fixed = make_sequence(LOOP, number=2, k=16, adaptive=False, method=method)

    def length(*others: Sequence) -> int:
        plan = drafting.plan_round([fixed, *others], WORKER)[2]
        return plan.num_draft_tokens or len(plan.lookup_ids)

    limit = max(4, len(drafting.lengths.plan.steps))
    assert length(make_sequence()) == length(make_sequence(), make_sequence(number=3, adaptive=False)) == limit
    assert length() == length(make_sequence(number=3, k=16, adaptive=False)) == 16
    short = make_sequence(number=4, k=2, adaptive=False, method=DraftMethod.MODEL)
    assert drafting.plan_round([make_sequence(), short], WORKER)[4].num_draft_tokens == 2


@pytest.mark.parametrize(("rate", "prefills"), [(0.9, True), (0.01, False)])
def test_the_draft_prefills_only_sequences_that_it_will_draft_for(rate: float, prefills: bool) -> None:
    sequence = make_sequence(tuple(range(40)))
    sequence.target.commit(0)
    sequence.draft.commit(0)
    plans = make_drafting(rate, number=7).plan_round([sequence], WORKER)
    items = Round(1, [sequence], 128, plans).propose_items(lambda _: WorkerInfo(max_model_len=1000, vocab_size=1000))
    assert bool(items) is prefills
    assert all(item.num_draft_tokens == 0 for item in items)


def test_a_large_draft_lag_is_caught_up_only_where_it_pays() -> None:
    drafting = make_drafting(rate=0.5)
    drafting.costs.draft = StepTimes({1: 0.003, 1000: 3.0})
    for _ in range(PLAN_ROUNDS):
        near = plan_of(drafting, make_sequence(tuple(range(900))))
    assert near.num_draft_tokens
    far = make_sequence(tuple(range(900)))
    far.draft.commit(0)
    assert plan_of(drafting, far).num_draft_tokens == 0


# --- Verification of drafts


def test_only_likely_tokens_are_verified() -> None:
    sequence = make_sequence()
    round_ = Round(1, [sequence], 128, {1: DraftPlan(8, min_chance=0.3, next_chance=0.5)})
    (proposed,) = round_.propose_items(lambda _: WorkerInfo(max_model_len=1000, vocab_size=1000))
    assert (proposed.num_draft_tokens, proposed.min_chance, proposed.next_chance) == (8, 0.3, 0.5)
    round_.take_proposals([proposal_of(sequence, (4, 5, 6), (0.9, 0.6, 0.4))], 1000)
    (item,) = round_.verify_items()
    assert item.draft_token_ids == (4, 5)
    (commit,) = round_.commit([Verdict(1, ItemStatus.OK, (4, 5, 6), 5)])
    assert (commit.drafted, commit.accepted) == (2, 2)
    assert sequence.draft.num_cached_tokens == 3, "all proposed tokens were right, so the cache is kept"


def test_prompt_lookup_replaces_a_failed_draft() -> None:
    sequence = make_sequence()
    lookup = Lookup((5, 6, 7), (0.5,) * 3, run=2)
    round_ = Round(1, [sequence], 128, {1: DraftPlan(8, lookup_ids=(5, 6), lookup=lookup)})
    assert round_.propose_items(lambda _: WorkerInfo(max_model_len=1000, vocab_size=1000))
    (item,) = round_.verify_items()
    assert item.draft_token_ids == (5, 6)
    (commit,) = round_.commit([Verdict(1, ItemStatus.OK, (5, 7), 4)])
    assert (commit.drafted, commit.accepted, commit.method) == (2, 1, DraftMethod.NGRAM)
    assert commit.lookup == lookup


@pytest.mark.parametrize(("k", "expected"), [(0, 0), (4, 8), (16, 32), (20, 32), (1024, 1024)])
def test_lookups_may_be_longer_than_drafts_of_the_model(k: int, expected: int) -> None:
    assert max_lookup_tokens(k) == expected


# --- Learning


def sequences_with_rates(drafting: Drafting) -> set[int]:
    """Sequences with an acceptance rate of their own for prompt lookup."""
    return set(drafting.sources.sequence.rates._sequences)


def test_first_unverified_token_counts_with_its_probability() -> None:
    drafting, sequence = make_drafting(), make_sequence()
    proposal = proposal_of(sequence, (4, 5), (0.9, 0.1))
    for _ in range(200):
        drafting.observe(Commit(sequence, (4, 9), str, (), 1, 1, DraftMethod.MODEL, proposal))
    assert drafting.lengths.acceptance.rate(1) == pytest.approx(0.55, abs=0.03)


def test_costs_are_learned_from_rounds() -> None:
    drafting, sequence = Drafting(max_num_draft_tokens=8), make_sequence()
    items = [VerifyItem(1, 2, (3,), draft_token_ids=(4, 5, 6))]
    call = DraftCall(
        draft_steps([ProposeItem(1, 2, (3,), num_draft_tokens=3)], [proposal_of(sequence, (4, 5, 6))]),
        Timed(0.0303, 0.03),
    )
    for _ in range(300):
        drafting.observe_round(RoundOutcome(items, Timed(0.0503, 0.05), [], [call]))
    assert drafting.costs.verify(4) == pytest.approx(0.05, rel=0.02)
    assert drafting.costs.draft(1) == pytest.approx(0.01, rel=0.02)
    assert drafting.costs.exchange == pytest.approx(0.0003, rel=0.1)


def test_prefill_does_not_change_cost_estimates() -> None:
    drafting, sequence = Drafting(max_num_draft_tokens=8), make_sequence()
    before = dict(drafting.costs.verify.points), dict(drafting.costs.draft.points)
    items = [VerifyItem(1, 0, tuple(range(99)), prefill_only=True)]
    call = DraftCall(draft_steps([ProposeItem(1, 0, tuple(range(99)))], [proposal_of(sequence, ())]), Timed(9.0, 9.0))
    drafting.observe_round(RoundOutcome(items, Timed(9.0, 9.0), [], [call]))
    assert (drafting.costs.verify.points, drafting.costs.draft.points) == before


def observed(
    drafting: Drafting, *, drafted: bool, seconds: float, is_quiet: bool = True, adaptive: bool = True
) -> None:
    """A round of one sequence: 5 ms per call in messages, 20 ms of verification, and 10 ms of drafting."""
    sequence = make_sequence(adaptive=adaptive)
    tokens = (4,) if drafted else ()
    outcome = RoundOutcome([VerifyItem(1, 2, (3,), draft_token_ids=tokens)], Timed(0.025, 0.02), [])
    outcome.commits = [Commit(sequence, (9,), str)]
    outcome.is_quiet = is_quiet
    if drafted:
        proposal = proposal_of(sequence, tokens)
        outcome.commits = [commit_of(sequence, (9,), proposal)]
        outcome.called_draft = True
        outcome.draft_calls = [DraftCall((1,), Timed(0.015, 0.01))]
    drafting.observe_round(outcome)
    drafting.observe_seconds(outcome, seconds)


def test_plain_rounds_teach_how_long_the_target_waits_between_them() -> None:
    drafting = Drafting(max_num_draft_tokens=8)
    for _ in range(200):
        observed(drafting, drafted=False, seconds=0.0203)
        observed(drafting, drafted=True, seconds=0.043)
    assert drafting.costs.exchange == pytest.approx(0.005, rel=0.1)
    assert drafting.costs.plain_exchange == pytest.approx(0.0003, rel=0.1), "the next round was sent before"
    assert drafting.costs.scheduling == pytest.approx(0.003, rel=0.1)
    assert drafting.costs.seconds(1, []) == pytest.approx(0.0203, rel=0.05)
    assert drafting.costs.seconds(1, [1]) == pytest.approx(0.043, rel=0.05)


def test_pass_times_of_workers_that_disturb_each_other_are_not_learned() -> None:
    drafting = Drafting(max_num_draft_tokens=8)
    before = dict(drafting.costs.verify.points), dict(drafting.costs.draft.points)
    observed(drafting, drafted=True, seconds=0.04, is_quiet=False)
    assert (drafting.costs.verify.points, drafting.costs.draft.points) == before
    observed(drafting, drafted=True, seconds=0.04)
    assert drafting.costs.verify.points != before[0]
    assert drafting.costs.draft.points != before[1]


@pytest.mark.parametrize("adaptive", [True, False])
def test_drafting_pauses_while_adaptive_rounds_lose_time(adaptive: bool) -> None:
    """Only draft lengths that the coordinator chose itself count."""
    drafting = make_drafting(rate=0.9)
    for _ in range(5):
        observed(drafting, drafted=False, seconds=0.025)
    for _ in range(5):
        observed(drafting, drafted=True, seconds=0.2, adaptive=adaptive)
    assert (plan_of(drafting, make_sequence()).num_draft_tokens == 0) is adaptive
    fixed = make_sequence(adaptive=False, k=3, method=DraftMethod.MODEL)
    assert plan_of(drafting, fixed).num_draft_tokens == 3, "requests with a fixed length draft on"


def test_a_plain_round_beside_a_draft_worker_that_does_not_answer_is_no_plain_round() -> None:
    drafting = make_drafting(rate=0.9)
    outcome = RoundOutcome([VerifyItem(1, 2, (3,))], Timed(0.025, 0.02), [Commit(make_sequence(), (9,), str)])
    outcome.called_draft = True
    before = drafting.lengths.ledger.plain.seconds(1)
    for _ in range(5):
        drafting.observe_seconds(outcome, 5.0)
    assert drafting.lengths.ledger.plain.seconds(1) == before


def test_finished_sequences_are_forgotten() -> None:
    drafting, sequence = make_drafting(), make_sequence(LOOP)
    plan = plan_of(drafting, sequence)
    drafting.observe(commit_of(sequence, (5, 6), proposal_of(sequence, (5,)), plan.lookup))
    assert sequences_with_rates(drafting) == {sequence.sequence_id}
    drafting.forget([sequence.sequence_id])
    assert not drafting.sources.sequence._indexes
    assert not drafting.lengths.acceptance._sequences
    assert not sequences_with_rates(drafting)


def test_calibration_corrects_an_overconfident_draft() -> None:
    calibration = Calibration()
    before = calibration.chance(0.55)
    for _ in range(100):
        calibration.add((0.95, 0.95), accepted=0)
    assert calibration.chance(0.97) < 0.15
    assert calibration.chance(0.55) == before, "other confidences keep their chances"


@pytest.mark.parametrize("accepted", range(4))
def test_draft_tokens_after_the_end_count_as_agreed(accepted: int) -> None:
    """A stop does not count against the draft, wherever it cuts a fully accepted round."""
    whole, cut = make_drafting(0.5), make_drafting(0.5)
    for drafting, committed in ((whole, 5), (cut, accepted + 1)):
        sequence = make_sequence()
        proposal = proposal_of(sequence, (4, 5, 6, 7), (0.9,) * 4)
        tokens, dropped = (4, 5, 6, 7, 8)[:committed], 5 - committed
        commit = Commit(sequence, tokens, str, (), 4, committed - 1, DraftMethod.MODEL, proposal, num_dropped=dropped)
        drafting.observe(commit)
    assert cut.lengths.acceptance.overall_rate == whole.lengths.acceptance.overall_rate
    assert cut.calibration.chances == whole.calibration.chances


def test_draft_models_learn_separately() -> None:
    """Each draft model has its own acceptance and calibration. A moved sequence starts with the rate of its new one."""
    current, new = DraftModel(("", "a"), max_model_len=1000), DraftModel(("", "b"), max_model_len=2)
    drafting, sequence = make_drafting(), make_sequence(number=7)
    drafting.assign([sequence], [current])
    for _ in range(100):
        proposal = proposal_of(sequence, (4, 5), (0.95, 0.95))
        drafting.observe(Commit(sequence, (9,), str, (), 2, 0, DraftMethod.MODEL, proposal))
    rates = drafting.lengths.acceptance
    assert rates.rate(7) < 0.1
    others = [make_sequence(number=number) for number in (8, 9)]
    drafting.assign(others[:1], [new])
    drafting.assign(others[1:], [current])
    assert rates.rate(8) == FIRST_RATE, "nothing is inherited from the other draft"
    assert rates.rate(9) < 0.1
    assert current.calibration.chance(0.95) < 0.2 < new.calibration.chance(0.95)
    assert sequence.draft.model is current
    drafting.assign([sequence], [new])
    assert (sequence.draft.model, rates.rate(7)) == (new, FIRST_RATE)
    assert current.evidence.rate.mean < 0.3 < new.evidence.rate.mean
    assert not plan_of(drafting, sequence, replace(WORKER, max_model_len=0)).num_draft_tokens, "it is too long for it"
    drafting.forget([7, 8, 9])
    assert not rates._drafts


# --- Tokens that a grammar forces


def make_constrained(**fields: object) -> Sequence:
    return make_sequence(sampling=SamplingParams(grammar="g"), **fields)


def forced_commit(sequence: Sequence, accepted: int) -> Commit:
    return Commit(sequence, (0,) * (accepted + 1), str, forced=3, accepted_forced=accepted)


def test_forced_tokens_are_asked_for_while_they_pay() -> None:
    drafting = make_drafting(0.9)
    assert plan_of(drafting, make_constrained()).allows_forced_tokens
    drafting.costs.verify = StepTimes({1: 0.02, 64: 1.2})  # a row costs almost as much as a pass
    for _ in range(100):
        drafting.observe(forced_commit(make_constrained(), 0))
    rounds = 0
    for _ in range(1000):
        rounds += plan_of(drafting, make_constrained()).allows_forced_tokens
        drafting.lengths.ledger.observe(1, 1, 0.02, None)
    assert 4 <= rounds <= 50  # trials
    assert plan_of(drafting, make_constrained(adaptive=False)).allows_forced_tokens
    for _ in range(200):
        drafting.observe(forced_commit(make_constrained(), 3))
    assert plan_of(drafting, make_constrained()).allows_forced_tokens


def test_forced_tokens_say_nothing_about_the_draft_model_nor_about_plain_rounds() -> None:
    drafting, sequence = make_drafting(0.9), make_constrained()
    before = drafting.lengths.acceptance.overall_rate
    commit = forced_commit(sequence, 0)
    drafting.observe(commit)
    assert drafting.lengths.acceptance.overall_rate == before
    item = VerifyItem(sequence.sequence_id, 2, (3,), max_draft_tokens=8)
    outcome = RoundOutcome([item], Timed(0.02, 0.02), [commit])
    assert outcome.rows == {sequence.sequence_id: 4}
    assert not outcome.is_comparable


# --- Rounds in which the model rests


def test_a_model_that_rests_is_still_tried_with_states_before() -> None:
    """Rounds between plans are planned without the model's options, and count towards its trials."""
    drafting, sequence = make_drafting(rate=0.02), make_sequence(method=DraftMethod.MODEL)
    worker, reads, trials, rests = replace(WORKER, reads_states=True), list[bool](), list[int](), 0
    for number in range(3000):
        rests += drafting.lengths.rests(1)
        plan = plan_of(drafting, sequence, worker)
        reads.append(plan.reads_states)
        if plan.num_draft_tokens:
            assert plan.is_trial
            trials.append(number)
            drafting.lengths.acceptance.add(sequence.sequence_id, 1, 0)
        drafting.lengths.ledger.observe(1, 1, 0.02, None)
    assert len(trials) > 10
    assert rests > 1500
    assert all(all(reads[number - STATES_BEFORE_TRIAL : number + 1]) for number in trials)
    assert sum(reads) <= len(trials) * (STATES_BEFORE_TRIAL + 1) + STATES_BEFORE_TRIAL
