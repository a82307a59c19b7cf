"""How many tokens each sequence of a round drafts, and by what: whatever gains the most tokens per second. Pure.

A draft token is worth the chance that it and all before it are accepted. It costs a row of the verification and, if the
draft model makes it, a share of a draft step. Nobody drafts where none of it pays.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul

from coordinator.drafting.acceptance import AcceptanceOfAll
from coordinator.drafting.costs import RoundCosts
from coordinator.drafting.trials import FIRST_TRIALS, Trials

# Acceptance rates are told apart in so many steps: few enough that sequences alike are counted, not looked at.
STEPS = 32
# Another number of draft steps must promise so much more before it replaces the last one; and so much more than none,
# before the model drafts at all: what is promised is wrong by some per cent, and who drafts nothing loses nothing.
HYSTERESIS, GAIN_OF_DRAFTING = 0.02, 0.04
# A plan serves for so many rounds, or until the number of sequences is another by such a share: its costs and the rates
# of all change slowly.
ROUNDS_OF_A_PLAN, CHANGE_OF_BATCH = 8, 0.25
# A draft that lacks so many tokens is caught up in passing.
LITTLE = 8
# Where somebody drafts, one round of so many is plain: what plain decoding takes is not known from others.
PLAIN_EVERY = 128


@dataclass(frozen=True)
class Options:
    """What a sequence could draft in the next round."""

    limit: int
    """Draft tokens that it can use."""
    by_model: bool = True
    """Whether the draft worker can be asked for them."""
    lacking: int = 0
    """Tokens that the draft worker would have to catch up with first, beyond those of every round."""
    catch_up_rounds: int = 1
    """Rounds that this serves."""
    ngram_limit: int = 0
    """Draft tokens that prompt lookup has found."""
    ngram_rate: float = 0.0
    """The rate at which these are expected to be accepted."""


@dataclass(frozen=True)
class DraftLength:
    """Draft tokens of one sequence: the model's, or if there are none, those of prompt lookup."""

    by_model: int = 0
    by_ngram: int = 0


@dataclass(frozen=True)
class Plan:
    """What a draft token must be worth to be drafted. Costs are in tokens: what the same time would gain otherwise."""

    sequences: int = 0
    speed: float = 0.0
    """Tokens per second that are expected."""
    row: float = 0.0
    """The cost of a token more to verify."""
    steps: tuple[float, ...] = ()
    """Of the model's draft tokens one by one, beside their rows: for one sequence more that takes part in a step."""
    shares: tuple[float, ...] = ()
    """The same if all who take part share the step equally."""


@dataclass
class DraftLengths:
    """Chooses draft lengths, and learns from what became of the model's."""

    costs: RoundCosts
    longest: int
    """Draft tokens of a sequence, at most."""
    first_rate: float = 0.6
    """Believed of a draft that was never tried."""
    plan: Plan = Plan()
    """The last one."""
    _age: int = 0
    _by_ngram: Mapping[int, int] = field(default_factory=dict)
    """By sequence: the tokens that prompt lookup drafted in the last round."""
    _trials_of_model: Trials = field(default_factory=Trials)
    _trials_of_ngrams: Trials = field(default_factory=Trials)
    _since_plain: int = PLAIN_EVERY - FIRST_TRIALS

    def __post_init__(self) -> None:
        self.acceptance = AcceptanceOfAll(self.first_rate)

    def choose(self, options: Mapping[int, Options]) -> dict[int, DraftLength]:
        """The draft length of each sequence id."""
        self._age += 1
        changed = abs(len(options) - self.plan.sequences) > CHANGE_OF_BATCH * self.plan.sequences
        if changed or self._age >= ROUNDS_OF_A_PLAN:
            self.plan, self._age = self._best(options), 0
        chosen = {i: self._length(i, its) for i, its in options.items()}
        self._by_ngram = {i: length.by_ngram for i, length in chosen.items() if not length.by_model}
        self._since_plain += 1
        if not self.plan.steps:
            self._try_others(chosen, options)
        elif self._since_plain >= PLAIN_EVERY:
            chosen = dict.fromkeys(options, DraftLength())
        if not any(length.by_model or length.by_ngram for length in chosen.values()):
            self._since_plain = 0
        return chosen

    def _length(self, sequence_id: int, options: Options) -> DraftLength:
        """What pays for one sequence: of what the model and prompt lookup offer, that which gains more."""
        plan, rate = self.plan, _middle(_step(self.acceptance.rate(sequence_id)))
        by_model = _paying(rate, [plan.row + step for step in plan.steps]) if options.by_model else 0
        by_model = min(by_model, options.limit)
        by_ngram = _paying(options.ngram_rate, [plan.row] * min(options.limit, options.ngram_limit))
        if by_model and by_ngram:
            gain = expected_tokens(rate, by_model) - 1 - sum(plan.shares[:by_model]) - plan.row * by_model
            gain_by_ngram = expected_tokens(options.ngram_rate, by_ngram) - 1 - plan.row * by_ngram
            return DraftLength(by_model if gain > gain_by_ngram else 0, by_ngram)
        catching_up = self._catching_up(options.lacking / options.catch_up_rounds)
        if by_model and catching_up * plan.speed > expected_tokens(rate, by_model) - 1:
            by_model = 0
        return DraftLength(by_model, by_ngram)

    def _catching_up(self, tokens: float) -> float:
        """Seconds that the draft worker takes more for so many tokens."""
        return self.costs.draft(1 + tokens) - self.costs.draft(1)

    def _best(self, options: Mapping[int, Options]) -> Plan:
        """The plan that promises most, for sequences of which some go on with prompt lookup as in the last round."""
        found = {i: min(self._by_ngram.get(i, 0), its.limit, its.ngram_limit) for i, its in options.items()}
        gained = sum(expected_tokens(options[i].ngram_rate, k) - 1 for i, k in found.items() if k)
        able = [i for i, its in options.items() if its.limit > 0 and its.by_model and not found[i]]
        batch = _Batch(
            self.costs, len(options), Counter(_step(self.acceptance.rate(i)) for i in able), sum(found.values()), gained
        )
        depth = min(len(self.plan.steps), self.longest)
        best = batch.plan(depth)
        for direction in (-1, 1):  # the speed has one summit
            while 0 <= depth + direction <= self.longest and able:
                other = batch.plan(depth + direction)
                if other.speed <= best.speed * (1 + HYSTERESIS * (len(best.steps) == len(self.plan.steps))):
                    break
                best, depth = other, depth + direction
        none = batch.plan(0)
        least = 0.0 if self.plan.steps else GAIN_OF_DRAFTING
        return best if best.speed > none.speed * (1 + least) else none

    def _try_others(self, chosen: dict[int, DraftLength], options: Mapping[int, Options]) -> None:
        """Now and then has one token verified for some who draft nothing, so that what changed is noticed."""
        idle = {i: its for i, its in options.items() if its.limit > 0 and not chosen[i].by_ngram}
        plain = self.costs.seconds(len(options), [])
        if able := {i: its.lacking for i, its in idle.items() if its.by_model}:
            least = min(able.values())
            # Those who lack little, or one of those who lack much.
            some = [i for i, lacking in able.items() if lacking <= least + 1][: None if least <= LITTLE else 1]
            seconds = self.costs.seconds(len(options), [len(some)]) - plain + self._catching_up(least * len(some))
            gained = sum(map(self.acceptance.rate, some)) * plain / len(options)
            if self._trials_of_model.may_try(plain, seconds, gained):
                chosen.update(dict.fromkeys(some, DraftLength(by_model=1)))
        elif found := {i: its.ngram_rate for i, its in idle.items() if its.ngram_limit}:
            seconds = self.costs.seconds(len(options), [], len(found)) - plain
            if self._trials_of_ngrams.may_try(plain, seconds, sum(found.values()) * plain / len(options)):
                chosen.update(dict.fromkeys(found, DraftLength(by_ngram=1)))


@dataclass(frozen=True)
class _Batch:
    """The sequences of a round: those that the model could draft for by step of their rate, and what others find."""

    costs: RoundCosts
    sequences: int
    counts: Mapping[int, int]
    found: int
    gained: float

    def plan(self, depth: int) -> Plan:
        """The best one of at most so many draft steps: whoever's token is worth its costs takes part in a step."""
        costs, lengths = self.costs, dict.fromkeys(self.counts, depth)
        for _ in range(3):  # the speed decides what a second is worth, and that decides who takes part
            speed, drafting = self._speed(lengths), self._drafting(lengths, depth)
            rows = self.sequences + self.found + sum(drafting)
            row = speed * (costs.verify(rows + 1) - costs.verify(rows))
            # Where others draft too, one sequence more costs little; alone it would cost the whole step.
            steps = [speed * (costs.draft(n) - costs.draft(n - 1)) if n > 1 else 0.0 for n in drafting]
            lengths = {step: _paying(_middle(step), [row + share for share in steps]) for step in lengths}
        depth = max(lengths.values(), default=0)
        shares = [speed * costs.draft(n) / n for n in self._drafting(lengths, depth)]
        return Plan(self.sequences, self._speed(lengths), row, tuple(steps[:depth]), tuple(shares))

    def _speed(self, lengths: Mapping[int, int]) -> float:
        """Tokens per second that are to be expected."""
        gained = sum(self.counts[step] * (expected_tokens(_middle(step), k) - 1) for step, k in lengths.items())
        drafting = self._drafting(lengths, max(lengths.values(), default=0))
        return (self.sequences + self.gained + gained) / self.costs.seconds(self.sequences, drafting, self.found)

    def _drafting(self, lengths: Mapping[int, int], depth: int) -> list[int]:
        """Sequences that take part in each draft step."""
        return [sum(self.counts[step] for step, k in lengths.items() if k > j) for j in range(depth)]


def expected_tokens(rate: float, k: int) -> float:
    """Tokens gained in a round with k draft tokens."""
    return 1.0 + float(sum(accumulate(repeat(rate, k), mul)))


def _paying(rate: float, costs: list[float]) -> int:
    """How many draft tokens are worth what they cost, in tokens."""
    length, worth = 0, rate
    while length < len(costs) and worth >= costs[length]:
        length, worth = length + 1, worth * rate
    return length


def _step(rate: float) -> int:
    return min(STEPS - 1, int(rate * STEPS))


def _middle(step: int) -> float:
    return (step + 0.5) / STEPS
