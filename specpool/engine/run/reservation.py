"""Reserves the KV cache of an engine within its memory limit."""

import logging
from dataclasses import dataclass, replace

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.extents import Extents
from specpool.engine.cache.layout import LAYOUTS, KVLayout
from specpool.engine.cache.memory import Footprint, KVLimit, activation_bytes, default_kv_memory, weight_bytes
from specpool.engine.cache.slots import SlotTable
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, first_line
from specpool.engine.models.facts import ModelFacts
from specpool.engine.models.loading import LoadedModel
from specpool.engine.numerics.tiles import Tiles, round_up
from specpool.engine.passes.forward_pass import ForwardPass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReservedCache:
    """A KV cache with its bookkeeping, and the memory that the engine takes."""

    slots: SlotTable
    layout: KVLayout
    footprint: Footprint


def footprint_of(loaded: LoadedModel, facts: ModelFacts, forward_pass: ForwardPass, rows: int) -> Footprint:
    """Memory of the weights, and of the activations of a pass of `rows` rows."""
    activations = activation_bytes(loaded.config, forward_pass.compute_dtype, facts.vocab_size, rows)
    scratch = forward_pass.scratch_bytes(rows, facts.max_model_len)
    return Footprint(weights=weight_bytes(forward_pass), activations=activations + scratch)


def reserve_cache(
    facts: ModelFacts,
    dtype: torch.dtype,
    tiles: Tiles,
    options: EngineOptions,
    others: Footprint,
    other_ranks: int | None = None,
) -> ReservedCache:
    """Reserves a cache of this dtype. `others`: memory of weights and activations. `other_ranks`: maximum bytes of the
    cache of each other rank.

    UnsupportedModelError: the limit holds no sequence of full length, or the device has less memory than the limit.
    """
    layout, per_token = LAYOUTS[options.kv_layout], facts.kv_bytes_per_token(dtype)
    # Attended columns are a multiple of the tile, counted from the sequence's start.
    longest = round_up(facts.max_model_len, tiles.kv) + (tiles.kv if layout.spare_columns else 0)
    multiple = longest if layout.spare_columns else tiles.kv
    limit = replace(kv_limit(options, others, facts.device), other_ranks=other_ranks)
    columns = _affordable_columns(longest, multiple, per_token, options, limit)
    footprint = replace(others, kv=columns * per_token)
    log.info("memory: %s", footprint)
    try:
        arena = KVArena(facts.layers, facts.kv_heads, columns, facts.head_dim, dtype, facts.device)
    except (RuntimeError, MemoryError) as error:
        raise UnsupportedModelError(
            f"a KV cache of {columns * per_token:,} bytes cannot be allocated: {first_line(error)}"
        ) from error
    extents = Extents(options.max_sequences, longest, columns, multiple)
    return ReservedCache(SlotTable(options.max_sequences, extents), layout(arena, extents), footprint)


def _affordable_columns(longest: int, multiple: int, per_token: int, options: EngineOptions, limit: KVLimit) -> int:
    """Columns of the cache: enough for `max_sequences` sequences of full length, within the limit."""
    full = options.max_sequences * longest
    columns = min(full, limit.kv_bytes // per_token // multiple * multiple)
    if columns < longest:
        raise UnsupportedModelError(
            f"{limit} holds no sequence of {longest} positions ({longest * per_token:,} bytes): "
            f"lower max_model_len or raise {limit.name}"
        )
    if columns < full:
        log.warning(
            "%s holds %d positions, not %d sequences of %d", limit.name, columns, options.max_sequences, longest
        )
    return columns


def kv_limit(options: EngineOptions, others: Footprint, device: torch.device) -> KVLimit:
    """The memory limit of the KV cache."""
    if options.memory_budget is not None:
        return KVLimit("memory_budget", int(options.memory_budget), others)
    if options.kv_memory is not None:
        return KVLimit("kv_memory", int(options.kv_memory))
    # Each rank has a GPU of its own, but ranks on CPUs share the memory of their node.
    sharing = options.tensor_parallel // options.nnodes if device.type == "cpu" else 1
    return KVLimit("kv_memory", default_kv_memory(device) // sharing)
