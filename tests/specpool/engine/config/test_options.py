"""Engine options: limits, units, aliases and contradictions."""

from typing import Any

import pytest
from pydantic import ValidationError

from specpool.engine.config.options import EngineOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 15}, "max_model_len"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"threads": 0}, "threads"),
        ({"dtype": "int8"}, "dtype"),
        ({"kv_memory": "much"}, "kv_memory"),
        ({"kv_memory": "1MiB", "memory_budget": "1GiB"}, "give kv_memory or memory_budget, not both"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"tensor_parallel": 0}, "greater than or equal to 1"),
        ({"tensor_parallel": 3, "nnodes": 2, "master_addr": "a"}, "tensor_parallel 3 is not a multiple of nnodes 2"),
        ({"tensor_parallel": 2, "nnodes": 2}, "master_addr must be given if nnodes is above 1"),
        ({"tensor_parallel": 2, "master_addr": "a"}, "master_addr must be given if nnodes is above 1, and only then"),
        ({"tensor_parallel": 2, "nnodes": 2, "node_rank": 2, "master_addr": "a"}, "node_rank must be below nnodes"),
        ({"tensor_parallel": 2, "nnodes": 2, "master_addr": " "}, "master_addr\n.*should match pattern"),
    ],
)
def test_invalid_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineOptions(model="m", **changes)


def test_memory_units_are_accepted() -> None:
    assert EngineOptions(model="m", kv_memory="2MiB").kv_memory == 2 * 2**20


def test_default_caches_are_sized_for_ordinary_sequences() -> None:
    assert [EngineOptions(model="m").expected_positions(device) for device in ("cpu", "cuda")] == [2048, 4096]
    assert EngineOptions(model="m", max_model_len=100).expected_positions("cpu") is None
