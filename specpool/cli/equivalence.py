"""The name that commands show for a model's equivalence."""

from specpool.v1 import common_pb2


def equivalence_name(model: common_pb2.ModelInfo) -> str:
    """How closely the model's logits agree between batches: "bitwise", "numeric", or "unspecified"."""
    return common_pb2.Equivalence.Name(model.equivalence).removeprefix("EQUIVALENCE_").lower()
