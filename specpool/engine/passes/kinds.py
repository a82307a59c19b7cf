"""Descriptions of how the layers of model families differ. All fast passes read them."""

from typing import Literal, NamedTuple

import torch

TINY = 1e-20
"""Keeps a sum of weights above 0."""


class AttentionKind(NamedTuple):
    """A layer's kind of attention."""

    window: int | None = None
    """Number of positions that a row attends to, including its own; None: all positions up to its own."""
    sinks: torch.Tensor | None = None
    """Logits [heads] that count in the softmax denominator but have no value; None: no sinks."""
    softcap: float | None = None
    """Bound on scores, applied as softcap * tanh(score / softcap); None: no bound."""


FULL_ATTENTION = AttentionKind()


class Activation(NamedTuple):
    """How an MLP combines its gate and up projections: function(gate) * (up + shift)."""

    function: Literal["silu", "gelu_tanh"] = "silu"
    """gelu_tanh: GELU in its tanh approximation."""
    alpha: float = 1.0
    """Factor within silu: gate * sigmoid(alpha * gate)."""
    limit: float | None = None
    """Upper bound on the gate, and bound on the magnitude of up; None: no bounds."""
    shift: float = 0.0


SILU = Activation()


class Routing(NamedTuple):
    """How a layer chooses experts, and the weights of their outputs, from router logits in float32.

    Scores choose the experts, highest first; of equal scores, the lower index comes first. The weights are the scores
    of the chosen experts.
    """

    top_k: int
    """Number of experts per row."""
    scores: Literal["softmax", "sigmoid"]
    renormalizes: bool
    """Whether weights are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of consecutive experts."""
    top_groups: int = 1
    """Number of groups from which experts are chosen."""
    ranked_by: int = 2
    """Number of a group's highest scores whose sum ranks it: 1 or 2."""
    epsilon: float = TINY
    """Added to the sum of weights before dividing by it."""
