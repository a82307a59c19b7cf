"""A model with its KV cache. One ragged forward pass runs the new tokens of many sequences."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from specpool.engine.cache.memory import Footprint
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import explain_max_model_len
from specpool.engine.models.facts import ModelFacts
from specpool.engine.models.loading import LoadedModel
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.attention import LibraryModel
from specpool.engine.passes.drafts import Draft, DraftRound, drafts_of
from specpool.engine.passes.families import why_not_fusable
from specpool.engine.passes.forward_pass import DraftLoop, ForwardPass
from specpool.engine.run.contention import ContentionMonitor
from specpool.engine.run.leader import Leader
from specpool.engine.run.reservation import LimitCache, ReservedCache, footprint_of, reserve_cache
from specpool.engine.run.runner import PassResult, PassRunner
from specpool.engine.sampling.head import Head
from specpool.protocol.worker_info import CacheLoad, RankMemory, WorkerInfo

log = logging.getLogger(__name__)

STEP_CACHED = 128
"""Cached positions of each sequence in the passes whose times are `Engine.step_seconds`."""
MIN_BATCHED_TOKENS = 64
"""Lower limit of `max_num_batched_tokens` when it is halved because device memory runs out."""


class Engine:
    """A model with its KV cache, for the thread that built it.

    `specpool.engine.startup.loading` builds engines, and fills in the self-test result and the step times.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        facts: ModelFacts,
        forward_pass: ForwardPass,
        tiles: Tiles,
        options: EngineOptions,
        leader: Leader | None = None,
        limit_cache: LimitCache | None = None,
    ) -> None:
        """Reserve the cache.

        `tiles`: shapes of batch-invariant passes. `leader`: rank 0 of a sharded model. `limit_cache`: returns the
        cache's memory limit; None: this is the only model of the process.
        """
        self.loaded, self.facts, self.forward_pass = loaded, facts, forward_pass
        self.notes: list[str] = [*loaded.notes, *forward_pass.notes]
        """What an operator should know, one sentence each."""
        if isinstance(forward_pass, LibraryModel):
            reason = why_not_fusable(loaded.config) or "the fused pass is switched off"
            self.notes.append(f"runs slowly on the modules of transformers, because {reason}")
        self.vocab_size, self.tiles, self.native = facts.vocab_size, tiles, options.native
        self.head = Head(self.vocab_size, loaded.output_ids)
        max_tokens = options.resolve_max_num_batched_tokens(facts.device.type)
        self.max_num_batched_tokens = min(max_tokens, self.tiles.max_rows or max_tokens)
        footprint = footprint_of(loaded, facts, forward_pass, self.max_num_batched_tokens)
        reserved = self._reserve(options, footprint, leader, limit_cache)
        self.max_model_len = reserved.max_model_len
        reason = explain_max_model_len(loaded.config, options, self.max_model_len)
        log.info("--max-model-len %d (%s)", self.max_model_len, reason)
        self.kv_layout = options.kv_layout
        self.slots, self.layout, self.footprint = reserved.slots, reserved.layout, reserved.footprint
        self.grammar_bytes = reserved.grammar_bytes
        """Memory limit of compiled grammars, in bytes."""
        self.leader = leader
        """Rank 0's connection to the other ranks; None unless the model is sharded."""
        sizes = facts.query_groups, facts.hidden_size
        self.runner = PassRunner(forward_pass, self.layout.arena, self.tiles, *sizes, self.slots.checkpoints)
        self._ranks: tuple[RankMemory, ...] = ()
        self._weight_kinds = Counter(forward_pass.weight_kinds)
        if leader is not None:
            leader.begin(self.layout.arena, self.tiles)
            self._ranks = leader.memory(str(facts.device), self.footprint)
            for report in leader.reports:
                self._weight_kinds.update(report.weight_kinds)
        self.draft_loop: DraftLoop | None = None
        """Runs all steps of drafts on the device; None if the pass has no such loop."""
        if not self.layout.is_padded:
            self.draft_loop = forward_pass.draft_loop(self.layout.arena, self.head)
        self.realign_ns = 0
        """Nanoseconds spent on realignment so far."""
        self.own_states: torch.Tensor | None = None
        """A feature draft's own states [R, hidden] of the rows of logits of the last `forward`."""
        self._passes = 0
        self.tokens = 0
        """Tokens run so far, each one row of a pass."""
        self.weights_fingerprint = self.numerics_fingerprint = ""
        """Fingerprints of the weights and of their logits."""
        self.bitwise = False
        """Whether the self-test proved that a token's logits have the same bits in every batch."""
        self.step_seconds: Mapping[int, float] = {}
        """Seconds of a pass by its number of new tokens, measured at start."""
        self.seconds_per_cached = 0.0
        """Extra seconds per new token and additional cached position, measured at start."""
        self.contention: ContentionMonitor | None = None
        """Warns once if other processes use the cores; None: do not watch."""

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Cache the new tokens of all spans. Return the requested logits [R, rows of the head] in span order.

        `head` maps rows of the head to tokens. Spans with more than `max_num_batched_tokens` tokens are split into
        several passes, which give the same bits.
        """
        own_states = list[torch.Tensor]()
        chunks = _chunks(spans, self.max_num_batched_tokens)
        logits = [self.run_pass(chunk, own_states=own_states).logits for chunk in chunks]
        self.own_states = torch.cat(own_states) if len(own_states) > 1 else next(iter(own_states), None)
        return self._joined(logits)

    @torch.inference_mode()
    def forward_with_states(self, spans: Sequence[Span], layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Call `forward`. Return its logits, and bfloat16 states [sum of `num_states`, len(layers) * hidden size].

        States are those of the last `num_states` tokens of each span, in span order. `layers`: numbers of layers after
        which to take them, at most `facts.layers`. The final norm is not applied. Requires `has_states`. On a GPU, the
        host does not wait for the pass.
        """
        passes = [self.run_pass(chunk, layers) for chunk in _chunks(spans, self.max_num_batched_tokens)]
        states = [each.states for each in passes if each.states is not None]
        if len(states) != 1:
            size, device = len(layers) * self.facts.hidden_size, self.facts.device
            states = [torch.cat([torch.empty(0, size, dtype=torch.bfloat16, device=device), *states])]
        return self._joined([each.logits for each in passes]), states[0]

    def shrink_passes(self) -> bool:
        """Free unused device memory, and halve `max_num_batched_tokens`. Return False if it is minimal.

        Sharded models do not shrink, because their ranks cannot repeat a pass.
        """
        torch.cuda.empty_cache()
        if self.leader is not None or self.max_num_batched_tokens <= MIN_BATCHED_TOKENS:
            return False
        self.max_num_batched_tokens = max(MIN_BATCHED_TOKENS, self.max_num_batched_tokens // 2)
        return True

    @property
    def has_states(self) -> bool:
        """Whether `forward_with_states` can return states."""
        return self.forward_pass.has_states

    def _joined(self, logits: list[torch.Tensor]) -> torch.Tensor:
        rows = [each for each in logits if len(each)]
        if len(rows) == 1:
            return rows[0]
        return torch.cat(rows) if rows else torch.empty(0, self.facts.outputs, device=self.facts.device)

    @torch.inference_mode()
    def capture_graphs(self, drafts: bool = True) -> int:
        """Capture the passes that CUDA graphs can hold, before serving. Return the number of graphs.

        `drafts`: capture the steps of drafts, too.
        """
        max_drafts, known = self.slots.total if drafts else 0, len(self.forward_pass.notes)
        sizes = self.max_num_batched_tokens, self.max_model_len, max_drafts
        if self.leader is not None:
            self.leader.tell_to_capture(*sizes)
        count = self.runner.capture_graphs(*sizes)
        self.notes += self.forward_pass.notes[known:]
        return count

    @property
    def supports_branches(self) -> bool:
        """Whether spans may be branches of their sequences."""
        return self.forward_pass.supports_branches and not self.layout.is_padded and self.facts.recurrent is None

    @property
    def passes(self) -> int:
        """Forward passes so far, including those of a draft in progress."""
        return self._passes + (0 if self.draft_loop is None else self.draft_loop.passes_in_progress)

    def can_draft(self, drafts: Sequence[Draft]) -> bool:
        """Whether `draft` can run all steps of these drafts on the device, and that is faster than single steps."""
        loop, steps = self.draft_loop, max((draft.num_draft_tokens for draft in drafts), default=0)
        if loop is None or not loop.min_draft_tokens <= steps <= self.slots.max_draft_tokens:
            return False
        if len(drafts) > self.max_num_batched_tokens:
            return False
        return all(map(loop.can_draft, drafts))

    @torch.inference_mode()
    def draft(self, rounds: Sequence[DraftRound]) -> None:
        """Cache the spans of all drafts, then extend the drafts until each round has enough.

        The host waits for the device once. The last token of a draft is not cached.
        """
        assert self.draft_loop is not None
        for each in drafts_of(rounds):
            self._grow(each.span, max(0, each.num_draft_tokens - 1))
        logits = self.forward([draft.span for draft in drafts_of(rounds)])
        rounds = [replace(each, drafts=[draft for draft in each.drafts if draft.num_draft_tokens]) for each in rounds]
        if not len(logits):
            return
        self.runner.plan_drafts(drafts_of(rounds))
        passes, tokens = self.draft_loop(logits, rounds, self.own_states)
        self.runner.end_drafts(drafts_of(rounds))
        self.count_passes(passes, tokens)

    def count_passes(self, passes: int, tokens: int) -> None:
        """Count forward passes, and the tokens that they ran."""
        self._passes += passes
        self.tokens += tokens

    @property
    def load(self) -> CacheLoad:
        """How full the cache is."""
        return CacheLoad(slots_in_use=self.slots.in_use, kv_positions_free=self.slots.tables.free)

    def info(self) -> WorkerInfo:
        """Description of the model and how full its cache is."""
        per_token = self.facts.kv_bytes_per_token(self.forward_pass.compute_dtype)
        features = self.loaded.features
        name = f" ({torch.cuda.get_device_name(self.facts.device)})" if self.facts.device.type == "cuda" else ""
        return WorkerInfo(
            model=self.loaded.name,
            architecture=self.loaded.config.model_type,
            dtype=str(self.facts.dtype).removeprefix("torch."),
            device=f"{self.facts.device}{name}",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            tokenizer_fingerprint=self.loaded.tokenizer.fingerprint,
            bitwise=self.bitwise,
            parameters=self.facts.parameters,
            embedding_parameters=self.facts.embedding_parameters,
            slots_total=self.slots.total,
            kv_bytes_per_token=per_token,
            kv_bytes_total=per_token * self.layout.arena.columns,
            state_bytes_total=self.footprint.states,
            kv_positions_total=self.slots.tables.columns,
            kv_positions_multiple=self.slots.tables.page_size,
            kv_layout=self.kv_layout,
            weight_bytes=sum(rank.weight_bytes for rank in self._ranks) or self.footprint.weights,
            activation_bytes=sum(rank.activation_bytes for rank in self._ranks) or self.footprint.activations,
            step_seconds=self.step_seconds,
            step_cached=STEP_CACHED,
            seconds_per_cached=self.seconds_per_cached,
            max_rows=self.max_num_batched_tokens,
            notes=tuple(self.notes),
            weights_fingerprint=self.weights_fingerprint,
            numerics_fingerprint=self.numerics_fingerprint,
            tensor_parallel=max(1, len(self._ranks)),
            tensor_parallel_sums="" if self.leader is None else self.leader.sharding.sums,
            weight_kinds=self._weight_kinds,
            activations=self.forward_pass.activations,
            ranks=self._ranks,
            hidden_size=self.facts.hidden_size,
            num_layers=self.facts.layers,
            feature_layers=() if features is None else features.layers,
            feature_width=0 if features is None else features.width,
            **self.load._asdict(),
        )

    def forget_all(self) -> None:
        """Empty the cache. No sequence may be using it. On a CPU, this also returns its memory to the system."""
        tables = self.slots.tables
        for slot in range(self.slots.total):
            tables.truncate(slot, 0)
        tables.pool.clear()
        if self.slots.checkpoints is not None:
            self.slots.checkpoints.clear()
        self.layout.arena.clear()

    def close(self) -> None:
        """End the other ranks of a sharded model. The engine cannot be used afterwards."""
        if self.leader is not None:
            self.leader.end()

    @contextmanager
    def realigning(self) -> Iterator[None]:
        """Add the time spent in this context to `realign_ns`."""
        self._synchronize()  # do not count passes still in flight
        began = time.perf_counter_ns()
        yield
        self._synchronize()
        self.realign_ns += time.perf_counter_ns() - began

    def _synchronize(self) -> None:
        if self.facts.device.type == "cuda" and self.layout.is_padded:  # the other layout moves nothing
            torch.cuda.synchronize(self.facts.device)

    def run_pass(
        self, spans: Sequence[Span], state_layers: tuple[int, ...] = (), own_states: list[torch.Tensor] | None = None
    ) -> PassResult:
        """Run spans that fit in one forward pass. `own_states`: gets those of a feature draft."""
        assert self.supports_branches or not any(span.offset for span in spans), "this engine has no branches"
        with self.realigning():
            spans = self.layout.align(spans)
            for span in spans:
                self._grow(span)
        began = time.perf_counter()
        if self.leader is None:
            result = self.runner.run(spans, state_layers, own_states)
        else:
            result = self.leader.run(self.runner, spans, state_layers)
        rows = sum(len(span.token_ids) for span in spans)
        self.count_passes(1, rows)
        self._watch_contention(spans, rows, time.perf_counter() - began)
        return result

    def _grow(self, span: Span, following: int = 0) -> None:
        """Give a slot pages for a span and `following` tokens, unless `realign` has already done so."""
        if not self.slots.tables.grow(span.slot, span.columns + following):
            raise RuntimeError(f"slot {span.slot} needs {span.columns + following} columns, but the KV cache is full")

    def _watch_contention(self, spans: Sequence[Span], rows: int, seconds: float) -> None:
        if self.contention is None:
            return
        cached = sum(len(span.token_ids) * max(0, span.start - STEP_CACHED) for span in spans)
        if (found := self.contention.add(rows, seconds, cached * self.seconds_per_cached)) is not None:
            log.warning("%s: %s", self.loaded.name, found)
            self.contention = None

    def _reserve(
        self, options: EngineOptions, footprint: Footprint, leader: Leader | None, limit_cache: LimitCache | None
    ) -> ReservedCache:
        """Reserve the cache. In a sharded model, rank 0 caches its own heads, and every rank may limit the columns."""
        own, others = self.facts, None
        if leader is not None:
            own = own.of_rank(leader.sharding.kv_heads.sizes[0])
            others = min(report.kv_limit for report in leader.reports)
        dtype = self.forward_pass.compute_dtype
        return reserve_cache(own, dtype, self.tiles, options, footprint, others, limit_cache)


def _chunks(spans: Sequence[Span], limit: int) -> list[list[Span]]:
    """Split spans into chunks of at most `limit` tokens. Each piece keeps the logits and states of its tokens."""
    chunks: list[list[Span]] = []
    room = 0  # in the last chunk
    for span in spans:
        begin, count = 0, len(span.token_ids)
        while begin < count:
            if room == 0:
                chunks.append([])
                room = limit
            take = min(room, count - begin)
            chunks[-1].append(span if take == count else span.piece(begin, take))
            begin, room = begin + take, room - take
    return chunks
