"""The plan for drafting a sequence in a round. Pure."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from specpool.protocol.rounds import MAX_LOOKUP_TOKENS

# After a round, the draft worker lacks one token, or two after full acceptance. One pass handles both.
MAX_DRAFT_LAG = 2


class DraftMethod(enum.StrEnum):
    """Where draft tokens come from. `specpool.v1.DraftMethod` documents the members."""

    MODEL = "model"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    PREDICTION = "prediction"
    BEST = "best"


def max_lookup_tokens(num_draft_tokens: int) -> int:
    """Return the maximum lookup tokens with adaptive draft lengths. They need no draft steps, so it may be doubled."""
    return max(num_draft_tokens, min(2 * num_draft_tokens, MAX_LOOKUP_TOKENS))


class LookupSource(enum.StrEnum):
    """Sources of drafts that cost no model pass."""

    SEQUENCE = "sequence"
    """The sequence's own tokens."""
    ANSWERS = "answers"
    """Earlier answers in the request's namespace."""
    PREDICTION = "prediction"
    """The request's prediction."""

    @property
    def method(self) -> DraftMethod:
        """Name of the source in the ledger, counters and metrics."""
        return _METHODS[self]


_METHODS = {
    LookupSource.SEQUENCE: DraftMethod.NGRAM,
    LookupSource.ANSWERS: DraftMethod.SUFFIX,
    LookupSource.PREDICTION: DraftMethod.PREDICTION,
}


class Lookup(NamedTuple):
    """Draft tokens found by a source."""

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    """Acceptance probability of each token if all before it are accepted."""
    source: LookupSource = LookupSource.SEQUENCE
    run: int = 0
    """Number of matched tokens before the draft tokens."""
    start: int = 0
    """Length of the sequence at lookup time. Rounds in flight may add tokens before the commit."""
    bins: tuple[int, ...] = ()
    """Statistics bin of each token, as defined by the source."""

    def after(self, num_tokens: int) -> "Lookup":
        """Return the lookup without its first tokens, for a round after pending ones."""
        if not num_tokens:
            return self
        return self._replace(token_ids=self.token_ids[num_tokens:], chances=self.chances[num_tokens:])


NO_LOOKUP = Lookup()


class DraftPlan(NamedTuple):
    """How a sequence drafts in a round."""

    num_draft_tokens: int = 0
    """Tokens to request from the draft worker, in each branch if there are any. With a carried draft: tokens to verify
    in this round, and to draft for the next one."""
    num_branches: int = 0
    """Branches to draft during this round's verification. 0: draft before it."""
    min_chance: float = 0.0
    """Minimum probability that a token and all before it are accepted; less likely tokens are not worth their cost."""
    next_chance: float = 1.0
    """Acceptance probability of the next draft token if all earlier ones are accepted."""
    lookup_ids: tuple[int, ...] = ()
    """Lookup tokens after those that pending rounds may yield. Verified if the draft worker proposes none."""
    lookup: Lookup = NO_LOOKUP
    """The most promising lookup. Its source learns from it whether its tokens are verified or not."""
    allows_forced_tokens: bool = True
    """Whether the target worker may append forced tokens."""
    reads_states: bool = True
    """Whether a draft that reads hidden states drafts now or soon, so that the target worker should return them."""
    drafts_next: bool = True
    """Whether a carried draft drafts for the next round."""
    is_trial: bool = False
    """Whether the sequence tries a draft method that currently does not pay off."""


NO_DRAFTS = DraftPlan()


@dataclass(frozen=True)
class SpeculationState:
    """Estimates behind the current draft lengths. `specpool.v1.SpeculationState` documents them."""

    draft_steps: int
    expected_tokens_per_s: float
    plain_tokens_per_s: float
    model_acceptance_rate: float
    ngram_acceptance_rates: dict[int, float]
    draft_step_s: float
    verify_s: float
    verify_row_s: float
    exchange_s: float
