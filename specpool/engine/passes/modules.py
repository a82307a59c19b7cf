"""Modules for a CPU that replace ones that are not batch-invariant: activation functions and linear layers.

Torch splits large tensors among threads without regard to rows, and computes the tail of a vector differently. For
functions such as `exp`, the two paths differ in the last bit. Activations here take chunks small enough for one thread:
several rows if a row is a multiple of the vector length, otherwise one row.

Linear layers have weights in oneDNN's blocked layout. They are faster for few rows and, with few exceptions,
batch-invariant at every row count. `specpool.engine.probes.batch_invariance` finds the exceptions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS

from specpool.engine.passes.kinds import Activation

# Torch uses threads from this many elements on. Its vectors are at most this long.
THREADED_ELEMENTS, VECTOR_ELEMENTS = 32_768, 64

_ACTIVATIONS: tuple[Any, ...] = (nn.GELU, *(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()))


def in_chunks(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to `x` [..., features]."""
    features = x.shape[-1]
    rows = max(1, (THREADED_ELEMENTS - 1) // features) if features % VECTOR_ELEMENTS == 0 else 1
    if x.device.type != "cpu" or x.numel() <= rows * features:
        return function(x)
    chunks = x.reshape(-1, features).split(rows)
    return torch.cat([function(chunk) for chunk in chunks]).view(x.shape)


def softcapped(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return softcap * tanh(x / softcap)."""
    return in_chunks(torch.tanh, x / softcap) * softcap


def activated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply the activation to gate and up [rows, 2 * size]. Return [rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.function == "gelu_tanh":
        return in_chunks(partial(functional.gelu, approximate="tanh"), gate) * up
    if activation.alpha == 1:
        return in_chunks(functional.silu, gate) * (up + activation.shift if activation.shift else up)
    return gate * in_chunks(torch.sigmoid, gate * activation.alpha) * (up + activation.shift)


class ChunkedActivation(nn.Module):
    """Applies an activation module of transformers in chunks."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of `x` [..., features]."""
        return in_chunks(self._activation, x.contiguous())  # some activations depend on the memory layout


def chunk_activations(module: nn.Module) -> None:
    """Replace every activation module below `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, _ACTIVATIONS):
            setattr(module, name, ChunkedActivation(child))
        else:
            chunk_activations(child)


_FUNCTIONS = {torch.tanh, torch.Tensor.tanh, torch.sigmoid, torch.Tensor.sigmoid, functional.sigmoid, functional.tanh}
_FUNCTIONS |= {functional.silu, functional.gelu, functional.softplus}


class ChunkedFunctions(TorchFunctionMode):
    """While active, applies activation functions in chunks, for code that calls them without a module."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, in chunks if it is an activation function."""
        kwargs = kwargs or {}
        if func not in _FUNCTIONS or not args or args[0].dim() == 0:
            return func(*args, **kwargs)
        return in_chunks(lambda x: func(x, *args[1:], **kwargs), args[0].contiguous())


class PrepackedLinear(nn.Module):
    """Replaces an `nn.Linear` for inference. `forward`: [..., in_features] to [..., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # The layout is chosen for 16 rows, a typical row count of a round.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of `x` by the weight and add the bias."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return output


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has a GEMM for this dtype on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        PrepackedLinear(nn.Linear(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except RuntimeError:
        return False
    return True


def prepack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module`."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PrepackedLinear(child))
        else:
            prepack_linears(child)
