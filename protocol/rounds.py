"""A round as coordinator and workers speak of it: what a worker is asked for each sequence, and what it answers.

The protocol is the same in every state: keep exactly `base_length` cached positions, then append `token_ids`.
"""

import enum
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from protocol.sampling import SamplingParams, TokenLogprobs


class ItemStatus(enum.Enum):
    """What became of the command to keep exactly `base_length` cached positions of a sequence."""

    OK = "ok"
    CACHE_MISS = "cache miss"
    NO_SLOT = "no slot"
    STALE_ROUND = "stale round"


@dataclass(frozen=True)
class SequenceItem:
    """Tokens that follow the first `base_length` cached positions of a sequence: what both workers are sent.

    On first contact `base_length` is 0, or the length of a prefix that another sequence has cached.
    """

    sequence_id: int
    base_length: int
    token_ids: tuple[int, ...]
    _: KW_ONLY
    sampling: SamplingParams | None = None
    """How the sequence's tokens are chosen, on first contact; None: by the largest logit."""
    prefix_sequence_id: int | None = None
    """The sequence whose cached positions are to be copied, if any."""
    max_length: int | None = None
    """Positions that the sequence can reach, drafts included, on first contact; None: as many as the model has."""


@dataclass(frozen=True)
class ProposeItem(SequenceItem):
    """What the draft worker is asked for one sequence."""

    _: KW_ONLY
    num_draft_tokens: int = 0
    min_chance: float = 0.0
    """What a draft token must gain: drafting ends early once less is expected of the next one. 0: it never does."""
    next_chance: float = 1.0
    """The probability that a token is accepted if all before it are: expected of one that is not drafted yet."""


@dataclass(frozen=True)
class Proposal:
    """What the draft worker answers for one sequence."""

    sequence_id: int
    status: ItemStatus
    draft_token_ids: tuple[int, ...] = ()
    cached_length: int = 0
    confidences: tuple[float, ...] = ()
    """The draft's own probability of each draft token, if it was asked for."""


@dataclass(frozen=True)
class VerifyItem(SequenceItem):
    """What the target worker is asked for one sequence."""

    _: KW_ONLY
    draft_token_ids: tuple[int, ...] = ()
    prefill_only: bool = False
    logprobs: int | None = None
    """Log-probabilities wanted at each position beside that of the chosen token; None: not even that one."""


@dataclass(frozen=True)
class Verdict:
    """What the target worker answers for one sequence."""

    sequence_id: int
    status: ItemStatus
    token_ids: tuple[int, ...] = ()
    """The accepted draft tokens and one of the target's own; empty for a prompt chunk."""
    cached_length: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities at each of these tokens, if they were asked for."""


@dataclass(frozen=True)
class RoundLimits:
    """What a worker checks the items of a round against."""

    vocab_size: int
    max_model_len: int
    capacity: Callable[[int], int | None]
    """Positions reserved for a sequence, by its id; None if it has no slot yet."""
