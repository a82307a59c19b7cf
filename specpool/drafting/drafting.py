"""Draft planning: plans each round, and learns acceptance rates and costs from its results. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from specpool.drafting.acceptance import Acceptance, Calibration
from specpool.drafting.costs import UNKNOWN_DRAFT, UNKNOWN_VERIFY, RoundCosts, StepTimes
from specpool.drafting.draft_lengths import DraftLengths, DraftOptions
from specpool.drafting.draft_models import DraftModel
from specpool.drafting.draft_shares import DraftShares, Speeds
from specpool.drafting.fixed_lengths import plan_fixed
from specpool.drafting.ledger import MIN_GAIN
from specpool.drafting.outcome import DraftCall, RoundOutcome, expected_lookup_gain
from specpool.drafting.plans import (
    MAX_DRAFT_LAG,
    NO_DRAFTS,
    DraftMethod,
    DraftPlan,
    Lookup,
    SpeculationState,
)
from specpool.drafting.round_plans import HYSTERESIS
from specpool.drafting.sequences import Commit, DraftWorker, Sequence
from specpool.drafting.sources import DraftSources

# Initial estimate of the seconds of a round trip to a worker.
FIRST_EXCHANGE = UNKNOWN_DRAFT[1]
FORCED = "forced"
"""The ledger's name for forced tokens."""
MODEL_METHODS = {DraftMethod.MODEL, DraftMethod.BEST}
"""Methods that include the draft model."""
NO_STATES = NO_DRAFTS._replace(reads_states=False)


class Drafting:
    """Plans how rounds draft, and learns from them."""

    def __init__(
        self,
        max_num_draft_tokens: int,
        costs: RoundCosts | None = None,
        sources: DraftSources | None = None,
        shares: DraftShares | None = None,
    ) -> None:
        """`max_num_draft_tokens`: for sequences with adaptive draft lengths. `sources`: may be shared.

        `shares`: assigns one of several draft models; default: a bandit.
        """
        costs = costs or RoundCosts(StepTimes(UNKNOWN_DRAFT), StepTimes(UNKNOWN_VERIFY), FIRST_EXCHANGE)
        self.lengths = DraftLengths(costs, max_num_draft_tokens)
        self.sources = sources if sources is not None else DraftSources()
        self.calibration = Calibration()
        self.shares = shares if shares is not None else DraftShares()
        self._models: dict[int, DraftModel] = {}
        """The draft model of each sequence that was assigned one."""
        self._forced_tokens = Acceptance()
        self._draft_steps = 0
        """Draft steps that preceded the last round's verification."""

    @property
    def costs(self) -> RoundCosts:
        """Current estimates."""
        return self.lengths.costs

    @property
    def chance(self) -> Callable[[float], float]:
        """Acceptance probability by draft probability."""
        return self.calibration.chance

    @property
    def hints(self) -> tuple[list[float], float]:
        """Acceptance by draft probability of the only draft, and `step_cost`."""
        return self.calibration.chances, self.step_cost

    @property
    def step_cost(self) -> float:
        """Minimum gain of a draft step, in tokens."""
        return self.lengths.plan.speed * self.costs.draft(1)

    @property
    def speeds(self) -> Speeds:
        """Expected speeds of a batch of the current size."""
        return Speeds(self.costs, max(1, self.lengths.plan.sequences), self.lengths.max_num_draft_tokens)

    def assign(self, group: Iterable[Sequence], models: Items[DraftModel]) -> None:
        """Assign a draft model to each sequence that may use one. A sequence keeps its model while the model is ready.

        `models`: all models with a ready worker.
        """
        for sequence in group:
            sequence_id, before = sequence.sequence_id, sequence.draft.model
            if before is not None and before is self._models.get(sequence_id) and before in models:
                continue
            if not sequence.request.num_speculative_tokens or sequence.request.method not in MODEL_METHODS:
                continue
            # A sequence from another target worker has that worker's model object. Match it by key.
            same = (model for model in models if before is not None and model.key == before.key)
            model = next(same, None) or self.shares.choose(models, self.speeds)
            if model is not self._models.get(sequence_id):
                self._end_samples([sequence_id])
            sequence.draft.model = model
            if model is not None:
                self._models[sequence_id] = model
                self.lengths.acceptance.assign(sequence_id, model.acceptance)

    def _end_samples(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            if (model := self._models.pop(sequence_id, None)) is not None:
                self.shares.end(model, [sequence_id])

    def plan_round(
        self,
        group: Items[Sequence],
        worker: DraftWorker | None,
        verify_times: StepTimes | None = None,
        batch: int | None = None,
    ) -> dict[int, DraftPlan]:
        """Return the draft plan of each sequence id. Without a draft model, only lookups draft.

        `verify_times`: like `DraftWorker.step_times`, of the target worker. `batch`: see `observe_seconds`.
        """
        batch = batch or len(group)
        self.costs.verify = verify_times or self.costs.verify
        self.costs.draft = (worker and worker.step_times) or self.costs.draft
        drafting = [sequence for sequence in group if sequence.request.num_speculative_tokens]
        self.sources.index_answers()
        is_own = self.costs.has_own_draft = worker is not None and worker.is_own
        limits = {s.sequence_id: self._max_num_draft_tokens(s, is_own) for s in drafting}
        lookups = {s.sequence_id: self._look_up(s) for s in drafting}
        adaptive = [sequence for sequence in drafting if sequence.request.adaptive]
        rests = bool(adaptive) and self.lengths.rests(len(adaptive))
        counts = Counter(s.draft.model for s in drafting if s.draft.model is not None)
        main = max(counts, key=counts.__getitem__, default=None)
        options = {
            s.sequence_id: self._options(s, worker, lookups[s.sequence_id], limits[s.sequence_id], main)
            for s in drafting
            if not rests or lookups[s.sequence_id].token_ids or not s.request.adaptive
        }
        mean_length = sum(len(sequence.token_ids) for sequence in group) / len(group)
        self.costs.verify.cached = self.costs.draft.cached = mean_length
        plans = dict.fromkeys((sequence.sequence_id for sequence in group), NO_DRAFTS)
        max_branches = 0
        if worker is not None:
            max_branches, costs = worker.max_branches, self.costs
            self.lengths.reads_states = worker.reads_states
            first = costs.exchange + costs.scheduling if costs.ahead_exchange is None else costs.ahead_exchange
            costs.ahead_exchange = first if worker.selects_branches else None
        of_adaptive = {s.sequence_id: options[s.sequence_id] for s in adaptive if s.sequence_id in options}
        if rests:
            plans |= self.lengths.rest(of_adaptive, batch)
        elif adaptive:
            plans |= self.lengths.choose(of_adaptive, batch, max_branches)
            plans |= {
                s.sequence_id: self._plan_adaptive(s, plans[s.sequence_id], limits[s.sequence_id]) for s in adaptive
            }
        if fixed := [sequence for sequence in drafting if not sequence.request.adaptive]:
            of_fixed = {s.sequence_id: options[s.sequence_id] for s in fixed}
            plans |= plan_fixed(self.lengths, of_fixed, len(group), max_branches, bool(adaptive))
        if not any(plan.num_draft_tokens and not plan.num_branches for plan in plans.values()):
            self._draft_steps = 0
        if constrained := [s.sequence_id for s in adaptive if s.request.sampling.may_force_tokens]:
            allowed = self._allows_forced_tokens(len(constrained), batch)
            plans |= {i: plans[i]._replace(allows_forced_tokens=allowed) for i in constrained}
        plans |= {i: plans[i]._replace(lookup=lookup) for i, lookup in lookups.items() if lookup.token_ids}
        if worker is not None and worker.reads_states:
            unread = [s.sequence_id for s in drafting if not self._reads_states(s, options.get(s.sequence_id))]
            plans |= {i: NO_STATES if plans[i] is NO_DRAFTS else plans[i]._replace(reads_states=False) for i in unread}
        return plans

    def observe_round(self, outcome: RoundOutcome[Commit]) -> None:
        """Learn from the results of a round, and from the times that the workers report."""
        for call in outcome.draft_calls:
            if outcome.is_quiet:
                self.observe_draft(call)
            if call.rows and not outcome.drafted_ahead:
                self._draft_steps = len(call.rows)
        if not outcome.continues:  # a continued round waits at the worker, which is not message latency
            self.costs.observe_exchange(outcome.verified.wire)
        if outcome.is_quiet and outcome.all_decode:
            self.costs.verify.observe(sum(outcome.rows.values()), outcome.verified.forward)
        if outcome.is_quiet:
            self.costs.draft.observe_steps(outcome.verified.draft_rows, outcome.verified.draft)
        for commit in outcome.commits:
            self.observe(commit)
            self.lengths.branching.observe(commit)

    def observe_seconds(self, outcome: RoundOutcome[Commit], seconds: float, batch: int | None = None) -> None:
        """Learn from the wall time of a round, since the end of the previous one.

        `batch`: sequences of both groups if two overlap. A plain round would contain all of them. Excludes the time
        spent waiting for other drafts than the main one, which is bounded elsewhere.
        """
        seconds -= outcome.waited
        overlaps = batch is not None and batch > len(outcome.verify_items)
        if not outcome.is_comparable or (overlaps and outcome.method is None):
            return
        sequences = batch if batch is not None and overlaps else len(outcome.verify_items)
        observed = sequences, outcome.num_tokens, seconds, outcome.method, outcome.is_trial
        self.lengths.ledger.observe(*observed, parts=outcome.lookup_parts)
        if not overlaps:
            self._observe_waiting(outcome, seconds)

    def observe(self, commit: Commit) -> None:
        """Learn from the draft tokens of one sequence."""
        sequence_id, proposal = commit.sequence.sequence_id, commit.proposal
        self.sources.observe(commit.sequence, commit.lookup)
        if commit.method is DraftMethod.PREDICTION:
            gained = min(commit.num_agreed, commit.drafted)
            self.sources.prediction.verified(commit.sequence, expected_lookup_gain(commit), gained)
        if commit.forced and commit.num_agreed >= commit.drafted:
            self._forced_tokens.add(commit.forced, commit.num_agreed - commit.drafted)
        if proposal is None or not proposal.draft_token_ids:
            return
        drafted = commit.drafted if commit.method is DraftMethod.MODEL else 0
        accepted, model = min(commit.num_agreed, drafted), commit.sequence.draft.model
        calibration = self.calibration if model is None else model.calibration
        calibration.add(proposal.confidences[:drafted], accepted)
        if model is not None and drafted:
            self.shares.observe(model, sequence_id, drafted, accepted)
        unverified = proposal.confidences[drafted : drafted + 1]
        if accepted == drafted and unverified:  # the first unverified token counts with its probability
            self.lengths.acceptance.add(sequence_id, drafted + 1, accepted + calibration.chance(unverified[0]))
        else:
            self.lengths.acceptance.add(sequence_id, drafted, accepted)

    def observe_draft(self, call: DraftCall) -> None:
        """Learn from the time of a call to the draft worker."""
        self.costs.observe_exchange(call.timed.wire)
        self.costs.draft.observe_steps(call.rows, call.timed.forward)

    def _observe_waiting(self, outcome: RoundOutcome[Commit], seconds: float) -> None:
        """Learn how long the target waits between rounds, and how long the coordinator takes for other rounds."""
        costs, verified = self.costs, outcome.verified
        if not outcome.called_draft:
            costs.observe_plain(seconds - verified.forward - verified.realign - verified.draft)
        elif outcome.ahead_seconds is not None and costs.ahead_exchange is not None:
            calls = sum(call.timed.forward + call.timed.waited for call in outcome.draft_calls)
            costs.observe_ahead(outcome.ahead_seconds - calls)
        else:
            elapsed = [timed.elapsed for timed in outcome.calls]
            costs.observe_scheduling(seconds - (max(elapsed) if outcome.drafted_ahead else sum(elapsed)))

    def overlap_pays(self, sequences: int) -> bool:
        """Whether two alternating groups, one drafting while the other is verified, beat a single group."""
        steps, costs = self._draft_steps, self.costs
        if not steps or sequences < 2:
            return False
        half = -(-sequences // 2)
        draft = steps * costs.draft(half) + costs.exchange
        verify = costs.verify(half * (1 + steps)) + costs.exchange
        cycle = max(2 * draft, 2 * verify, draft + verify)
        return cycle * (1 + MIN_GAIN) < costs.seconds(sequences, [sequences] * steps)

    def state(self) -> SpeculationState:
        costs, plan, sequences = self.costs, self.lengths.plan, max(1, self.lengths.plan.sequences)
        return SpeculationState(
            draft_steps=self.lengths.branches.length or len(plan.steps),
            expected_tokens_per_s=self.lengths.branches.speed or plan.speed,
            plain_tokens_per_s=sequences / costs.seconds(sequences, []),
            model_acceptance_rate=self.lengths.acceptance.overall_rate,
            ngram_acceptance_rates=self.sources.sequence.rates.by_length(),
            draft_step_s=costs.draft(1),
            verify_s=costs.verify(1),
            verify_row_s=costs.verify(sequences + 1) - costs.verify(sequences),
            exchange_s=costs.exchange,
        )

    def forget(self, sequence_ids: Iterable[int]) -> None:
        sequence_ids = list(sequence_ids)
        self._end_samples(sequence_ids)
        self.sources.forget(sequence_ids)
        self.lengths.forget(sequence_ids)

    def _look_up(self, sequence: Sequence) -> Lookup:
        """Return the most promising lookup, including the tokens that pending rounds may yield."""
        limit = sequence.max_num_lookup_tokens
        return self.sources.propose(sequence, limit + sequence.num_pending_tokens if limit > 0 else 0)

    def _options(
        self, sequence: Sequence, worker: DraftWorker | None, lookup: Lookup, limit: int, main: DraftModel | None
    ) -> DraftOptions:
        """`main`: the draft model with the most sequences."""
        model = sequence.draft.model
        return DraftOptions(
            max_num_draft_tokens=limit,
            has_model=_can_draft(sequence, worker),
            draft_lag=max(0, len(sequence.token_ids) - sequence.draft.start - MAX_DRAFT_LAG),
            catch_up_rounds=max(1, limit),
            lookup=lookup.after(sequence.num_pending_tokens),
            can_branch=model is None or model.max_branches > 0,
            is_main=model in (None, main),
        )

    def _allows_forced_tokens(self, constrained: int, batch: int) -> bool:
        """Whether the target worker may append tokens that spell the only text that a grammar allows.

        The target rejects them if it tokenizes that text differently, and each costs a row of the verification.
        """
        if self.lengths.measures_plain:
            return False
        rate, row = self._forced_tokens.rate(1.0), self.lengths.plan.row
        share = constrained / batch
        return rate >= row or self.lengths.ledger.may_try(FORCED, batch, row * share, rate * share)

    def _reads_states(self, sequence: Sequence, options: DraftOptions | None) -> bool:
        """Whether a draft that reads hidden states drafts for a sequence now or soon. `options`: None if it rests."""
        has_model = options is not None and options.has_model
        has_model &= sequence.draft.model is None or sequence.draft.model.features is not None
        return has_model and (not sequence.request.adaptive or self.lengths.needs_states)

    def _max_num_draft_tokens(self, sequence: Sequence, is_own: bool) -> int:
        """Maximum number of draft tokens. Pending rounds do not limit own drafts, which end at `max_length`."""
        if is_own:
            left = sequence.max_length - len(sequence.token_ids) - 1
            num_draft_tokens = min(sequence.request.num_speculative_tokens, left)
        else:
            num_draft_tokens = sequence.max_num_draft_tokens
        if sequence.request.adaptive:
            num_draft_tokens = min(num_draft_tokens, self.lengths.max_num_draft_tokens)
        return max(0, num_draft_tokens)

    def _plan_adaptive(self, sequence: Sequence, plan: DraftPlan, limit: int) -> DraftPlan:
        """The plan of a greedy sequence with the minimum probability of its draft tokens, where drafting pays."""
        round_plan, branches = self.lengths.plan, self.lengths.branches
        if not sequence.request.sampling.is_argmax:
            return plan
        if plan.num_branches:
            length = branches.length or plan.num_draft_tokens  # a trial's
            min_chance = min(1.0, max(HYSTERESIS, branches.row))
            return plan._replace(num_draft_tokens=min(length, limit), min_chance=min_chance)
        if not plan.num_draft_tokens or not round_plan.shares:
            return plan
        # Drafting pays off on average. The draft's own probabilities decide where this draft ends.
        return plan._replace(
            num_draft_tokens=limit,
            min_chance=min(1.0, max(HYSTERESIS, round_plan.row)),
            next_chance=self.lengths.acceptance.rate(sequence.sequence_id),
        )


def _can_draft(sequence: Sequence, worker: DraftWorker | None) -> bool:
    """Whether a draft worker can draft for a sequence."""
    model = sequence.draft.model
    return (
        worker is not None
        and sequence.request.method in MODEL_METHODS
        and len(sequence.token_ids) < (worker.max_model_len if model is None else model.max_model_len)
        and worker.round_id >= sequence.draft.backoff_until
    )
