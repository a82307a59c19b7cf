"""Draft orders for each round: their lengths and methods, and what is learned from how a round went. Pure."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from coordinator.drafting.acceptance import Calibration
from coordinator.drafting.costs import UNKNOWN_DRAFT, UNKNOWN_VERIFY, RoundCosts, StepTimes
from coordinator.drafting.draft_lengths import DraftLengths, DraftOptions, expected_tokens
from coordinator.drafting.lookup import PromptLookup
from coordinator.scheduling.commits import Commit, DraftOrder
from coordinator.scheduling.counters import Timed
from coordinator.scheduling.sequence import DRAFT_MAY_LACK, DraftMethod, Sequence
from specpool.protocol.rounds import Proposal, ProposeItem, VerifyItem

# Most rounds over which the cost of catching up the draft worker is spread.
CATCH_UP_ROUNDS = 32
# The least `min_chance`, even where verifying one more token seems to cost nothing.
LEAST_MIN_CHANCE = 0.02
# Seconds of a message to a worker and its answer: the first estimate, and the share of it that each round replaces.
FIRST_EXCHANGE, EXCHANGE_PER_ROUND = 0.0015, 0.05
# The gain that two groups in turns must promise over one.
OVERLAP_GAIN = 0.05
# Draft tokens that a request may always fix, also in rounds with requests that get as many as save time.
LEAST_FIXED = 4
# Drafting ahead is of use if all drafts of a round are accepted: the least chance of that.
LEAST_CHANCE_AHEAD = 0.1


@dataclass(frozen=True)
class DraftWorker:
    """The draft worker when a round begins."""

    max_model_len: int
    round_id: int


@dataclass(frozen=True)
class SpeculationState:
    """The figures that draft lengths are chosen by now, as `specpool.v1.SpeculationState` documents them."""

    draft_steps: int
    expected_tokens_per_s: float
    plain_tokens_per_s: float
    model_acceptance_rate: float
    ngram_acceptance_rates: dict[int, float]
    draft_step_s: float
    verify_s: float
    verify_row_s: float
    exchange_s: float


class Drafting:
    """Draft orders, round after round. `longest`: most draft tokens of a sequence whose request fixes no number."""

    def __init__(self, longest: int, costs: RoundCosts | None = None) -> None:
        costs = costs or RoundCosts(StepTimes(UNKNOWN_DRAFT), StepTimes(UNKNOWN_VERIFY), FIRST_EXCHANGE)
        self.lengths = DraftLengths(costs, longest)
        self.lookup = PromptLookup()
        self.calibration = Calibration()
        self._depth = 0
        """Draft steps of the last round."""

    @property
    def costs(self) -> RoundCosts:
        """The costs of rounds, as believed now."""
        return self.lengths.costs

    def orders(self, group: Items[Sequence], worker: DraftWorker | None) -> dict[int, DraftOrder]:
        """The draft order of each sequence id; without a draft worker only prompt lookup drafts.

        In a round with requests that fix no number of draft tokens, a request that does gets no more than the plan has
        or `LEAST_FIXED`, whichever is more: the others would wait for draft steps that save them no time.
        """
        options = {s.sequence_id: self._options(s, worker) for s in group}
        lengths = [len(sequence.token_ids) for sequence in group]
        self.costs.verify.cached = self.costs.draft.cached = sum(lengths) / len(lengths)
        adaptive = {s.sequence_id: options[s.sequence_id] for s in group if s.request.adaptive}
        chosen = self.lengths.choose(adaptive) if adaptive else {}
        most = max(LEAST_FIXED, len(self.lengths.plan.steps)) if adaptive else None
        orders = {
            s.sequence_id: self._adaptive(s, chosen[s.sequence_id])
            if s.request.adaptive
            else self._fixed(s, options[s.sequence_id], most)
            for s in group
        }
        if not any(order.num_draft_tokens for order in orders.values()):
            self._depth = 0
        return orders

    def observe(self, commit: Commit) -> None:
        """Learns from the verified draft tokens of a sequence."""
        self.lookup.observe(commit.sequence.sequence_id, commit.token_ids)
        if commit.proposal is not None and commit.proposal.draft_token_ids:
            self._observe_model(commit, commit.proposal)

    def _observe_model(self, commit: Commit, proposal: Proposal) -> None:
        drafted, accepted = (commit.drafted, commit.accepted) if commit.method is DraftMethod.MODEL else (0, 0)
        self.calibration.add(proposal.confidences[:drafted], accepted)
        doubted = proposal.confidences[drafted : drafted + 1]
        if accepted == drafted and doubted:  # a token that was not verified counts as the draft believes
            chance = self.calibration.chance(doubted[0])
            self.lengths.acceptance.add(commit.sequence.sequence_id, drafted + 1, accepted + chance)
        else:
            self.lengths.acceptance.add(commit.sequence.sequence_id, drafted, accepted)

    def observe_verification(self, items: Items[VerifyItem], timed: Timed) -> None:
        """Learns from the time of a verification."""
        self._observe_exchange(timed)
        if all(len(item.token_ids) == 1 for item in items):
            self.costs.verify.observe(sum(1 + len(item.draft_token_ids) for item in items), timed.forward)

    def observe_proposals(self, items: Items[ProposeItem], proposals: Items[Proposal], timed: Timed) -> None:
        """Learns from the time of a round's draft steps."""
        self._observe_exchange(timed)
        lengths = [len(proposal.draft_token_ids) for proposal in proposals]
        if any(lengths) and all(len(item.token_ids) <= DRAFT_MAY_LACK for item in items):
            self._depth = max(lengths)
            steps = [sum(k > j for k in lengths) for j in range(self._depth)]
            self.costs.draft.observe_steps(steps, timed.forward)

    def _observe_exchange(self, timed: Timed) -> None:
        self.costs.exchange += EXCHANGE_PER_ROUND * (timed.wire - self.costs.exchange)

    def halves_pay(self, sequences: int) -> bool:
        """Whether two halves in turns, one drafted for while the other is verified, gain more than all at once."""
        depth, costs = self._depth, self.costs
        if not depth or sequences < 2:
            return False
        half = -(-sequences // 2)
        draft = depth * costs.draft(half) + costs.exchange
        verify = costs.verify(half * (1 + depth)) + costs.exchange
        turn = max(2 * draft, 2 * verify, draft + verify)
        return turn * (1 + OVERLAP_GAIN) < costs.seconds(sequences, [sequences] * depth)

    def steps_beside(self, items: Items[VerifyItem]) -> int:
        """Draft steps for these sequences that take no longer than verifying them; 0 if hardly of use."""
        rates = (self.lengths.acceptance.rate(item.sequence_id) ** (1 + len(item.draft_token_ids)) for item in items)
        if math.prod(rates) < LEAST_CHANCE_AHEAD:
            return 0
        seconds = self.costs.verify(sum(1 + len(item.draft_token_ids) for item in items)) - self.costs.exchange
        return int(seconds / self.costs.draft(len(items)))

    def state(self) -> SpeculationState:
        """The figures that the next round's lengths will be chosen by."""
        costs, plan, sequences = self.costs, self.lengths.plan, max(1, self.lengths.plan.sequences)
        return SpeculationState(
            draft_steps=len(plan.steps),
            expected_tokens_per_s=plan.speed,
            plain_tokens_per_s=sequences / costs.seconds(sequences, []),
            model_acceptance_rate=self.lengths.acceptance.rate_of_all,
            ngram_acceptance_rates={run: acceptance.rate_of_all for run, acceptance in self.lookup.acceptance.items()},
            draft_step_s=costs.draft(1),
            verify_s=costs.verify(1),
            verify_row_s=costs.verify(sequences + 1) - costs.verify(sequences),
            exchange_s=costs.exchange,
        )

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops what is known of sequences that have ended."""
        sequence_ids = list(sequence_ids)
        self.lookup.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self.lengths.acceptance.forget(sequence_id)

    def _options(self, sequence: Sequence, worker: DraftWorker | None) -> DraftOptions:
        limit = self._limit(sequence)
        return DraftOptions(
            limit=limit,
            has_model=_can_ask(sequence, worker),
            lacking=max(0, len(sequence.token_ids) - sequence.draft_base_length - DRAFT_MAY_LACK),
            catch_up_rounds=max(1, min(CATCH_UP_ROUNDS, sequence.max_num_draft_tokens)),
            lookup_ids=self.lookup.look_up(sequence, limit).token_ids,
            lookup_rate=self.lookup.rate(sequence),
        )

    def _limit(self, sequence: Sequence) -> int:
        """Draft tokens that the sequence can use."""
        longest = self.lengths.longest if sequence.request.adaptive else sequence.max_num_draft_tokens
        return max(0, min(longest, sequence.max_num_draft_tokens))

    def _adaptive(self, sequence: Sequence, order: DraftOrder) -> DraftOrder:
        plan = self.lengths.plan
        if not order.num_draft_tokens or not plan.shares or not sequence.request.sampling.is_argmax:
            return order
        # The plan says that drafting pays; how far it does this time, the draft knows better than an average.
        return replace(
            order,
            num_draft_tokens=self._limit(sequence),
            min_chance=min(1.0, max(LEAST_MIN_CHANCE, plan.row)),
            next_chance=self.lengths.acceptance.rate(sequence.sequence_id),
        )

    @property
    def hints(self) -> tuple[list[float], float]:
        """Hints for the draft worker: the chances by its probabilities, and the tokens that a draft step must gain."""
        return self.calibration.chances, self.lengths.plan.speed * self.costs.draft(1)

    def _fixed(self, sequence: Sequence, options: DraftOptions, most: int | None) -> DraftOrder:
        """The number of tokens that the request asks for, up to `most`, by the method that is expected to be right more
        often."""
        k = options.limit if most is None else min(options.limit, most)
        rate = self.lengths.acceptance.rate(sequence.sequence_id)
        better = options.lookup_ids and expected_tokens(options.lookup_rate, k) > expected_tokens(rate, k)
        num_draft_tokens = k if options.has_model and not better else 0
        return DraftOrder(num_draft_tokens, lookup_ids=options.lookup_ids[:k])


def _can_ask(sequence: Sequence, worker: DraftWorker | None) -> bool:
    """Whether the draft worker can draft for a sequence."""
    return (
        worker is not None
        and sequence.request.method is not DraftMethod.NGRAM
        and len(sequence.token_ids) < worker.max_model_len
        and worker.round_id >= sequence.draft_rests_until
    )
