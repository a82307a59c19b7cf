"""Interfaces of the objects that drafting reads: sequences, requests, commits and the draft. Pure."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from specpool.drafting.costs import StepTimes
from specpool.drafting.draft_models import DraftModel
from specpool.drafting.plans import DraftMethod, Lookup
from specpool.protocol.rounds import Proposal
from specpool.protocol.sampling import SamplingParams


class Request(Protocol):
    """The request of a sequence."""

    @property
    def num_speculative_tokens(self) -> int: ...
    @property
    def adaptive(self) -> bool: ...
    @property
    def method(self) -> DraftMethod: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def namespace(self) -> tuple[str, str]: ...
    @property
    def prediction(self) -> Items[int]: ...


class DraftCache(Protocol):
    """What the draft worker has cached of a sequence."""

    model: DraftModel | None
    """The draft model assigned to the sequence. None: no model assigned, or there is only one draft."""

    @property
    def start(self) -> int: ...
    @property
    def backoff_until(self) -> int: ...


class Sequence(Protocol):
    """A sequence that drafts are planned for."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def token_ids(self) -> Items[int]: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def is_decoding(self) -> bool: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def max_length(self) -> int: ...
    @property
    def max_num_draft_tokens(self) -> int: ...
    @property
    def max_num_lookup_tokens(self) -> int: ...
    @property
    def num_pending_tokens(self) -> int: ...
    @property
    def draft(self) -> DraftCache: ...


class Commit(Protocol):
    """The tokens that a sequence gained in a round, and the drafts for them."""

    @property
    def sequence(self) -> Sequence: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def drafted(self) -> int: ...
    @property
    def forced(self) -> int: ...
    @property
    def num_agreed(self) -> int: ...
    @property
    def method(self) -> DraftMethod | None: ...
    @property
    def proposal(self) -> Proposal | None: ...
    @property
    def lookup(self) -> Lookup: ...
    @property
    def branch(self) -> int | None: ...
    @property
    def num_branches(self) -> int: ...


@dataclass(frozen=True)
class DraftWorker:
    """The draft workers that are ready when a round begins, or the draft carried by the target worker."""

    max_model_len: int
    """Limit of sequences without an assigned draft model."""
    round_id: int
    step_times: StepTimes | None = None
    """Measured by the worker at each start. None: keep the learned times."""
    max_branches: int = 0
    """Maximum branches of a sequence; 0 if it cannot draft during a verification."""
    selects_branches: bool = False
    """Whether the target worker can select among the branches."""
    reads_states: bool = False
    """Whether the draft reads hidden states of the target."""
    is_own: bool = False
    """Whether the target worker carries the draft."""
