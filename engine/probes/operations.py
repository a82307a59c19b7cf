"""Finds tensor operations of a forward pass that give equal rows different bits.

A kernel may divide elements among threads, compute what is left of a cut in another way than whole vectors, or add in
another order for another number of rows. So while a pass runs, each of its operations is repeated with all rows filled
alike, with numbers for which such a difference shows; all rows of the result must then be the same bits, in a pass of
one row as in one of hundreds. Products with wide weights and attention are probed further in `engine.probes.exactness`.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.probes.inputs import ProbeInputs

log = logging.getLogger(__name__)

Key = tuple[object, ...]

# Fills of each operation: a sum of one row may happen to round alike in either order.
FILLS = 4
# Numbers among which those are searched whose result depends on whether they are computed alone.
CANDIDATES = 4096
# What rows of an ordinary fill may differ by, of the largest result, for the operation to count as one on rows.
ROUNDING = 0.02
# Results that differ by right: rows that see different numbers of positions, and memory that nobody wrote to.
_UNLIKE = {"aten::scaled_dot_product_attention", "aten::empty_like", "aten::new_empty"}


class OperationProbe(TorchDispatchMode):
    """While it is entered, the operations of passes are probed; `unequal` names those that failed."""

    def __init__(self, kept: Iterable[torch.Tensor]) -> None:
        """`kept`: weights, tables and caches, which operations are given as they are."""
        super().__init__()
        self.unequal: dict[str, None] = {}
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.layout == torch.strided}
        self._probed: set[Key] = set()
        self._rows: dict[Key, list[torch.Tensor]] = {}
        self._fills: dict[Key, list[list[torch.Tensor]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation as asked for, and probes it unless that was done in this shape."""
        kwargs = kwargs or {}
        if not (func.is_view or func._schema.is_mutable or func._schema.name in _UNLIKE):
            self._probe(func, args, kwargs)
        return func(*args, **kwargs)

    def _probe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places = [i for i, value in enumerate(args) if self._is_filled(value)]
        if not places:
            return
        shape = (func, *map(_shape, args), *map(_shape, kwargs.items()))
        if shape in self._probed:
            return
        self._probed.add(shape)
        if not _on_rows(func(*_filled(args, places, _ordinary(args, places)), **kwargs)):
            return
        key = (func, *(_row_shape(value, i in places) for i, value in enumerate(args)), *map(_shape, kwargs.items()))
        if key not in self._fills:
            self._fills[key] = self._telling_fills(func, args, kwargs, places)
        rows = [_rows(func(*_filled(args, places, fill), **kwargs)) for fill in self._fills[key]]
        first = self._rows.setdefault(key, [result[:1] for result in rows])
        if not all(_same(result, one) for result, one in zip(rows, first, strict=True)):
            self.unequal[func._schema.name] = None

    def _is_filled(self, value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.layout == torch.strided
            and value.numel() > 0
            and value.dim() > 0
            and value.untyped_storage().data_ptr() not in self._kept
        )

    def _telling_fills(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: list[int]
    ) -> list[list[torch.Tensor]]:
        """Rows for the arguments at `places` under which a different way to compute shows: one or several sets."""
        inputs = ProbeInputs(args[places[0]])
        widths = [args[place].shape[-1] for place in places]
        if torch.Tag.pointwise in func.tags and len(places) == 1:
            told = _told_apart(func, args, kwargs, places[0], inputs)
            if told is not None:
                return [[told.repeat(-(-widths[0] // len(told)))[: widths[0]]]]
        weighted = any(isinstance(value, torch.Tensor) and value.dim() > 1 and i not in places
                       for i, value in enumerate(args))  # fmt: skip
        count = 1 if weighted else FILLS  # a product has a sum for every output already
        return [[inputs.cancelling(width)[inputs.order(width)] for width in widths] for _ in range(count)]


def _told_apart(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int, inputs: ProbeInputs
) -> torch.Tensor | None:
    """Numbers whose result depends on whether they are computed alone or among others; None if none was found."""
    numbers = inputs.cancelling(CANDIDATES)

    def compute(part: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = func(*[part if i == place else value for i, value in enumerate(args)], **kwargs)
        return result

    try:
        together, alone = compute(numbers), torch.cat([compute(number) for number in numbers.split(1)])
        found = numbers[(together != alone) & together.isfinite()]
    except RuntimeError:  # another argument has the width of a row
        return None
    return found if len(found) else None


def _ordinary(args: tuple[Any, ...], places: list[int]) -> list[torch.Tensor]:
    """Rows that no way to compute them changes by much."""
    return [(torch.arange(args[place].shape[-1]) % 7 / 4 + 0.5).to(args[place]) for place in places]


def _filled(args: tuple[Any, ...], places: list[int], rows: list[torch.Tensor]) -> list[Any]:
    """The arguments with other numbers in the same memory layout: each row of those at `places` is the same."""
    filled = list(args)
    for place, row in zip(places, rows, strict=True):
        like = args[place]
        reach = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        copy = torch.empty(reach, dtype=like.dtype, device=like.device).as_strided(like.shape, like.stride())
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())
        copy[once].copy_(row[: copy[once].shape[-1]])
        filled[place] = copy
    return filled


def _results(output: Any) -> Iterator[torch.Tensor]:
    for value in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0 and value.numel() > 0:
            yield value


def _rows(output: Any) -> torch.Tensor:
    """[rows, width] of the first result that has rows."""
    result = next(_results(output))
    return result.reshape(-1, result.shape[-1])


def _on_rows(output: Any) -> bool:
    """Whether equal rows gave nearly equal rows: an operation that does, works on each row by itself."""
    if not any(True for _ in _results(output)):
        return False
    rows = _rows(output).float()
    return bool((rows - rows[:1]).abs().max() <= ROUNDING * rows.abs().max())


def _same(rows: torch.Tensor, one: torch.Tensor) -> bool:
    return bool(((rows == one) | (rows.isnan() & one.isnan())).all())


def _shape(value: object) -> object:
    """What a kernel may be chosen by."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape, value))
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return value.dtype, value.shape, value.stride() if value.layout == torch.strided else value.layout


def _row_shape(value: object, filled: bool) -> object:
    """What the result for a row may depend on."""
    if filled:
        assert isinstance(value, torch.Tensor)
        return value.dtype, value.shape[-1]
    return id(value) if isinstance(value, torch.Tensor) and value.dim() > 1 else _shape(value)
