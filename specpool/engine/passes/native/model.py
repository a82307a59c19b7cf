"""The fused pass as one call of compiled code, for CPUs: computed in float32, with weights as they are stored."""

import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from ctypes import CDLL, byref, c_double, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import nn

from specpool.engine.cache.arena import KVArena
from specpool.engine.numerics.tiles import round_up
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.compiler import compile_decoder
from specpool.engine.passes.native.packed_weights import PackedWeights, Products, bytes_of, products_of
from specpool.engine.passes.native.panels import BFLOAT16, FLOAT32, NUMBERS, segments_of
from specpool.engine.passes.native.structures import NORMS, PRODUCTS, Batch, Layer, Linear, Model
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Weight

# As in decoder.c.
LANES = 16
STAGES = ("products", "attention", "rows and cache")
NEVER = 1 << 30
# Numbers of rows that are tried, and how often, to find out from how many on panels are better widened into the cache.
TRIED_ROWS, TRIALS = (4, 6, 9, 12, 16, 24, 32, 64), 5

Compiler = Callable[..., CDLL | None]


class NativeModel(ForwardPass):
    """Takes the weights out of a fused model layer by layer, so that there is never a second copy of all weights."""

    compute_dtype = torch.float32
    plans_attention = False
    exact_by_construction = True
    weights: torch.Tensor

    def __init__(self, fused: FusedModel, products: Products, compiler: Compiler) -> None:
        """`products`: those of the fused model. `compiler`: compiles the decoder for them, and can do so here."""
        super().__init__()
        first: Any = fused.layers[0]
        self._groups, self._compile, self._kinds = first.heads // first.kv_heads, compiler, products.kinds
        library = compiler()
        assert library is not None
        self._library, self._forward, self._multiply = library, library.forward, library.multiply
        self._workspace_floats = library.workspace_floats
        self._workspace_floats.restype = c_int64
        linears = (first.qkv, first.out, first.gate_up, first.down, fused.head)
        self._product_inputs = {linear.in_features for linear in linears}
        self._rotary, self._outputs = fused.rotary.in_float32(), fused.head.out_features
        self._workspace = torch.empty(0)
        self._arena: KVArena | None = None
        self._layers = (Layer * len(fused.layers))()
        self._packed = PackedWeights(bytes_of(fused, products))
        self.register_buffer("weights", self._packed.memory, persistent=False)
        head, own = self._packed.product(products.head, fused.head.bias, NEVER), products.embedding
        self._model = Model(
            layers=self._layers,
            num_layers=len(fused.layers),
            hidden=fused.norm.numel(),
            intermediate=first.gate_up.out_features // 2,
            kv_heads=first.kv_heads,
            norm=self._packed.numbers(fused.norm),
            embedding=head if own is None else self._packed.product(own, None, NEVER),
            head=head,
            eps=fused.eps,
            scaling=first.scaling,
        )
        for index, layer in enumerate(fused.layers):
            self._layers[index] = self._layer(products.layers[index], layer)
            products.layers[index], fused.layers[index] = {}, nn.Identity()
        self._set_widened_from(NEVER if self._kinds.keys() <= {FLOAT32, BFLOAT16} else self._best_widened_from())

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the rows that the batch asks for."""
        arguments, logits = self._prepared(batch)
        self._forward(byref(self._model), byref(arguments))
        return logits[:, : self._outputs]

    def _prepared(self, batch: PackedBatch) -> tuple[Batch, torch.Tensor]:
        """The arguments of a pass, and the logits [R, padded rows of the head] that it will write."""
        self._point_to(batch.arena)
        tables = self._rotary(batch.longest)
        self._model.cosines, self._model.sines = (table.data_ptr() for table in tables)
        threads, scores = torch.get_num_threads(), round_up(batch.longest, LANES)
        floats = self._workspace_floats(byref(self._model), c_int64(batch.tokens))
        floats += threads * self._groups * scores
        if floats > self._workspace.numel():
            self._workspace = torch.empty(floats)
        logits = torch.empty(batch.num_logits, self._model.head.outputs)
        token_ids, positions, columns, result_rows = batch.addresses
        arguments = Batch(
            rows=batch.tokens,
            results=batch.num_logits,
            threads=threads,
            token_ids=token_ids,
            positions=positions,
            columns=columns,
            result_rows=result_rows,
            workspace=self._workspace.data_ptr(),
            scores=scores,
            logits=logits.data_ptr(),
        )
        return arguments, logits

    @property
    def library_digest(self) -> str:
        """SHA-256 of the compiled code."""
        library: Any = self._library
        digest: str = library.digest
        return digest

    @property
    def compiled_products(self) -> "NativeModel":
        """The model itself: all its products are compiled."""
        return self

    @property
    def product_inputs(self) -> Set[int]:
        """The different numbers of inputs that products of the pass have."""
        return self._product_inputs

    @property
    def weight_kinds(self) -> Mapping[str, int]:
        """Bytes of the weights of products by the kind in which they are kept."""
        return {
            kind if kind in QUANTIZATION_TYPES and kind != INT8.name else kind.lower(): its
            for kind, its in self._kinds.items()
        }

    @property
    def kinds(self) -> Mapping[str, int]:
        """The same, by the names of panels.h."""
        return self._kinds

    def product_with(self, weight: Weight, widened_from: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product of float32 rows [n, inputs] with a weight [outputs, inputs], as a pass computes it.

        `outputs` is a multiple of PANEL, and the weight of a kind that the pass has, or float32 that bfloat16 cannot
        hold. `widened_from`: rows from which panels are widened into the cache; default: as the pass does it.
        """
        segments = segments_of([weight])
        assert all(segment.kind in (FLOAT32, *self._kinds) for segment in segments)
        kept = PackedWeights(sum(segment.panels * segment.panel_bytes for segment in segments))
        linear = kept.product(segments, None, widened_from or self._model.head.widened_from)

        def product(rows: torch.Tensor, _alive: PackedWeights = kept) -> torch.Tensor:
            return self._multiplied(linear, rows)

        return product

    @contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """A context in which passes measure their stages. At its end the dictionary holds the seconds of each stage."""
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

    def _multiplied(self, linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        """The product of contiguous rows [n, inputs], [n, padded outputs]."""
        out = torch.empty(len(rows), linear.outputs)
        sizes = c_int64(len(rows)), c_int64(torch.get_num_threads())
        self._multiply(byref(linear), *sizes, c_void_p(rows.data_ptr()), c_void_p(out.data_ptr()))
        return out

    def _point_to(self, arena: KVArena) -> None:
        if arena is not self._arena:
            self._arena, self._model.columns = arena, arena.columns
            for layer, keys, values in zip(self._layers, arena.keys, arena.values, strict=True):
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def _set_widened_from(self, rows: int) -> None:
        for layer in self._layers:
            for name in PRODUCTS:
                getattr(layer, name).widened_from = rows
        self._model.head.widened_from = rows

    def _best_widened_from(self) -> int:
        """The least number of rows from which a panel is better widened once, into the cache, than in registers again
        and again. Both ways have the same bits."""
        layer = self._layers[0]
        products = [getattr(layer, name) for name in PRODUCTS]
        coded = [its for its in products if its.panels[0].kind not in (NUMBERS[FLOAT32], NUMBERS[BFLOAT16])]
        product = min(coded or products, key=lambda its: int(its.outputs * its.inputs))
        for rows in TRIED_ROWS:
            x, seconds = torch.rand(rows, product.inputs), dict[int, float]()
            for widened_from in (NEVER, 1) * TRIALS:
                product.widened_from = widened_from
                began = time.perf_counter()
                self._multiplied(product, x)
                spent = time.perf_counter() - began
                seconds[widened_from] = min(spent, seconds.get(widened_from, spent))
            if seconds[1] < seconds[NEVER]:
                return rows
        return NEVER

    def _layer(self, products: Mapping[str, Any], layer: Any) -> Layer:
        return Layer(
            **{name: self._packed.product(products[name], getattr(layer, name).bias, NEVER) for name in PRODUCTS},
            **{name: self._packed.numbers(getattr(layer, name)) for name in NORMS},
        )


def compile_pass(fused: FusedModel, pass_class: type[NativeModel]) -> NativeModel | None:
    """The model as compiled code, which takes over its weights; None if this machine cannot run it so."""
    if not _suits(fused):
        return None
    layer: Any = fused.layers[0]
    products = products_of(fused)
    kinds = frozenset({FLOAT32, *products.kinds})
    compiler = partial(compile_decoder, layer.head_dim, layer.heads // layer.kv_heads, kinds)
    return None if compiler() is None else pass_class(fused, products, compiler)


def _suits(fused: FusedModel) -> bool:
    layer: Any = fused.layers[0]
    # Of the whole model, so that all ranks that share it find the same.
    intermediate = fused.group.full_size(layer.gate_up.out_features // 2, "intermediate")
    sizes = (layer.head_dim, fused.norm.numel(), intermediate)
    layers: list[Any] = list(fused.layers)
    shapes = {tuple((its.out_features, its.in_features) for its in map(partial(getattr, x), PRODUCTS)) for x in layers}
    suits = fused.norm.device.type == "cpu" and fused.norm.dtype in (torch.float32, torch.bfloat16)
    return suits and len(shapes) == 1 and all(size % LANES == 0 for size in sizes)
