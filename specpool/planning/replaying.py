"""Replay of recorded answers, with the interfaces that `Drafting` expects. Pure."""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from specpool.distill.replay import Prediction
from specpool.drafting.draft_models import DraftModel
from specpool.drafting.plans import MAX_DRAFT_LAG, NO_LOOKUP, DraftMethod, DraftPlan, Lookup, max_lookup_tokens
from specpool.protocol.rounds import ItemStatus, Proposal
from specpool.protocol.sampling import SamplingParams

WRONG = -1
"""Stands for a draft token that differs from the target's choice."""


@dataclass(frozen=True)
class Recording:
    """A prompt, the target's greedy answer, and the draft model's predictions of its tokens."""

    prompt: Items[int]
    token_ids: Items[int]
    prediction: Prediction


@dataclass(frozen=True)
class Request:
    method: DraftMethod
    num_speculative_tokens: int
    adaptive: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prediction: Items[int] = ()
    cache_salt: str = ""
    namespace: tuple[str, str] = ("", "")


@dataclass
class DraftCache:
    start: int
    model: DraftModel | None = None
    backoff_until: int = 0


@dataclass(eq=False)
class Sequence:
    """A recorded answer being replayed."""

    sequence_id: int
    request: Request
    recording: Recording
    token_ids: list[int]
    draft: DraftCache
    is_decoding: bool = False
    own_draft: Proposal | None = None
    """Draft tokens that the target worker prepared after the last commit."""
    pending_ids: tuple[int, ...] = ()
    """Tokens of a round whose result the coordinator does not know yet."""
    num_pending_tokens: int = 0
    """Tokens that the pending round yields if its draft tokens are accepted."""

    @property
    def prompt_length(self) -> int:
        return len(self.recording.prompt)

    @property
    def max_length(self) -> int:
        return self.prompt_length + len(self.recording.token_ids)

    @property
    def length(self) -> int:
        return len(self.token_ids) + len(self.pending_ids)

    @property
    def is_complete(self) -> bool:
        return len(self.token_ids) == self.max_length

    @property
    def max_num_draft_tokens(self) -> int:
        return max(0, min(self.request.num_speculative_tokens, self.max_length - self.length - 1))

    @property
    def max_num_lookup_tokens(self) -> int:
        left = self.max_length - len(self.token_ids) - self.num_pending_tokens - 1
        return max(0, min(max_lookup_tokens(self.request.num_speculative_tokens), left))

    def following(self, num_tokens: int) -> tuple[int, ...]:
        """Return the target's next tokens."""
        position = self.length - self.prompt_length
        return tuple(self.recording.token_ids[position : position + num_tokens])

    def predict(self, step: int) -> tuple[int, float]:
        """Return the model's draft token at a step, assuming the earlier ones are accepted, and its confidence."""
        position = self.length - self.prompt_length + step
        is_right, confidence = self.recording.prediction.at(position, step)
        return self.recording.token_ids[position] if is_right else WRONG, confidence

    def remaining_lookup(self, plan: DraftPlan) -> tuple[int, ...]:
        """Return the lookup tokens left to verify: none if the previous round gained other tokens."""
        looked_up, gained = plan.lookup.token_ids, tuple(self.token_ids[plan.lookup.start :])
        if not plan.lookup_ids or gained != looked_up[: len(gained)]:
            return ()
        left = self.max_length - self.length - 1
        return looked_up[len(gained) :][: max(0, min(len(plan.lookup_ids), left))]

    def settle(self) -> None:
        """Commit the pending tokens."""
        self.token_ids += self.pending_ids
        self.pending_ids, self.num_pending_tokens = (), 0


@dataclass
class Commit:
    """The result of a round for a sequence, as `Drafting` expects it."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    drafted: int
    method: DraftMethod | None
    proposal: Proposal | None
    lookup: Lookup = NO_LOOKUP
    forced = num_branches = 0
    branch = None

    @property
    def num_agreed(self) -> int:
        return len(self.token_ids) - 1


@dataclass(eq=False)
class ModelDraft:
    """A draft in progress. Stops by the same rule as `specpool.engine.passes.drafts.Draft`."""

    sequence: Sequence
    plan: DraftPlan
    limit: int
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0

    @property
    def gain(self) -> float:
        return self.chance * self.plan.next_chance - self.plan.min_chance if self.plan.min_chance else math.inf

    @property
    def wants_more(self) -> bool:
        return len(self.token_ids) < self.limit and self.gain >= 0

    @property
    def lag(self) -> int:
        """Additional tokens of the first step, with which the draft catches up."""
        return max(0, self.sequence.length - self.sequence.draft.start - MAX_DRAFT_LAG)

    def finished(self) -> Proposal:
        confidences = tuple(self.confidences) if self.plan.min_chance else ()
        return Proposal(self.sequence.sequence_id, ItemStatus.OK, tuple(self.token_ids), confidences=confidences)
