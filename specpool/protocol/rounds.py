"""A round between the coordinator and a worker: the work requested for each sequence, and the worker's answer.

The command is the same in every state: keep exactly `base_length` cached positions, then append `token_ids`.
"""

import enum
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from specpool.protocol.sampling import SamplingParams, TokenLogprobs

MAX_DRAFT_TOKENS = 16
"""Most draft tokens of a sequence in a round, unless the coordinator's settings allow more."""


class ItemStatus(enum.Enum):
    """Outcome of the command to keep exactly `base_length` cached positions of a sequence."""

    OK = "ok"
    CACHE_MISS = "cache miss"
    NO_SLOT = "no slot"
    STALE_ROUND = "stale round"


@dataclass(frozen=True)
class SequenceItem:
    """Work on one sequence for either worker: tokens that follow its first `base_length` cached positions.

    On first contact `base_length` is 0, or the length of a prefix that another sequence has cached.
    """

    sequence_id: int
    base_length: int
    token_ids: tuple[int, ...]
    _: KW_ONLY
    sampling: SamplingParams | None = None
    """Sampling rules of the sequence, on first contact; None: the largest logit is chosen."""
    prefix_sequence_id: int | None = None
    """The sequence whose cached positions are copied, if any."""
    max_length: int | None = None
    """Positions that the sequence can reach, drafts included, on first contact; None: all that the model has."""


@dataclass(frozen=True)
class ProposeItem(SequenceItem):
    """Work on one sequence for the draft worker."""

    _: KW_ONLY
    num_draft_tokens: int = 0
    min_chance: float = 0.0
    """Lowest acceptance probability of a draft token; drafting ends early once the next token's is lower. 0: none."""
    next_chance: float = 1.0
    """Expected probability that the next token is accepted if all draft tokens before it are."""


@dataclass(frozen=True)
class Proposal:
    """The draft worker's answer for one sequence."""

    sequence_id: int
    status: ItemStatus
    draft_token_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    confidences: tuple[float, ...] = ()
    """The draft's own probability of each draft token, if requested."""


@dataclass(frozen=True)
class VerifyItem(SequenceItem):
    """Work on one sequence for the target worker."""

    _: KW_ONLY
    draft_token_ids: tuple[int, ...] = ()
    prefill_only: bool = False
    logprobs: int | None = None
    """Number of log-probabilities wanted at each position besides that of the chosen token; None: not even that one."""


@dataclass(frozen=True)
class Verdict:
    """The target worker's answer for one sequence."""

    sequence_id: int
    status: ItemStatus
    token_ids: tuple[int, ...] = ()
    """The accepted draft tokens and one token that the target chose; empty for a prompt chunk."""
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities at the position of each of these tokens, if requested."""


@dataclass(frozen=True)
class RoundLimits:
    """Limits that a worker checks the items of a round against."""

    vocab_size: int
    max_model_len: int
    capacity: Callable[[int], int | None]
    """Positions reserved for a sequence, by its id; None if it has no slot yet."""
    max_items: int = 2**16
    """Items of one round."""
    max_logits: int = 2**16
    """Positions of one round, all its sequences together, whose logits are asked for."""
