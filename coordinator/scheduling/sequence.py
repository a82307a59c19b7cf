"""A sequence being generated: tokens, its cache in each worker, and stop conditions. Pure."""

import enum
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256

from coordinator.scheduling.caches import WorkerCache
from coordinator.scheduling.records import Blame, Progress, SpeculationStats
from coordinator.scheduling.text import ShownText, TextStream
from specpool.drafting.plans import MAX_DRAFT_LAG, DraftMethod, max_lookup_tokens
from specpool.protocol.prefixes import PageDigests
from specpool.protocol.rounds import Branch
from specpool.protocol.sampling import SamplingParams

Shape = tuple[int, int, int, int]
"""Length, tokens to run in each worker, and draft tokens. Sequences of equal shape need no padding."""


class FinishReason(enum.StrEnum):
    """Finish reasons of the public API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Finish:
    """The end of a generation, with the stop token or stop string that matched."""

    reason: FinishReason
    matched_token_id: int | None = None
    matched_stop: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int]
    """Includes the end-of-sequence tokens unless the request ignores them."""
    num_speculative_tokens: int
    """Draft tokens per round; the maximum if `adaptive`."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Alternatives to report beside each chosen token; None disables log-probabilities."""
    constraint: str = ""
    """Field with the constraint, such as "sampling_params.regex". `sampling` has its grammar. Empty: none."""
    starts_in_reasoning: bool = False
    """Whether the prompt ends within a reasoning block."""
    skip_special_tokens: bool = True
    """Whether the text omits special tokens."""
    n: int = 1
    adaptive: bool = False
    """Choose the number of draft tokens in each round, possibly zero."""
    method: DraftMethod = DraftMethod.MODEL
    priority: int = 0
    """Lower runs earlier, among the waiting requests of one client."""
    prediction: tuple[int, ...] = ()
    """Tokens that the client expects in the answer."""
    cache_salt: str = ""
    client: str = ""
    """The caller, who owns its request ids and cached prefixes."""
    is_background: bool = False
    """Runs in room that other requests leave. Uses and leaves no cached prefixes, and counts in no statistics."""

    @property
    def max_num_lookup_tokens(self) -> int:
        """Maximum lookup tokens per round."""
        return max_lookup_tokens(self.num_speculative_tokens) if self.adaptive else self.num_speculative_tokens

    @property
    def key(self) -> tuple[str, str]:
        """Identity among the requests in flight."""
        return self.client, self.request_id

    @property
    def namespace(self) -> tuple[str, str]:
        """Requests share cached prefixes only within a namespace."""
        return self.client, self.cache_salt

    @property
    def cache_namespace(self) -> bytes | None:
        """Namespace of the prefix cache on the wire. None: the request neither uses nor leaves cached prefixes."""
        return None if self.is_background else sha256(repr(self.namespace).encode()).digest()

    @property
    def is_costly(self) -> bool:
        """Whether choosing and reporting its tokens takes the target worker longer than greedy decoding."""
        return not self.sampling.is_argmax or self.logprobs is not None

    @property
    def worker_sampling(self) -> SamplingParams:
        """Sampling parameters to send on first contact with a worker."""
        stops, prompt_length = tuple(sorted(self.stop_token_ids)), len(self.prompt_ids)
        return replace(self.sampling, stop_token_ids=stops, prompt_length=prompt_length)

    def samples(self) -> Iterator["GenerationRequest"]:
        """One request per sample, each with its own seed. Requested alone, a sample has the same tokens."""
        for i in range(self.n):
            yield replace(self, sampling=replace(self.sampling, seed=(self.sampling.seed + i) % 2**64), n=1)


class Sequence:
    """A sequence and its committed tokens. Draft tokens live in their round only."""

    def __init__(
        self,
        sequence_id: int,
        request: GenerationRequest,
        text: TextStream | None = None,
        *,
        prefix_caching: bool = True,
    ) -> None:
        """`text`: detokenizes and matches stop strings. `prefix_caching`: share prefixes within the namespace."""
        self.sequence_id = sequence_id
        self.first_sample_id = sequence_id
        """The first sequence of the same request."""
        self.request = request
        self.token_ids = list(request.prompt_ids)
        self.cache_namespace = request.cache_namespace if prefix_caching else None
        self._page_digests: dict[int, PageDigests] = {}
        """By page size."""
        self.target, self.draft = WorkerCache(), WorkerCache()
        self.cached_tokens = 0
        """Number of prompt tokens found in the target worker's prefix cache."""
        self.num_accepted = 0
        """Draft tokens that the last verification accepted."""
        self.branch: Branch | None = None
        """The branch that matched the last verification, for the next round to verify."""
        self.prefill_waits = 0
        """Rounds in a row that had no share of the target worker's prefill budget left for the sequence."""
        self.ready_since = 0
        """The window's round count when the sequence became ready."""
        self.grammar_error: str | None = None
        """Why the grammar failed; None if it did not."""
        self.grammar_waits = 0
        """Consecutive rounds in which the target worker had not compiled the grammar yet."""
        self.overtaken = 0
        """Sequences that entered the window before it because they are shorter."""
        self.protected_until = 0
        """Number of tokens to reach before it may be preempted again for pages."""
        self.is_preempted = False
        self.paused = False
        """Kept out of rounds because its reader lags behind."""
        self.finish: Finish | None = None
        self.text = text
        self.speculation = SpeculationStats()
        self.blame = Blame()

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that count towards the queue's token limit."""
        return self.prompt_length + len(self.request.prediction)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens until `max_tokens`."""
        return self.request.max_tokens - self.num_generated

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def is_complete(self) -> bool:
        """Whether generation has ended by itself."""
        return self.finish is not None and self.finish.reason is not FinishReason.ABORT

    @property
    def progress(self) -> Progress:
        return len(self.token_ids), self.target.num_cached_tokens

    @property
    def can_continue(self) -> bool:
        """Whether another round can begin now, although one may be pending."""
        if self.finish is not None:
            return False
        pending = self.target.pending
        if not pending:
            return True
        is_last = self.num_generated + self.target.min_pending_gain >= self.request.max_tokens
        return len(pending) == 1 and not is_last and not self.blame.is_suspect

    @property
    def is_decoding(self) -> bool:
        """Whether the target lacks only the last token, so that the next pass yields a new one."""
        return self.target.continues or self.target.expected_length == len(self.token_ids) - 1

    @property
    def draft_base_length(self) -> int:
        """Positions for the draft worker to keep. It recomputes those whose states it lacked."""
        return self.draft.base_length - self.num_recomputed

    @property
    def num_recomputed(self) -> int:
        """Positions that the draft worker has cached without states that have arrived since."""
        return self.draft.num_recomputed(len(self.token_ids))

    @property
    def shape(self) -> Shape:
        length = len(self.token_ids)
        draft_lag = max(MAX_DRAFT_LAG, length - self.draft.start_after(self.draft_base_length))
        return length, length - self.target.start, draft_lag, self.max_num_draft_tokens

    @property
    def max_length(self) -> int:
        """Maximum number of positions, including draft tokens."""
        return len(self.request.prompt_ids) + self.request.max_tokens

    @property
    def next_length(self) -> int:
        """Maximum number of positions after the next round."""
        length = len(self.token_ids) + self.target.max_pending_gain + self.request.max_num_lookup_tokens
        return min(self.max_length, length)

    @property
    def max_num_draft_tokens(self) -> int:
        """Maximum useful draft tokens. Every round gains one token more than it accepts."""
        return min(self.request.num_speculative_tokens, self.remaining - self.target.max_pending_gain - 1)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that pending rounds yield if their draft tokens are accepted."""
        return self.target.likely_pending_gain

    @property
    def max_num_lookup_tokens(self) -> int:
        """Like `max_num_draft_tokens`, for lookup tokens after the pending ones."""
        return min(self.request.max_num_lookup_tokens, self.remaining - self.num_pending_tokens - 1)

    @property
    def max_num_own_draft_tokens(self) -> int:
        """Like `max_num_draft_tokens`, for the target worker's own drafts, which the worker cuts itself."""
        return min(self.request.num_speculative_tokens, self.remaining - self.target.min_pending_gain - 1)

    def page_digests(self, page_size: int, length: int) -> list[bytes]:
        """Return the digests of the full pages in the first `length` tokens. Empty if prefixes are not shared."""
        if self.cache_namespace is None or not page_size:
            return []
        if page_size not in self._page_digests:
            self._page_digests[page_size] = PageDigests(self.cache_namespace, page_size)
        return self._page_digests[page_size].first(length // page_size, self.token_ids)

    def preempt(self) -> None:
        """Reset what belongs to the window that the sequence leaves. The workers release it."""
        self.is_preempted = True
        self.branch = None
        self.target.release()
        self.draft.release()

    def end(self, finish: Finish) -> None:
        """End the generation. Results of pending rounds are dropped."""
        self.finish = finish
        self.target.discard_all()

    def commit(self, gained: Items[int], branch: Branch | None = None) -> tuple[list[int], ShownText]:
        """Append verified tokens up to the first that ends the generation. Return them, and their text on demand.

        `branch`: the one that matches them. Detokenizes only if there are stop strings, since the round waits for it.
        Call the functions in commit order.
        """
        self.num_accepted, self.branch = len(gained) - 1, branch
        kept: list[int] = []
        undecoded: list[int] = []
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
                shown += self.text.feed(token, self.num_generated >= self.request.sampling.min_tokens)
                if self.text.matched is not None:
                    self.finish = Finish(FinishReason.STOP, matched_stop=self.text.matched)
            else:
                undecoded.append(token)
            if self.finish is None and self.num_generated >= self.request.max_tokens:
                self.finish = Finish(FinishReason.LENGTH)
        if self.finish is not None:
            self.target.discard_all()
            self.draft.drop_features()
        flush = self.finish is not None and self.finish.matched_stop is None
        return kept, partial(self._show, shown, undecoded, flush)

    def _show(self, shown: str, undecoded: list[int], flush: bool) -> str:
        if self.text is None:
            return ""
        decoded = "".join(self.text.feed(token) for token in undecoded)
        return shown + decoded + (self.text.flush() if flush else "")
