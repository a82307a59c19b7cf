"""Reserves the KV cache of an engine within its memory limit."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.checkpoints import Checkpoints
from specpool.engine.cache.layout import LAYOUTS, KVLayout, page_size_of
from specpool.engine.cache.memory import (
    Footprint,
    KVLimit,
    activation_bytes,
    default_kv_memory,
    process_memory,
    readable,
    weight_bytes,
)
from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.recurrent import RecurrentArena, tail_rows
from specpool.engine.cache.slots import SlotTable
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.recurrent_sizes import CHECKPOINTS_PER_SLOT
from specpool.engine.config.sources import UnsupportedModelError, first_line
from specpool.engine.models.facts import ModelFacts
from specpool.engine.models.loading import LoadedModel
from specpool.engine.numerics.tiles import Tiles, round_up
from specpool.engine.passes.forward_pass import ForwardPass

log = logging.getLogger(__name__)

GRAMMAR_BYTES_PER_TOKEN = 900
"""Measured bytes of llguidance's tokenizer per vocabulary token."""
LENGTH_STEP = 512
"""A `max_model_len` that memory limits is a multiple of this, so starts with slightly less memory agree on it."""


class SmallCacheError(UnsupportedModelError):
    """The memory limit leaves too little for the KV cache. `least`: the smallest sufficient limit in bytes."""

    def __init__(self, reason: str, least: int) -> None:
        super().__init__(reason)
        self.least = least


@dataclass(frozen=True)
class ReservedCache:
    """A KV cache with its bookkeeping, and the memory that the engine takes."""

    slots: SlotTable
    layout: KVLayout
    footprint: Footprint
    max_model_len: int
    """Maximum positions of a sequence: fewer than the model's if memory limits them."""
    grammar_bytes: int
    """Memory limit of compiled grammars, in bytes."""


@dataclass(frozen=True)
class CacheNeeds:
    """Inputs for the memory limit of a KV cache."""

    options: EngineOptions
    facts: ModelFacts
    dtype: torch.dtype
    others: Footprint
    """Memory of the model without its cache."""

    @property
    def position_bytes(self) -> int:
        return self.facts.kv_bytes_per_token(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of all sequences and of the prefix cache."""
        if self.facts.recurrent is None:
            return 0
        return self.options.max_sequences * self.facts.recurrent.slot_bytes(self.dtype.itemsize, self.tail_rows)

    @property
    def tail_rows(self) -> int:
        """Rows of a tail of recurrent states."""
        return tail_rows(page_size_of(self.facts.device))


LimitCache = Callable[[CacheNeeds], KVLimit]
"""Returns the memory limit of a KV cache, once the model is loaded and before its cache is reserved."""


def footprint_of(loaded: LoadedModel, facts: ModelFacts, forward_pass: ForwardPass, rows: int) -> Footprint:
    """Memory of the weights, and of the activations of a pass of `rows` rows and of captured passes."""

    def of_pass(rows: int) -> int:
        activations = activation_bytes(loaded.config, forward_pass.compute_dtype, facts.vocab_size, rows)
        return activations + forward_pass.scratch_bytes(rows, facts.max_model_len)

    captured = min(rows, forward_pass.captured_rows)
    activations = of_pass(rows) + (of_pass(captured) if captured else 0)
    return Footprint(weights=weight_bytes(forward_pass), activations=activations)


def reserve_cache(
    facts: ModelFacts,
    dtype: torch.dtype,
    tiles: Tiles,
    options: EngineOptions,
    others: Footprint,
    other_ranks: int | None = None,
    limit_cache: LimitCache | None = None,
) -> ReservedCache:
    """Reserve a cache of this dtype.

    `others`: memory of weights and activations. `other_ranks`: smallest limit, in bytes, of the other ranks' caches.
    `limit_cache`: returns the memory limit; default: `own_limit`.

    UnsupportedModelError: the limit is too small for a sequence of the requested length, or exceeds the device memory.
    """
    layout, per_token = LAYOUTS[options.kv_layout], facts.kv_bytes_per_token(dtype)
    grammar_bytes = options.resolve_grammar_memory(facts.device.type)
    if options.memory_limit is not None and grammar_bytes and facts.device.type == "cpu":
        others = replace(others, grammars=grammar_bytes + facts.vocab_size * GRAMMAR_BYTES_PER_TOKEN)
    needs = CacheNeeds(options, facts, dtype, others)
    limit = replace((limit_cache or own_limit)(needs), other_ranks=other_ranks)
    page_size = page_size_of(facts.device)
    spare = tiles.kv if layout.is_padded else 0
    length = min(facts.max_model_len, limit.max_model_len or facts.max_model_len)
    if options.max_model_len is None:
        length = _affordable_length(length, limit.positions(per_token) // tiles.kv * tiles.kv - spare)
    # Attended columns are a multiple of the tile, counted from the sequence's start.
    longest = round_up(length, math.lcm(tiles.kv, page_size)) + spare
    if layout.is_padded:
        page_size = longest
    expected = None if layout.is_padded else options.expected_positions(facts.device.type)
    sequence = longest if expected is None else min(longest, round_up(expected, page_size))
    columns = _affordable_columns(longest, page_size, sequence, per_token, options, limit)
    footprint = replace(limit.included or others, kv=columns * per_token, states=needs.state_bytes)
    log.info("memory: %s", footprint)
    try:
        recurrent = _recurrent_arena(needs)
        arena = KVArena(
            facts.attention_layers,
            facts.kv_heads,
            columns,
            facts.head_dim,
            dtype,
            facts.device,
            (options.max_sequences, longest // page_size),
            page_size,
            recurrent,
            facts.latent_rank,
        )
    except (RuntimeError, MemoryError) as error:
        states = f" and recurrent states of {readable(footprint.states)}" if footprint.states else ""
        raise UnsupportedModelError(
            f"a KV cache of {readable(footprint.kv)}{states} cannot be allocated: {first_line(error)}"
        ) from error
    tables = PageTables(options.max_sequences, longest, columns, page_size)
    tables.assign = arena.assign
    checkpoints = None
    if recurrent is not None:
        checkpoints = Checkpoints(options.max_sequences, recurrent.entries, page_size, recurrent.rows)
    slots = SlotTable(options.max_sequences, tables, facts.window, checkpoints)
    return ReservedCache(slots, layout(arena), footprint, length, grammar_bytes)


def _recurrent_arena(needs: CacheNeeds) -> RecurrentArena | None:
    sizes, slots, device = needs.facts.recurrent, needs.options.max_sequences, needs.facts.device
    if sizes is None:
        return None
    return RecurrentArena(sizes, CHECKPOINTS_PER_SLOT * slots, slots, needs.tail_rows, needs.dtype, device)


def _affordable_length(length: int, columns: int) -> int:
    """The maximum positions of a sequence in a cache of at most `columns`, but at least one step."""
    return length if length <= columns else min(length, max(LENGTH_STEP, columns // LENGTH_STEP * LENGTH_STEP))


def _affordable_columns(
    longest: int, page_size: int, sequence: int, per_token: int, options: EngineOptions, limit: KVLimit
) -> int:
    """Columns of the cache: at most enough for `max_sequences` sequences of full length, within the limit.

    By default, they are enough for `max_sequences` of `sequence` columns, and for one of full length.
    """
    enough = max(longest, options.max_sequences * sequence)
    full = options.max_sequences * longest if options.memory_limits else enough
    columns = min(full, limit.positions(per_token) // page_size * page_size)
    if columns < longest:
        needed = longest * (limit.position_bytes or per_token)
        flags = "--max-sequences or --max-model-len" if limit.states else "--max-model-len"
        raise SmallCacheError(
            f"{limit} is too small for a sequence of {longest} positions ({readable(needed)}): "
            f"lower {flags}, or raise {limit.flag} to {math.ceil(limit.least(needed) / 2**20)}MiB",
            limit.least(needed),
        )
    if columns < enough:
        log.warning(
            "%s holds %d positions, fewer than %d sequences of %d need",
            limit.flag,
            columns,
            options.max_sequences,
            sequence,
        )
    return columns


def own_limit(needs: CacheNeeds) -> KVLimit:
    """Return the limit of a cache that no other model's cache shares."""
    return replace(kv_limit(needs.options, needs.others, needs.facts.device), states=needs.state_bytes)


def kv_limit(
    options: EngineOptions, others: Footprint, device: torch.device, beside: Footprint | None = None
) -> KVLimit:
    """Return the memory limit of the KV cache. `beside`: memory of another loaded model in this process."""
    if options.memory_limit is not None:
        present, peak = process_memory(device)
        weights = others.weights + (0 if beside is None else beside.weights)
        others = replace(others, base=max(0, present - weights))
        return KVLimit("memory_limit", int(options.memory_limit), others, loading=peak, beside=beside)
    if options.memory_budget is not None:
        return KVLimit("memory_budget", int(options.memory_budget), others, beside=beside)
    if options.kv_memory is not None:
        return KVLimit("kv_memory", int(options.kv_memory))
    # Each rank has a GPU of its own, but ranks on CPUs share the memory of their node.
    sharing = options.tensor_parallel // options.nnodes if device.type == "cpu" else 1
    return KVLimit("kv_memory", default_kv_memory(device) // sharing)
