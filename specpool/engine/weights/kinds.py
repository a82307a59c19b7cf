"""Kinds of quantized weights: which codes of few bits the bytes of a file hold, and which weights these stand for.

A weight is `code * scale`, or `code * scale + offset`, in float32, with the roundings of ggml's reference. Sources: the
block structures of ggml-common.h, and the numpy implementation of the PyPI package `gguf`, whose results these equal.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SCALE_BYTES = 4
"""Of a row of the kind INT8."""


@dataclass(frozen=True)
class Fields:
    """What the bytes of rows mean. A block has `columns / blocks` inputs of an output, a part a fraction of a block."""

    codes: torch.Tensor
    """[rows, columns], int8: of 8 bits with a sign, of fewer bits without one."""
    scale: torch.Tensor
    """[rows, blocks], float16; of INT8 [rows, 1], float32."""
    offset: torch.Tensor | None = None
    """[rows, blocks], float16, if the kind has offsets."""
    scale_factors: torch.Tensor | None = None
    """[rows, blocks, parts], if every part has a scale of its own: whole numbers by which the block's is multiplied."""
    offset_factors: torch.Tensor | None = None
    """The same for offsets."""

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return len(self.codes)

    @property
    def columns(self) -> int:
        """Number of inputs."""
        return self.codes.shape[1]


@dataclass(frozen=True)
class Kind:
    """A way to write down the weights of a row, block by block."""

    name: str
    block: int
    """Inputs of a block."""
    block_bytes: int
    bits: int
    """Of a code."""
    split: Callable[[torch.Tensor], Fields]
    """The fields of bytes [rows, blocks, bytes of a block]."""
    halves: tuple[int, ...] = ()
    """Where the numbers in float16 are, in bytes from the beginning of a block."""
    middle: int = 0
    """Subtracted from codes, which have no sign of their own."""

    def fields(self, data: torch.Tensor) -> Fields:
        """The fields of the bytes [rows, bytes of a row]."""
        return self.split(data.unflatten(1, (-1, self.block_bytes)))

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row. ValueError if blocks do not divide it."""
        if columns % self.block:
            raise ValueError(f"rows of {columns} weights are no multiple of the {self.block} in a block of {self.name}")
        return columns // self.block * self.block_bytes

    def columns(self, row_bytes: int) -> int:
        """Weights in a row of so many bytes."""
        return row_bytes // self.block_bytes * self.block

    def is_finite(self, data: torch.Tensor) -> bool:
        """Whether all scales and offsets of the bytes [rows, bytes of a row] are finite numbers."""
        blocks = data.unflatten(1, (-1, self.block_bytes))
        return all(bool(_halves(blocks, at).isfinite().all()) for at in self.halves)

    def part(self, data: torch.Tensor, chosen: range) -> torch.Tensor | None:
        """The bytes of some columns; None if these are no whole blocks."""
        if chosen.start % self.block or chosen.stop % self.block:
            return None
        begin, end = (at // self.block * self.block_bytes for at in (chosen.start, chosen.stop))
        return data[:, begin:end].contiguous()

    def dequantized(self, fields: Fields) -> torch.Tensor:
        """The weights [rows, columns] in float32."""
        scale = _of_parts(fields.scale, fields.scale_factors)
        codes = fields.codes - self.middle if self.middle else fields.codes
        weights = codes.float().reshape(*scale.shape, -1).mul_(scale[..., None])
        if fields.offset is not None:
            offset = _of_parts(fields.offset, fields.offset_factors)
            # Of a block with parts, the offset is subtracted.
            weights = weights.add_(offset[..., None], alpha=1 if fields.offset_factors is None else -1)
        return weights.flatten(1)


class RowKind(Kind):
    """INT8: a row is one block, of any number of inputs, and has a scale in float32."""

    def fields(self, data: torch.Tensor) -> Fields:
        """The fields of the bytes [rows, bytes of a row]."""
        # Cloned, since even contiguous bytes may begin at an address, or have a stride, that no float32 can have.
        scale = data[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return Fields(data[:, SCALE_BYTES:].view(torch.int8), scale)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row."""
        return SCALE_BYTES + columns

    def columns(self, row_bytes: int) -> int:
        """Weights in a row of so many bytes."""
        return row_bytes - SCALE_BYTES

    def is_finite(self, data: torch.Tensor) -> bool:
        """Whether all scales of the bytes [rows, bytes of a row] are finite numbers."""
        return bool(self.fields(data).scale.isfinite().all())

    def part(self, data: torch.Tensor, chosen: range) -> torch.Tensor:
        """The bytes of some columns, with the scale of all."""
        codes = data[:, SCALE_BYTES + chosen.start : SCALE_BYTES + chosen.stop]
        return torch.cat([data[:, :SCALE_BYTES], codes], 1)


def _of_parts(numbers: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """A number in float32 for every part, [rows, blocks * parts]. Such products are exact."""
    each = numbers.float()
    return each if factors is None else (each[..., None] * factors.float()).flatten(1)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at this byte of each block; blocks have even numbers of bytes."""
    return blocks.view(torch.float16)[..., at // 2]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits [..., 2n] of bytes [..., n]: first all that are in lower halves, then all in upper ones."""
    size = packed.shape[-1]
    codes = packed.new_empty(*packed.shape[:-1], 2 * size)
    torch.bitwise_and(packed, 15, out=codes[..., :size])
    torch.bitwise_right_shift(packed, 4, out=codes[..., size:])
    return codes


def _split_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The fields of so many bits in each byte, lowest first: [..., 8 / bits] of bytes [...]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return packed[..., None] >> shifts & ((1 << bits) - 1)


def _codes(codes: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of codes [rows, blocks, ...]."""
    return codes.flatten(1).view(torch.int8)


def _q4_0(blocks: torch.Tensor) -> Fields:
    return Fields(_codes(_nibbles(blocks[..., 2:])), _halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Fields:
    return Fields(_codes(_nibbles(blocks[..., 4:])), _halves(blocks, 0), _halves(blocks, 2))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    return _split_bits(packed, 1).flatten(-2) << 4


def _q5_0(blocks: torch.Tensor) -> Fields:
    return Fields(_codes(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])), _halves(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Fields:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Fields(_codes(codes), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Fields:
    return Fields(_codes(blocks[..., 2:]), _halves(blocks, 0))


def _q4_k(blocks: torch.Tensor) -> Fields:
    # Six bits each of 8 scales and 8 offsets: of the last 4 of both, the upper two bits are with the first 4.
    scales, offsets, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return Fields(
        _codes(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))),
        _halves(blocks, 0),
        _halves(blocks, 2),
        torch.cat([scales & 63, rest & 15 | scales >> 6 << 4], -1),
        torch.cat([offsets & 63, rest >> 4 | offsets >> 6 << 4], -1),
    )


def _q6_k(blocks: torch.Tensor) -> Fields:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # [rows, blocks, 2, 128]
    high = _split_bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).transpose(-1, -2).flatten(-2)
    return Fields(_codes(low | high << 4), _halves(blocks, 208), scale_factors=blocks[..., 192:208].view(torch.int8))


def _no_blocks(blocks: torch.Tensor) -> Fields:
    raise AssertionError("a row is its own block")


INT8 = RowKind("INT8", 1, 1, 8, _no_blocks)
KINDS = {
    kind.name: kind
    for kind in (
        INT8,
        Kind("Q4_0", 32, 18, 4, _q4_0, (0,), middle=8),
        Kind("Q4_1", 32, 20, 4, _q4_1, (0, 2)),
        Kind("Q5_0", 32, 22, 5, _q5_0, (0,), middle=16),
        Kind("Q5_1", 32, 24, 5, _q5_1, (0, 2)),
        Kind("Q8_0", 32, 34, 8, _q8_0, (0,)),
        Kind("Q4_K", 256, 144, 4, _q4_k, (0, 2)),
        Kind("Q6_K", 256, 210, 6, _q6_k, (208,), middle=32),
    )
}
"""By the names that ggml gives them; INT8 is our own."""
