"""Quantization types: how the bytes of a file encode weights.

A weight is `code * scale`, or `code * scale + offset`, in float32, rounded like ggml's reference. Sources: the block
structures of ggml-common.h, and the numpy implementation in the PyPI package `gguf`, which gives the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SCALE_BYTES = 4  # bytes of the scale that starts each INT8 row


@dataclass(frozen=True)
class Fields:
    """Decoded rows. A row has `blocks` blocks, and a block may have several parts."""

    codes: torch.Tensor  # [rows, columns], int8; 8-bit codes are signed, shorter ones are not
    scale: torch.Tensor  # [rows, blocks], float16; INT8: [rows, 1], float32
    offset: torch.Tensor | None = None  # [rows, blocks], float16, if the type has offsets
    scale_factors: torch.Tensor | None = None
    """[rows, blocks, parts]: integer multipliers of the block's scale, if every part has its own scale."""
    offset_factors: torch.Tensor | None = None  # [rows, blocks, parts]: integer multipliers of the block's offset

    @property
    def rows(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class QuantizationType:
    """An encoding of weight rows, block by block."""

    name: str
    block: int  # inputs per block
    block_bytes: int
    bits: int  # bits per code
    split: Callable[[torch.Tensor], Fields]  # decodes bytes [rows, blocks, block_bytes]
    float16_offsets: tuple[int, ...] = ()  # byte positions of float16 numbers in a block
    zero_point: int = 0  # subtracted from unsigned codes

    def fields(self, data: torch.Tensor) -> Fields:
        """Decode the bytes [rows, row_bytes]."""
        return self.split(self._blocks(data))

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row. Raises ValueError if its columns are not whole blocks."""
        if columns % self.block:
            raise ValueError(f"rows of {columns} weights are not a multiple of {self.block}, the block of {self.name}")
        return columns // self.block * self.block_bytes

    def columns(self, row_bytes: int) -> int:
        return row_bytes // self.block_bytes * self.block

    def is_finite(self, data: torch.Tensor) -> bool:
        return all(bool(_float16_at(self._blocks(data), at).isfinite().all()) for at in self.float16_offsets)

    def slice_columns(self, data: torch.Tensor, columns: range) -> torch.Tensor | None:
        """Return the bytes of these columns, or None if they are not whole blocks."""
        if columns.start % self.block or columns.stop % self.block:
            return None
        begin, end = (at // self.block * self.block_bytes for at in (columns.start, columns.stop))
        return data[:, begin:end].contiguous()

    def dequantize(self, fields: Fields) -> torch.Tensor:
        """Return the weights [rows, columns] in float32."""
        scale = _per_part(fields.scale, fields.scale_factors)
        codes = fields.codes - self.zero_point if self.zero_point else fields.codes
        weights = codes.float().reshape(*scale.shape, -1).mul_(scale[..., None])
        if fields.offset is not None:
            offset = _per_part(fields.offset, fields.offset_factors)
            # Types with parts subtract their offsets.
            weights = weights.add_(offset[..., None], alpha=1 if fields.offset_factors is None else -1)
        return weights.flatten(1)

    def _blocks(self, data: torch.Tensor) -> torch.Tensor:
        blocks: torch.Tensor = data.unflatten(1, (-1, self.block_bytes))
        return blocks


class Int8Rows(QuantizationType):
    """INT8: a row is one block of any length with a float32 scale."""

    def fields(self, data: torch.Tensor) -> Fields:
        # Clone: the address or stride of the bytes may not suit float32.
        scale = data[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return Fields(data[:, SCALE_BYTES:].view(torch.int8), scale)

    def row_bytes(self, columns: int) -> int:
        return SCALE_BYTES + columns

    def columns(self, row_bytes: int) -> int:
        return row_bytes - SCALE_BYTES

    def is_finite(self, data: torch.Tensor) -> bool:
        return bool(self.fields(data).scale.isfinite().all())

    def slice_columns(self, data: torch.Tensor, columns: range) -> torch.Tensor:
        """Return the bytes of these columns, with the scale of the whole row."""
        codes = data[:, SCALE_BYTES + columns.start : SCALE_BYTES + columns.stop]
        return torch.cat([data[:, :SCALE_BYTES], codes], 1)


def _per_part(numbers: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 number of every part [rows, blocks * parts]; the multiplication is exact."""
    per_block = numbers.float()
    return per_block if factors is None else (per_block[..., None] * factors.float()).flatten(1)


def _float16_at(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at this byte of each block; blocks have an even number of bytes."""
    return blocks.view(torch.float16)[..., at // 2]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack 4-bit codes [..., 2n] from bytes [..., n]: all lower halves, then all upper halves."""
    size = packed.shape[-1]
    codes = packed.new_empty(*packed.shape[:-1], 2 * size)
    torch.bitwise_and(packed, 15, out=codes[..., :size])
    torch.bitwise_right_shift(packed, 4, out=codes[..., size:])
    return codes


def _split_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Split each byte into fields of `bits` bits, lowest first: [..., 8 / bits] from [...]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return packed[..., None] >> shifts & ((1 << bits) - 1)


def _codes(codes: torch.Tensor) -> torch.Tensor:
    """Join codes [rows, blocks, ...] to [rows, columns]."""
    return codes.flatten(1).view(torch.int8)


def _plain(bits: int, numbers: int) -> Callable[[torch.Tensor], Fields]:
    """Return the decoder of blocks with float16 numbers (scale, offset), the fifth bits of codes, and the rest."""

    def split(blocks: torch.Tensor) -> Fields:
        header, codes = [_float16_at(blocks, 2 * i) for i in range(numbers)], blocks[..., 2 * numbers :]
        if bits == 4:
            codes = _nibbles(codes)
        elif bits == 5:
            codes = _nibbles(codes[..., 4:]) | _split_bits(codes[..., :4], 1).flatten(-2) << 4
        return Fields(_codes(codes), *header)

    return split


def _q4_k(blocks: torch.Tensor) -> Fields:
    # 8 scales and 8 offsets of 6 bits; the first 4 of both also hold the upper 2 bits of the last 4.
    scales, offsets, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return Fields(
        _codes(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))),
        _float16_at(blocks, 0),
        _float16_at(blocks, 2),
        torch.cat([scales & 63, rest & 15 | scales >> 6 << 4], -1),
        torch.cat([offsets & 63, rest >> 4 | offsets >> 6 << 4], -1),
    )


def _q6_k(blocks: torch.Tensor) -> Fields:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # [rows, blocks, 2, 128]
    high = _split_bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).transpose(-1, -2).flatten(-2)
    return Fields(
        _codes(low | high << 4), _float16_at(blocks, 208), scale_factors=blocks[..., 192:208].view(torch.int8)
    )


def _no_blocks(blocks: torch.Tensor) -> Fields:
    raise AssertionError("INT8 rows have no blocks")


INT8 = Int8Rows("INT8", 1, 1, 8, _no_blocks)
QUANTIZATION_TYPES = {
    qtype.name: qtype
    for qtype in (
        INT8,
        QuantizationType("Q4_0", 32, 18, 4, _plain(4, 1), (0,), zero_point=8),
        QuantizationType("Q4_1", 32, 20, 4, _plain(4, 2), (0, 2)),
        QuantizationType("Q5_0", 32, 22, 5, _plain(5, 1), (0,), zero_point=16),
        QuantizationType("Q5_1", 32, 24, 5, _plain(5, 2), (0, 2)),
        QuantizationType("Q8_0", 32, 34, 8, _plain(8, 1), (0,)),
        QuantizationType("Q4_K", 256, 144, 4, _q4_k, (0, 2)),
        QuantizationType("Q6_K", 256, 210, 6, _q6_k, (208,), zero_point=32),
    )
}
"""By ggml's names; INT8 is our own."""
