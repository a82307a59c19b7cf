"""The commit: tokens that a sequence gained in a round. Counters of commits and rounds. Pure."""

from dataclasses import dataclass, field
from functools import cached_property

from coordinator.scheduling.grouping import Group
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.text import ShownText
from specpool.drafting.costs import Timed
from specpool.drafting.plans import NO_LOOKUP, DraftMethod, Lookup
from specpool.protocol.rounds import Proposal
from specpool.protocol.sampling import NO_LOGPROBS, Logprobs

GRAMMAR = "grammar"
"""Name of forced tokens in counters by draft method. Not a method that requests can choose."""


@dataclass
class Commit:
    """Tokens that a round committed for one sequence."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    shown: ShownText
    logprobs: Logprobs = NO_LOGPROBS
    drafted: int = 0
    """Draft tokens of the draft method."""
    accepted: int = 0
    """Accepted tokens of `drafted`. Together with `accepted_forced`, one less than the committed tokens.

    If generation ends within the draft, the last committed token counts as the bonus token.
    """
    method: DraftMethod | None = None
    """Draft method used; None if nothing was drafted."""
    proposal: Proposal | None = None
    """The draft model's tokens, possibly only partly verified."""
    lookup: Lookup = NO_LOOKUP
    """The lookup of the draft plan."""
    branch: int | None = None
    """Index of the branch that matched the verification; None without one."""
    num_branches: int = 0
    """Number of branches that were drafted during the verification."""
    forced: int = 0
    """Forced tokens that the target worker appended."""
    accepted_forced: int = 0
    num_dropped: int = 0
    """Verified tokens past the end of generation."""

    @property
    def num_agreed(self) -> int:
        """Tokens of `drafted` and `forced` that match the target's choices, even past the end of generation."""
        return self.accepted + self.accepted_forced + self.num_dropped

    @cached_property
    def text(self) -> str:
        """Text that can be shown now. Read it in commit order; no round waits for detokenization."""
        return self.shown()


STAGES = ("draft", "verify", "realign", "wire", "schedule")


@dataclass
class GroupingCounters:
    """Rounds by kind of group. A round of one sequence is neither same-length nor mixed."""

    same_length_rounds: int = 0
    mixed_rounds: int = 0
    fallback_rounds: int = 0
    group_sizes: list[int] = field(default_factory=list)
    """At index i: rounds of i + 1 sequences."""

    def add(self, group: Group, same_length: bool) -> None:
        """Record a round. `same_length`: whether the group had equal lengths when it was chosen."""
        size = len(group.sequences)
        _increment(self.group_sizes, size - 1)
        self.same_length_rounds += size > 1 and same_length
        self.mixed_rounds += size > 1 and not same_length
        self.fallback_rounds += group.fallback


@dataclass
class DraftCounters:
    """Draft tokens of one draft method."""

    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass
class Counters:
    """Totals since the start."""

    rounds: int = 0
    completion_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    cache_misses: int = 0
    grouping_errors: int = 0
    """Number of failed group selections. The log has each traceback."""
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    grouping: GroupingCounters = field(default_factory=GroupingCounters)
    draft_lengths: list[int] = field(default_factory=list)
    """At index i: verifications of i draft tokens of a sequence."""
    accepted_lengths: list[int] = field(default_factory=list)
    """At index i: verifications with draft tokens that accepted i of them."""
    drafts: dict[str, DraftCounters] = field(default_factory=dict)
    """By draft method, and for `GRAMMAR`."""

    def add_commit(self, commit: Commit) -> None:
        self.completion_tokens += len(commit.token_ids)
        drafted, accepted = commit.drafted + commit.forced, commit.accepted + commit.accepted_forced
        self.draft_tokens += drafted
        self.accepted_draft_tokens += accepted
        _increment(self.draft_lengths, drafted)
        if drafted:
            _increment(self.accepted_lengths, accepted)
        if commit.method is not None:
            self._add_drafts(commit.method, commit.drafted, commit.accepted)
        if (model := commit.sequence.draft.model) is not None:
            is_its = commit.method is DraftMethod.MODEL
            model.observe_round(len(commit.token_ids), is_its * commit.drafted, is_its * commit.accepted)
        if commit.forced:
            self._add_drafts(GRAMMAR, commit.forced, commit.accepted_forced)

    def _add_drafts(self, source: str, drafted: int, accepted: int) -> None:
        drafts = self.drafts.setdefault(source, DraftCounters())
        drafts.draft_tokens += drafted
        drafts.accepted_draft_tokens += accepted

    def add_times(self, proposed: Timed, verified: Timed, elapsed: float) -> None:
        """Record a round's seconds by stage. `elapsed`: seconds of the whole round."""
        self.stage_seconds["draft"] += proposed.forward + verified.draft
        self.stage_seconds["verify"] += verified.forward
        self.stage_seconds["realign"] += proposed.realign + verified.realign
        self.stage_seconds["wire"] += proposed.wire + verified.wire
        self.stage_seconds["schedule"] += max(0.0, elapsed - proposed.elapsed - verified.elapsed)


def _increment(counts: list[int], index: int) -> None:
    """Add one at an index, extending the list as needed."""
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1
