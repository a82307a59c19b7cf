"""Draft lengths and methods of a round's sequences: those that gain the most tokens per second. Pure.

A draft token gains the chance that it and all before it are accepted. It costs a row of the verification and, if the
draft model makes it, a share of a draft step. Where drafting does not pay, no token is drafted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul

from coordinator.drafting.acceptance import AcceptanceOfAll
from coordinator.drafting.costs import RoundCosts
from coordinator.drafting.trials import FIRST_TRIALS, Trials
from coordinator.scheduling.commits import DraftOrder

# Bins of acceptance rates: few enough that sequences with about the same rate are counted, not looked at one by one.
STEPS = 32
# The gain that another number of draft steps must promise before it replaces the present one, and the gain over plain
# decoding before the model drafts at all: promises are wrong by some per cent, and plain decoding loses nothing.
HYSTERESIS, GAIN_OF_DRAFTING = 0.02, 0.04
# Rounds that a plan serves for, and the change in the number of sequences that ends it sooner: costs and rates change
# slowly.
ROUNDS_OF_A_PLAN, CHANGE_OF_BATCH = 8, 0.25
# Tokens that a draft worker catches up with in passing.
LITTLE = 8
# While the model drafts, one round in this number is plain: the time of plain decoding is not known from other rounds.
PLAIN_EVERY = 128


@dataclass(frozen=True)
class DraftOptions:
    """What a sequence could have drafted in the next round."""

    limit: int
    """Most draft tokens that the sequence can use."""
    has_model: bool = True
    """Whether the draft worker can be asked for them."""
    lacking: int = 0
    """Tokens that the draft worker would have to catch up with first, beyond those of every round."""
    catch_up_rounds: int = 1
    """Rounds over which the cost of catching up is spread."""
    lookup_ids: tuple[int, ...] = ()
    """Draft tokens of prompt lookup."""
    lookup_rate: float = 0.0
    """The rate at which the tokens of prompt lookup are expected to be accepted."""


@dataclass(frozen=True)
class RoundPlan:
    """The costs of a draft token in the next rounds, in tokens: what the same time would gain otherwise."""

    sequences: int = 0
    speed: float = 0.0
    """Expected tokens per second."""
    row: float = 0.0
    """Cost of verifying one more token: the `min_chance` of a token that is drafted already."""
    steps: tuple[float, ...] = ()
    """Cost of each draft step for one more sequence that takes part in it, without the row."""
    shares: tuple[float, ...] = ()
    """Cost of each draft step if all sequences that take part share it equally."""


@dataclass
class DraftLengths:
    """Chooses draft lengths, and learns from what became of the model's."""

    costs: RoundCosts
    longest: int
    """Draft tokens of a sequence, at most."""
    first_rate: float = 0.6
    """Acceptance rate believed of a draft model before it was tried."""
    plan: RoundPlan = RoundPlan()
    """The plan that serves now."""
    _age: int = 0
    _by_lookup: Mapping[int, int] = field(default_factory=dict)
    """By sequence: the number of tokens that prompt lookup drafted in the last round."""
    _trials_of_model: Trials = field(default_factory=Trials)
    _trials_of_lookup: Trials = field(default_factory=Trials)
    _since_plain: int = PLAIN_EVERY - FIRST_TRIALS

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceOfAll(self.first_rate)

    def choose(self, options: Mapping[int, DraftOptions]) -> dict[int, DraftOrder]:
        """The draft order of each sequence id."""
        self._age += 1
        changed = abs(len(options) - self.plan.sequences) > CHANGE_OF_BATCH * self.plan.sequences
        if changed or self._age >= ROUNDS_OF_A_PLAN:
            self.plan, self._age = self._best(options), 0
        chosen = {i: self._order(i, its) for i, its in options.items()}
        self._by_lookup = {i: len(order.lookup_ids) for i, order in chosen.items() if not order.num_draft_tokens}
        self._since_plain += 1
        if not self.plan.steps:
            self._try_others(chosen, options)
        elif self._since_plain >= PLAIN_EVERY:
            chosen = dict.fromkeys(options, DraftOrder())
        if not any(order.num_draft_tokens or order.lookup_ids for order in chosen.values()):
            self._since_plain = 0
        return chosen

    def _order(self, sequence_id: int, options: DraftOptions) -> DraftOrder:
        """The draft tokens that pay for one sequence: the model's or prompt lookup's, whichever gain more."""
        plan, rate = self.plan, _middle(_bin(self.acceptance.rate(sequence_id)))
        num_draft_tokens = _paying(rate, [plan.row + step for step in plan.steps]) if options.has_model else 0
        num_draft_tokens = min(num_draft_tokens, options.limit)
        by_lookup = _paying(options.lookup_rate, [plan.row] * min(options.limit, len(options.lookup_ids)))
        lookup_ids = options.lookup_ids[:by_lookup]
        if num_draft_tokens and by_lookup:
            costs = sum(plan.shares[:num_draft_tokens]) + plan.row * num_draft_tokens
            gain = expected_tokens(rate, num_draft_tokens) - 1 - costs
            gain_by_lookup = expected_tokens(options.lookup_rate, by_lookup) - 1 - plan.row * by_lookup
            return DraftOrder(num_draft_tokens if gain > gain_by_lookup else 0, lookup_ids=lookup_ids)
        catching_up = self._catching_up(options.lacking / options.catch_up_rounds)
        if num_draft_tokens and catching_up * plan.speed > expected_tokens(rate, num_draft_tokens) - 1:
            num_draft_tokens = 0
        return DraftOrder(num_draft_tokens, lookup_ids=lookup_ids)

    def _catching_up(self, tokens: float) -> float:
        """Extra seconds that the draft worker takes to catch up with this number of tokens."""
        return self.costs.draft(1 + tokens) - self.costs.draft(1)

    def _best(self, options: Mapping[int, DraftOptions]) -> RoundPlan:
        """The plan that promises most, if prompt lookup goes on for the sequences that it drafted for last."""
        by_lookup = {i: min(self._by_lookup.get(i, 0), its.limit, len(its.lookup_ids)) for i, its in options.items()}
        gained = sum(expected_tokens(options[i].lookup_rate, k) - 1 for i, k in by_lookup.items() if k)
        able = [i for i, its in options.items() if its.limit > 0 and its.has_model and not by_lookup[i]]
        counts = Counter(_bin(self.acceptance.rate(i)) for i in able)
        batch = _Batch(self.costs, len(options), counts, sum(by_lookup.values()), gained)
        depth = min(len(self.plan.steps), self.longest)
        best = batch.plan(depth)
        for direction in (-1, 1):  # the speed has one peak for each number of passes
            while 0 <= depth + direction <= self.longest and able:
                other = batch.plan(depth + direction)
                if not self._replaces(other, best):
                    break
                best, depth = other, depth + direction
        for depth in batch.filling():
            if depth <= self.longest and self._replaces(other := batch.plan(depth), best):
                best = other
        none = batch.plan(0)
        least = 0.0 if self.plan.steps else GAIN_OF_DRAFTING
        return best if best.speed > none.speed * (1 + least) else none

    def _replaces(self, other: RoundPlan, best: RoundPlan) -> bool:
        """Whether another plan promises enough more than the best one so far, which may be the present one."""
        return other.speed > best.speed * (1 + HYSTERESIS * (len(best.steps) == len(self.plan.steps)))

    def _try_others(self, chosen: dict[int, DraftOrder], options: Mapping[int, DraftOptions]) -> None:
        """Now and then has one token drafted for sequences that have none, so that changes are noticed."""
        idle = {i: its for i, its in options.items() if its.limit > 0 and not chosen[i].lookup_ids}
        plain = self.costs.seconds(len(options), [])
        if able := {i: its.lacking for i, its in idle.items() if its.has_model}:
            least = min(able.values())
            # All sequences that the draft worker is little behind with, or one that it is far behind with.
            some = [i for i, lacking in able.items() if lacking <= least + 1][: None if least <= LITTLE else 1]
            seconds = self.costs.seconds(len(options), [len(some)]) - plain + self._catching_up(least * len(some))
            gained = sum(map(self.acceptance.rate, some)) * plain / len(options)
            if self._trials_of_model.may_try(plain, seconds, gained):
                chosen.update(dict.fromkeys(some, DraftOrder(num_draft_tokens=1)))
        elif rates := {i: its.lookup_rate for i, its in idle.items() if its.lookup_ids}:
            seconds = self.costs.seconds(len(options), [], len(rates)) - plain
            if self._trials_of_lookup.may_try(plain, seconds, sum(rates.values()) * plain / len(options)):
                chosen.update({i: DraftOrder(lookup_ids=options[i].lookup_ids[:1]) for i in rates})


@dataclass(frozen=True)
class _Batch:
    """The sequences of a round, as far as a plan needs to know them."""

    costs: RoundCosts
    sequences: int
    counts: Mapping[int, int]
    """Sequences that the model could draft for, by bin of their acceptance rate."""
    by_lookup: int
    """Draft tokens of prompt lookup."""
    gained: float
    """Tokens that prompt lookup is expected to gain."""

    def plan(self, depth: int) -> RoundPlan:
        """The best plan of at most `depth` draft steps: sequences whose token is worth its cost take part in a step."""
        costs, lengths = self.costs, dict.fromkeys(self.counts, depth)
        for _ in range(3):  # the speed decides what a second is worth, and that decides which sequences take part
            speed, drafting = self._speed(lengths), self._drafting(lengths, depth)
            # An average: one row more would cost a whole pass, or a tile of it, where the others fill theirs.
            drafted = max(1, self.by_lookup + sum(drafting))
            row = speed * (costs.verify(self.sequences + drafted) - costs.verify(self.sequences)) / drafted
            # Where others draft too, one sequence more costs little; alone it would cost the whole step.
            steps = [speed * (costs.draft(n) - costs.draft(n - 1)) if n > 1 else 0.0 for n in drafting]
            lengths = {rate: _paying(_middle(rate), [row + step for step in steps]) for rate in lengths}
        depth = max(lengths.values(), default=0)
        shares = [speed * costs.draft(n) / n for n in self._drafting(lengths, depth)]
        return RoundPlan(self.sequences, self._speed(lengths), row, tuple(steps[:depth]), tuple(shares))

    def filling(self) -> set[int]:
        """Numbers of draft steps that fill the passes that plain decoding needs anyway, or one pass more."""
        most, able = self.costs.verify.max_rows, sum(self.counts.values())
        if not most or not able:
            return set()
        room = -(self.sequences + self.by_lookup) % most
        return {room // able, (room + most) // able}

    def _speed(self, lengths: Mapping[int, int]) -> float:
        """Expected tokens per second."""
        gained = sum(self.counts[rate] * (expected_tokens(_middle(rate), k) - 1) for rate, k in lengths.items())
        drafting = self._drafting(lengths, max(lengths.values(), default=0))
        return (self.sequences + self.gained + gained) / self.costs.seconds(self.sequences, drafting, self.by_lookup)

    def _drafting(self, lengths: Mapping[int, int], depth: int) -> list[int]:
        """Sequences that take part in each draft step."""
        return [sum(self.counts[rate] for rate, k in lengths.items() if k > j) for j in range(depth)]


def expected_tokens(rate: float, k: int) -> float:
    """Tokens gained in a round with k draft tokens."""
    return 1.0 + float(sum(accumulate(repeat(rate, k), mul)))


def _paying(rate: float, min_chances: list[float]) -> int:
    """The number of draft tokens that are worth their cost: each has a `min_chance` of its own."""
    length, chance = 0, rate
    while length < len(min_chances) and chance >= min_chances[length]:
        length, chance = length + 1, chance * rate
    return length


def _bin(rate: float) -> int:
    return min(STEPS - 1, int(rate * STEPS))


def _middle(rate_bin: int) -> float:
    return (rate_bin + 0.5) / STEPS
