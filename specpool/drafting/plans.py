"""The plan for drafting a sequence in a round. Pure."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

# After a round, the draft worker lacks one token, or two after full acceptance. One pass handles both.
MAX_DRAFT_LAG = 2


class DraftMethod(enum.StrEnum):
    """Where draft tokens come from. `specpool.v1.DraftMethod` documents the members."""

    MODEL = "model"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    PREDICTION = "prediction"
    BEST = "best"


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
    """Tokens to request from the draft worker, in each branch if there are any. With a carried draft: tokens to verify
    in this round, and to draft for the next one."""
    num_branches: int = 0
    """Branches to draft during this round's verification. 0: draft before it."""
    min_chance: float = 0.0
    """Minimum probability that a token and all before it are accepted; less likely tokens are not worth their cost."""
    next_chance: float = 1.0
    """Acceptance probability of the next draft token if all earlier ones are accepted."""
    lookup_ids: tuple[int, ...] = ()
    """Prompt-lookup tokens, verified if the draft worker proposes none."""
    lookup: Lookup = NO_LOOKUP
    """What prompt lookup found. Its acceptance counts whether the tokens are verified or not."""
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
