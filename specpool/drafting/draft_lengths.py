"""Adaptive draft lengths: how many tokens each sequence drafts, and with which method, to maximize tokens/s. Pure.

The expected gain of a draft token is the probability that it and all draft tokens before it are accepted. It costs a
row of the verification. A token of the draft model also costs a share of a draft step. If no draft token pays off,
nothing is drafted. If the draft worker can draft during a verification, `Branching` plans branches where they are
faster. The ledger pauses methods that lose time despite the plan.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from specpool.drafting.acceptance import (
    FIRST_RATE,
    AcceptanceRates,
    expected_gain,
    expected_tokens,
    likely_tokens,
    rate_bin,
    rate_of,
)
from specpool.drafting.branching import Branching, BranchPlan
from specpool.drafting.costs import RoundCosts
from specpool.drafting.ledger import MIN_GAIN, Ledger
from specpool.drafting.plans import (
    MAX_DRAFT_LAG,
    NO_DRAFTS,
    NO_LOOKUP,
    DraftMethod,
    DraftPlan,
    Lookup,
    LookupSource,
)
from specpool.drafting.round_plans import HYSTERESIS, Batch, RoundPlan, profitable_length

# Rounds between plans, which cost more time than a round's own choices.
PLAN_ROUNDS = 8
# Draft lag, in tokens, that costs next to nothing to catch up with.
SMALL_LAG = 4 * MAX_DRAFT_LAG
# Rounds before a trial in which the target worker returns hidden states: a draft that reads few of them drafts badly.
STATES_BEFORE_TRIAL = PLAN_ROUNDS // 2
# Rounds with branches before one without, if some drafts cannot branch. The latter need rounds to show their worth.
ROUNDS_WITH_BRANCHES = 32


class DraftOptions(NamedTuple):
    """Draft tokens available to a sequence in the next round."""

    max_num_draft_tokens: int
    has_model: bool = True
    """Whether the draft worker can draft."""
    draft_lag: int = 0
    """Tokens that the draft worker must catch up with first, beyond the usual one or two."""
    catch_up_rounds: int = 1
    """Rounds over which to spread the cost of catching up."""
    lookup: Lookup = NO_LOOKUP
    """Draft tokens of the most promising source."""
    can_branch: bool = True
    """Whether the draft worker can draft branches."""
    is_main: bool = True
    """Whether the sequence's draft model has the most sequences in the round."""

    @property
    def can_use_model(self) -> bool:
        return self.has_model and self.max_num_draft_tokens > 0


@dataclass
class DraftLengths:
    """Chooses draft lengths, and tracks the acceptance of the draft model's tokens."""

    costs: RoundCosts
    max_num_draft_tokens: int
    plan: RoundPlan = field(default_factory=RoundPlan)
    """The current plan for drafts before a verification."""
    branches: BranchPlan = field(default_factory=BranchPlan)
    """The current plan for drafts during a verification; empty if the other plan is faster."""
    reads_states: bool = False
    """Whether the draft reads hidden states of the target, which plain rounds need not return."""
    _age: int = 0
    _num_lookup_tokens: Mapping[int, int] = field(default_factory=dict)
    """Lookup tokens of the last round, by sequence id."""
    _trial_in: int = 0
    """Rounds until the next model trial, while hidden states are collected for it; 0: no trial is scheduled."""
    _tries_model: bool = False
    """Whether the last round is a trial of the model."""
    _tried: tuple[int, ...] = ()
    """Sequences that drafted in a trial in their last round. Their next round verifies the drafts."""
    _allowed_last: tuple[object, ...] = ()
    """Last round's permissions (model, paused lookups, trials only) and branch limit."""
    _with_branches: int = 0
    """Rounds with branches since the last round in which drafts without branches could draft."""
    _is_new: bool = False
    """Whether the model's costs are not confirmed yet, so that it may draft in trials only."""
    _has_model: bool = True
    """Whether the draft worker could draft for a sequence at the model's last chance to draft."""

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceRates(FIRST_RATE)
        self.ledger = Ledger(self.costs)
        self.measures_plain = False
        """Whether the last planned round has no drafts, to measure the time of plain decoding."""
        self.branching = Branching(self.costs)
        self._lookup_row = 0.0

    @property
    def uses_model(self) -> bool:
        """Whether the draft model drafts, except in trials."""
        return bool(self.plan.steps or self.branches.num_branches)

    @property
    def needs_states(self) -> bool:
        """Whether the draft model drafts now, or soon in a trial."""
        return self.uses_model or self._trial_in > 0 or self._tries_model

    def rests(self, sequences: int) -> bool:
        """Whether the model does not draft in the next round, so that `rest` can replace `choose`."""
        is_known = not self._has_model or not self.ledger.has_free_trial(DraftMethod.MODEL, sequences)
        is_idle = is_known and not (self.uses_model or self._trial_in or self._tried)
        return is_idle and self._age + 1 < PLAN_ROUNDS and not self._has_changed(sequences)

    def rest(self, options: Mapping[int, DraftOptions], batch: int) -> dict[int, DraftPlan]:
        """Plan a round in which the draft model rests. `options`: only sequences with a lookup."""
        self._age, self._tries_model = self._age + 1, False
        paused = self._paused_lookups(batch)
        allowed = {i: option for i, option in options.items() if option.lookup.source not in paused}
        return self._planned(allowed, batch)

    def choose(
        self, options: Mapping[int, DraftOptions], batch: int | None = None, max_branches: int = 0
    ) -> dict[int, DraftPlan]:
        """Choose the draft plan of each sequence. `batch`: sequences of the round if others take part.

        `max_branches`: maximum of a sequence; 0 if the draft worker cannot draft during a verification.
        """
        batch = batch or len(options)
        self._age += 1
        self._tries_model, tried = False, tuple(i for i in self._tried if i in options)
        self._tried = tuple(i for i in self._tried if i not in options)  # a round of new sequences came first
        options = self._allowed(options, batch, max_branches)
        self._has_model = any(option.has_model for option in options.values())
        if self._has_changed(len(options)) or self._age >= PLAN_ROUNDS:
            self.plan, self._age = self._best_plan(options), 0
            self.branches = self._best_branches(options, batch, max_branches)
        plans = self._planned(options, batch)
        if self.branches.num_branches and not self.measures_plain and not self._is_turn_of_others(options):
            plans = {i: self._plan_branches(i, option, plans[i]) for i, option in options.items()}
        elif not self.plan.steps and not self.measures_plain:
            self._run_trials(plans, options, batch, max_branches, tried)
        if self.uses_model:
            self._trial_in = 0
        return plans

    def _is_turn_of_others(self, options: Mapping[int, DraftOptions]) -> bool:
        """Return whether to draft before the verification instead, for the drafts that cannot branch."""
        self._with_branches += any(option.can_use_model and not option.can_branch for option in options.values())
        if self._with_branches <= ROUNDS_WITH_BRANCHES or not self.plan.steps:
            return False
        self._with_branches = 0
        return True

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        gone = set(sequence_ids)
        self._tried = tuple(i for i in self._tried if i not in gone)
        for sequence_id in gone:
            self.acceptance.forget(sequence_id)

    def _has_changed(self, sequences: int) -> bool:
        return abs(sequences - self.plan.sequences) > self.plan.sequences / PLAN_ROUNDS

    def _planned(self, options: Mapping[int, DraftOptions], batch: int) -> dict[int, DraftPlan]:
        """Plan each sequence, without drafts if a plain round is due."""
        self._lookup_row = self._cost_of_lookup_row(batch)
        plans = {i: self._plan_sequence(i, option) for i, option in options.items()}
        self._num_lookup_tokens = {i: len(plan.lookup_ids) for i, plan in plans.items() if not plan.num_draft_tokens}
        self.measures_plain = self.ledger.is_plain_due(batch)
        return dict.fromkeys(options, NO_DRAFTS) if self.measures_plain else plans

    def _cost_of_lookup_row(self, batch: int) -> float:
        """Cost of verifying one more lookup token, in tokens generated in the same time at the recent speed.

        The plan's own speed changes too slowly for short runs of accepted tokens.
        """
        speed = self.ledger.speed(batch)
        if speed is None:
            return self.plan.row
        drafted, verify = max(1, sum(self._num_lookup_tokens.values())), self.costs.verify
        return speed * (verify(batch + drafted) - verify(batch)) / drafted

    def _allowed(
        self, options: Mapping[int, DraftOptions], batch: int, max_branches: int
    ) -> Mapping[int, DraftOptions]:
        """Options without the methods that the ledger has paused. The start or end of a pause forces a new plan."""
        may_use_model, paused = self.ledger.may_draft(DraftMethod.MODEL, batch), self._paused_lookups(batch)
        self._is_new = self._trial_in > 0 or self.ledger.has_free_trial(DraftMethod.MODEL, batch)
        if (allowed := (may_use_model, paused, self._is_new, max_branches)) != self._allowed_last:
            self._allowed_last, self._age = allowed, PLAN_ROUNDS
        if may_use_model and not paused:
            return options
        return {
            i: option._replace(
                has_model=option.has_model and may_use_model,
                lookup=NO_LOOKUP if option.lookup.source in paused else option.lookup,
            )
            for i, option in options.items()
        }

    def _paused_lookups(self, batch: int) -> frozenset[LookupSource]:
        """Sources that the ledger has paused."""
        return frozenset(source for source in LookupSource if not self.ledger.may_draft(source.method, batch))

    def _plan_sequence(self, sequence_id: int, options: DraftOptions) -> DraftPlan:
        """Choose the draft model or the lookup, whichever gains more."""
        plan, rate = self.plan, rate_of(rate_bin(self.acceptance.rate(sequence_id)))
        limit = options.max_num_draft_tokens
        num_draft_tokens = profitable_length(rate, [plan.row + step for step in plan.steps]) if options.has_model else 0
        num_draft_tokens = min(num_draft_tokens, limit)
        lookup_ids = likely_tokens(options.lookup.token_ids, options.lookup.chances, self._lookup_row)
        if not num_draft_tokens and not lookup_ids:
            return NO_DRAFTS
        gain = expected_tokens(rate, num_draft_tokens) - 1
        if num_draft_tokens and lookup_ids:
            gain -= sum(plan.shares[:num_draft_tokens]) + plan.row * num_draft_tokens
            lookup_gain = expected_gain(options.lookup.chances[: len(lookup_ids)])
            lookup_gain -= self._lookup_row * len(lookup_ids)
            return DraftPlan(num_draft_tokens if gain > lookup_gain else 0, lookup_ids=lookup_ids)
        if num_draft_tokens and self._catch_up_seconds(options.draft_lag / options.catch_up_rounds) * plan.speed > gain:
            num_draft_tokens = 0
        return DraftPlan(num_draft_tokens, lookup_ids=lookup_ids)

    def _best_branches(self, options: Mapping[int, DraftOptions], sequences: int, max_branches: int) -> BranchPlan:
        """The fastest plan for branches; empty if drafting before the verification, or not at all, is as fast."""
        drafting = [i for i, option in options.items() if option.can_use_model and option.can_branch]
        if not drafting or not max_branches or self._is_new:
            return BranchPlan()
        rate = sum(map(self.acceptance.rate, drafting)) / len(drafting)
        lengths = range(1, self.max_num_draft_tokens + 1)
        best = self.branching.best(sequences, len(drafting), rate, max_branches, lengths)
        other = self.plan.speed / len(options) * sequences
        min_gain = 0.0 if self.branches.num_branches else HYSTERESIS if self.plan.steps else MIN_GAIN
        return best if best.speed > other * (1 + min_gain) else BranchPlan()

    def _plan_branches(self, sequence_id: int, options: DraftOptions, plan: DraftPlan) -> DraftPlan:
        """Draft branches. Verify the profitable tokens of the matching branch, or the lookup if no branch matches."""
        branches, rate = self.branches, self.acceptance.rate(sequence_id)
        if not options.can_use_model or not options.can_branch:
            return plan
        length = max(1, profitable_length(rate, [branches.row] * branches.length))
        num_draft_tokens = min(length, options.max_num_draft_tokens)
        return DraftPlan(num_draft_tokens, branches.num_branches, lookup_ids=plan.lookup_ids)

    def _catch_up_seconds(self, tokens: float) -> float:
        return self.costs.draft(1 + tokens) - self.costs.draft(1)

    def _best_plan(self, options: Mapping[int, DraftOptions]) -> RoundPlan:
        """Return the fastest plan, assuming that lookups draft for the same sequences as in the last round."""
        lookups = {
            i: min(self._num_lookup_tokens.get(i, 0), len(option.lookup.token_ids)) for i, option in options.items()
        }
        lookup_gain = sum(expected_gain(options[i].lookup.chances[:k]) for i, k in lookups.items() if k)
        drafting = [i for i, option in options.items() if option.can_use_model and not lookups[i]]
        counts = Counter(rate_bin(self.acceptance.rate(i)) for i in drafting)
        batch = Batch(self.costs, len(options), counts, sum(lookups.values()), lookup_gain)
        return batch.best(len(self.plan.steps), 0 if self._is_new else self.max_num_draft_tokens)

    def _run_trials(
        self,
        plans: dict[int, DraftPlan],
        options: Mapping[int, DraftOptions],
        batch: int,
        max_branches: int,
        tried_last: tuple[int, ...],
    ) -> None:
        """Occasionally draft one token for idle sequences, to notice changes in acceptance or cost.

        If possible, draft branches, which cost less time. The next round verifies them, and belongs to the trial. So
        does the round that verifies an own draft.
        """
        num_branches = min(2, max_branches) * all(option.can_branch for option in options.values())
        is_own = self.costs.has_own_draft
        takes_two = num_branches > 0 or is_own
        if takes_two and (again := [i for i in tried_last if options[i].can_use_model]):
            self._tries_model = True
            plans.update(dict.fromkeys(again, DraftPlan(1, num_branches, drafts_next=not is_own, is_trial=True)))
            return
        idle = {
            i: option for i, option in options.items() if option.max_num_draft_tokens > 0 and not plans[i].lookup_ids
        }
        plain = self.costs.seconds(len(options), [])
        if not self._has_model:
            self._trial_in = 0
        if lags := {i: option.draft_lag for i, option in idle.items() if option.has_model}:
            if min(lags.values()) > SMALL_LAG:  # one draft represents all of them
                lags = {i: lag for i, lag in lags.items() if idle[i].is_main} or lags
            min_lag = min(lags.values())
            # All sequences with a small lag, or a single one with a large lag.
            tried = [i for i, lag in lags.items() if lag <= min_lag + 1][: None if min_lag <= SMALL_LAG else 1]
            seconds = self.costs.seconds(len(options), [len(tried)]) - plain
            if num_branches:
                seconds = 2 * (self.branching.seconds(len(options), len(tried), num_branches, 1) - plain)
            seconds += self._catch_up_seconds(min_lag * len(tried))
            gained = sum(map(self.acceptance.rate, tried)) / len(options)
            if self._is_trial_due(batch, seconds / plain, gained):
                self._tries_model = True
                self._tried = tuple(tried) if takes_two else ()
                plans.update(dict.fromkeys(tried, DraftPlan(1, num_branches, is_trial=True)))
            return
        for source in LookupSource:
            lookups = {
                i: option.lookup
                for i, option in idle.items()
                if option.lookup.token_ids and option.lookup.source is source
            }
            if not lookups:
                continue
            seconds = self.costs.seconds(len(options), [], len(lookups)) - plain
            gained = sum(lookup.chances[0] for lookup in lookups.values()) / len(options)
            if self.ledger.may_try(source.method, batch, seconds / plain, gained):
                tried_ids = {i: lookup.token_ids[:1] for i, lookup in lookups.items()}
                plans.update({i: DraftPlan(lookup_ids=ids, is_trial=True) for i, ids in tried_ids.items()})
                return

    def _is_trial_due(self, batch: int, cost: float, gained: float) -> bool:
        """Whether to try the model now; see `Ledger.may_try`. If it reads hidden states, collect them first."""
        if self._trial_in:
            self._trial_in -= 1
            return not self._trial_in
        may_try = self.ledger.may_try(DraftMethod.MODEL, batch, cost, gained)
        self._trial_in = STATES_BEFORE_TRIAL * (may_try and self.reads_states)
        return may_try and not self._trial_in
