"""Writes weights as panels.h reads them: in panels of PANEL outputs, each of one kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES, Fields, QuantizationType
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor, slice_of
from specpool.engine.weights.threads import run_in_slices

PANEL, PART = 32, 32
FLOAT32, BFLOAT16 = "FLOAT32", "BFLOAT16"
NUMBERS = {name: i for i, name in enumerate((FLOAT32, BFLOAT16, *QUANTIZATION_TYPES))}
"""The kinds of panels, as in the enum of panels.h."""


@dataclass(frozen=True)
class Segment:
    """Neighbouring panels of one kind."""

    kind: str
    """A name of NUMBERS."""
    weight: Weight
    """[outputs, inputs]; the last panel need not be full."""

    @property
    def panels(self) -> int:
        """How many they are."""
        return -(-self.weight.shape[0] // PANEL)

    @cached_property
    def panel_bytes(self) -> int:
        """Bytes of each."""
        return self._written(slice_of(self.weight, 0, PANEL)).shape[1]

    def write(self, to: torch.Tensor) -> None:
        """Writes them into bytes [panels, panel_bytes]."""

        def write(some: slice) -> None:
            to[some] = self._written(slice_of(self.weight, some.start * PANEL, some.stop * PANEL))

        run_in_slices(write, self.panels, PANEL * self.weight.shape[1])

    def _written(self, weight: Weight) -> torch.Tensor:
        if isinstance(weight, Quantized):
            return coded_panels(weight.qtype, weight.fields())
        return dense_panels(self.kind, weight)


def segments_of(parts: Sequence[Weight]) -> list[Segment]:
    """The panels of weights whose outputs follow each other. A panel with outputs of several is kept in float32."""
    found: list[Segment] = []
    loose: list[Weight] = []  # rows of a panel that is not full yet
    for part in parts:
        begin, end = 0, part.shape[0]
        if loose:
            begin = min(end, PANEL - _rows(loose))
            loose.append(slice_of(part, 0, begin))
            if _rows(loose) < PANEL:
                continue
            found.append(Segment(FLOAT32, torch.cat([as_tensor(rows) for rows in loose])))
        whole = begin + (end - begin) // PANEL * PANEL
        if whole > begin:
            found.append(_segment(slice_of(part, begin, whole)))
        loose = [slice_of(part, whole, end)] if whole < end else []
    if loose:
        found.append(_segment(loose[0] if len(loose) == 1 else torch.cat([as_tensor(rows) for rows in loose])))
    return found


def _rows(parts: Sequence[Weight]) -> int:
    return sum(part.shape[0] for part in parts)


def _segment(weight: Weight) -> Segment:
    if isinstance(weight, Quantized) and weight.shape[1] % PART == 0:
        return Segment(weight.qtype.name, weight)
    numbers = as_tensor(weight)
    held = torch.equal(numbers.bfloat16().to(numbers.dtype), numbers)
    return Segment(BFLOAT16 if held else FLOAT32, numbers)


def dense_panels(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Bytes [panels, bytes of a panel] of a weight [outputs, inputs], which is filled up with zeros."""
    panels = _by_panel(weight.detach())
    if kind == BFLOAT16:
        return _pairs(panels.bfloat16()).flatten(1).view(torch.uint8)
    return panels.float().transpose(1, 2).flatten(1).view(torch.uint8)


def coded_panels(kind: QuantizationType, fields: Fields) -> torch.Tensor:
    """Bytes [panels, bytes of a panel]; outputs are filled up with zeros."""
    codes = _words(kind, _by_panel(fields.codes.view(torch.uint8)))  # [panels, parts, bytes]
    scales = [_by_panel(its).transpose(1, 2) for its in (fields.scale, fields.offset) if its is not None]
    if kind is INT8:
        header = _by_panel(fields.scale).flatten(1).view(torch.uint8)
        return torch.cat([header, codes.flatten(1)], 1)
    # [panels, blocks, bytes]
    shared = torch.cat([its.contiguous().view(torch.uint8) for its in scales], 2)
    if fields.scale_factors is None:
        return torch.cat([shared, codes], 2).flatten(1)
    factors = _factors(fields, shared.shape[1] * kind.block // PART)
    parts = torch.cat([factors, codes], 2).reshape(*shared.shape[:2], -1)
    return torch.cat([shared, parts], 2).flatten(1)


def _by_panel(rows: torch.Tensor) -> torch.Tensor:
    """[panels, PANEL, ...] of rows [outputs, ...], filled up with zeros."""
    missing = -len(rows) % PANEL
    filled = pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
    return filled.reshape(-1, PANEL, *rows.shape[1:])


def _pairs(panels: torch.Tensor) -> torch.Tensor:
    """Words [panels, n, PANEL / 2, 2] of numbers of 16 bits [panels, PANEL, n]: one of each half of the panel."""
    halves = panels.reshape(len(panels), 2, PANEL // 2, -1)
    return halves.permute(0, 3, 2, 1).contiguous()


def _factors(fields: Fields, parts: int) -> torch.Tensor:
    """Bytes [panels, parts, 64] of what scales are multiplied by: two of each output of a part in a word."""
    assert fields.scale_factors is not None
    two = fields.scale_factors.view(torch.uint8).reshape(fields.rows, parts, -1)  # of a part: 1 or 2
    if fields.offset_factors is not None:
        two = torch.cat([two, fields.offset_factors.reshape(fields.rows, parts, 1)], 2)
    halves = _by_panel(two).reshape(-1, 2, PANEL // 2, parts, 2)
    return halves.permute(0, 3, 2, 4, 1).flatten(2)


def _words(kind: QuantizationType, codes: torch.Tensor) -> torch.Tensor:
    """Bytes [panels, parts, bytes] of codes [panels, PANEL, inputs]."""
    parts = codes.shape[2] // PART
    if kind.bits == 8:
        return _by_part(codes, parts)
    words = [_by_part(_packed(codes & 15, 4), parts)]
    if kind.bits > 4:
        words.append(_by_part(_packed(codes >> 4, kind.bits - 4), parts))
    return torch.cat(words, 2)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of so many bits in bytes, the first ones lowest."""
    each = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    packed = each[..., 0].clone()
    for i in range(1, 8 // bits):
        packed |= each[..., i] << i * bits
    return packed


def _by_part(packed: torch.Tensor, parts: int) -> torch.Tensor:
    """Bytes [panels, parts, bytes] of bytes [panels, PANEL, ...]: words of a part, each of all outputs."""
    words = packed.reshape(len(packed), PANEL, parts, -1, 4)
    return words.permute(0, 2, 3, 1, 4).flatten(2)
