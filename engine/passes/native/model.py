"""The lean pass as one call of compiled code, for CPUs: computed in float32, with weights in float32 or bfloat16."""

import math
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from ctypes import CDLL, byref, c_double, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from engine.cache.arena import KVArena
from engine.cache.memory import zeros
from engine.numerics import round_up
from engine.passes.forward_pass import ForwardPass
from engine.passes.lean import LeanModel
from engine.passes.native.compiler import compile_decoder
from engine.passes.native.structures import NORMS, PRODUCTS, Batch, Layer, Linear, Model
from engine.passes.packing import PackedBatch

# As in decoder.c.
LANES, PANEL = 16, 32
STAGES = ("products", "attention", "rows and cache")


class NativeModel(ForwardPass):
    """Takes the weights out of a lean model layer by layer, so that there is never a second copy of all weights."""

    compute_dtype = torch.float32
    plans_attention = False
    exact_by_construction = True
    weights: torch.Tensor

    def __init__(self, lean: LeanModel, dtype: torch.dtype) -> None:
        """`lean`: a model that `can_compile` accepts. `dtype`: in which the weights are kept."""
        super().__init__()
        first: Any = lean.layers[0]
        self._groups, self._compile = first.heads // first.kv_heads, _compiler_for(lean, dtype)
        library = self._compile()
        assert library is not None
        self._library, self._forward, self._multiply = library, library.forward, library.multiply
        self._workspace_floats = library.workspace_floats
        self._workspace_floats.restype = c_int64
        linears = (first.qkv, first.out, first.gate_up, first.down, lean.head)
        self._product_inputs = {linear.in_features for linear in linears}
        self._rotary, self._outputs = lean.rotary.in_float32(), lean.head.out_features
        self._workspace = torch.empty(0)
        self._arena: KVArena | None = None
        self._layers = (Layer * len(lean.layers))()
        # All weights lie in one tensor, for large pages: a step took up to a fifth longer when each weight had its own.
        elements = sum(_padded_elements(weight) for weight in _weights_of(lean))
        self.register_buffer("weights", zeros((elements,), dtype, lean.norm.device), persistent=False)
        self._used = 0
        tied = lean.embedding.data_ptr() == lean.head.weight.data_ptr()
        self._model = Model(
            layers=self._layers,
            num_layers=len(lean.layers),
            hidden=lean.norm.numel(),
            intermediate=first.gate_up.out_features // 2,
            kv_heads=first.kv_heads,
            embedding=None if tied else self._kept(lean.embedding),
            norm=self._kept(lean.norm),
            head=self._linear(lean.head),
            eps=lean.eps,
            scaling=first.scaling,
        )
        for index, layer in enumerate(lean.layers):
            self._layers[index] = self._layer(layer)
            lean.layers[index] = nn.Identity()

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
        if floats > len(self._workspace):
            self._workspace = torch.empty(floats)
        logits = torch.empty(batch.num_logits, self._model.head.outputs)
        arguments = Batch(
            rows=batch.tokens,
            results=batch.num_logits,
            threads=threads,
            token_ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            columns=batch.columns.data_ptr(),
            result_rows=batch.logit_rows.data_ptr(),
            workspace=self._workspace.data_ptr(),
            scores=scores,
            logits=logits.data_ptr(),
        )
        return arguments, logits

    @property
    def compiled_products(self) -> "NativeModel":
        """The model itself: all its products are compiled."""
        return self

    @property
    def product_inputs(self) -> Set[int]:
        """The different numbers of inputs that products of the pass have."""
        return self._product_inputs

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype in which weights are kept."""
        return self.weights.dtype

    def product_with(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product of float32 rows [n, inputs] with a weight [outputs, inputs], as a pass computes it.

        `outputs` is a multiple of PANEL.
        """
        outputs, inputs = weight.shape
        panels = _panels(weight, self.weight_dtype).contiguous()

        def product(rows: torch.Tensor) -> torch.Tensor:
            linear = Linear(weight=panels.data_ptr(), bias=None, inputs=inputs, outputs=outputs)
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

    def _layer(self, layer: Any) -> Layer:
        return Layer(
            **{name: self._linear(getattr(layer, name)) for name in PRODUCTS},
            **{name: self._kept(getattr(layer, name)) for name in NORMS},
        )

    def _linear(self, linear: nn.Linear) -> Linear:
        outputs, inputs = linear.weight.shape
        missing, panels = -outputs % PANEL, _panels(linear.weight, self.weights.dtype)
        bias = None if linear.bias is None else pad(linear.bias, (0, missing))
        return Linear(weight=self._kept(panels), bias=self._kept(bias), inputs=inputs, outputs=outputs + missing)

    def _kept(self, weight: torch.Tensor | None) -> int | None:
        """The address of a copy that lives as long as this model and does not lie in a mapped file."""
        if weight is None:
            return None
        copy = self.weights[self._used : self._used + weight.numel()]
        copy.view(weight.shape).copy_(weight.detach())
        self._used += round_up(weight.numel(), PANEL)
        return copy.data_ptr()


def _panels(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight [outputs, inputs] padded to whole panels, in the order in which a product with this dtype reads it."""
    halves = pad(weight, (0, 0, 0, -len(weight) % PANEL)).view(-1, 2, LANES, weight.shape[1])
    return halves.permute((0, 3, 2, 1) if dtype == torch.bfloat16 else (0, 3, 1, 2))


def _weights_of(lean: LeanModel) -> list[torch.Tensor]:
    layers: list[Any] = list(lean.layers)
    return [*lean.parameters(), *(layer.head_norms for layer in layers if layer.head_norms is not None)]


def _padded_elements(weight: torch.Tensor) -> int:
    """Number of elements of a weight once its outputs are padded to whole panels."""
    outputs, *inputs = weight.shape
    return math.prod([round_up(outputs, PANEL), *inputs])


def lossless_dtype(lean: LeanModel) -> torch.dtype:
    """The smaller of the two dtypes that holds these weights without rounding."""
    held = all(torch.equal(weight.bfloat16().to(weight.dtype), weight) for weight in _weights_of(lean))
    return torch.bfloat16 if held else torch.float32


def can_compile(lean: LeanModel, dtype: torch.dtype) -> bool:
    """Whether this machine can run a model as compiled code, with weights in this dtype."""
    layer: Any = lean.layers[0]
    # Of the whole model, so that all ranks that share it find the same.
    intermediate = lean.group.total(layer.gate_up.out_features // 2, "intermediate")
    sizes = (layer.head_dim, lean.norm.numel(), intermediate)
    suits = lean.norm.device.type == "cpu" and lean.norm.dtype in (torch.float32, torch.bfloat16)
    layers: list[Any] = list(lean.layers)
    shapes = {(x.qkv.weight.shape, x.out.weight.shape, x.gate_up.weight.shape, x.down.weight.shape) for x in layers}
    suits = suits and len(shapes) == 1 and all(size % LANES == 0 for size in sizes)
    return suits and _compiler_for(lean, dtype)() is not None


def _compiler_for(lean: LeanModel, dtype: torch.dtype) -> Callable[..., CDLL | None]:
    layer: Any = lean.layers[0]
    return partial(compile_decoder, layer.head_dim, layer.heads // layer.kv_heads, dtype == torch.bfloat16)
