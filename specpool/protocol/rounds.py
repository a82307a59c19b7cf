"""A round between the coordinator and a worker: the work for each sequence, and the worker's result.

The command is the same in every state: keep exactly `base_length` cached positions, then append `token_ids`.

Every sequence needs new items and results in every round. Their classes are not frozen: creating a frozen object takes
almost three times as long.
"""

import enum
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from specpool.protocol.sampling import NO_LOGPROBS, Logprobs, SamplingParams

MAX_DRAFT_TOKENS = 16
"""Default maximum of draft tokens per sequence and round."""
MAX_LOOKUP_TOKENS = 2 * MAX_DRAFT_TOKENS
"""Default maximum of lookup tokens. Higher than for draft models, because lookups need no draft steps."""
MAX_ITEM_BRANCHES, MAX_ITEM_UNVERIFIED = 64, 64
"""Maximum branches of an item, and maximum tokens that are being verified."""


class ItemStatus(enum.Enum):
    """Outcome of a round for one sequence."""

    OK = "ok"
    CACHE_MISS = "cache miss"
    NO_SLOT = "no slot"
    STALE_ROUND = "stale round"
    GRAMMAR_FAILED = "grammar failed"
    GRAMMAR_NOT_READY = "grammar not ready"


class Continuation(NamedTuple):
    """Position at which a sequence continues after its last round."""

    base_length: int
    """Positions that the round kept in the cache."""
    token_id: int
    """The last token that the round yielded."""
    num_accepted: int
    """Draft tokens that the round accepted."""


@dataclass
class SequenceItem:
    """Work on one sequence for either worker: tokens that follow its first `base_length` cached positions.

    On first contact `base_length` is 0.
    """

    sequence_id: int
    base_length: int
    token_ids: tuple[int, ...]
    _: KW_ONLY
    sampling: SamplingParams | None = None
    """Sampling parameters, on first contact. None: greedy decoding."""
    cache_namespace: bytes | None = None
    """Namespace of the prefix cache, on first contact. None: the sequence neither uses nor leaves cached prefixes."""
    expected_prefix_length: int = 0
    """Number of leading tokens that the prefix cache must hold. If it holds fewer, the item is a cache miss."""

    @property
    def end(self) -> int:
        """Positions that the item needs."""
        return self.base_length + len(self.token_ids)

    @property
    def max_end(self) -> int:
        """Maximum number of positions that the item can use."""
        return self.end

    @property
    def max_prefix_length(self) -> int:
        """Maximum number of leading tokens to take from the prefix cache. The last token must run for its logits."""
        return len(self.token_ids) - 1

    @property
    def max_num_new_tokens(self) -> int:
        """Maximum number of tokens to run, apart from draft tokens. A continued item runs one token."""
        return max(1, len(self.token_ids) - self.expected_prefix_length)


@dataclass
class ProposeItem(SequenceItem):
    """Work on one sequence for the draft worker."""

    _: KW_ONLY
    num_draft_tokens: int = 0
    min_chance: float = 0.0
    """Minimum acceptance probability of a draft token. Drafting stops before a token below it. 0: no minimum."""
    next_chance: float = 1.0
    """Estimated acceptance probability of the next token, given that all earlier draft tokens are accepted."""
    num_branches: int = 0
    """Maximum number of branches, for outcomes of the verification of the last `num_unverified` tokens. 0: draft after
    all tokens, without branches."""
    num_unverified: int = 0
    features: bytes = b""
    """Hidden states of the target before the last committed tokens; see `ProposeItem` in draft_worker.proto."""

    @property
    def end(self) -> int:
        """Positions that the item needs. The last draft token is not cached. Branches use spare positions."""
        drafted = 0 if self.num_branches else max(0, self.num_draft_tokens - 1)
        return super().end + drafted

    @property
    def max_prefix_length(self) -> int:
        """At most the expected prefix if the item carries states, which further cached pages may lack."""
        return self.expected_prefix_length if self.features else super().max_prefix_length


@dataclass(frozen=True)
class ProposeRound:
    """A coordinator's round for the draft worker."""

    coordinator_id: str
    round_id: int
    items: Sequence[ProposeItem]
    chances: Sequence[float] = ()
    """Acceptance probabilities by the draft's own probability, in equal bins from 0 to 1. If empty, the draft's own
    probability counts."""
    step_cost: float = 0.0
    """Minimum expected gain of a draft step over all items."""
    translation_id: str = ""
    """Id of the translation of the items' tokens. Empty: the tokens are the draft's own."""


@dataclass
class Branch:
    """Draft tokens after one outcome of a verification."""

    num_accepted: int
    token_id: int
    """The target's token after the accepted ones."""
    draft_token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()

    @property
    def outcome(self) -> tuple[int, int]:
        """The outcome that the branch continues: accepted tokens, and the token after them."""
        return self.num_accepted, self.token_id


@dataclass
class Proposal:
    """The draft worker's result for one sequence."""

    sequence_id: int
    status: ItemStatus
    draft_token_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    confidences: tuple[float, ...] = ()
    """The draft model's probability of each draft token, if requested."""
    branches: tuple[Branch, ...] = ()
    """The most probable first."""


class OwnDraftItem(NamedTuple):
    """How a worker that carries a draft drafts for one sequence."""

    max_verified: int = 0
    """Maximum number of the worker's own draft tokens to verify in this round."""
    num_draft_tokens: int = 0
    """Number of tokens to draft after this round, for the next one."""
    max_length: int = 0
    """Maximum number of committed and draft tokens of the sequence."""
    min_chance: float = 0.0
    """See `ProposeItem`. The worker does not verify less likely own draft tokens, either."""
    next_chance: float = 1.0

    @property
    def is_idle(self) -> bool:
        """Whether the worker neither verifies nor makes its own draft, and at most keeps states for it."""
        return not self.max_verified and not self.num_draft_tokens


@dataclass
class OwnDraft(Proposal):
    """The own draft that a round found in the worker, and the state of the draft's cache after the round."""

    num_verified: int = 0
    """Number of draft tokens that the round verified."""

    @property
    def verified_ids(self) -> tuple[int, ...]:
        """Draft tokens that the round verified."""
        return self.draft_token_ids[: self.num_verified]


@dataclass
class VerifyItem(SequenceItem):
    """Work on one sequence for the target worker."""

    _: KW_ONLY
    draft_token_ids: tuple[int, ...] = ()
    prefill_only: bool = False
    logprobs: int | None = None
    """Number of top log-probabilities per position, besides the chosen token's. None: no log-probabilities."""
    after_round_id: int | None = None
    """The sequence's previous round, whose result determines `base_length` and `token_ids`. They are empty until the
    result is known, and if the round yielded no token."""
    branches: tuple[Branch, ...] = ()
    """Draft tokens for possible outcomes of that round. Cleared once the outcome is known."""
    max_draft_tokens: int = 0
    """Maximum number of draft tokens, including forced tokens. 0: no forced tokens."""
    want_features: bool = False
    """Whether to return the hidden states of the last committed and of the accepted tokens, or to keep them for a
    carried draft."""
    own_draft: OwnDraftItem | None = None
    """None: the worker neither verifies nor makes its own draft."""

    @property
    def end(self) -> int:
        """Positions that the item needs."""
        return super().end + len(self.draft_token_ids)

    @property
    def max_end(self) -> int:
        """Maximum number of positions that the item can use, forced tokens included."""
        return super().end + max(len(self.draft_token_ids), self.max_draft_tokens)

    @property
    def max_num_draft_tokens(self) -> int:
        """Maximum number of draft tokens, whatever the outcome of the previous round."""
        drafted = max((len(branch.draft_token_ids) for branch in self.branches), default=len(self.draft_token_ids))
        own = self.own_draft.max_verified if self.own_draft is not None else 0
        return max(drafted, own, self.max_draft_tokens)

    def num_features(self, window: int, num_draft_tokens: int, prefix_length: int = 0) -> int:
        """Return the number of states of at most `window` committed tokens and the `num_draft_tokens` after them.

        `prefix_length`: leading tokens that the worker did not run.
        """
        return min(window, len(self.token_ids) - prefix_length) + num_draft_tokens if self.want_features else 0

    def select_branch(self, num_accepted: int, token_id: int) -> None:
        """Take the draft tokens of the branch that matches this outcome, if any, and clear `branches`."""
        outcome, branches, self.branches = (num_accepted, token_id), self.branches, ()
        for branch in branches:
            if branch.outcome == outcome:
                self.draft_token_ids = branch.draft_token_ids
                return


@dataclass(frozen=True)
class VerifyRound:
    """A coordinator's round for the target worker."""

    coordinator_id: str
    round_id: int
    items: Sequence[VerifyItem]
    may_join: bool = False
    """Whether the round may share a forward pass with an earlier round of its coordinator."""
    feature_layers: tuple[int, ...] = ()
    """Numbers of layers after which to take the features."""
    feature_window: int = 0
    """Maximum number of committed tokens of an item to return features for."""
    chances: Sequence[float] = ()
    """For the carried draft; see `ProposeRound`."""
    step_cost: float = 0.0


@dataclass
class Verdict:
    """The target worker's result for one sequence."""

    sequence_id: int
    status: ItemStatus
    token_ids: tuple[int, ...] = ()
    """The accepted draft tokens and the recovered or bonus token. Empty for a prompt chunk."""
    num_cached_tokens: int = 0
    logprobs: Logprobs = NO_LOGPROBS
    """Log-probabilities for each of `token_ids`, if requested."""
    num_forced_tokens: int = 0
    """Number of forced tokens that the worker appended to the draft tokens."""
    prefix_length: int = 0
    """Number of the item's leading tokens found in the prefix cache."""
    error: str = ""
    """The reason if the grammar failed."""
    features: bytes = b""
    """Hidden states of the last cached positions, if requested; see `VerifyResult` in target_worker.proto."""
    own_draft: OwnDraft | None = None
    """The worker's own draft; None unless the item has an `OwnDraftItem`."""
    reusable_length: int | None = None
    """Number of leading tokens after which other sequences can continue. None: they can after every full page."""


@dataclass(frozen=True)
class RoundLimits:
    """A worker's limits for the items of a round."""

    vocab_size: int
    max_model_len: int
    max_items: int = 2**16
    """Maximum number of items in a round."""
    max_logits: int = 2**16
    """Maximum number of positions in a round whose logits are needed."""
    num_layers: int = 0
    """Layers whose states the worker returns; 0: it returns none."""
    hidden_size: int = 0
    carries_draft: bool = False
    """Whether the target worker carries a draft."""
