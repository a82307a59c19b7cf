"""The fused pass on CPUs, as one call of compiled code: float32 arithmetic on weights in their stored format."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import CDLL, byref, c_double, c_int64, c_void_p
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.recurrent import RecurrentArena
from specpool.engine.config.options import Activations, Int8RefusedError
from specpool.engine.native.compiler import compiler_problem
from specpool.engine.numerics.tiles import round_up
from specpool.engine.passes.forward_pass import DraftLoop, ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.fused_latent import FusedLatentLayer
from specpool.engine.passes.fused_layers import FusedLayer
from specpool.engine.passes.native.decoder import (
    LINEARS,
    Activation,
    Batch,
    Layer,
    Linear,
    Model,
    Rotary,
    compile_decoder,
)
from specpool.engine.passes.native.draft_loop import compile_draft_loop
from specpool.engine.passes.native.packed_weights import (
    ModelPanels,
    PackedWeights,
    bytes_of,
    gemm_kinds,
    numbers_of,
    panels_of,
    resolve_activations,
    stacked_bias,
)
from specpool.engine.passes.native.panels import BFLOAT16, FLOAT32, KIND_NUMBERS, PART, segments_of
from specpool.engine.passes.native.shapes import (
    LANES,
    attention_layers,
    gemm_inputs_of,
    largest_intermediate,
    latent_floats,
    latent_sizes_of,
    query_groups,
    recurrence_sizes_of,
    routing_of,
    shape_problem,
)
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sampling.head import Head
from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Weight

# As in decoder.c.
STAGES = ("gemm", "attention", "rows and cache")
NEVER = 1 << 30
ROUNDED_BYTES = 48
"""Size of a RoundedPart (rounded.h)."""
DENSE = {KIND_NUMBERS[FLOAT32], KIND_NUMBERS[BFLOAT16]}
# Row counts to time, and trials of each, to find where widening panels into the cache pays off.
TIMED_ROWS, TRIALS = (4, 6, 9, 12, 16, 24, 32, 64), 5

Compiler = Callable[..., CDLL | None]


class NativeModel(ForwardPass):
    """Takes over the weights of a fused model layer by layer, so memory never holds them twice."""

    compute_dtype = torch.float32
    plans_attention = False
    exact_by_construction = True
    weights: torch.Tensor

    def __init__(self, fused: FusedModel, panels: ModelPanels, compiler: Compiler, activations: str) -> None:
        """`panels`: weights of the fused model. `compiler`: compiles the decoder for them, and must succeed.

        `activations`: "float32", or "int8" for GEMMs with quantized weights.
        """
        super().__init__()
        self._activations = activations
        first = next(attention_layers(fused))
        activation = first.mlp.activation
        self._groups, self._compile = query_groups(first), compiler
        self._latent_floats = latent_floats(first)
        self.kinds: Mapping[str, int] = panels.kinds
        """Bytes of GEMM weights by kind, as named in panels.h."""
        library = compiler()
        assert library is not None
        self._library, self._forward = library, library.forward
        self._workspace_floats = library.workspace_floats
        self._workspace_floats.restype = c_int64
        self.gemm_inputs = gemm_inputs_of(fused)
        """The distinct input sizes of the pass's GEMMs."""
        self.state_size = fused.state_size
        self._rotaries, self._outputs = [tables.in_float32() for tables in fused.rotaries], fused.head.out_features
        self._workspace = torch.empty(0)
        self._arena: KVArena | None = None
        self._layers = (Layer * len(fused.layers))()
        self._packed = PackedWeights(bytes_of(fused, panels))
        self.register_buffer("weights", self._packed.memory, persistent=False)
        head, embedding = self._packed.linear(panels.head, fused.head.bias, NEVER), panels.embedding
        self._model = Model(
            layers=self._layers,
            num_layers=len(fused.layers),
            hidden=fused.norm.numel(),
            intermediate=largest_intermediate(fused),
            kv_heads=first.heads // self._groups,
            rotaries=(Rotary * len(fused.rotaries))(),  # the struct keeps the array alive
            norm=self._packed.numbers(fused.norm),
            input_norms=self._packed.numbers(None if fused.input_norms is None else fused.input_norms.weight),
            norms_output=fused.norms_output,
            embedding=head if embedding is None else self._packed.linear(embedding, None, NEVER),
            head=head,
            eps=fused.eps,
            scaling=first.scaling,
            embedding_scale=fused.embedding_scale,
            softcap=fused.softcap or 0,
            routing=routing_of(fused),
            activation=Activation(
                activation.function == "gelu_tanh", activation.alpha, activation.limit or inf, activation.shift
            ),
            recurrence=recurrence_sizes_of(fused),
            latent=latent_sizes_of(first),
        )
        if fused.fc is not None:
            self._model.fc = self._packed.linear(panels.fc, fused.fc.bias, NEVER)
        self._state_norm, self._projection = fused.state_norm, None
        if fused.projection is not None:
            self._projection = self._packed.linear(panels.projection, fused.projection.bias, NEVER)
        del first  # packing releases each layer
        for index, layer in enumerate(fused.layers):
            self._layers[index] = self._pack_layer(panels.layers[index], layer)
            panels.layers[index], fused.layers[index] = {}, nn.Identity()
        never_widens = activations == "int8" or self.kinds.keys() <= {FLOAT32, BFLOAT16}
        self._set_widened_from(NEVER if never_widens else self._best_widened_from())

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows."""
        arguments, logits = self._prepare(batch)
        self._forward(byref(self._model), byref(arguments))
        return logits[:, : self._outputs]

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Project states of the target [n, width] to those that the pass reads [n, hidden]."""
        if self._state_norm is not None:
            states = self._state_norm(states)
        if self._projection is None:
            return states
        return self._gemm(self._projection, states.contiguous())[:, : self.state_size]

    def draft_loop(self, arena: KVArena, head: Head) -> DraftLoop | None:
        """The compiled draft loop; None if this machine cannot run it."""
        return compile_draft_loop(self._library, self._model, self._prepare, arena, head)

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Scratch bytes, beyond activations, of a pass of `rows` rows: of the chosen experts and latent attention."""
        routing = self._model.routing
        floats: int = (3 * routing.size * routing.top_k + self._latent_floats) * rows
        return floats * torch.float32.itemsize

    @property
    def activations(self) -> str:
        """Format of the activations in GEMMs with quantized weights."""
        return self._activations

    @property
    def library_digest(self) -> str:
        """SHA-256 of the compiled code."""
        library: Any = self._library
        digest: str = library.digest
        return digest

    @property
    def weight_kinds(self) -> Mapping[str, int]:
        """Bytes of GEMM weights by dtype or quantized kind."""
        return {
            kind if kind in QUANTIZATION_TYPES and kind != INT8.name else kind.lower(): count
            for kind, count in self.kinds.items()
        }

    def gemm_with(self, weight: Weight, widened_from: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the GEMM of float32 rows [n, inputs] with a weight [outputs, inputs], as a pass computes it.

        `outputs` is a multiple of PANEL. The weight has one of `kinds`, or is float32. `widened_from`: rows from
        which panels are widened into the cache; default: the pass's own number.
        """
        segments = segments_of([weight])
        assert all(segment.kind in (FLOAT32, *self.kinds) for segment in segments)
        packed = PackedWeights(sum(segment.total_bytes for segment in segments))
        linear = packed.linear(segments, None, widened_from or self._model.head.widened_from)

        def gemm(rows: torch.Tensor, _alive: PackedWeights = packed) -> torch.Tensor:
            return self._gemm(linear, rows)

        return gemm

    @contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """Measure the stages of passes. At the end, the dictionary holds the seconds of each stage."""
        library = self._compile(measured=True)
        assert library is not None
        stages, seconds = (c_double * len(STAGES)).in_dll(library, "stage_seconds"), dict[str, float]()
        before, unmeasured = list(stages), self._forward
        self._forward = library.forward
        try:
            yield seconds
        finally:
            self._forward = unmeasured
            seconds.update({name: now - then for name, now, then in zip(STAGES, stages, before, strict=True)})

    def _prepare(self, batch: PackedBatch) -> tuple[Batch, torch.Tensor]:
        """The arguments of a pass, and the logits [R, padded rows of the head] that it will write."""
        self._point_to(batch.arena)
        for index, tables in enumerate(self._rotaries):
            self._model.rotaries[index] = Rotary(*(table.data_ptr() for table in tables(batch.max_length)))
        threads, scores = torch.get_num_threads(), round_up(batch.max_length, LANES)
        floats = self._workspace_floats(byref(self._model), c_int64(batch.tokens))
        floats += threads * (self._groups * scores + scores // LANES)
        if floats > self._workspace.numel():
            self._workspace = torch.empty(floats)
        logits = torch.empty(batch.num_logits, self._model.head.outputs)
        token_ids, positions, slots, prefix_lengths, offsets, result_rows = batch.addresses
        arguments = Batch(
            rows=batch.tokens,
            results=batch.num_logits,
            threads=threads,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            prefix_lengths=prefix_lengths,
            offsets=offsets,
            result_rows=result_rows,
            workspace=self._workspace.data_ptr(),
            scores=scores,
            logits=logits.data_ptr(),
            input_states=None if batch.input_states is None else batch.input_states.data_ptr(),
            own_states=None if batch.own_states is None else batch.own_states.data_ptr(),
        )
        if batch.states is not None:
            arguments.num_state_layers = count = len(batch.state_layers)
            arguments.state_layers = (c_int64 * count)(*batch.state_layers)  # the struct keeps the array alive
            arguments.states = batch.states.data_ptr()
        if batch.num_segments:
            arguments.num_segments, arguments.segments = batch.num_segments, batch.segments.data_ptr()
        return arguments, logits

    def _gemm(self, linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous rows [n, inputs]. Return [n, padded outputs]."""
        out = torch.empty(len(rows), linear.outputs)
        rounded = torch.empty(
            rows.numel() // PART if self.activations == "int8" else 0, ROUNDED_BYTES, dtype=torch.uint8
        )
        sizes = c_int64(len(rows)), c_int64(torch.get_num_threads())
        addresses = (c_void_p(tensor.data_ptr()) for tensor in (rows, rounded, out))
        self._library.run_gemm(byref(linear), *sizes, *addresses)
        return out

    def _point_to(self, arena: KVArena) -> None:
        if arena is not self._arena:
            self._arena, self._model.columns, self._model.page_size = arena, arena.keys[0].shape[1], arena.page_size
            self._model.tables, self._model.table_size = arena.tables.data_ptr(), arena.tables.shape[1]
            attending = [layer for layer in self._layers if not layer.taps]
            for layer, keys, values in zip(attending, arena.keys, arena.values, strict=True):
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            if arena.recurrent is not None:
                self._point_to_states(arena.recurrent)

    def _point_to_states(self, recurrent: RecurrentArena) -> None:
        self._model.recurrence.tail_rows = recurrent.rows
        tensors = recurrent.states, recurrent.edges, recurrent.inputs, recurrent.gates
        for layer, of_layer in zip(
            (layer for layer in self._layers if layer.taps), zip(*tensors, strict=True), strict=True
        ):
            layer.states, layer.edges, layer.tail_inputs, layer.tail_gates = (each.data_ptr() for each in of_layer)

    def _set_widened_from(self, rows: int) -> None:
        for layer in self._layers:
            for name in LINEARS:
                getattr(layer, name).widened_from = rows
        for linear in (self._model.head, self._model.fc, self._projection):
            if linear is not None:
                linear.widened_from = rows

    def _best_widened_from(self) -> int:
        """Find the row count from which it is faster to widen a panel once, into the cache, than per tile of rows, in
        registers. Both give the same bits."""
        linears = [linear for name in LINEARS if (linear := getattr(self._layers[0], name)).panels]
        quantized = [linear for linear in linears if linear.panels[0].kind not in DENSE]
        smallest = min(quantized or linears, key=lambda linear: int(linear.outputs * linear.inputs))
        for rows in TIMED_ROWS:
            x, seconds = torch.rand(rows, smallest.inputs), dict[int, float]()
            for widened_from in (NEVER, 1) * TRIALS:
                smallest.widened_from = widened_from
                began = time.perf_counter()
                self._gemm(smallest, x)
                spent = time.perf_counter() - began
                seconds[widened_from] = min(spent, seconds.get(widened_from, spent))
            if seconds[1] < seconds[NEVER]:
                return rows
        return NEVER

    def _pack_layer(self, panels: Mapping[str, Any], layer: Any) -> Layer:
        packed = Layer(
            **{name: self._packed.linear(panels[name], stacked_bias(layer.linears[name]), NEVER) for name in panels},
            **{name: self._packed.numbers(numbers) for name, numbers in numbers_of(layer).items()},
        )
        if isinstance(layer, FusedLayer):
            packed.window, packed.softcap = layer.attention.window or 0, layer.attention.softcap or 0
            packed.rotary, packed.is_gated = layer.rotary, layer.gated
        return packed


def compile_pass(fused: FusedModel, pass_class: type[NativeModel], activations: Activations) -> NativeModel | None:
    """Compile a fused model and take over its weights; None if this machine cannot run it that way.

    `activations`: the option. Int8RefusedError: it is int8, but the weights do not suit it, or nothing is compiled.
    """
    if (problem := shape_problem(fused)) is not None:
        _refuse_int8(activations, problem)
        return None
    first = next(attention_layers(fused))
    head_dim, groups = first.head_dim, query_groups(first)
    rank = first.rank if isinstance(first, FusedLatentLayer) else 0
    del first  # packing releases each layer
    panels = panels_of(fused)
    notes: list[str] = []
    if routing_of(fused).experts or rank:  # int8 is refused before weights are read
        activations = "float32"
    resolved = resolve_activations(activations, gemm_kinds(panels), fused.group, notes.append)
    kinds = frozenset({FLOAT32, *panels.kinds})
    compiler = partial(compile_decoder, head_dim, groups, kinds, rank, rounded=resolved == "int8")
    if compiler() is None:
        _refuse_int8(activations, *(compiler_problem() or ["failed to compile (see the warning above)"]))
        return None
    native = pass_class(fused, panels, compiler, resolved)
    native.notes += notes
    return native


def _refuse_int8(activations: Activations, problem: str, remedy: str = "") -> None:
    if activations == "int8":
        raise Int8RefusedError(f"the compiled pass, which {problem}", remedy)
