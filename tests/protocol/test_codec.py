"""Messages that say nothing of what is not known."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from protocol.answers import read_step_costs
from protocol.codec import worker_info_response
from protocol.worker_info import StepCosts, WorkerInfo

NUMBERS = {field.name: 1 for field in fields(WorkerInfo) if field.type in (int, "int")}
TEXTS = {field.name: "x" for field in fields(WorkerInfo) if field.type in (str, "str")}


@pytest.mark.parametrize(
    ("step_seconds", "max_rows", "known"), [({}, 0, False), ({}, 8, True), ({1: 0.5, 8: 0.75}, 0, True)]
)
def test_costs_are_unset_if_nothing_is_known_of_them(
    step_seconds: Mapping[int, float], max_rows: int, known: bool
) -> None:
    described: dict[str, Any] = {
        **NUMBERS, **TEXTS, "bitwise": True, "step_seconds": step_seconds, "step_cached": 3 if step_seconds else 0,
        "seconds_per_cached": 0.25 if step_seconds else 0.0, "max_rows": max_rows,
    }  # fmt: skip
    response = worker_info_response(WorkerInfo(**described))
    assert response.HasField("costs") is known
    costs = {field.name: described[field.name] for field in fields(StepCosts)}
    assert read_step_costs(response) == StepCosts(**costs)
