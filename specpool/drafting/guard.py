"""The guard against slow drafting: pauses draft methods that measurably lose time. Pure, without a clock.

The cost model predicts the gain of a draft. The guard measures it: it compares the wall time of every round that
drafts with the time that plain rounds would have needed for the same tokens. Each method has an account of gains and
losses for each class of batch sizes, in units of plain rounds. A cap keeps past gains from paying for lasting losses.
An empty account pauses the method. Time refills it slowly, so that retries cost a small share of the time.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from specpool.drafting.costs import RoundCosts
from specpool.drafting.plain_times import PlainTimes, size_class
from specpool.drafting.plans import DraftMethod

# Share of the time that drafting may lose in the long run. Halved after each failed retry, `MAX_FAILURES` times.
LOSS_SHARE, MAX_FAILURES = 0.01, 3
# Balances in plain rounds: of the first account of a method, after a pause, and the maximum.
FIRST_BALANCE, RETRY_BALANCE, MAX_BALANCE = 1.5, 2.0, 12.0
# Share of the balance that a new account inherits from the last one, if that was used, and its minimum balance.
INHERITED_SHARE, MIN_INHERITED = 0.25, 0.5
# Minimum balance, and maximum loss of one round: one stalled round must not cause a long pause.
MIN_BALANCE, MAX_LOSS = -4.0, 4.0
# Below this balance, one of this many rounds is plain, in case the baseline is wrong.
UNSURE_BALANCE, UNSURE_PLAIN_EVERY = 9.0, 16
# Plain rounds at the start of a pause, to reassess its reason: plain rounds may have become slower, too.
REASSESS_ROUNDS = 15
# Maximum number of rounds to reassess, the latest ones.
MAX_REASSESSED = 64


@dataclass(frozen=True)
class _Drafted:
    """A round that drafted."""

    sequences: int
    tokens: int
    seconds: float

    def gain(self, plain_seconds: float) -> float:
        """Gain over plain decoding in plain rounds; negative for a loss."""
        return max(-MAX_LOSS, self.tokens / self.sequences - self.seconds / plain_seconds)


@dataclass
class _Account:
    """Gains and losses of a draft method at similar batch sizes."""

    balance: float = FIRST_BALANCE
    is_used: bool = False
    """Whether a round was added, to this account or to one before it."""
    is_paused: bool = False
    failures: int = -1
    """Consecutive pauses after the first one."""
    reassess_in: int = 0
    """Plain rounds until the reason for the pause is reassessed; 0 if it has been, or without a pause."""
    recent: deque[_Drafted] = field(default_factory=lambda: deque(maxlen=MAX_REASSESSED))

    @classmethod
    def after(cls, last: "_Account | None") -> "_Account":
        """An account of another batch size than the last one. A pause goes on."""
        if last is None or not last.is_used:
            return cls()
        balance = max(MIN_INHERITED, INHERITED_SHARE * last.balance)
        return cls(balance, is_used=True, is_paused=last.is_paused)

    def refill(self, rounds: float) -> None:
        """Add a share of the elapsed time, in plain rounds. End the pause once a retry is affordable."""
        self.balance = min(MAX_BALANCE, self.balance + LOSS_SHARE / 2 ** max(0, self.failures) * rounds)
        if self.is_paused and not self.reassess_in and self.balance >= RETRY_BALANCE:
            self._resume()

    def add(self, drafted: _Drafted, plain_seconds: float) -> None:
        """Add a round that drafted. Pause if it empties the account."""
        self.is_used = True
        self.recent.append(drafted)
        self.balance = min(MAX_BALANCE, max(MIN_BALANCE, self.balance + drafted.gain(plain_seconds)))
        if self.balance == MAX_BALANCE:
            self.failures = -1
        if self.balance < 0 and not self.is_paused:
            self.is_paused, self.reassess_in = True, REASSESS_ROUNDS

    def reassess(self, plain: PlainTimes) -> None:
        """Count a plain round of a pause. After the last one, resume if plain decoding is not faster after all."""
        if not self.reassess_in:
            return
        self.reassess_in -= 1
        if self.reassess_in:
            return
        if sum(one.gain(plain.seconds(one.sequences) or one.seconds) for one in self.recent) > 0:
            self.balance = RETRY_BALANCE
            self._resume()
        else:
            self.failures = min(MAX_FAILURES, self.failures + 1)

    def _resume(self) -> None:
        self.is_paused = False
        self.recent.clear()


class Guard:
    """Compares rounds that draft with plain rounds, and pauses draft methods that lose time.

    Allows everything until the first round is reported.
    """

    def __init__(self, costs: RoundCosts) -> None:
        """`costs`: the cost model, used only to compare batches of different sizes."""
        self.plain = PlainTimes(costs)
        self.is_active = False
        """Whether rounds are reported."""
        self._accounts: dict[tuple[DraftMethod, int], _Account] = {}
        self._last_accounts: dict[DraftMethod, _Account] = {}
        """The account used last, by method."""
        self._charged: _Account | None = None
        """The account charged last."""
        self._since_plain = 0
        """Rounds since the last plain one."""
        self._now = 0.0
        """Time of all rounds so far, in seconds."""

    def observe(self, sequences: int, tokens: int, seconds: float, method: DraftMethod | None) -> float:
        """Learn from a round. Return its gain over plain decoding in seconds, 0 if unknown.

        `sequences`: number that decoded. `tokens`: gained by all of them. `seconds`: since the previous round ended.
        `method`: None for a plain round.
        """
        self.is_active = True
        if not seconds > 0 or not sequences:
            return 0.0
        self._now += seconds
        self._since_plain += 1
        if method is None:
            self._since_plain = 0
            self.plain.observe(self._now, sequences, seconds)
        plain_seconds = self.plain.seconds(sequences)
        if plain_seconds is None:
            return 0.0
        for account in self._accounts_of(sequences):
            account.refill(seconds / plain_seconds)
            if method is None:
                account.reassess(self.plain)
        if method is None:
            return 0.0
        return _Drafted(sequences, tokens, seconds).gain(plain_seconds) * plain_seconds

    def charge(self, sequences: int, tokens: int, seconds: float, method: DraftMethod) -> None:
        """Add a round to the account of its method, after `observe`. Leave out trials, which have their own budget."""
        if (plain_seconds := self.plain.seconds(sequences)) and seconds > 0:
            self._charged = self._account(method, sequences)
            self._charged.add(_Drafted(sequences, tokens, seconds), plain_seconds)

    def may_draft(self, sequences: int, method: DraftMethod) -> bool:
        """Whether a method may draft for a batch of this size."""
        return not self._account(method, sequences).is_paused

    def needs_plain_round(self, sequences: int) -> bool:
        """Whether a plain round of this size must be measured first."""
        is_unsure = self._charged is not None and self._charged.balance < UNSURE_BALANCE
        if is_unsure and self._since_plain >= UNSURE_PLAIN_EVERY:
            return True
        return self.is_active and self.plain.needs_round(self._now, sequences)

    def _account(self, method: DraftMethod, sequences: int) -> _Account:
        """The account of a batch size. A new one inherits from the account used last, including its pause."""
        key = method, size_class(sequences)
        if key not in self._accounts:
            self._accounts[key] = _Account.after(self._last_accounts.get(method))
        account = self._last_accounts[method] = self._accounts[key]
        return account

    def _accounts_of(self, sequences: int) -> Iterable[_Account]:
        wanted = size_class(sequences)
        return (account for (_, size), account in self._accounts.items() if size == wanted)
