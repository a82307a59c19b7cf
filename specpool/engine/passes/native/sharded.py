"""The compiled pass of a rank of a sharded model: the stages of decoder.c one by one, with exchanges between them."""

from ctypes import byref, c_int64, c_void_p
from functools import partial
from typing import Any

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.decoder import Activations, Linear
from specpool.engine.passes.native.model import Compiler, NativeModel
from specpool.engine.passes.native.packed_weights import ModelPanels
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sampling.head import Head
from specpool.engine.sharding.group import Group


class ShardedNativeModel(NativeModel):
    """Shards linear layers by outputs or inputs, and attention by heads. Every rank computes all hidden states."""

    def __init__(self, fused: FusedModel, panels: ModelPanels, compiler: Compiler, activations: str) -> None:
        first: Any = fused.layers[0]
        branch_features = first.out.out_features
        super().__init__(fused, panels, compiler, activations)
        assert isinstance(fused.group, Group)
        self.group, self._branch_features = fused.group, branch_features
        self._library.activations_of.restype = Activations

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows."""
        group, model, library = self.group, byref(self._model), self._library
        own_tokens = group.local_tokens(batch.input_ids)
        arguments, logits = self._prepare(batch)
        arguments.token_ids = own_tokens.data_ptr()
        c_batch, rows = byref(arguments), batch.tokens
        activations = library.activations_of(model, c_batch)
        hidden = self._view(activations.hidden, rows, self._model.hidden)
        attended = self._view(activations.attended, rows, group.local_size("attended"))
        gated = self._view(activations.gated, rows, self._model.intermediate)
        library.embed_stage(model, c_batch, c_void_p(activations.hidden))
        hidden.copy_(group.select_rows(hidden, batch.input_ids[:rows]))
        branch: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            library.attend_stage(model, c_batch, c_int64(index), _address(branch))
            branch = group.project(partial(self._branch, layer.out), attended, "attended")
            library.gate_stage(model, c_batch, c_int64(index), _address(branch))
            branch = group.project(partial(self._branch, layer.down), gated, "intermediate")
        library.logits_stage(model, c_batch, _address(branch))
        return group.gather(logits[:, : self._outputs], "tokens")

    def draft_loop(self, arena: KVArena, head: Head) -> None:
        """None: ranks synchronize several times per pass."""

    def _branch(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return self._gemm(linear, x)[:, : self._branch_features]

    def _view(self, address: int, rows: int, features: int) -> torch.Tensor:
        """Activations [rows, features] in the workspace."""
        start = (address - self._workspace.data_ptr()) // self._workspace.itemsize
        return self._workspace[start : start + rows * features].view(rows, features)


def _address(tensor: torch.Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())
