"""Round trips of worker descriptions."""

from dataclasses import fields
from typing import Any

import pytest

from specpool.protocol.codec import worker_info_response
from specpool.protocol.responses import read_worker_info
from specpool.protocol.worker_info import TENSOR_PARALLEL_SUMS, RankMemory, WorkerInfo

NOT_SENT = "embedding_parameters"
SIMPLE: dict[str, Any] = {int: 1, str: "x", bool: True, float: 0.25}
RANKS = tuple(RankMemory(f"cuda:{rank} (GPU)", 100 + rank, 200 + rank, 2**40 + rank) for rank in range(3))


def described(**changes: Any) -> WorkerInfo:
    """A description with all fields that a worker sends."""
    simple = {field.name: SIMPLE[field.type] for field in fields(WorkerInfo) if field.type in SIMPLE}
    more = {
        "notes": ("slow",),
        "weight_kinds": {"Q4_1": 8},
        "feature_layers": (2, 5),
        "step_seconds": {1: 0.5, 8: 0.75},
    }
    return WorkerInfo(**simple | {NOT_SENT: 0, "tensor_parallel_sums": ""} | more | changes)


@pytest.mark.parametrize(
    "info",
    [
        described(),
        described(bitwise=False, activations="", instance_id="i" * 32),
        described(step_seconds={}, max_rows=8),
        *(described(tensor_parallel=3, tensor_parallel_sums=sums, ranks=RANKS) for sums in TENSOR_PARALLEL_SUMS),
    ],
)
def test_descriptions_reach_the_coordinator(info: WorkerInfo) -> None:
    assert read_worker_info(worker_info_response(info)) == info


def test_unknown_costs_are_unset() -> None:
    assert not worker_info_response(described(step_seconds={}, max_rows=0)).HasField("costs")


@pytest.mark.parametrize(
    ("dtype", "activations", "shown"),
    [
        ("float32", "int8", "(float32, int8 activations, x)"),
        ("float32", "float32", "(float32, x)"),
        ("bfloat16", "float32", "(bfloat16, float32 activations, x)"),
        ("bfloat16", "", "(bfloat16, x)"),
    ],
)
def test_summary_names_activations_that_differ_from_the_dtype(dtype: str, activations: str, shown: str) -> None:
    assert shown in described(dtype=dtype, activations=activations).summary
