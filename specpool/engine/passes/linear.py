"""Linear layers with weights in oneDNN's blocked layout.

On a CPU they are faster for few rows and, with few exceptions, batch-invariant at every row count.
`specpool.engine.probes.batch_invariance` finds the exceptions.
"""

import torch
from torch import nn


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
