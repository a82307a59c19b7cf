"""A sequence being generated: its tokens, what the workers have cached of it, and when it ends. Pure."""

import enum
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

from coordinator.scheduling.speculation import SpeculationStats
from coordinator.scheduling.suspicion import Progress, Suspicion
from coordinator.scheduling.text import ShownText, TextStream
from specpool.protocol.sampling import SamplingParams

Shape = tuple[int, int, int, int]
"""Numbers that must be equal for sequences to need no padding between them: tokens, tokens that each worker lacks, and
draft tokens of the next round."""

# A round leaves the draft one token behind, or two after a full acceptance: both are fed in one pass.
DRAFT_MAY_LACK = 2


class DraftMethod(enum.StrEnum):
    """Draft methods: the draft worker's model, prompt lookup, or in each round the one that promises more."""

    MODEL = "model"
    NGRAM = "ngram"
    BEST = "best"


class FinishReason(enum.StrEnum):
    """Reasons why a generation ended, as the public API names them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Finish:
    """The end of a generation, and the stop token or the stop string that ended it, if one did."""

    reason: FinishReason
    matched_token_id: int | None = None
    matched_stop: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """A request after validation."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int]
    """Tokens that end the generation: with the end-of-sequence tokens, unless the request ignores those."""
    num_speculative_tokens: int
    """Draft tokens of a round; the most if `adaptive`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    """Strings that end the generation."""
    logprobs: int | None = None
    """Log-probabilities wanted at each position beside that of the chosen token; None: not even that one."""
    n: int = 1
    """Samples of the prompt."""
    adaptive: bool = False
    """Whether each round has as many draft tokens as save time, possibly zero."""
    method: DraftMethod = DraftMethod.MODEL
    priority: int = 0
    """Order among the waiting requests of one client: a lower number is served earlier."""
    cache_salt: str = ""
    """Caches are reused only by requests with the same salt."""
    client: str = ""
    """The caller: requests share the server, caches and request ids with those of the same client only."""

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the request among those in flight: request ids belong to the client."""
        return self.client, self.request_id

    @property
    def namespace(self) -> tuple[str, str]:
        """What requests must have in common to reuse each other's caches."""
        return self.client, self.cache_salt

    @property
    def worker_sampling(self) -> SamplingParams:
        """Sampling parameters that a worker gets on first contact."""
        stops, prompt_length = tuple(sorted(self.stop_token_ids)), len(self.prompt_ids)
        return replace(self.sampling, stop_token_ids=stops, prompt_length=prompt_length)

    def samples(self) -> Iterator["GenerationRequest"]:
        """The request of each sample: the same with a seed of its own, so that it can be asked for alone."""
        for i in range(self.n):
            yield replace(self, sampling=replace(self.sampling, seed=(self.sampling.seed + i) % 2**64), n=1)


@dataclass(frozen=True)
class Prefix:
    """The first `length` tokens of a sequence, which an earlier one, the source, has too."""

    source: "Sequence"
    length: int

    @property
    def is_coming(self) -> bool:
        """Whether the source has yet to prefill part of it: then it is worth waiting for, unless the source waits for
        its reader."""
        source = self.source
        return not (source.finish or source.paused or source.is_preempted) and source.num_cached_tokens < self.length

    @property
    def in_target(self) -> int:
        """Positions of it that the target worker has cached."""
        return min(self.length, self.source.num_cached_tokens)

    @property
    def in_draft(self) -> int:
        """Positions of it that the draft worker has cached."""
        return min(self.length, self.source.num_draft_cached_tokens)


@dataclass(frozen=True)
class DraftedAhead:
    """Draft tokens that follow the committed ones, drafted during the last verification."""

    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]


class Sequence:
    """A sequence with its committed tokens: draft tokens live in their round and are forgotten with it."""

    def __init__(self, sequence_id: int, request: GenerationRequest, text: TextStream | None = None) -> None:
        """`text` makes the text of the tokens, and finds stop strings in it."""
        self.sequence_id = sequence_id
        self.first_sample_id = sequence_id
        """The sequence of the first sample of the same request."""
        self.request = request
        self.token_ids = list(request.prompt_ids)
        self.num_cached_tokens = 0
        """Positions that the target worker has cached; a prefix of `token_ids`."""
        self.num_draft_cached_tokens = 0
        """Positions that the draft worker has cached; a prefix of `token_ids`."""
        self.target_prefix: Prefix | None = None
        """The prefix that the target worker can copy, until it was asked to."""
        self.draft_prefix: Prefix | None = None
        """The prefix that the draft worker can copy, until it was asked to."""
        self.cached_tokens = 0
        """Tokens of the prompt that the target worker copied."""
        self.drafted_ahead: DraftedAhead | None = None
        """Tokens drafted for the next round already."""
        self.draft_rests_until = 0
        """First round in which the draft worker is asked again, after it had no free slot."""
        self.ready_since = 0
        """Rounds of the pool when the sequence became ready."""
        self.is_preempted = False
        """Whether it has given its place in the window to another."""
        self.paused = False
        """Whether the sequence is kept out of rounds because its reader lags behind."""
        self.finish: Finish | None = None
        self.text = text
        self.speculation = SpeculationStats()
        self.suspicion = Suspicion()

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
    def progress(self) -> Progress:
        """How far the sequence has come."""
        return len(self.token_ids), self.num_cached_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the target lacks only the last token: the next pass gives a new one."""
        return self.num_cached_tokens == len(self.token_ids) - 1

    @property
    def target_base_length(self) -> int:
        """Positions that the target worker can keep: its own, or at first those that it can copy."""
        return self.num_cached_tokens or (self.target_prefix.in_target if self.target_prefix else 0)

    @property
    def draft_base_length(self) -> int:
        """Positions that the draft worker can keep: its own, or at first those that it can copy."""
        return self.num_draft_cached_tokens or (self.draft_prefix.in_draft if self.draft_prefix else 0)

    @property
    def shape(self) -> Shape:
        """The shape: sequences of equal shapes make a batch without padding."""
        length = len(self.token_ids)
        draft_lacks = max(DRAFT_MAY_LACK, length - self.draft_base_length)
        return length, length - self.target_base_length, draft_lacks, self.max_num_draft_tokens

    @property
    def max_length(self) -> int:
        """Positions that the sequence can reach, draft tokens included."""
        return len(self.request.prompt_ids) + self.request.max_tokens

    @property
    def max_num_draft_tokens(self) -> int:
        """Draft tokens that the next round can use: a round always gains one token beyond the accepted."""
        remaining = self.request.max_tokens - self.num_generated
        return min(self.request.num_speculative_tokens, remaining - 1)

    def preempt(self) -> None:
        """Notes that the sequence has left the window for a while, and that the workers cache nothing of it now."""
        self.is_preempted = True
        self.num_cached_tokens = self.num_draft_cached_tokens = 0
        self.target_prefix = self.draft_prefix = self.drafted_ahead = None

    def commit(self, gained: Items[int]) -> tuple[list[int], ShownText]:
        """Appends verified tokens up to the first that ends the generation. Returns the appended tokens, and a function
        that makes the text they allow to be shown, to be called in the order of the commits.

        Text is made here only where a stop string may end the generation: rounds wait for it.
        """
        kept: list[int] = []
        unseen: list[int] = []
        shown = ""
        for token in gained:
            if self.finish is not None:
                break
            kept.append(token)
            self.token_ids.append(token)
            if token in self.request.stop_token_ids:
                self.finish = Finish(FinishReason.STOP, matched_token_id=token)
                break
            if self.text is not None and self.text.may_end:
                shown += self._watch(self.text, token)
            else:
                unseen.append(token)
            if self.finish is None and self.num_generated >= self.request.max_tokens:
                self.finish = Finish(FinishReason.LENGTH)
        ends = self.finish is not None and self.finish.matched_stop is None
        return kept, partial(self._shown, shown, unseen, ends)

    def _watch(self, text: TextStream, token: int) -> str:
        """Ends the generation if this token completes a stop string; returns the text to show."""
        shown = text.feed(token, may_stop=self.num_generated >= self.request.sampling.min_tokens)
        if text.matched is not None:
            self.finish = Finish(FinishReason.STOP, matched_stop=text.matched)
        return shown

    def _shown(self, known: str, unseen: list[int], ends: bool) -> str:
        if self.text is None:
            return ""
        more = "".join(self.text.feed(token) for token in unseen)
        return known + more + (self.text.flush() if ends else "")
