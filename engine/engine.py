"""A model with its KV cache: realign sequences, run their new tokens in one ragged forward pass, choose tokens."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.cache.arena import KVArena
from engine.cache.extents import Extents
from engine.cache.layout import LAYOUTS, KVLayout
from engine.cache.memory import Footprint, KVLimit, activation_bytes, default_kv_memory, weight_bytes
from engine.cache.slots import SlotTable
from engine.forward import forward_pass
from engine.models.loading import LoadedModel, UnsupportedModelError, first_line, load_model
from engine.numerics import Tiles, round_up
from engine.options import EngineOptions
from engine.passes.activations import activate_in_pieces
from engine.passes.attention import PACKED_ATTENTION
from engine.passes.attention_plan import plan_attention
from engine.passes.graphs import RecordedModel
from engine.passes.kernels import splits_for
from engine.passes.native.model import NativeModel
from engine.passes.packing import Place, Span, pack
from engine.probes.exactness import choose_tiles
from engine.probes.self_test import self_test
from engine.probes.step_times import CACHED, measure_seconds_per_cached, measure_step_times

log = logging.getLogger(__name__)

PROBE_TOKENS = 8
# Rows of a recorded pass are a multiple of this, at least.
FEW_SHAPES = 8


@dataclass(frozen=True)
class EngineInfo:
    """What an engine runs and holds, as plain data."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    bitwise: bool
    parameters: int
    embedding_parameters: int
    slots_total: int
    slots_in_use: int
    kv_bytes_per_token: int
    kv_bytes_total: int
    kv_positions_total: int
    kv_positions_free: int
    kv_positions_multiple: int
    kv_layout: str
    weight_bytes: int
    activation_bytes: int
    step_seconds: Mapping[int, float]
    step_cached: int
    seconds_per_cached: float


class Engine:
    """Everything here runs on one thread, the one that built it."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions, exact: bool) -> None:
        """`exact`: make every token's logits independent of its batch, and prove it on this device."""
        self.loaded = loaded
        self.vocab_size, self.max_model_len = loaded.vocab_size, loaded.max_model_len
        self._outputs = self.vocab_size if loaded.output_ids is None else len(loaded.output_ids)
        self._parameters = sum(weight.numel() for weight in loaded.model.parameters())
        self._embedding_parameters = loaded.embedding_parameters
        config = loaded.config
        heads = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.query_groups = heads // self._kv_heads
        self._device, self._dtype = loaded.model.device, loaded.model.dtype
        # From the whole vocabulary: the first ids are often control tokens that were never learnt. There computing in
        # bfloat16 changed the library's own logits of SmolLM2-135M by 94% of the largest, here by 2%.
        self._probe = [self.vocab_size * i // PROBE_TOKENS for i in range(PROBE_TOKENS)]
        own_logits = self._own_logits()
        self._model = forward_pass(loaded, options)
        # A compiled pass computes and caches in float32 whatever its weights are.
        self._computed_dtype = torch.float32 if isinstance(self._model, NativeModel) else self._dtype
        self.tiles = Tiles()
        if exact and not isinstance(self._model, NativeModel):  # which is exact in every shape
            activate_in_pieces(self._model)
            attention = (self._kv_heads, self.query_groups, self._head_dim)
            self.tiles = choose_tiles(self._model, attention if self._model.plans_attention else None)
        if isinstance(self._model, RecordedModel):
            self.tiles = replace(self.tiles, row_multiple=max(FEW_SHAPES, self.tiles.row_multiple))
        self.max_forward_tokens = min(options.max_forward_tokens, self.tiles.max_rows or options.max_forward_tokens)
        self.footprint = Footprint(
            weights=weight_bytes(self._model),
            activations=activation_bytes(config, self._computed_dtype, self.vocab_size, self.max_forward_tokens)
            + self._splits_bytes(heads),
        )
        self.kv_layout = options.kv_layout
        self.slots, self.layout = self._reserve(options)
        self.realign_ns = 0
        """Nanoseconds spent so far on bringing caches to the length and the place where a pass needs them."""
        self._refuse_other_logits(own_logits)
        self.bitwise = exact and self_test(self)
        self.step_seconds: Mapping[int, float] = {}
        """What a pass takes by the number of its new tokens, as measured when the model was loaded."""
        self.seconds_per_cached = 0.0

    @classmethod
    def load(cls, options: EngineOptions, exact: bool) -> "Engine":
        """Loads the model and makes it ready. UnsupportedModelError says why it cannot be."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        engine = cls(load_model(options), options, exact)
        if not engine.layout.spare_columns:  # else a pass takes as long as it does to bring the sequences in line
            engine.step_seconds = measure_step_times(engine)
            engine.seconds_per_cached = measure_seconds_per_cached(engine)
        log.info("ready: %s", engine.info())
        return engine

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Caches the new tokens of all spans and returns the logits that they ask for, [R, rows of the head], in span
        order. `token_ids` and `over_vocabulary` say which tokens the head has rows for.

        More than `max_forward_tokens` are worked off in several passes, which changes no bit of the result.
        """
        logits = [self._pass(chunk) for chunk in _chunks(spans, self.max_forward_tokens)]
        wanted = [rows for rows in logits if len(rows)]
        return torch.cat(wanted) if wanted else torch.empty(0, self._outputs, device=self._device)

    def token_ids(self, rows: torch.Tensor) -> torch.Tensor:
        """The tokens that rows of the head, by their numbers, are for."""
        return rows if self.loaded.output_ids is None else self.loaded.output_ids[rows]

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] of [n, rows of the head]: a token that the head has no row for is never chosen."""
        if self.loaded.output_ids is None:
            return logits
        known = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        known[:, self.loaded.output_ids] = logits
        return known

    def info(self) -> EngineInfo:
        """What runs here, and how full it is."""
        per_token = self._kv_bytes_per_token()
        name = f" ({torch.cuda.get_device_name(self._device)})" if self._device.type == "cuda" else ""
        return EngineInfo(
            model=self.loaded.name,
            architecture=self.loaded.config.model_type,
            dtype=str(self._dtype).removeprefix("torch."),
            device=f"{self._device}{name}",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            tokenizer_fingerprint=self.loaded.tokenizer.fingerprint,
            bitwise=self.bitwise,
            parameters=self._parameters,
            embedding_parameters=self._embedding_parameters,
            slots_total=self.slots.total,
            slots_in_use=self.slots.in_use,
            kv_bytes_per_token=per_token,
            kv_bytes_total=per_token * self.layout.arena.columns,
            kv_positions_total=self.slots.extents.columns,
            kv_positions_free=self.slots.extents.free,
            kv_positions_multiple=self.slots.extents.multiple,
            kv_layout=self.kv_layout,
            weight_bytes=self.footprint.weights,
            activation_bytes=self.footprint.activations,
            step_seconds=self.step_seconds,
            step_cached=CACHED,
            seconds_per_cached=self.seconds_per_cached,
        )

    @contextmanager
    def realigning(self) -> Iterator[None]:
        """Counts the time of what is done in it as realignment."""
        self._synchronize()  # else the time of what still runs would be
        began = time.perf_counter_ns()
        yield
        self._synchronize()
        self.realign_ns += time.perf_counter_ns() - began

    def _synchronize(self) -> None:
        if self._device.type == "cuda" and self.layout.spare_columns:  # the other layout rarely moves anything
            torch.cuda.synchronize(self._device)

    def _pass(self, spans: Sequence[Span]) -> torch.Tensor:
        with self.realigning():
            starts = self.layout.align(spans)
        arena = self.layout.arena
        places = [Place(self.layout.origin(span.slot), start) for span, start in zip(spans, starts, strict=True)]
        batch = pack(spans, places, arena, self.tiles)
        if self._model.plans_attention:
            gather = self._device.type != "cpu"
            plan = plan_attention(spans, places, arena, self.tiles, self.query_groups, gather)
            batch = replace(batch, attention=plan)
        logits: torch.Tensor = self._model(batch)[: batch.num_logits]
        return logits

    def _kv_bytes_per_token(self) -> int:
        layers = int(self.loaded.config.num_hidden_layers)
        return 2 * layers * self._kv_heads * self._head_dim * self._computed_dtype.itemsize

    def _splits_bytes(self, heads: int) -> int:
        """Of the parts of attention that are joined afterwards, where kernels attend."""
        if self._model.plans_attention or isinstance(self._model, NativeModel):
            return 0
        return self.max_forward_tokens * splits_for(self.max_model_len) * heads * (self._head_dim + 2) * 4

    def _reserve(self, options: EngineOptions) -> tuple[SlotTable, KVLayout]:
        layout, per_token = LAYOUTS[options.kv_layout], self._kv_bytes_per_token()
        # Attended columns are a multiple of the tile, counted from the sequence's start.
        longest = round_up(self.max_model_len, self.tiles.kv) + (self.tiles.kv if layout.spare_columns else 0)
        multiple = longest if layout.spare_columns else self.tiles.kv
        limit = self._limit(options)
        wanted = options.max_sequences * longest
        columns = min(wanted, limit.kv_bytes // per_token // multiple * multiple)
        if columns < longest:
            raise UnsupportedModelError(
                f"{limit} holds no sequence of {longest} positions ({longest * per_token:,} bytes): "
                f"lower max_model_len or raise {limit.name}"
            )
        if columns < wanted:
            log.warning(
                "%s holds %d positions, not %d sequences of %d",
                limit.name,
                columns,
                options.max_sequences,
                longest,
            )
        self.footprint = replace(self.footprint, kv=columns * per_token)
        log.info("memory: %s", self.footprint)
        layers = self.loaded.config.num_hidden_layers
        try:
            arena = KVArena(layers, self._kv_heads, columns, self._head_dim, self._computed_dtype, self._device)
        except (RuntimeError, MemoryError) as error:
            raise UnsupportedModelError(
                f"a KV cache of {columns * per_token:,} bytes cannot be allocated: {first_line(error)}"
            ) from error
        extents = Extents(options.max_sequences, longest, columns, multiple)
        return SlotTable(options.max_sequences, extents), layout(arena, extents)

    def _limit(self, options: EngineOptions) -> KVLimit:
        """What the KV cache may take."""
        if options.memory_budget is not None:
            return KVLimit("memory_budget", int(options.memory_budget), self.footprint)
        if options.kv_memory is not None:
            return KVLimit("kv_memory", int(options.kv_memory))
        return KVLimit("kv_memory", default_kv_memory(self._device))

    @torch.inference_mode()
    def _refuse_other_logits(self, own: torch.Tensor) -> None:
        """Refuses a model that does not attend through our function, or that means something else by it.

        `own`: the logits that the model gives by itself.
        """
        kind = self.loaded.config.model_type
        try:
            # In two passes, so that the second one needs what the first one cached.
            self.forward([Span(slot=0, start=0, token_ids=self._probe[:3], num_logits=0)])
            logits = self.forward([Span(slot=0, start=3, token_ids=self._probe[3:], num_logits=len(own))])
        except Exception as error:  # whatever the code of a foreign model raises
            raise UnsupportedModelError(f"this {kind} model cannot run packed batches: {first_line(error)}") from error
        # A layer that attends in its own way leaves its keys untouched.
        cached = slice(0, PROBE_TOKENS)
        foreign = [layer for layer, keys in enumerate(self.layout.arena.keys) if not keys[:, cached].any()]
        if foreign:
            raise UnsupportedModelError(f"layers {foreign} of this {kind} model have another kind of attention or none")
        # Rounding is far below this in every dtype, and another mask, scale or order of heads is far above.
        difference, largest = (logits - own).abs().max().item(), own.abs().max().item()
        if not difference <= 0.1 * largest:
            raise UnsupportedModelError(
                f"packed batches do not give this {kind} model's own logits: "
                f"they differ by {difference:.3g} of {largest:.3g}"
            )

    @torch.inference_mode()
    def _own_logits(self) -> torch.Tensor:
        """Logits [4, rows of the head] of the last probe tokens, by the attention that came with the model."""
        model = self.loaded.model
        model.set_attn_implementation("eager")
        try:
            output = model(input_ids=torch.tensor([self._probe], device=self._device), use_cache=False)
        except Exception as error:  # whatever the code of a foreign model raises
            kind = self.loaded.config.model_type
            raise UnsupportedModelError(f"this {kind} model cannot run: {first_line(error)}") from error
        finally:
            model.set_attn_implementation(PACKED_ATTENTION)
        logits: torch.Tensor = output.logits[0, -4:]
        return logits


def _chunks(spans: Sequence[Span], limit: int) -> list[list[Span]]:
    """Cuts spans so that every chunk has at most `limit` tokens; each piece keeps the logits of its own tokens."""
    chunks: list[list[Span]] = []
    room = 0
    for span in spans:
        start, tokens, logits = span.start, span.token_ids, span.num_logits
        while tokens:
            if room == 0:
                chunks.append([])
                room = limit
            take = min(room, len(tokens))
            piece_logits = max(0, logits - (len(tokens) - take))
            chunks[-1].append(Span(span.slot, start, tokens[:take], piece_logits))
            logits -= piece_logits
            start, tokens, room = start + take, tokens[take:], room - take
    return chunks
