"""The ledger of draft methods: is a method worth its time at this batch size now? Pure, without a clock.

The cost model predicts the gain of a draft; the ledger measures it. It compares the wall time of each round that drafts
with the time that plain rounds would have needed for the same tokens. Each method has an entry for each class of batch
sizes, in units of plain rounds:

- Gains and losses add up to a balance. While it is negative, a second loss in a row pauses the method, and after an
  earlier pause the first loss does. Time refills the balance until a retry.
- A method that the cost model rules out gets trials, paid from a budget that time refills too.

The more often a method loses, the slower both refill.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from specpool.drafting.costs import RECENT, RoundCosts
from specpool.drafting.plain_times import PlainTimes, size_class

# Share of all time that retries, and trials, may lose.
SHARE = 0.01
# Losses lower the share, at most to 1 / MAX_DIVISOR of it: a change must still be noticed.
MAX_DIVISOR = 8
# Trials before the budget counts and a plan may rely on the method: startup measurements can be wrong. As many plain
# rounds are the balance at first and after a pause: a few losses cannot be told from noise.
FREE_TRIALS = 2
# Maximum balance, so that past gains do not pay for lasting losses.
MAX_BALANCE = 12.0
# Maximum loss of one round, and of a balance: one stalled round must not cause a long pause.
MAX_LOSS = MAX_BALANCE / 2
# Share of all time that plain rounds may lose where drafts pay.
PLAIN_SHARE = SHARE / 4
# Minimum gain of drafting that can be told from noise.
MIN_GAIN = 0.04


@dataclass
class _Entry:
    """Gains, losses and trials of a draft method at similar batch sizes, in plain rounds."""

    balance: float = FREE_TRIALS
    budget: float = 0.0
    """Loss that the next trial may cause. Negative after a trial that lost more than expected."""
    trials: int = 0
    divisor: float = 1.0
    """Divides `SHARE`. Each lost trial adds one, a failed retry doubles it, and a won trial halves it."""
    is_paused: bool = False
    is_retry: bool = False
    """Whether the method has been paused since its balance was full."""
    rounds: int = 0
    """Rounds with drafts since the last pause."""
    lost: bool = False
    """Whether the last round with drafts lost time. A single loss may be a stall."""
    tokens: float = 0.0
    """Recent mean tokens per sequence of a round that drafts."""
    seconds: float = 0.0
    """Recent mean seconds of a round that drafts."""
    reassess_in: int = 0
    """Plain rounds of a pause until its reason is reassessed."""
    _spent: float = 0.0
    """Budget used by the last trial."""

    @property
    def has_free_trial(self) -> bool:
        return self.trials < FREE_TRIALS and self.budget > -FREE_TRIALS / 2

    def gain(self, plain_seconds: float) -> float:
        """Recent mean gain of a round that drafts."""
        return self.tokens - self.seconds / plain_seconds

    def refill(self, rounds: float) -> None:
        """Add a share of the elapsed time. End the pause once a retry is affordable."""
        share = SHARE / self.divisor
        self.balance = min(MAX_BALANCE, self.balance + share * rounds)
        if not self.is_paused:
            self.budget += (share if self.budget >= 0 else SHARE) * rounds
        elif self.balance >= FREE_TRIALS and not self.reassess_in:
            self._resume()

    def charge(self, tokens: float, seconds: float, plain_seconds: float) -> None:
        """Record a round that drafted. Pause the method at the second loss in a row with a negative balance.

        A method that was paused before pauses at its first loss again.
        """
        self.rounds += 1
        weight = max(1 / RECENT, 1 / self.rounds)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.budget = min(0.0, self.budget)
        gain = max(-MAX_LOSS, tokens - seconds / plain_seconds)
        self.balance = min(MAX_BALANCE, max(-MAX_LOSS, self.balance + gain))
        if self.balance == MAX_BALANCE:
            self.divisor, self.is_retry = 1.0, False
        lost_before, self.lost = self.lost, gain < 0
        is_certain = self.is_retry or (self.lost and lost_before) or self.balance == -MAX_LOSS
        if self.balance < 0 and is_certain and not self.is_paused:
            self.is_paused, self.reassess_in = True, RECENT

    def reassess(self, plain_seconds: float) -> None:
        """Record a plain round of a pause. Eventually, resume if plain decoding has slowed down too."""
        if not self.reassess_in:
            return
        self.reassess_in -= 1
        if self.reassess_in:
            return
        if self.gain(plain_seconds) > 0:
            self.balance = FREE_TRIALS
            self._resume()
        else:
            self._divide(2 * self.divisor if self.is_retry else self.divisor)
            self.is_retry = True

    def may_try(self, cost: float, gain: float) -> bool:
        """Return whether to run a trial now. A trial uses up the whole budget."""
        if not self.has_free_trial and self.budget < max(0.0, cost - gain):
            return False
        self.trials, self._spent, self.budget = self.trials + 1, max(0.0, self.budget), min(0.0, self.budget)
        return True

    def settle(self, lost: float) -> None:
        """Charge the part of a trial's measured loss that exceeds the budget it used."""
        self._divide(self.divisor + 1 if lost > 0 else self.divisor / 2)
        self.budget -= max(0.0, lost - self._spent)
        self._spent = max(0.0, self._spent - max(0.0, lost))

    def _resume(self) -> None:
        self.is_paused, self.lost, self.rounds = False, False, 0

    def _divide(self, divisor: float) -> None:
        self.divisor = min(max(1.0, divisor), MAX_DIVISOR)


class Part(NamedTuple):
    """One method's part in a round."""

    share: float
    """Share of the round's draft tokens."""
    gained: float
    """Tokens gained from them, over all sequences."""


class Ledger:
    """Compares rounds that draft with plain rounds."""

    def __init__(self, costs: RoundCosts) -> None:
        """`costs`: the cost model, used only to compare batches of different sizes."""
        self.plain = PlainTimes(costs)
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._last: dict[str, _Entry] = {}
        """The entry used last, by method."""
        self._charged: _Entry | None = None
        """The entry charged last."""
        self._since_plain = 0
        """Rounds since the last plain one."""
        self._speeds: dict[int, tuple[float, float]] = {}
        """Recent tokens and seconds, by class of batch sizes."""
        self._now = 0.0
        """Time of all rounds so far, in seconds."""

    def observe(
        self,
        sequences: int,
        tokens: float,
        seconds: float,
        method: str | None,
        is_trial: bool = False,
        skipped: int = 0,
        parts: Mapping[str, Part] = MappingProxyType({}),
    ) -> None:
        """Learn from a round, even after later ones were planned.

        `sequences`: number that decoded. `tokens`: gained by all of them. `seconds`: since the previous round ended.
        `method`: None for a plain round. `skipped`: similar rounds before it that were not observed.
        `parts`: each method's part, if several drafted.
        """
        if not seconds > 0 or not sequences:
            return
        self._now += seconds * (1 + skipped)
        self._observe_speed(sequences, tokens, seconds)
        self._since_plain += 1
        if method is None:
            self._since_plain = 0
            self.plain.observe(self._now, sequences, seconds)
        plain_seconds = self.plain.seconds(sequences)
        if plain_seconds is None:
            return
        for entry in self._entries_of(sequences):
            entry.refill(seconds * (1 + skipped) / plain_seconds)
            if method is None:
                entry.reassess(plain_seconds)
        if method is None:
            return
        for name, part in (parts or {method: Part(1.0, tokens - sequences)}).items():
            entry, gained = self._entry(name, sequences), part.share + part.gained / sequences
            if is_trial:
                entry.settle(part.share * seconds / plain_seconds - gained)
            if not is_trial or entry.trials <= FREE_TRIALS:  # later trials have their own budget
                self._charged = entry
                entry.charge(gained, part.share * seconds, plain_seconds)

    def speed(self, sequences: int) -> float | None:
        """Recent tokens per second of rounds with a similar number of sequences; None before the first."""
        tokens, seconds = self._speeds.get(size_class(sequences), (0.0, 0.0))
        return tokens / seconds if seconds else None

    def _observe_speed(self, sequences: int, tokens: float, seconds: float) -> None:
        before = self._speeds.get(size_class(sequences), (tokens, seconds))
        kept = 1 - 1 / RECENT
        self._speeds[size_class(sequences)] = kept * before[0] + tokens, kept * before[1] + seconds

    def may_draft(self, method: str, sequences: int) -> bool:
        """Whether a method may draft for a batch of this size."""
        return not self._entry(method, sequences).is_paused

    def may_try(self, method: str, sequences: int, cost: float, gain: float) -> bool:
        """Whether to try a method now that does not pay according to the cost model.

        `cost`, `gain`: extra time of the trial, and the time that it saves, in plain rounds.
        """
        return self._entry(method, sequences).may_try(cost, gain)

    def has_free_trial(self, method: str, sequences: int) -> bool:
        """Whether a method has a trial left that the budget does not limit, so that no plan may rely on it yet."""
        return self._entry(method, sequences).has_free_trial

    def is_plain_due(self, sequences: int) -> bool:
        """Whether a plain round of this size must be measured now."""
        if self.plain.needs_round(self._now, sequences):
            return True
        plain_seconds = self.plain.seconds(sequences)
        if self._charged is None or plain_seconds is None:
            return False
        return self._since_plain * PLAIN_SHARE >= max(MIN_GAIN, self._charged.gain(plain_seconds))

    def _entry(self, method: str, sequences: int) -> _Entry:
        """Return the entry of a batch size. A new entry inherits the last one's pause, but not its gains."""
        key = method, size_class(sequences)
        if key not in self._entries:
            last = self._last.get(method)
            self._entries[key] = (
                replace(last, balance=min(FREE_TRIALS / 4, last.balance), lost=False, rounds=0, reassess_in=0)
                if last is not None
                else _Entry()
            )
        entry = self._last[method] = self._entries[key]
        return entry

    def _entries_of(self, sequences: int) -> Iterator[_Entry]:
        wanted = size_class(sequences)
        return (entry for (_, size), entry in self._entries.items() if size == wanted)
