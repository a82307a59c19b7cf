"""Both workers' real backends on a toy engine: a KV cache that holds tokens, without torch operations.

Slots, pages, realignment, continuations, acceptance and branches are the workers' own code. The cache is an array of
token ids, which the toy models read back, so that a wrong position leads to a wrong token.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from draft_worker.translating import TranslatingProposer
from draft_worker.translation.translations import Translations
from simulator.model import EOS, VOCAB_SIZE, ToyPair
from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.slots import SequenceKey, SlotTable
from specpool.engine.cache.spans import Span
from specpool.engine.run.sequences import Choices, SequenceEngine
from specpool.engine.sampling.ranking import Ranking
from specpool.engine.sampling.rows import SequenceRows
from specpool.protocol.rounds import MAX_ITEM_BRANCHES
from specpool.protocol.sampling import NO_LOGPROBS, Logprobs
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import CacheLoad, WorkerInfo
from target_worker.own_draft import OwnDrafts
from target_worker.verifier import Verifier

PAGE_SIZE = 16
MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
EMPTY = 2**32 - 1
"""A column that nothing was written to."""


class ToyEngine:
    """A KV cache of token ids, with passes that take virtual time."""

    supports_branches = True
    vocab_size, max_num_batched_tokens = VOCAB_SIZE, 256
    realign_ns = 0
    has_states, facts, draft_loop = False, SimpleNamespace(layers=0, hidden_size=0), None
    weights = "toy"
    """Fingerprint of the weights."""
    loaded, own_states = SimpleNamespace(features=None), None
    """Neither a feature draft nor a target for one."""

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        columns: int,
        device: str,
        pass_seconds: Callable[[int], float],
        spend: Callable[[float], None],
    ) -> None:
        """`columns`: of the cache. `pass_seconds`: of a pass with a number of rows. `spend`: takes this time."""
        self.max_model_len, self.device = max_model_len, device
        self.passes = self.tokens = 0
        self._total, self._pass_seconds, self._spend = slots, pass_seconds, spend
        self._columns = [EMPTY] * columns
        self.forget()

    def forget(self) -> None:
        """Lose all caches."""
        self._columns = [EMPTY] * len(self._columns)
        longest = -(-self.max_model_len // PAGE_SIZE) * PAGE_SIZE
        self.slots = SlotTable(self._total, PageTables(self._total, longest, len(self._columns), PAGE_SIZE))

    def can_draft(self, drafts: Sequence[Any]) -> bool:
        """There is no draft loop."""
        return False

    @property
    def load(self) -> CacheLoad:
        """How full the cache is."""
        return CacheLoad(self.slots.in_use, self.slots.tables.free)

    @contextmanager
    def realigning(self) -> Iterator[None]:
        """Realignment takes no time."""
        yield

    def forward(self, spans: Sequence[Span]) -> Iterator[Sequence[int]]:
        """Cache the new tokens of all spans. Return the context of each requested row."""
        for span in spans:
            for position, token in enumerate(span.token_ids, span.start):
                self._columns[self._column(span, position)] = token
        rows = sum(len(span.token_ids) for span in spans)
        self.passes += 1
        self.tokens += rows
        self._spend(self._pass_seconds(rows))
        return (context for span in spans for context in self._contexts(span))

    def _contexts(self, span: Span) -> Iterator[Sequence[int]]:
        tokens = [self._columns[self._column(span, position)] for position in range(span.end)]
        for length in range(span.end - span.num_logits + 1, span.end + 1):
            yield tokens[:length]

    def _column(self, span: Span, position: int) -> int:
        """Return the column of the cache that holds a position."""
        page, column = divmod(position + span.offset * (position >= span.prefix_length), PAGE_SIZE)
        return self.slots.tables.held[span.slot][page] * PAGE_SIZE + column

    def info(self) -> WorkerInfo:
        """The description of a toy worker."""
        return WorkerInfo(
            model="toy",
            architecture="toy",
            dtype="float32",
            device=self.device,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            tokenizer_fingerprint="toy",
            bitwise=True,
            parameters=1,
            embedding_parameters=0,
            slots_total=self.slots.total,
            slots_in_use=self.slots.in_use,
            kv_bytes_per_token=0,
            kv_bytes_total=0,
            kv_positions_total=self.slots.tables.columns,
            kv_positions_free=self.slots.tables.free,
            kv_positions_multiple=PAGE_SIZE,
            kv_layout="slots",
            weight_bytes=0,
            activation_bytes=0,
            step_seconds={rows: self._pass_seconds(rows) for rows in MEASURED_ROWS},
            step_cached=0,
            seconds_per_cached=0.0,
            max_rows=self.max_num_batched_tokens,
            weights_fingerprint=self.weights,
            numerics_fingerprint="toy",
        )


class ToyBackend(SequenceEngine):
    """A worker's backend without grammars, torch and its sampler."""

    def __init__(self, engine: ToyEngine, pair: ToyPair) -> None:
        self.engine: Any = engine
        self.grammars: Any = SimpleNamespace(start=None, block=lambda _: None)
        self._has_kernels = False
        self._pair = pair

    def info(self) -> WorkerInfo:
        """Description of the toy."""
        return self.engine.info()

    def choose_rows(
        self,
        spans: Sequence[Span],
        rows: Sequence[SequenceRows],
        confidences: bool = False,
        state_layers: tuple[int, ...] = (),
    ) -> list[Choices]:
        """Run the spans, and choose the tokens of their rows."""
        contexts = self.engine.forward(spans)
        choices = []
        for each in rows:
            token_ids = [self._choose(next(contexts), _seed(each)) for _ in range(each.count)]
            confident = [self._pair.agreement] * len(token_ids) if confidences else []
            choices.append(Choices(token_ids, confident, _logprobs(each, token_ids)))
        return choices

    def rank(self, spans: Mapping[SequenceKey, Span], count: int) -> dict[SequenceKey, list[Ranking]]:
        """Run the spans, and rank the draft's best tokens."""
        contexts, rows = self.engine.forward(list(spans.values())), self._rows_of(spans, {})
        share = self._pair.agreement
        chances = [share, *((1 - share) / 2**place for place in range(1, count))]
        return {
            key: [
                list(zip(self._pair.rank((next(contexts), _seed(each))), chances, strict=False))
                for _ in range(each.count)
            ]
            for key, each in zip(spans, rows, strict=True)
        }

    def _choose(self, context: Sequence[int], seed: int) -> int:
        raise NotImplementedError


class ToyProposer(ToyBackend, TranslatingProposer):
    """The backend of a draft."""

    translations = Translations(TokenizerFiles(b"", "", {}, ()), 0)

    def info(self) -> WorkerInfo:
        """Description of the toy."""
        return replace(super().info(), max_branches=MAX_ITEM_BRANCHES)

    def _choose(self, context: Sequence[int], seed: int) -> int:
        return self._pair.draft((context, seed))


class ToyVerifier(ToyBackend, Verifier):
    """The target worker's backend."""

    def __init__(self, engine: ToyEngine, pair: ToyPair, draft: ToyEngine | None = None) -> None:
        """`draft`: engine of the draft that the worker carries."""
        super().__init__(engine, pair)
        if draft is not None:
            self.drafts = OwnDrafts(self.engine, ToyProposer(draft, pair))

    def info(self) -> WorkerInfo:
        """Description of the toy, and of the draft that it carries."""
        return replace(super().info(), draft=None if self.drafts is None else self.drafts.proposer.info())

    def tokenizer(self) -> TokenizerFiles:
        """A stand-in, which the simulated tokenizer pool ignores."""
        return TokenizerFiles(b"toy", "", {}, (EOS,))

    def _choose(self, context: Sequence[int], seed: int) -> int:
        return self._pair.choose((context, seed))


def _logprobs(rows: SequenceRows, token_ids: list[int]) -> Logprobs:
    """Equal ones, if the sequence needs any."""
    if (num_top := rows.num_logprobs) is None:
        return NO_LOGPROBS
    equal = -math.log(VOCAB_SIZE)
    return Logprobs.of(num_top, ((equal, range(num_top), [equal] * num_top) for _ in token_ids))


def _seed(rows: SequenceRows) -> int:
    return rows.params.seed if rows.params is not None else 0
