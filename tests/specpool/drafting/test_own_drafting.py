"""Plans and costs of own drafts, made by a target worker that carries a draft."""

import random
from dataclasses import dataclass, field
from itertools import takewhile

import pytest
from measured_rounds import confirm_costs, measure_plain_rounds

from coordinator.scheduling.caches import PendingRound
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.drafting.costs import RoundCosts, StepTimes, Timed
from specpool.drafting.draft_lengths import PLAN_ROUNDS
from specpool.drafting.drafting import Drafting
from specpool.drafting.outcome import RoundOutcome
from specpool.drafting.plans import DraftMethod, DraftPlan
from specpool.drafting.sequences import DraftWorker
from specpool.protocol.rounds import ItemStatus, OwnDraft, OwnDraftItem, VerifyItem

OWN = DraftWorker(max_model_len=1000, round_id=1, is_own=True)
SEPARATE = DraftWorker(max_model_len=1000, round_id=1)
EXCHANGE = 0.004


def make_sequence(max_tokens: int = 200, k: int = 8, *, adaptive: bool = True, number: int = 1) -> Sequence:
    request = GenerationRequest("1", (1, 2, 3), max_tokens, frozenset(), k, adaptive=adaptive, method=DraftMethod.MODEL)
    sequence = Sequence(number, request)
    sequence.target.commit(2)
    sequence.draft.commit(2)
    return sequence


def make_costs(draft: float = 0.002) -> RoundCosts:
    costs = RoundCosts(StepTimes({1: draft, 64: 2 * draft}), StepTimes({1: 0.02, 64: 0.04}), EXCHANGE)
    costs.plain_exchange = EXCHANGE / 10
    return costs


def outcome_of(
    plan: DraftPlan, found: int, accepted: int, *, draft: float = 0.0, verify: float = 0.02
) -> RoundOutcome[Commit]:
    """A round that found `found` own draft tokens, and took `draft` seconds to draft for the next round."""
    k = plan.num_draft_tokens
    own = OwnDraftItem(k, k if plan.drafts_next else 0) if k else None
    item = VerifyItem(1, 2, (3,), draft_token_ids=(4,) * found, own_draft=own)
    rows = (1,) * k if draft else ()
    proposal = OwnDraft(1, ItemStatus.OK, (4,) * found, 3, num_verified=found)
    commit = Commit(make_sequence(), (4,) * accepted + (9,), str, (), found, accepted, proposal=proposal)
    commit.method = DraftMethod.MODEL if found else None
    timed = Timed(verify + draft + EXCHANGE, verify, draft=draft, draft_rows=rows)
    return RoundOutcome([item], timed, [commit], is_trial=plan.is_trial)


def test_own_drafts_take_no_messages() -> None:
    costs = make_costs()
    separate = costs.seconds(1, [1, 1])
    costs.has_own_draft = True
    assert costs.seconds(1, [1, 1]) == pytest.approx(2 * costs.draft(1) + costs.verify(3) + EXCHANGE / 10)
    assert separate == pytest.approx(2 * costs.draft(1) + costs.verify(3) + 2 * EXCHANGE)
    costs.plain_exchange = None
    assert costs.seconds(1, [1]) == pytest.approx(costs.draft(1) + costs.verify(2) + EXCHANGE)


def test_costs_are_learned_from_rounds() -> None:
    drafting = Drafting(8, make_costs())
    plan = DraftPlan(3)
    for _ in range(300):
        outcome = outcome_of(plan, 3, 3, draft=0.009, verify=0.03)
        drafting.observe_round(outcome)
        drafting.observe_seconds(outcome, 0.03 + 0.009 + 0.001)
    assert drafting.costs.draft(1) == pytest.approx(0.003, rel=0.02)
    assert drafting.costs.verify(4) == pytest.approx(0.03, rel=0.02)
    assert drafting.costs.plain_exchange == pytest.approx(0.001, rel=0.05)
    assert drafting.costs.exchange == pytest.approx(EXCHANGE, rel=0.05)
    assert drafting.costs.scheduling == 0


@pytest.mark.parametrize("plan", [DraftPlan(), DraftPlan(1), DraftPlan(1, drafts_next=False)])
def test_a_round_uses_the_model_if_it_may_draft_or_verify(plan: DraftPlan) -> None:
    assert outcome_of(plan, 0, 0).method is (DraftMethod.MODEL if plan.num_draft_tokens else None)


def test_a_trial_drafts_in_one_round_and_verifies_in_the_next() -> None:
    drafting, sequence = Drafting(8, make_costs(draft=0.1)), make_sequence()  # too slow to pay off
    confirm_costs(drafting.lengths)
    plans, found = [], 0
    for _ in range(2000):
        plan = drafting.plan_round([sequence], OWN)[1]
        plans.append(plan)
        drafts = plan.num_draft_tokens if plan.drafts_next else 0
        outcome = outcome_of(plan, min(found, plan.num_draft_tokens), 0, draft=0.1 * drafts)
        drafting.observe_round(outcome)
        drafting.observe_seconds(outcome, 0.0204 + 0.1 * drafts)
        found = drafts
    tried = [index for index, plan in enumerate(plans) if plan.num_draft_tokens]
    assert tried
    firsts, seconds = tried[::2], tried[1::2]
    assert [first + 1 for first in firsts] == seconds
    assert all(plans[index].num_draft_tokens == 1 and plans[index].is_trial for index in tried)
    assert all(plans[index].drafts_next for index in firsts)
    assert not any(plans[index].drafts_next for index in seconds)


def test_a_round_of_new_sequences_does_not_end_a_trial() -> None:
    drafting, sequence, newcomer = Drafting(8, make_costs()), make_sequence(), make_sequence(number=2)
    measure_plain_rounds(drafting.lengths)
    assert drafting.plan_round([sequence], OWN)[1].is_trial
    newcomer.draft.back_off(100)
    drafting.plan_round([newcomer], OWN)
    plan = drafting.plan_round([sequence], OWN)[1]
    assert (plan.num_draft_tokens, plan.drafts_next) == (1, False)
    drafting.forget([1, 2])
    assert not drafting.lengths._tried


@dataclass
class Loop:
    """Rounds of one sequence, answered by a worker with these times and this acceptance rate."""

    acceptance: float
    step_seconds: float
    drafting: Drafting = field(default_factory=lambda: Drafting(8, make_costs()))
    found: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def run(self, rounds: int) -> float:
        """Return the mean number of draft tokens per round in the last quarter."""
        drafted = []
        for _ in range(rounds):
            plan = self.drafting.plan_round([make_sequence()], OWN)[1]
            drafts = plan.num_draft_tokens if plan.drafts_next else 0
            found = min(self.found, plan.num_draft_tokens)
            accepted = sum(takewhile(bool, (self.rng.random() < self.acceptance for _ in range(found))))
            verify, draft = self.drafting.costs.verify(1 + found), self.step_seconds * drafts
            outcome = outcome_of(plan, found, accepted, draft=draft, verify=verify)
            self.drafting.observe_round(outcome)
            self.drafting.observe_seconds(outcome, verify + draft + EXCHANGE / 10)
            self.found = drafts
            drafted.append(drafts)
        return sum(drafted[-rounds // 4 :]) / (rounds // 4)


def test_drafting_stops_where_it_does_not_pay_and_resumes_where_it_does() -> None:
    loop = Loop(acceptance=0.9, step_seconds=0.002)
    assert loop.run(400) > 4
    loop.acceptance = 0.0
    assert loop.run(2000) < 0.2
    loop.acceptance = 0.9
    assert loop.run(8000) > 3
    loop.step_seconds = 0.1
    assert loop.run(2000) < 0.2
    loop.step_seconds = 0.002
    assert loop.run(8000) > 3


def test_own_drafts_pay_where_messages_are_slow() -> None:
    lengths = {}
    for worker in (OWN, SEPARATE):
        drafting, sequence = Drafting(8, make_costs(draft=0.006)), make_sequence()
        confirm_costs(drafting.lengths)
        for _ in range(400):
            drafting.lengths.acceptance.add(1, 1, 0.45)
        for _ in range(PLAN_ROUNDS):
            drafting.plan_round([sequence], worker)
        lengths[worker.is_own] = len(drafting.lengths.plan.steps)
    assert lengths[True] > lengths[False] == 0


def test_pending_rounds_do_not_limit_own_drafts() -> None:
    """The worker cuts them at the sequence's maximum length."""
    lengths = {}
    for worker in (OWN, SEPARATE):
        sequence = make_sequence(max_tokens=8, k=4, adaptive=False)
        sequence.target.send(PendingRound(1, VerifyItem(1, 2, (3,), draft_token_ids=(4,) * 4), None))
        lengths[worker.is_own] = Drafting(8, make_costs()).plan_round([sequence], worker)[1].num_draft_tokens
    assert lengths == {True: 4, False: 2}
