"""The compiled pass of a rank of a divided model: the parts of decoder.c one by one, and exchanges in between."""

from ctypes import byref, c_int64, c_void_p
from functools import partial
from typing import Any

import torch

from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.model import Compiler, NativeModel
from specpool.engine.passes.native.packed_weights import Products
from specpool.engine.passes.native.structures import Linear, Space
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sharding.group import Group


class DividedNativeModel(NativeModel):
    """Products are divided by their outputs or inputs, attention by heads; every rank computes all hidden states."""

    def __init__(self, fused: FusedModel, products: Products, compiler: Compiler) -> None:
        first: Any = fused.layers[0]
        added_features = first.out.out_features
        super().__init__(fused, products, compiler)
        assert isinstance(fused.group, Group)
        self.group, self._added_features = fused.group, added_features
        self._library.space_of.restype = Space

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the rows that the batch asks for."""
        group, model, library = self.group, byref(self._model), self._library
        own_tokens = group.local_tokens(batch.input_ids)
        arguments, logits = self._prepared(batch)
        arguments.token_ids = own_tokens.data_ptr()
        numbers, rows = byref(arguments), batch.tokens
        space = library.space_of(model, numbers)
        hidden = self._view(space.hidden, rows, self._model.hidden)
        attended = self._view(space.attended, rows, group.local_size("attended"))
        gated = self._view(space.gated, rows, self._model.intermediate)
        library.embed_part(model, numbers, c_void_p(space.hidden))
        hidden.copy_(group.select_rows(hidden, batch.input_ids[:rows]))
        branch: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            library.attend_part(model, numbers, c_int64(index), _address(branch))
            branch = group.project(partial(self._product, layer.out), attended, "attended")
            library.activate_part(model, numbers, c_int64(index), _address(branch))
            branch = group.project(partial(self._product, layer.down), gated, "intermediate")
        library.judge_part(model, numbers, _address(branch))
        return group.gather(logits[:, : self._outputs], "tokens")

    def _product(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return self._multiplied(linear, x)[:, : self._added_features]

    def _view(self, address: int, rows: int, features: int) -> torch.Tensor:
        """Numbers [rows, features] in the workspace."""
        at = (address - self._workspace.data_ptr()) // self._workspace.itemsize
        return self._workspace[at : at + rows * features].view(rows, features)


def _address(tensor: torch.Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())
