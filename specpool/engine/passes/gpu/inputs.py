"""The input of a model's layers on a GPU: embeddings of tokens, and for feature drafts, states beside them."""

from typing import Any, NamedTuple

import torch
from torch import nn

from specpool.engine.passes.fused import FusedModel, JoiningLayer
from specpool.engine.passes.gpu.gemm import Gemm
from specpool.engine.passes.gpu.rows import Addend, join
from specpool.engine.passes.packing import PackedBatch


class Inputs(NamedTuple):
    """What the first layer reads."""

    hidden: torch.Tensor  # [rows, hidden]
    added: Addend | None  # to be added to `hidden`
    normed: torch.Tensor | None = None  # [rows, 2 * hidden] input of attention; None: `hidden`, normalized


class GpuEmbedding(nn.Module):
    """Looks up tokens, and joins them with the states that a feature draft reads."""

    def __init__(self, fused: FusedModel) -> None:
        super().__init__()
        first: Any = fused.layers[0]
        self.group, self.weight, self.eps = fused.group, fused.dense_embedding, fused.eps
        self.reads_states, self.norms, self.norms_residual = fused.state_size > 0, None, False
        self.fc: Gemm | None = None
        if fused.fc is not None:
            self.fc, self.bias = Gemm(fused.fc.weight), fused.fc.bias
        elif isinstance(first, JoiningLayer):
            self.norms, self.norms_residual = first.norms.weight, first.norms_residual

    def forward(self, batch: PackedBatch) -> Inputs:
        """The input of the first layer. With `batch.logits_in_order`, `hidden` is the memory of the own states."""
        if not self.reads_states:
            return Inputs(self.group.embed(self.weight, batch.input_ids), None)
        assert batch.input_states is not None
        hidden = batch.own_states if batch.logits_in_order else None
        if hidden is None:
            hidden = torch.empty_like(batch.input_states)
        joined = join(
            batch.input_ids, self.weight, batch.input_states, self.norms, hidden, self.norms_residual, self.eps
        )
        if self.fc is None:
            return Inputs(hidden, None, joined)
        return Inputs(hidden, Addend(self.fc(joined), self.bias, None))
