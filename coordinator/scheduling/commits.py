"""What goes into a round for a sequence and what comes out: the draft order, and the commit. Pure."""

from dataclasses import dataclass

from coordinator.scheduling.sequence import DraftMethod, Sequence
from coordinator.scheduling.text import ShownText
from specpool.protocol.rounds import Proposal
from specpool.protocol.sampling import TokenLogprobs


@dataclass(frozen=True)
class DraftOrder:
    """The draft tokens that a sequence is to have in a round."""

    num_draft_tokens: int = 0
    """Tokens that the draft worker is asked for."""
    min_chance: float = 0.0
    """What a token must gain to be drafted and verified: the chance that it and all before it are accepted."""
    next_chance: float = 1.0
    """The chance that a token not drafted yet is accepted, if all before it are."""
    lookup_ids: tuple[int, ...] = ()
    """Tokens of prompt lookup, verified if the draft worker gives none."""


@dataclass(frozen=True)
class Commit:
    """What a round gained for one sequence, with the text that can be shown now."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    shown: ShownText
    logprobs: tuple[TokenLogprobs, ...]
    drafted: int
    accepted: int
    method: DraftMethod | None
    """The method that drafted the tokens; None if none were drafted."""
    proposal: Proposal | None
    """The draft worker's answer, of which not every token was verified."""
