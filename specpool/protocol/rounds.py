"""A round between the coordinator and a worker: the work for each sequence, and the worker's result.

The command is the same in every state: keep exactly `base_length` cached positions, then append `token_ids`.
"""

import enum
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from specpool.protocol.sampling import SamplingParams, TokenLogprobs

MAX_DRAFT_TOKENS = 16
"""Default maximum of draft tokens per sequence and round."""


class ItemStatus(enum.Enum):
    """Outcome of a round for one sequence."""

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
    """Sampling parameters, on first contact. None: greedy decoding."""
    prefix_sequence_id: int | None = None
    """Sequence to copy the cached prefix from."""
    max_length: int | None = None
    """Maximum length with draft tokens, on first contact. None: max_model_len."""


@dataclass(frozen=True)
class ProposeItem(SequenceItem):
    """Work on one sequence for the draft worker."""

    _: KW_ONLY
    num_draft_tokens: int = 0
    min_chance: float = 0.0
    """Minimum acceptance probability of a draft token. Drafting stops before a token below it. 0: no minimum."""
    next_chance: float = 1.0
    """Estimated acceptance probability of the next token, given that all earlier draft tokens are accepted."""


@dataclass(frozen=True)
class Proposal:
    """The draft worker's result for one sequence."""

    sequence_id: int
    status: ItemStatus
    draft_token_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    confidences: tuple[float, ...] = ()
    """The draft model's probability of each draft token, if requested."""


@dataclass(frozen=True)
class VerifyItem(SequenceItem):
    """Work on one sequence for the target worker."""

    _: KW_ONLY
    draft_token_ids: tuple[int, ...] = ()
    prefill_only: bool = False
    logprobs: int | None = None
    """Number of top log-probabilities per position, besides the chosen token's. None: no log-probabilities."""


@dataclass(frozen=True)
class Verdict:
    """The target worker's result for one sequence."""

    sequence_id: int
    status: ItemStatus
    token_ids: tuple[int, ...] = ()
    """The accepted draft tokens and the recovered or bonus token. Empty for a prompt chunk."""
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities for each of `token_ids`, if requested."""


@dataclass(frozen=True)
class RoundLimits:
    """A worker's limits for the items of a round."""

    vocab_size: int
    max_model_len: int
    capacity: Callable[[int], int | None]
    """Returns the positions reserved for a sequence id, or None if it has no slot."""
    max_items: int = 2**16
    """Maximum number of items in a round."""
    max_logits: int = 2**16
    """Maximum number of positions in a round whose logits are needed."""
