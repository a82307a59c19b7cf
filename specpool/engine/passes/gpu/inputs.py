"""The input of a model's layers on a GPU: embeddings of tokens, and for feature drafts, states beside them."""

from typing import Any, NamedTuple

import torch
from torch import nn

from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.fused_layers import JoiningLayer
from specpool.engine.passes.gpu.gemm import Gemm
from specpool.engine.passes.gpu.rows import Addend, warps_of
from specpool.engine.passes.packing import PackedBatch

if triton is not None:
    from specpool.engine.passes.gpu.rows import normalized


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
        self.scale = fused.embedding_scale
        self.reads_states, self.residual = fused.state_size > 0, "zeros"
        self.norms = None if fused.input_norms is None else fused.input_norms.weight
        self.fc: Gemm | None = None
        if fused.fc is not None:
            self.fc, self.bias = Gemm(fused.fc.weight), fused.fc.bias
        elif isinstance(first, JoiningLayer):
            self.norms, self.residual = first.norms.weight, "normed" if first.norms_residual else "states"

    def forward(self, batch: PackedBatch) -> Inputs:
        """The input of the first layer. With `batch.logits_in_order`, `hidden` is the memory of the own states."""
        if not self.reads_states:
            embedded = self.group.embed(self.weight, batch.input_ids)
            return Inputs(embedded if self.scale == 1 else embedded * self.scale, None)
        assert batch.input_states is not None
        hidden = batch.own_states if batch.logits_in_order else None
        if hidden is None:
            hidden = torch.empty_like(batch.input_states)
        joined = join(
            batch.input_ids, self.weight, self.scale, batch.input_states, self.norms, hidden, self.residual, self.eps,
        )  # fmt: skip
        if self.fc is None:
            return Inputs(hidden, None, joined)
        return Inputs(hidden, Addend(self.fc(joined), self.bias, None))


def join(
    token_ids: torch.Tensor,  # [rows]
    embedding: torch.Tensor,  # [vocab_size, hidden]
    scale: float,
    states: torch.Tensor,  # [rows, hidden]
    norms: torch.Tensor | None,  # [2, hidden] weights of the norms of states and embeddings
    residual: torch.Tensor,  # output, [rows, hidden]; may be `states`
    kind: str,
    eps: float,
) -> torch.Tensor:
    """Concatenate the states and scaled embeddings of rows, [rows, 2 * hidden], normalized with `norms` if given.

    `kind`: what `residual` gets: "zeros", the "states", or the "normed" states.
    """
    rows, size = states.shape
    joined = torch.empty(rows, 2 * size, dtype=states.dtype, device=states.device)
    _join_states[(rows, 2)](
        token_ids, embedding, states, joined if norms is None else norms, residual, joined, eps,
        SIZE=size, WIDTH=power_of_two(size), SCALE=scale, NORMED=norms is not None, RESIDUAL=kind,
        **launch_options(states.device), num_warps=warps_of(size),
    )  # fmt: skip
    return joined


if triton is not None:

    @triton.jit
    def _join_states(
        token_ids, embedding, states, norms, residual, joined, eps,
        SIZE: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, NORMED: tl.constexpr,
        RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Store the state of a row, or its embedding."""
        row, embeds, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
        mask = feature < SIZE
        if NORMED:
            factors = tl.load(norms + embeds * SIZE + feature, mask=mask, other=0.0)
        if OVERLAP:
            gdc_wait()
        if embeds == 1:
            token_id = tl.load(token_ids + row).to(tl.int64)
            x = tl.load(embedding + token_id * SIZE + feature, mask=mask, other=0.0)
            if SCALE != 1:
                x = (x.to(tl.float32) * SCALE).to(embedding.dtype.element_ty)
        else:
            x = tl.load(states + row * SIZE + feature, mask=mask, other=0.0)
        result = x
        if NORMED:
            result = normalized(x.to(tl.float32), factors, eps, SIZE).to(joined.dtype.element_ty)
        tl.store(joined + (2 * row + embeds) * SIZE + feature, result, mask=mask)
        if embeds == 0:
            if RESIDUAL == "zeros":
                kept = tl.zeros_like(x)
            elif RESIDUAL == "normed":
                kept = result
            else:
                kept = x
            tl.store(residual + row * SIZE + feature, kept, mask=mask)
