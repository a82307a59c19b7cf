"""The commit: tokens that a sequence gained in a round. Pure."""

from dataclasses import dataclass
from functools import cached_property

from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.text import ShownText
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
