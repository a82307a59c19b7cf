"""The rows of vLLM's batch as sequences, recognized from step to step by their tokens. Pure.

vLLM does not name requests, so rows are identified by their tokens. A row keeps its place between steps, and moves only
when another row leaves. A few tokens therefore suffice to recognize the row in the same place. Only moved rows are
compared token by token: a step takes O(new tokens), however long the sequences are. Confusing equal rows is harmless.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from specpool.drafting.draft_models import DraftModel
from specpool.drafting.plans import DraftMethod
from specpool.protocol.sampling import SamplingParams

# Tokens compared for a row in the same place: this many at the end, and as many spread over the whole row.
NUM_MARKS = 16

GREEDY = SamplingParams()


class Batch:
    """The rows of a step, as vLLM passes them."""

    def __init__(self, sampled_token_ids: Items[Items[int]], num_tokens: Any, token_ids: Any) -> None:
        """`num_tokens[i]`: tokens of row i, including those just sampled. `token_ids[i]`: these tokens, then padding.

        Both are numpy arrays, which may have more rows. IndexError, TypeError for invalid arguments.
        """
        self.sampled = [len(tokens) for tokens in sampled_token_ids]
        """Tokens gained by each row in this step; 0 during prefill."""
        self.lengths: list[int] = num_tokens[: len(self.sampled)].tolist()
        """Tokens of each row, including those gained."""
        self._token_ids = token_ids
        if len(self.lengths) < len(self.sampled):
            raise IndexError(f"{len(self.sampled)} rows have tokens, but only {len(self.lengths)} have a length")

    def __len__(self) -> int:
        return len(self.sampled)

    def previous_length(self, row: int) -> int:
        """Tokens of the row before this step."""
        return self.lengths[row] - self.sampled[row]

    def read(self, row: int, start: int, end: int) -> list[int]:
        """Tokens of a row in [start, end)."""
        tokens: list[int] = self._token_ids[row, start:end].tolist()
        return tokens

    def pick(self, row: int, positions: list[int]) -> list[int]:
        """Tokens of a row at these positions."""
        tokens: list[int] = self._token_ids[row, positions].tolist()
        return tokens


@dataclass(frozen=True)
class Request:
    """What `specpool.drafting.sequences.Request` asks of every row. The draft worker drafts greedily."""

    num_speculative_tokens: int
    method: DraftMethod = DraftMethod.BEST
    cache_salt: str = ""
    """If set, rows share their answers."""
    adaptive: bool = True
    sampling: SamplingParams = GREEDY
    prediction: Items[int] = ()

    @property
    def namespace(self) -> tuple[str, str]:
        """Client and salt. All rows have the same client."""
        return "", self.cache_salt


@dataclass(eq=False)
class DraftCache:
    """What the draft worker has cached of a sequence."""

    num_cached_tokens: int = 0
    model: DraftModel | None = None
    backoff_until: int = 0
    """First round that may use the draft worker again after it had no free slot."""

    @property
    def start(self) -> int:
        """Position of the first token for the draft worker to run."""
        return self.num_cached_tokens

    def commit(self, num_cached_tokens: int) -> None:
        """Record how many positions are cached. 0: the cache is lost."""
        self.num_cached_tokens = num_cached_tokens


@dataclass(eq=False)
class Sequence:
    """The tokens of a row."""

    sequence_id: int
    request: Request
    token_ids: list[int]
    max_length: int
    """Maximum tokens of a row in vLLM."""
    is_decoding: bool = False
    """Whether vLLM has prefilled the row."""
    is_complete: bool = False
    """Whether the row has left the batch: finished, aborted or preempted."""
    num_pending_tokens = 0
    draft: DraftCache = field(default_factory=DraftCache)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.token_ids)
        self._positions = [*range(0, self.prompt_length, max(1, self.prompt_length // NUM_MARKS))]
        self._marks = [self.token_ids[position] for position in self._positions]

    @property
    def max_num_draft_tokens(self) -> int:
        """Maximum useful draft tokens. Every step gains one token more than it accepts."""
        return min(self.request.num_speculative_tokens, self.max_length - len(self.token_ids) - 1)

    @property
    def max_num_lookup_tokens(self) -> int:
        """Maximum useful lookup tokens. vLLM has one limit for all drafts."""
        return self.max_num_draft_tokens

    @property
    def key(self) -> tuple[int, ...]:
        """Length and last tokens, to look up a moved row."""
        return len(self.token_ids), *self.token_ids[-NUM_MARKS:]

    def is_in_place(self, batch: Batch, row: int, skipped: bool) -> bool:
        """Whether this row continues the sequence."""
        tokens, length = self.token_ids, len(self.token_ids)
        before = batch.previous_length(row)
        if before < length or (before > length and not skipped):
            return False
        start = max(0, length - NUM_MARKS)
        return batch.read(row, start, length) == tokens[start:] and batch.pick(row, self._positions) == self._marks

    def equals(self, batch: Batch, row: int) -> bool:
        """Whether the row begins with all tokens of the sequence."""
        return batch.read(row, 0, len(self.token_ids)) == self.token_ids


def match(
    sequences: Items[Sequence], batch: Batch, skipped: bool = False
) -> tuple[list[Sequence | None], list[Sequence]]:
    """Return the sequence of each row (None for a new row), and the sequences without a row.

    `sequences`: those of all rows of the step before. `skipped`: whether steps since then were not observed. Moved rows
    then count as new, because they have gained more tokens than the last step reports.
    """
    matched: list[Sequence | None] = [None] * len(batch)
    moved: dict[tuple[int, ...], list[Sequence]] = {}
    for row, sequence in enumerate(sequences):
        if row < len(batch) and sequence.is_in_place(batch, row, skipped):
            matched[row] = sequence
        else:
            moved.setdefault(sequence.key, []).append(sequence)
    if moved:
        matched = [sequence or _take_moved(moved, batch, row) for row, sequence in enumerate(matched)]
    return matched, [sequence for group in moved.values() for sequence in group]


def _take_moved(moved: dict[tuple[int, ...], list[Sequence]], batch: Batch, row: int) -> Sequence | None:
    """Remove and return the sequence of a moved row; None for a new row."""
    before = batch.previous_length(row)
    candidates = moved.get((before, *batch.read(row, max(0, before - NUM_MARKS), before)), [])
    sequence = next((candidate for candidate in candidates if candidate.equals(batch, row)), None)
    if sequence is not None:
        candidates.remove(sequence)
    return sequence
