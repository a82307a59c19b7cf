"""Choose the format of activations in the GEMMs of a compiled pass."""

from collections.abc import Callable, Set

from specpool.engine.config.activations import FLOAT32, INT8, Activations, Int8RefusedError
from specpool.engine.passes.native.packed_weights import ModelPanels
from specpool.engine.passes.native.panels import PANEL
from specpool.engine.sharding.group import SINGLE_RANK, SingleRank
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES

MIXED = "mixed"
"""The kind of a panel that spans weights of different kinds, some of them quantized."""


def resolve_activations(
    option: Activations,
    kinds: Set[str],
    group: SingleRank = SINGLE_RANK,
    report: Callable[[str], None] = lambda note: None,
) -> str:
    """Return "int8" or "float32" for a compiled pass, the same on all ranks of a group.

    `kinds`: of this rank's GEMM weights, from `gemm_kinds`. `report`: called with a note for the operator if quantized
    weights keep float32. Int8RefusedError: int8 is required, but no weights are quantized, or some had to be
    dequantized.
    """
    if option == FLOAT32:
        return FLOAT32
    # A dequantized panel would keep float32 activations, and which outputs it has depends on the number of ranks.
    is_mixed = group.any_rank(MIXED in kinds)
    if is_mixed and option == INT8:
        raise Int8RefusedError(
            f"weights that share a panel of {PANEL} outputs to have one type, but this model mixes several there"
        )
    if is_mixed:
        report(f"its activations stay float32, because weights of several types share a panel of {PANEL} outputs")
        return FLOAT32
    is_quantized = group.any_rank(not kinds.isdisjoint(QUANTIZATION_TYPES))
    if option == INT8 and not is_quantized:
        supported = ", ".join(kind for kind, qtype in QUANTIZATION_TYPES.items() if qtype.block > 1)
        raise Int8RefusedError(f"a trained draft, or a GGUF file with weights in {supported}")
    return INT8 if is_quantized else FLOAT32


def gemm_kinds(panels: ModelPanels) -> Set[str]:
    """The kinds of a model's GEMM weights, including MIXED if there are mixed panels.

    Without an embedding that is not tied to the head: no GEMM uses it.
    """
    of_layers = (linear for layer in panels.layers for linear in layer.values())
    linears = [*of_layers, panels.head, panels.fc, panels.projection]
    return {MIXED if segment.is_mixed else segment.kind for linear in linears for segment in linear}
