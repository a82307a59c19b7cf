"""Weights by names that tell their kinds: those of bytes that are no such weight are refused."""

import pytest
import torch

from specpool.engine.models.compact import find_named


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        ("Q4_1", torch.zeros(4, 40), r"tensor a.Q4_1 is float32 \[4, 40\], not rows of bytes"),
        ("Q4_1", torch.zeros(40, dtype=torch.uint8), r"tensor a.Q4_1 is uint8 \[40\], not rows of bytes"),
        (
            "Q4_1",
            torch.zeros(4, 30, dtype=torch.uint8),
            "tensor a.Q4_1 has rows of 30 bytes, which are no whole bl",
        ),
        ("Q4_1", torch.zeros(4, 0, dtype=torch.uint8), "tensor a.Q4_1 has rows of 0 bytes, which are no whole bl"),
        ("INT8", torch.zeros(4, 4, dtype=torch.uint8), "tensor a.INT8 has rows of 4 bytes, which are no whole bl"),
        (
            "INT8",
            torch.full((4, 9), 255, dtype=torch.uint8),
            "tensor a.INT8 has a scale that is infinite or not",
        ),
    ],
)
def test_bytes_that_are_no_weight_of_their_kind_are_refused(kind: str, data: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_named({f"a.{kind}": data}, "a")
