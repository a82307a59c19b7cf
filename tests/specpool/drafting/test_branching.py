"""How many branches to draft during a verification, and how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.drafting.branching import Branching, BranchPlan
from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.drafting.draft_lengths import PLAN_ROUNDS, ROUNDS_WITH_BRANCHES, DraftLengths, DraftOptions
from specpool.drafting.drafting import Drafting
from specpool.drafting.ledger import FREE_TRIALS
from specpool.drafting.plans import DraftMethod, DraftPlan
from specpool.drafting.sequences import DraftWorker
from specpool.protocol.rounds import MAX_ITEM_BRANCHES, ItemStatus, Proposal

LENGTHS = range(1, 17)


def line(first: float, more: float) -> StepTimes:
    """Milliseconds of the first row, and of each further one."""
    return StepTimes({1: first / 1000, 1025: (first + 1024 * more) / 1000})


def costs(draft: float = 0.8, draft_row: float = 0.01) -> RoundCosts:
    return RoundCosts(line(draft, draft_row), line(6.0, 0.03), exchange=0.001)


def commit(branch: int | None, num_branches: int) -> Commit:
    request = GenerationRequest("r", (1,), 9, frozenset(), 4)
    return Commit(Sequence(1, request), (2,), str, branch=branch, num_branches=num_branches)


def test_more_branches_are_drafted_while_the_draft_fits_into_the_verification() -> None:
    cheap, costly = (Branching(costs(draft)).best(8, 8, 0.75, 64, LENGTHS) for draft in (0.8, 3.0))
    assert cheap.num_branches > costly.num_branches
    assert cheap.length > costly.length >= 1


def test_branches_that_never_come_true_are_not_drafted() -> None:
    branching = Branching(costs())
    for _ in range(400):
        branching.observe(commit(0, 8))
    fresh = Branching(costs()).best(8, 8, 0.75, 64, LENGTHS)
    assert branching.best(8, 8, 0.75, 64, LENGTHS).num_branches < fresh.num_branches
    assert branching.coverage(1) == pytest.approx(1, abs=0.1)
    for _ in range(400):
        branching.observe(commit(None, 8))
    assert branching.coverage(8) < 0.2


@given(
    sequences=st.integers(1, 64),
    share=st.floats(0, 1),
    rate=st.floats(0, 1),
    max_branches=st.integers(0, 64),
    outcomes=st.lists(st.one_of(st.none(), st.integers(0, 7)), max_size=50),
)
def test_plans_stay_within_their_limits(
    sequences: int, share: float, rate: float, max_branches: int, outcomes: list[int | None]
) -> None:
    branching, drafting = Branching(costs()), round(share * sequences)
    for outcome in outcomes:
        branching.observe(commit(outcome, 8))
    plan = branching.best(sequences, drafting, rate, max_branches, LENGTHS)
    assert 0 <= branching.coverage(8) <= 1
    if not drafting or not max_branches:
        assert plan == BranchPlan()
    else:
        assert plan.num_branches <= MAX_ITEM_BRANCHES
        assert plan.num_branches <= max_branches
        assert plan.length in LENGTHS
        assert plan.speed > 0
        assert plan.row >= 0


def lengths_after_trials(max_branches: int, **options: int) -> tuple[DraftLengths, dict[int, DraftPlan]]:
    """Draft lengths after plain rounds, trials and the first plan, and the plans of the next round."""
    lengths = DraftLengths(costs(), 16)
    offered = {i: DraftOptions(max_num_draft_tokens=16, **options) for i in range(8)}
    trials = []
    for _ in range(8 * PLAN_ROUNDS):
        plans = lengths.choose(offered, max_branches=max_branches)
        drafted = sum(plan.num_draft_tokens for plan in plans.values())
        if drafted and not lengths.uses_model:
            trials.append(plans[0])
        tokens, seconds = (8, 0.0063) if not drafted else (20, 0.009)
        lengths.ledger.observe(8, tokens, seconds, DraftMethod.MODEL if drafted else None)
    assert len(trials) >= FREE_TRIALS
    assert all((trial.num_branches > 0) == (max_branches > 0) for trial in trials)
    return lengths, lengths.choose(offered, max_branches=max_branches)


def test_branches_are_chosen_where_they_beat_drafts_before_the_verification() -> None:
    lengths, plans = lengths_after_trials(max_branches=64)
    assert lengths.branches.speed > lengths.plan.speed
    assert {plan.num_branches for plan in plans.values()} == {lengths.branches.num_branches}
    assert all(1 <= plan.num_draft_tokens <= lengths.branches.length for plan in plans.values())


def test_without_branches_drafts_come_before_the_verification() -> None:
    lengths, plans = lengths_after_trials(max_branches=0)
    assert lengths.branches == BranchPlan()
    assert all(plan.num_draft_tokens and not plan.num_branches for plan in plans.values())


def test_a_draft_that_cannot_branch_takes_no_branches_from_others() -> None:
    """It sometimes drafts before the verification, so that its acceptance is known."""
    lengths, _ = lengths_after_trials(max_branches=64)
    offered = {i: DraftOptions(max_num_draft_tokens=16, can_branch=i > 0) for i in range(8)}
    rounds = [lengths.choose(offered, max_branches=64) for _ in range(4 * ROUNDS_WITH_BRANCHES)]
    assert not any(plans[0].num_branches for plans in rounds)
    without = [plans for plans in rounds if not any(plan.num_branches for plan in plans.values())]
    assert 1 <= len(without) <= 4
    assert all(plan.num_draft_tokens for plans in without for plan in plans.values())


def test_a_paused_model_drafts_no_branches() -> None:
    lengths, _ = lengths_after_trials(max_branches=64)
    offered = {i: DraftOptions(max_num_draft_tokens=16) for i in range(8)}
    drafted = []
    for _ in range(40):  # rounds that draft take four times as long as plain ones, and gain nothing
        plans = lengths.choose(offered, max_branches=64)
        drafted.append(any(plan.num_draft_tokens for plan in plans.values()))
        lengths.ledger.observe(8, 8, 0.025 if drafted[-1] else 0.0063, DraftMethod.MODEL if drafted[-1] else None)
    assert drafted[0]
    assert not any(drafted[-10:])


def test_trials_with_branches_notice_that_the_draft_has_become_good() -> None:
    """A trial verifies in its second round what it has drafted in the first one."""
    drafting, sequence = (
        Drafting(16, costs()),
        Sequence(1, GenerationRequest("r", (1, 2), 9000, frozenset(), 16, adaptive=True)),
    )
    worker, drafted, rate = DraftWorker(9000, 1, max_branches=8), False, 0.0
    for number in range(4000):
        rate = 0.05 if number < 300 else 1.0
        plan = drafting.plan_round([sequence], worker)[1]
        verified = min(1, plan.num_draft_tokens) if drafted and plan.num_branches else 0
        drafted = plan.num_branches > 0
        assert plan.num_draft_tokens or not plan.num_branches
        accepted = verified if number * 0.377 % 1 < rate else 0
        proposal = Proposal(1, ItemStatus.OK, (7,) * verified, 0, (0.9,) * verified) if verified else None
        method = DraftMethod.MODEL if verified else None
        tokens, branches = (9,) * (1 + accepted), plan.num_branches
        drafting.observe(
            Commit(sequence, tokens, str, (), verified, accepted, method, proposal, branch=0, num_branches=branches)
        )
        drafting.lengths.ledger.observe(
            1, len(tokens), 0.0075 if branches else 0.0063, DraftMethod.MODEL if branches else None
        )
        if number > 300 and drafting.lengths.branches.num_branches:
            return
    pytest.fail("branches were never used")


def test_a_worker_that_no_longer_drafts_branches_gets_a_new_plan() -> None:
    lengths, _ = lengths_after_trials(max_branches=64)
    offered = {i: DraftOptions(max_num_draft_tokens=16) for i in range(8)}
    assert not any(plan.num_branches for plan in lengths.choose(offered, max_branches=0).values())
