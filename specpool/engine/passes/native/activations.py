"""Decides in which format activations enter the GEMMs of a compiled pass."""

from collections.abc import Set

from specpool.engine.config.activations import FLOAT32, INT8, Activations, int8_refusal
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.passes.native.packed_weights import ModelPanels
from specpool.engine.sharding.group import SINGLE_RANK, SingleRank
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES


def resolve_activations(option: Activations, kinds: Set[str], group: SingleRank = SINGLE_RANK) -> str:
    """Return "int8" or "float32" for a compiled pass, the same on all ranks of a group.

    `kinds`: of this rank's GEMM weights. UnsupportedModelError: int8 is required, but no weights are quantized.
    """
    if option == FLOAT32:
        return FLOAT32
    is_quantized = group.any_rank(not kinds.isdisjoint(QUANTIZATION_TYPES))
    if option == INT8 and not is_quantized:
        supported = ", ".join(kind for kind, qtype in QUANTIZATION_TYPES.items() if qtype.block > 1)
        raise UnsupportedModelError(int8_refusal(f"a trained draft, or a GGUF file with weights in {supported}"))
    return INT8 if is_quantized else FLOAT32


def gemm_kinds(panels: ModelPanels) -> Set[str]:
    """The kinds of a model's GEMM weights. An embedding that is not tied to the head is only looked up."""
    linears = [*(linear for layer in panels.layers for linear in layer.values()), panels.head]
    return {segment.kind for linear in linears for segment in linear}
