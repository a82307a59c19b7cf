"""The input of feature drafts: hidden states of the target beside the embeddings of tokens.

A token's input is fc(concat(state, embedding)); MTP layers normalize both before `fc`. The first layer of an EAGLE-3
head reads both without `fc`. The state is that of the position before the token: the projected state of the target, or
where the draft continues its own tokens, the draft's own state after its last layer. Missing states are zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from specpool.engine.cache.spans import Span
from specpool.engine.numerics.uploads import upload
from specpool.engine.weights.quantized import Weight

Project = Callable[[torch.Tensor], torch.Tensor]


class StateNorm(nn.Module):
    """RMSNorm of the parts of a target's states, [n, parts * size]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight`: [parts, size]."""
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        parts = states.unflatten(-1, self.weight.shape)
        return (rms_norm(parts, parts.shape[-1:], eps=self.eps) * self.weight).flatten(-2).to(states.dtype)


class FeatureEmbedding(nn.Module):
    """Embeds tokens whose states are missing, in place of a model's embedding."""

    def __init__(
        self,
        embedding: Any,
        fc: Any,
        project: Any,
        state_norm: StateNorm | None = None,
        norms_output: bool = False,
        input_norms: StateNorm | None = None,
    ) -> None:
        """`fc`: linear layer [hidden, 2 * hidden]; None: the first layer reads states and embeddings.

        `input_norms`: norms of a state and an embedding before `fc`; None: no norms.
        `project`: linear layer [hidden, width] for states of the target, after `state_norm`; None: states are as wide
        as the draft. `norms_output`: the draft's own states are those after its final norm.
        """
        super().__init__()
        self.embedding, self.fc, self.project = embedding, fc, project
        self.state_norm, self.norms_output, self.input_norms = state_norm, norms_output, input_norms

    @property
    def weight(self) -> Weight:
        """The embedding of tokens [vocab_size, hidden]."""
        weight: Weight = self.embedding.weight
        return weight

    def outlined(self, embedding: Any) -> "FeatureEmbedding":
        """The same input around another embedding, without weights."""
        fc, project = (
            layer and nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
            for layer in (self.fc, self.project)
        )
        return FeatureEmbedding(embedding, fc, project)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(ids)
        joined: torch.Tensor = self.fc(torch.cat([torch.zeros_like(embedded), embedded], -1))
        return joined


def fill_states(states: torch.Tensor, spans: Sequence[Span], project: Project) -> None:
    """Fill in the states of a packed batch's rows, [rows, hidden] zeros, with one copy for all spans."""
    given, own, end = dict[int, torch.Tensor](), dict[int, torch.Tensor](), 0  # by first row
    for span in spans:
        begin, end = end, end + len(span.token_ids)
        first = end
        if span.states is not None:
            first = end - len(span.states)
            given[first] = span.states
        own.update({begin + i: state for i, state in (span.own_states or {}).items() if begin + i < first})
    filled = [project(torch.cat([*given.values()]).to(states))] if given else []
    if own:
        filled.append(torch.stack([*own.values()]))
    if filled:
        rows = [row for first, each in given.items() for row in range(first, first + len(each))]
        index = upload(torch.tensor([*rows, *own], dtype=torch.int64), states.device)
        states.index_copy_(0, index, torch.cat(filled).to(states.dtype))
