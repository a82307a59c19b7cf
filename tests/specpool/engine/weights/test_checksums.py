"""Checksums detect changes that a plain sum would miss, and depend on the bits alone."""

import pytest
import torch
from gguf_files import random_rows

from specpool.engine.weights import checksums
from specpool.engine.weights.checksums import ROW_WORDS, checksum
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized


def change_bits(words: torch.Tensor, change: str) -> None:
    if change == "flip two signs":
        words[[1, 2]] ^= -(2**31)
    elif change == "swap neighbours":
        words[[3, 4]] = words[[4, 3]]
    elif change == "swap the ends":
        words[[0, -1]] = words[[-1, 0]]
    elif change == "rotate":
        words.copy_(words.roll(1))
    else:
        words[-1] = 0


@pytest.mark.parametrize("change", ["flip two signs", "swap neighbours", "swap the ends", "rotate", "zero the end"])
@pytest.mark.parametrize("size", [6, ROW_WORDS, 5 * ROW_WORDS + 77])
def test_checksum_detects_changes(size: int, change: str) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0))
    changed = weight.clone()
    change_bits(changed.view(torch.int32), change)
    assert not torch.equal(weight, changed)
    assert checksum(weight) != checksum(changed)


@pytest.mark.parametrize("size", [1, 3, ROW_WORDS - 1, 2 * ROW_WORDS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int64])
def test_checksum_ignores_the_memory_layout(size: int, dtype: torch.dtype) -> None:
    weight = torch.arange(size).to(dtype)
    strided = torch.stack([weight, weight], 1)[:, 0]
    offset = torch.cat([weight[:1], weight])[1:]
    assert checksum(weight) == checksum(strided) == checksum(offset)


@pytest.mark.parametrize(("rows", "columns"), [(1500, 96), (4096, 32), (5, 64)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_slices_give_the_checksum_of_the_full_weight(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(checksums, "SLICE_WEIGHTS", 1)
    weight = Quantized(QUANTIZATION_TYPES["Q8_0"], torch.from_numpy(random_rows("Q8_0", rows, columns)))
    full = weight.dequantized()
    assert checksum(weight, dtype) == checksum(full, dtype) == checksum(full if dtype is None else full.to(dtype))
