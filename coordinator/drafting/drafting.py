"""Who drafts what in a round: the chosen lengths, prompt lookup, and what is learned from how it went. Pure."""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from coordinator.counters import Timed
from coordinator.drafting.acceptance import AcceptanceOfAll, Calibration
from coordinator.drafting.costs import UNKNOWN_DRAFT, UNKNOWN_VERIFY, RoundCosts, StepTimes
from coordinator.drafting.draft_lengths import DraftLength, DraftLengths, Options, expected_tokens
from coordinator.drafting.ngrams import LONGEST_RUN, SHORTEST_RUN, NgramIndex
from coordinator.scheduling.commits import Commit, DraftOrder
from coordinator.scheduling.sequence import DRAFT_MAY_LACK, DraftMethod, Sequence
from coordinator.scheduling.turn import agreeing
from protocol.rounds import Proposal, ProposeItem, VerifyItem

# Believed of prompt lookup that was never tried, for the shortest run and for the longest.
FIRST_NGRAM_RATES = (0.3, 0.6)
# A draft that catches up is believed to serve for so many rounds at most.
CATCH_UP_ROUNDS = 32
# A draft token must gain so much even where one more to verify seems to cost nothing.
LEAST_WORTH = 0.02
# Of what a message to a worker takes, the share that each round replaces.
EXCHANGE_PER_ROUND, FIRST_EXCHANGE = 0.05, 0.0015


# Two groups in turns must promise so much more than one.
OVERLAP_GAIN = 0.05
# Drafting ahead is of use if all drafts of a round are accepted: that must be so likely.
LEAST_CHANCE_AHEAD = 0.1


@dataclass(frozen=True)
class DraftWorker:
    """What there is to know of the draft worker when a round begins."""

    max_model_len: int
    round_id: int


@dataclass(frozen=True)
class SpeculationState:
    """What draft lengths are chosen by now, as `specpool.v1.SpeculationState` documents it."""

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
    """Draft orders for round after round. `longest`: draft tokens of a sequence whose request fixes no number."""

    def __init__(self, longest: int) -> None:
        costs = RoundCosts(StepTimes(UNKNOWN_DRAFT), StepTimes(UNKNOWN_VERIFY), FIRST_EXCHANGE)
        self.lengths = DraftLengths(costs, longest)
        first, last = FIRST_NGRAM_RATES
        self.ngrams = {
            run: AcceptanceOfAll(first + (last - first) * (run - SHORTEST_RUN) / (LONGEST_RUN - SHORTEST_RUN))
            for run in range(SHORTEST_RUN, LONGEST_RUN + 1)
        }
        """Acceptance of prompt lookup by length of the run that was found again."""
        self.calibration = Calibration()
        self._depth = 0
        """Draft steps of the last round."""
        self._indexes: dict[int, NgramIndex] = {}
        self._found: dict[int, tuple[tuple[int, ...], int]] = {}
        """By sequence: what prompt lookup found for the round, and the length of the run."""

    @property
    def costs(self) -> RoundCosts:
        """What rounds are believed to cost."""
        return self.lengths.costs

    def orders(self, group: Items[Sequence], worker: DraftWorker | None) -> dict[int, DraftOrder]:
        """What each sequence is to have drafted; without a draft worker only by prompt lookup."""
        self._found.update({sequence.sequence_id: self._look_up(sequence) for sequence in group})
        lengths = [len(sequence.token_ids) for sequence in group]
        self.costs.verify.cached = self.costs.draft.cached = sum(lengths) / len(lengths)
        options = {s.sequence_id: self._options(s, worker) for s in group if s.request.adaptive}
        chosen = self.lengths.choose(options) if options else {}
        orders = {
            s.sequence_id: self._adaptive(s, chosen[s.sequence_id]) if s.request.adaptive else self._fixed(s, worker)
            for s in group
        }
        if not any(order.by_model for order in orders.values()):
            self._depth = 0
        return orders

    def observe(self, commit: Commit) -> None:
        """Learns from what became of a sequence's draft tokens."""
        sequence_id = commit.sequence.sequence_id
        found, run = self._found.get(sequence_id, ((), 0))
        if found:  # whether it was verified or not: what would have become of it is known either way
            tried = min(len(found), len(commit.token_ids))
            self.ngrams[run].add(sequence_id, tried, agreeing(found, commit.token_ids))
        if commit.proposal is not None and commit.proposal.draft_token_ids:
            self._observe_model(commit, commit.proposal)

    def _observe_model(self, commit: Commit, proposal: Proposal) -> None:
        drafted, accepted = (commit.drafted, commit.accepted) if commit.method is DraftMethod.MODEL else (0, 0)
        self.calibration.add(proposal.confidences[:drafted], accepted)
        doubted = proposal.confidences[drafted : drafted + 1]
        if accepted == drafted and doubted:  # it was not verified, so what the draft thinks of it must do
            chance = self.calibration.chance(doubted[0])
            self.lengths.acceptance.add(commit.sequence.sequence_id, drafted + 1, accepted + chance)
        else:
            self.lengths.acceptance.add(commit.sequence.sequence_id, drafted, accepted)

    def observe_verification(self, items: Items[VerifyItem], timed: Timed) -> None:
        """Learns from what a verification took."""
        self._observe_exchange(timed)
        if all(len(item.token_ids) == 1 for item in items):
            self.costs.verify.observe(sum(1 + len(item.draft_token_ids) for item in items), timed.forward)

    def observe_proposals(self, items: Items[ProposeItem], proposals: Items[Proposal], timed: Timed) -> None:
        """Learns from what the draft steps of a round took."""
        self._observe_exchange(timed)
        lengths = [len(proposal.draft_token_ids) for proposal in proposals]
        if any(lengths) and all(len(item.token_ids) <= DRAFT_MAY_LACK for item in items):
            self._depth = max(lengths)
            steps = [sum(k > j for k in lengths) for j in range(self._depth)]
            share = timed.forward / sum(map(self.costs.draft, steps))
            for sequences in steps:
                self.costs.draft.observe(sequences, self.costs.draft(sequences) * share)

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
        """Draft steps for all of these that take no longer than to verify them; none if hardly all will be of use."""
        rates = (self.lengths.acceptance.rate(item.sequence_id) ** (1 + len(item.draft_token_ids)) for item in items)
        if math.prod(rates) < LEAST_CHANCE_AHEAD:
            return 0
        seconds = self.costs.verify(sum(1 + len(item.draft_token_ids) for item in items)) - self.costs.exchange
        return int(seconds / self.costs.draft(len(items)))

    def state(self) -> SpeculationState:
        """What the next round's lengths will be chosen by."""
        costs, plan, sequences = self.costs, self.lengths.plan, max(1, self.lengths.plan.sequences)
        return SpeculationState(
            draft_steps=len(plan.steps),
            expected_tokens_per_s=plan.speed,
            plain_tokens_per_s=sequences / costs.seconds(sequences, []),
            model_acceptance_rate=self.lengths.acceptance.rate_of_all,
            ngram_acceptance_rates={run: acceptance.rate_of_all for run, acceptance in self.ngrams.items()},
            draft_step_s=costs.draft(1),
            verify_s=costs.verify(1),
            verify_row_s=costs.verify(sequences + 1) - costs.verify(sequences),
            exchange_s=costs.exchange,
        )

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """These have ended."""
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)
            self._found.pop(sequence_id, None)
            self.lengths.acceptance.forget(sequence_id)
            for acceptance in self.ngrams.values():
                acceptance.forget(sequence_id)

    def _look_up(self, sequence: Sequence) -> tuple[tuple[int, ...], int]:
        if sequence.request.method is DraftMethod.MODEL or sequence.draft_limit <= 0 or not sequence.is_decoding:
            return (), 0
        index = self._indexes.setdefault(sequence.sequence_id, NgramIndex())
        return index.propose(sequence.token_ids, self._limit(sequence))

    def _options(self, sequence: Sequence, worker: DraftWorker | None) -> Options:
        found, run = self._found[sequence.sequence_id]
        return Options(
            limit=self._limit(sequence),
            by_model=_can_ask(sequence, worker),
            lacking=max(0, len(sequence.token_ids) - sequence.draft_base - DRAFT_MAY_LACK),
            catch_up_rounds=max(1, min(CATCH_UP_ROUNDS, sequence.draft_limit)),
            ngram_limit=len(found),
            ngram_rate=self.ngrams[run].rate(sequence.sequence_id) if found else 0.0,
        )

    def _limit(self, sequence: Sequence) -> int:
        """Draft tokens that the sequence can use."""
        longest = self.lengths.longest if sequence.request.adaptive else sequence.draft_limit
        return max(0, min(longest, sequence.draft_limit))

    def _adaptive(self, sequence: Sequence, length: DraftLength) -> DraftOrder:
        found, _ = self._found[sequence.sequence_id]
        found, plan = found[: length.by_ngram], self.lengths.plan
        if not length.by_model or not plan.shares or not sequence.request.sampling.is_argmax:
            return DraftOrder(length.by_model, lookup_ids=found)
        # The plan says that drafting pays; how far it does this time, the draft knows better than an average.
        rate = self.lengths.acceptance.rate(sequence.sequence_id)
        return DraftOrder(self._limit(sequence), min(1.0, max(LEAST_WORTH, plan.row)), rate, found)

    @property
    def hints(self) -> tuple[list[float], float]:
        """What the draft worker is told of all sequences: what its probabilities are worth, what a step must gain."""
        return self.calibration.chances, self.lengths.plan.speed * self.costs.draft(1)

    def _fixed(self, sequence: Sequence, worker: DraftWorker | None) -> DraftOrder:
        """As many tokens as the request says, by whoever is expected to be right more often."""
        k = self._limit(sequence)
        found, run = self._found[sequence.sequence_id]
        if not _can_ask(sequence, worker):
            return DraftOrder(0, lookup_ids=found)
        rate = self.lengths.acceptance.rate(sequence.sequence_id)
        better = found and expected_tokens(self.ngrams[run].rate(sequence.sequence_id), k) > expected_tokens(rate, k)
        return DraftOrder(0 if better else k, lookup_ids=found)


def _can_ask(sequence: Sequence, worker: DraftWorker | None) -> bool:
    """Whether the draft worker can draft for a sequence."""
    return (
        worker is not None
        and sequence.request.method is not DraftMethod.NGRAM
        and len(sequence.token_ids) < worker.max_model_len
        and worker.round_id >= sequence.draft_rests_until
    )
