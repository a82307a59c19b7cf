"""One request being generated: its tokens, what the workers have cached of it, and when it ends. Pure."""

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

Shape = tuple[int, int, int, int]
"""What must be equal for sequences to need no padding between them: tokens, tokens that each worker lacks, and draft
tokens of the next round."""

# A round leaves the draft one token behind, or two after a full acceptance: both are fed in one pass.
DRAFT_MAY_LACK = 2


class FinishReason(enum.StrEnum):
    """Why a generation ended, as the public API says it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Finish:
    """The end of a generation; `matched_token_id` is the stop token, if one ended it."""

    reason: FinishReason
    matched_token_id: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """A request after validation."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int]
    """The end-of-sequence tokens are among them, unless the request ignores them."""
    num_speculative_tokens: int
    seed: int | None = None


@dataclass
class SpeculationStats:
    """What speculation did for one sequence. A round counts if it verified at least one draft token."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    """At index i: rounds in which exactly i draft tokens were accepted."""

    def add(self, drafted: int, accepted: int) -> None:
        """Counts one round."""
        if drafted == 0:
            return
        self.rounds += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per round, bonus included; 0 without rounds."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted; 0 if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


class Sequence:
    """Committed tokens only: drafts live in their round and are forgotten with it."""

    def __init__(self, sequence_id: int, request: GenerationRequest) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.token_ids = list(request.prompt_ids)
        self.target_length = 0
        """Positions that the target worker has cached; a prefix of `token_ids`."""
        self.draft_length = 0
        """Positions that the draft worker has cached; a prefix of `token_ids`."""
        self.draft_rests_until = 0
        """The first round in which the draft worker is asked again, after it had no slot."""
        self.ready_since = 0
        """The round of the pool after which it became ready."""
        self.finish: Finish | None = None
        self.speculation = SpeculationStats()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_length

    @property
    def generated_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.prompt_length :]

    @property
    def is_decoding(self) -> bool:
        """Whether the target lacks only the last token: the next pass gives a new one."""
        return self.target_length == len(self.token_ids) - 1

    @property
    def shape(self) -> Shape:
        """Equal shapes make a batch without padding."""
        length = len(self.token_ids)
        draft_lacks = max(DRAFT_MAY_LACK, length - self.draft_length)
        return length, length - self.target_length, draft_lacks, self.draft_limit

    @property
    def draft_limit(self) -> int:
        """Draft tokens that the next round can use: one token more than was accepted is always gained."""
        remaining = self.request.max_tokens - self.num_generated
        return min(self.request.num_speculative_tokens, remaining - 1)

    def commit(self, gained: Items[int]) -> list[int]:
        """Appends verified tokens up to the first that ends the generation; returns those that were appended."""
        kept = []
        for token in gained:
            if self.finish is not None:
                break
            kept.append(token)
            self.token_ids.append(token)
            if token in self.request.stop_token_ids:
                self.finish = Finish(FinishReason.STOP, token)
            elif self.num_generated >= self.request.max_tokens:
                self.finish = Finish(FinishReason.LENGTH)
        return kept
