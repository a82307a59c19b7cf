"""A sequence's part in a round: the draft plan at its start, and the commit at its end. Pure."""

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from coordinator.scheduling.sequence import DraftMethod, Sequence
from coordinator.scheduling.text import ShownText
from specpool.protocol.rounds import Proposal
from specpool.protocol.sampling import NO_LOGPROBS, Logprobs

GRAMMAR = "grammar"
"""Name of forced tokens in counters by draft method. Not a method that requests can choose."""


class LookupSource(enum.StrEnum):
    """What prompt lookup searches: the sequence's own tokens, or earlier answers of its namespace."""

    SEQUENCE = "sequence"
    ANSWERS = "answers"


class Lookup(NamedTuple):
    """Tokens that followed an earlier occurrence of a sequence's last tokens."""

    token_ids: tuple[int, ...] = ()
    run: int = 0
    """Length of the repeated run; 0 without one."""
    source: LookupSource = LookupSource.SEQUENCE
    start: int = 0
    """Number of tokens of the sequence when it was looked up. Rounds in flight may add some before the commit."""


NO_LOOKUP = Lookup()


class DraftPlan(NamedTuple):
    """How a sequence drafts in a round."""

    num_draft_tokens: int = 0
    """Tokens to request from the draft worker, in each branch if there are any."""
    num_branches: int = 0
    """Branches to draft during this round's verification. 0: draft before it."""
    min_chance: float = 0.0
    """Minimum probability that a token and all before it are accepted; less likely tokens are not worth their cost."""
    next_chance: float = 1.0
    """Acceptance probability of a token not drafted yet, given that all before it are accepted."""
    lookup_ids: tuple[int, ...] = ()
    """Prompt-lookup tokens, verified if the draft worker proposes none."""
    lookup: Lookup = NO_LOOKUP
    """What prompt lookup found. Its acceptance counts whether the tokens are verified or not."""
    allows_forced_tokens: bool = True
    """Whether the target worker may append forced tokens."""
    reads_states: bool = True
    """Whether a draft that reads hidden states drafts now or soon, so that the target worker should return them."""
    is_trial: bool = False
    """Whether the sequence tries a draft method that currently does not pay off."""


NO_DRAFTS = DraftPlan()


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
    """The draft worker's answer, possibly only partly verified."""
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
