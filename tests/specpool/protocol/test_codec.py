"""Round trips of worker descriptions."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import pytest

from specpool.protocol.codec import worker_info_response
from specpool.protocol.responses import check_worker_info, read_step_costs
from specpool.protocol.worker_info import TENSOR_PARALLEL_SUMS, RankMemory, StepCosts, WorkerInfo

REQUIRED = [field for field in fields(WorkerInfo) if field.default is MISSING]
NUMBERS = {field.name: 1 for field in REQUIRED if field.type in (int, "int")}
TEXTS = {field.name: "x" for field in REQUIRED if field.type in (str, "str")}


@pytest.mark.parametrize(
    ("step_seconds", "max_rows", "known"), [({}, 0, False), ({}, 8, True), ({1: 0.5, 8: 0.75}, 0, True)]
)
def test_unknown_costs_are_unset(step_seconds: Mapping[int, float], max_rows: int, known: bool) -> None:
    described: dict[str, Any] = {
        **NUMBERS, **TEXTS, "bitwise": True, "step_seconds": step_seconds, "step_cached": 3 if step_seconds else 0,
        "seconds_per_cached": 0.25 if step_seconds else 0.0, "max_rows": max_rows,
    }  # fmt: skip
    response = worker_info_response(WorkerInfo(**described))
    assert response.HasField("costs") is known
    costs = {field.name: described[field.name] for field in fields(StepCosts)}
    assert read_step_costs(response) == StepCosts(**costs)


def described(**changes: Any) -> WorkerInfo:
    more: dict[str, Any] = {"bitwise": True, "step_seconds": {}, "seconds_per_cached": 0.0}
    return WorkerInfo(**{**NUMBERS, **TEXTS, **more, **changes})


def test_unsharded_model_describes_no_ranks() -> None:
    response = worker_info_response(described())
    check_worker_info(response)
    assert (response.model.tensor_parallel, response.model.tensor_parallel_sums) == (1, "")
    assert not response.load.ranks


@pytest.mark.parametrize("sums", TENSOR_PARALLEL_SUMS)
def test_ranks_are_described_in_order(sums: str) -> None:
    ranks = tuple(RankMemory(f"cuda:{rank} (GPU)", 100 + rank, 200 + rank, 2**40 + rank) for rank in range(3))
    response = worker_info_response(described(tensor_parallel=3, tensor_parallel_sums=sums, ranks=ranks))
    check_worker_info(response)
    assert (response.model.tensor_parallel, response.model.tensor_parallel_sums) == (3, sums)
    names = [field.name for field in fields(RankMemory)]
    assert [RankMemory(*(getattr(rank, name) for name in names)) for rank in response.load.ranks] == list(ranks)


def test_activations_reach_the_coordinator() -> None:
    response = worker_info_response(described(dtype="float32", activations="int8"))
    check_worker_info(response)
    assert response.model.activations == "int8"
    assert worker_info_response(described()).model.activations == ""


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
