"""Packs weights into the layouts of panels.h: panels of PANEL outputs, each of one kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES, Fields, QuantizationType
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor, run_in_slices, slice_of

PANEL, PART, GROUP = 32, 32, 8
FLOAT32, BFLOAT16 = "FLOAT32", "BFLOAT16"
KIND_NUMBERS = {name: i for i, name in enumerate((FLOAT32, BFLOAT16, *QUANTIZATION_TYPES))}
"""The kinds of panels, as in the enum of panels.h."""


@dataclass(frozen=True)
class Segment:
    """Consecutive panels of one kind."""

    kind: str
    """A name of KIND_NUMBERS."""
    weight: Weight
    """[outputs, inputs]; the last panel may be partial."""
    is_mixed: bool = False
    """Whether the panel spans weights of different kinds, some of them quantized. Such a panel is dequantized."""

    @property
    def panels(self) -> int:
        """The number of panels."""
        return -(-self.weight.shape[0] // PANEL)

    @cached_property
    def panel_bytes(self) -> int:
        """Bytes of one panel."""
        return self._layout(slice_of(self.weight, 0, PANEL)).shape[1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all panels."""
        return self.panels * self.panel_bytes

    def write(self, to: torch.Tensor) -> None:
        """Write the panels into bytes [panels, panel_bytes]."""

        def write(some: slice) -> None:
            to[some] = self._layout(slice_of(self.weight, some.start * PANEL, some.stop * PANEL))

        run_in_slices(write, self.panels, PANEL * self.weight.shape[1])

    def _layout(self, weight: Weight) -> torch.Tensor:
        if isinstance(weight, Quantized):
            return _quantized_panels(weight.qtype, weight.fields())
        return _dense_panels(self.kind, weight)


def segments_of(parts: Sequence[Weight]) -> list[Segment]:
    """The panels of concatenated weights. A panel that spans weights of several kinds is stored in float32."""
    segments: list[Segment] = []
    partial: list[Weight] = []  # rows of a panel that is not full yet
    for part in parts:
        begin, end = 0, part.shape[0]
        if partial:
            begin = min(end, PANEL - _rows(partial))
            partial.append(slice_of(part, 0, begin))
            if _rows(partial) < PANEL:
                continue
            segments.append(_spanning(partial))
        full = begin + (end - begin) // PANEL * PANEL
        if full > begin:
            segments.append(_segment(slice_of(part, begin, full)))
        partial = [slice_of(part, full, end)] if full < end else []
    if partial:
        segments.append(_segment(partial[0]) if len(partial) == 1 else _spanning(partial))
    return segments


def _spanning(parts: Sequence[Weight]) -> Segment:
    """A panel that spans several weights."""
    quantized = [part for part in parts if isinstance(part, Quantized)]
    kinds = {part.qtype.name for part in quantized}
    if len(quantized) == len(parts) and len(kinds) == 1:
        return _segment(Quantized(quantized[0].qtype, torch.cat([part.data for part in quantized])))
    return Segment(FLOAT32, torch.cat([as_tensor(part) for part in parts]), is_mixed=bool(quantized))


def _rows(parts: Sequence[Weight]) -> int:
    return sum(part.shape[0] for part in parts)


def _segment(weight: Weight) -> Segment:
    if isinstance(weight, Quantized) and weight.shape[1] % PART == 0:
        return Segment(weight.qtype.name, weight)
    numbers = as_tensor(weight)
    is_lossless = torch.equal(numbers.bfloat16().to(numbers.dtype), numbers)
    return Segment(BFLOAT16 if is_lossless else FLOAT32, numbers)


def _dense_panels(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Bytes [panels, panel_bytes] of a weight [outputs, inputs], zero-padded."""
    panels = _by_panel(weight.detach())
    if kind == BFLOAT16:
        return _interleave_halves(panels.bfloat16()).flatten(1).view(torch.uint8)
    return panels.float().transpose(1, 2).flatten(1).view(torch.uint8)


def _quantized_panels(kind: QuantizationType, fields: Fields) -> torch.Tensor:
    """Bytes [panels, panel_bytes], zero-padded."""
    codes = _code_words(kind, _by_panel(fields.codes.view(torch.uint8)))  # [panels, parts, bytes]
    if kind is INT8:
        header = _by_panel(fields.scale).flatten(1).view(torch.uint8)
        return torch.cat([header, codes.flatten(1)], 1)
    scales = [_by_panel(field).transpose(1, 2) for field in (fields.scale, fields.offset) if field is not None]
    shared = torch.cat([scale.contiguous().view(torch.uint8) for scale in scales], 2)  # [panels, blocks, bytes]
    if fields.scale_factors is None:
        return torch.cat([shared, codes], 2).flatten(1)
    factors = _factors(fields, shared.shape[1] * kind.block // PART)
    parts = torch.cat([factors, codes], 2).reshape(*shared.shape[:2], -1)
    return torch.cat([shared, parts], 2).flatten(1)


def _by_panel(rows: torch.Tensor) -> torch.Tensor:
    """Rows [outputs, ...] as [panels, PANEL, ...], zero-padded."""
    missing = -len(rows) % PANEL
    padded = pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
    return padded.reshape(-1, PANEL, *rows.shape[1:])


def _interleave_halves(panels: torch.Tensor) -> torch.Tensor:
    """16-bit numbers [panels, PANEL, n] as words [panels, n, PANEL / 2, 2]: one number of each half of the panel."""
    halves = panels.reshape(len(panels), 2, PANEL // 2, -1)
    return halves.permute(0, 3, 2, 1).contiguous()


def _factors(fields: Fields, parts: int) -> torch.Tensor:
    """Scale factors as bytes [panels, parts, 64]: two per output and part, with the halves of a panel interleaved."""
    assert fields.scale_factors is not None
    factors = fields.scale_factors.view(torch.uint8).reshape(fields.rows, parts, -1)  # 1 or 2 per part
    if fields.offset_factors is not None:
        factors = torch.cat([factors, fields.offset_factors.reshape(fields.rows, parts, 1)], 2)
    halves = _by_panel(factors).reshape(-1, 2, PANEL // 2, parts, 2)
    return halves.permute(0, 3, 2, 4, 1).flatten(2)


def _code_words(kind: QuantizationType, codes: torch.Tensor) -> torch.Tensor:
    """Codes [panels, PANEL, inputs] as bytes [panels, parts, bytes]."""
    parts = codes.shape[2] // PART
    groups = codes.unflatten(2, (-1, GROUP // 2, 2))
    if kind.bits == 8:
        return _by_part(groups.transpose(3, 4).flatten(2), parts)
    words = [_by_part(_pack_bits(codes & 15, 4), parts)]
    if kind.bits > 4:
        # Byte j of a word holds the upper bits of inputs 2 j and 2 j + 1 of each of its groups.
        high = groups.unflatten(2, (-1, 4 // (kind.bits - 4))).movedim(4, 3).flatten(2) >> 4
        words.append(_by_part(_pack_bits(high, kind.bits - 4), parts))
    return torch.cat(words, 2)


def _pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `bits` bits packed into bytes, lowest bits first."""
    codes = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    packed = codes[..., 0].clone()
    for i in range(1, 8 // bits):
        packed |= codes[..., i] << i * bits
    return packed


def _by_part(packed: torch.Tensor, parts: int) -> torch.Tensor:
    """Reorder bytes [panels, PANEL, ...] to [panels, parts, bytes]: each word of a part, for all outputs in turn."""
    words = packed.reshape(len(packed), PANEL, parts, -1, 4)
    return words.permute(0, 2, 3, 1, 4).flatten(2)
