"""Results and durations of a round, from which draft planning learns. Pure."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from specpool.drafting.acceptance import expected_gain
from specpool.drafting.costs import Timed
from specpool.drafting.ledger import Part
from specpool.drafting.plans import MAX_DRAFT_LAG, DraftMethod
from specpool.drafting.sequences import Commit
from specpool.protocol.rounds import Proposal, ProposeItem, VerifyItem

C_co = TypeVar("C_co", bound=Commit, covariant=True)


class DraftCall(NamedTuple):
    """A call to the draft worker."""

    rows: Items[int]
    """Rows of each draft step; see `draft_steps`."""
    timed: Timed


@dataclass
class RoundOutcome(Generic[C_co]):
    """Results and durations of a round."""

    verify_items: Items[VerifyItem]
    verified: Timed
    commits: Items[C_co]
    draft_calls: list[DraftCall] = field(default_factory=list)
    """Answered calls to the draft worker."""
    called_draft: bool = False
    """Whether the draft worker was called, even if it did not answer."""
    drafted_ahead: bool = False
    """Whether the draft worker was called during the verification."""
    ahead_seconds: float | None = None
    """Seconds from the result of the previous round until the branches of this one arrived. None unless this round was
    sent while the previous one was in flight."""
    is_trial: bool = False
    """Whether the round was a trial of its draft method."""
    is_quiet: bool = True
    """Whether each worker had its devices to itself, so that pass times are those of one worker alone."""

    @property
    def all_decode(self) -> bool:
        """Whether no sequence prefills."""
        return all(len(item.token_ids) == 1 for item in self.verify_items)

    @property
    def continues(self) -> bool:
        """Whether the round was sent before the response to the previous one."""
        return any(item.after_round_id is not None for item in self.verify_items)

    @property
    def has_own_drafts(self) -> bool:
        """Whether the target worker was asked to verify or make its own drafts."""
        return any(item.own_draft is not None and not item.own_draft.is_idle for item in self.verify_items)

    @property
    def is_comparable(self) -> bool:
        """Whether the gain over a plain round is due to adaptive draft lengths alone."""
        fixed = any(commit.drafted and not commit.sequence.request.adaptive for commit in self.commits)
        forced = any(commit.forced for commit in self.commits)
        return bool(self.commits) and self.all_decode and not fixed and not forced

    @property
    def method(self) -> DraftMethod | None:
        """The most expensive draft method used; None for a plain round."""
        was_asked = self.called_draft or self.has_own_drafts
        if was_asked or any(commit.method is DraftMethod.MODEL for commit in self.commits):
            return DraftMethod.MODEL
        if drafted := [(commit.drafted, commit.method) for commit in self.commits if commit.method is not None]:
            return max(drafted)[1]
        return DraftMethod.NGRAM if any(item.draft_token_ids for item in self.verify_items) else None

    @property
    def lookup_parts(self) -> dict[str, Part]:
        """Each lookup method's part in the round. Empty if the draft model took part or nothing was drafted."""
        return {} if self.method in (None, DraftMethod.MODEL) else lookup_parts(self.commits)

    @property
    def rows(self) -> dict[int, int]:
        """Rows of the verification by sequence id."""
        forced = {commit.sequence.sequence_id: commit.forced for commit in self.commits}
        return {
            item.sequence_id: item.max_num_new_tokens + len(item.draft_token_ids) + forced.get(item.sequence_id, 0)
            for item in self.verify_items
        }

    @property
    def num_tokens(self) -> int:
        """Tokens gained by all sequences."""
        return sum(len(commit.token_ids) for commit in self.commits)

    @property
    def waited(self) -> float:
        """Extra seconds of the round from waiting for other drafts than the main one."""
        hidden = self.verified.forward if self.drafted_ahead else 0.0
        ends = ((call.timed.elapsed, call.timed.waited) for call in self.draft_calls)
        return sum(max(end + waited, hidden) - max(end, hidden) for end, waited in ends)

    @property
    def calls(self) -> list[Timed]:
        """Durations of the calls to both workers."""
        return [self.verified, *(call.timed for call in self.draft_calls)]


def lookup_parts(commits: Items[Commit]) -> dict[str, Part]:
    """Return each lookup method's part in a round without the draft model."""
    drafted = sum(commit.drafted for commit in commits)
    parts: dict[str, Part] = {}
    for commit in commits:
        if commit.method is not None:
            share, gained = parts.get(commit.method, Part(0.0, 0.0))
            parts[commit.method] = Part(share + commit.drafted / drafted, gained + _credit(commit))
    return parts


def _credit(commit: Commit) -> float:
    """Return the tokens to credit to a lookup in the ledger.

    A prediction is credited with its expected gain, which follows the client's own acceptance rates. One client's wrong
    predictions must not pause the predictions of others.
    """
    if commit.method is not DraftMethod.PREDICTION:
        return len(commit.token_ids) - 1
    return expected_lookup_gain(commit)


def expected_lookup_gain(commit: Commit) -> float:
    """Tokens that the verified part of a lookup was expected to gain. Call after the commit."""
    begin = len(commit.sequence.token_ids) - len(commit.token_ids)
    offset = max(0, begin - commit.lookup.start)
    return expected_gain(commit.lookup.chances[offset : offset + commit.drafted])


def draft_steps(items: Items[ProposeItem], proposals: Items[Proposal]) -> list[int]:
    """Rows of each pass of a call to the draft worker.

    Without branches, the first pass is the first draft step. Empty if the call drafted nothing or caught up first. With
    features, a draft regularly recomputes several tokens in its first pass.
    """
    has_features = any(item.features for item in items)
    if not has_features and any(item.max_num_new_tokens - item.num_unverified > MAX_DRAFT_LAG for item in items):
        return []
    branches = [branch.draft_token_ids for proposal in proposals for branch in proposal.branches]
    lengths = [len(drafted) for drafted in branches] or [len(proposal.draft_token_ids) for proposal in proposals]
    steps = [sum(k > j for k in lengths) for j in range(max(lengths, default=0))]
    new_tokens = sum(item.max_num_new_tokens for item in items)
    if any(item.num_branches for item in items):
        return [new_tokens, *steps]
    return [new_tokens, *steps[1:]] if has_features and steps else steps
