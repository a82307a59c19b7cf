"""Finds tensor operations of a forward pass that give equal rows different bits.

A kernel may divide elements among threads, compute the remainder of a division differently from whole vectors, or add
in another order for another number of rows. So while a pass runs, each of its operations is repeated with the same
numbers in every row, chosen so that such a difference shows. All rows of the result must then have the same bits, in a
pass of one row as in a pass of hundreds. Products with wide weights and attention are probed further in
`engine.probes.exactness`.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.probes.inputs import ProbeInputs

log = logging.getLogger(__name__)

Key = tuple[object, ...]

# Fills per operation: the sum of a single row may happen to round to the same value in either order.
FILLS = 4
# Numbers that are searched for some whose result depends on whether they are computed alone.
CANDIDATES = 4096
# For an operation to count as one on rows, rows of an ordinary fill differ by no more than this share of the largest.
ROUNDING = 0.02
# Operations whose rows rightly differ: rows that see different numbers of positions, and uninitialised memory.
_UNLIKE = {"aten::scaled_dot_product_attention", "aten::empty_like", "aten::new_empty"}


class OperationProbe(TorchDispatchMode):
    """A context in which the operations of passes are probed; `unequal` holds the names of those that failed."""

    def __init__(self, kept: Iterable[torch.Tensor]) -> None:
        """`kept`: weights, tables and caches, which operations receive unchanged."""
        super().__init__()
        self.unequal: dict[str, None] = {}
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.layout == torch.strided}
        self._probed: set[Key] = set()
        self._rows: dict[Key, list[torch.Tensor]] = {}
        self._fills: dict[Key, list[list[torch.Tensor]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation as requested, and probes it unless it was probed in this shape before."""
        kwargs = kwargs or {}
        if not (func.is_view or func._schema.is_mutable or func._schema.name in _UNLIKE):
            self._probe(func, args, kwargs)
        return func(*args, **kwargs)

    def _probe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        indexes = [i for i, value in enumerate(args) if self._is_filled(value)]
        if not indexes:
            return
        shape = (func, *map(_shape, args), *map(_shape, kwargs.items()))
        if shape in self._probed:
            return
        self._probed.add(shape)
        if not _on_rows(func(*_filled(args, indexes, _ordinary(args, indexes)), **kwargs)):
            return
        key = (func, *(_row_shape(value, i in indexes) for i, value in enumerate(args)), *map(_shape, kwargs.items()))
        if key not in self._fills:
            self._fills[key] = self._telling_fills(func, args, kwargs, indexes)
        rows = [_rows(func(*_filled(args, indexes, fill), **kwargs)) for fill in self._fills[key]]
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
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], indexes: list[int]
    ) -> list[list[torch.Tensor]]:
        """Rows for the filled arguments that reveal a different way of computing: one or several sets of rows."""
        inputs = ProbeInputs(args[indexes[0]])
        widths = [args[index].shape[-1] for index in indexes]
        if torch.Tag.pointwise in func.tags and len(indexes) == 1:
            told = _told_apart(func, args, kwargs, indexes[0], inputs)
            if told is not None:
                return [[told.repeat(-(-widths[0] // len(told)))[: widths[0]]]]
        weighted = any(isinstance(value, torch.Tensor) and value.dim() > 1 and i not in indexes
                       for i, value in enumerate(args))  # fmt: skip
        count = 1 if weighted else FILLS  # a product already has one sum for every output
        return [[inputs.cancelling(width)[inputs.order(width)] for width in widths] for _ in range(count)]


def _told_apart(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int, inputs: ProbeInputs
) -> torch.Tensor | None:
    """Numbers whose result depends on whether they are computed alone or among others; None if there are none."""
    numbers = inputs.cancelling(CANDIDATES)

    def compute(part: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = func(*[part if i == index else value for i, value in enumerate(args)], **kwargs)
        return result

    try:
        together, alone = compute(numbers), torch.cat([compute(number) for number in numbers.split(1)])
        telling = numbers[(together != alone) & together.isfinite()]
    except RuntimeError:  # another argument has the width of a row
        return None
    return telling if len(telling) else None


def _ordinary(args: tuple[Any, ...], indexes: list[int]) -> list[torch.Tensor]:
    """Rows whose results hardly depend on how they are computed."""
    return [(torch.arange(args[index].shape[-1]) % 7 / 4 + 0.5).to(args[index]) for index in indexes]


def _filled(args: tuple[Any, ...], indexes: list[int], rows: list[torch.Tensor]) -> list[Any]:
    """The arguments, with those at `indexes` replaced: the same numbers in every row, in the same memory layout."""
    filled = list(args)
    for index, row in zip(indexes, rows, strict=True):
        like = args[index]
        reach = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        copy = torch.empty(reach, dtype=like.dtype, device=like.device).as_strided(like.shape, like.stride())
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())
        copy[once].copy_(row[: copy[once].shape[-1]])
        filled[index] = copy
    return filled


def _results(output: Any) -> Iterator[torch.Tensor]:
    for value in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0 and value.numel() > 0:
            yield value


def _rows(output: Any) -> torch.Tensor:
    """The first result that has rows, as [rows, width]."""
    result = next(_results(output))
    return result.reshape(-1, result.shape[-1])


def _on_rows(output: Any) -> bool:
    """Whether equal rows gave nearly equal results, as they do if the operation works on each row separately."""
    if not any(True for _ in _results(output)):
        return False
    rows = _rows(output).float()
    return bool((rows - rows[:1]).abs().max() <= ROUNDING * rows.abs().max())


def _same(rows: torch.Tensor, one: torch.Tensor) -> bool:
    return bool(((rows == one) | (rows.isnan() & one.isnan())).all())


def _shape(value: object) -> object:
    """Everything about an argument by which a kernel may be chosen."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape, value))
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return value.dtype, value.shape, value.stride() if value.layout == torch.strided else value.layout


def _row_shape(value: object, filled: bool) -> object:
    """Everything about an argument on which the result of a row may depend."""
    if filled:
        assert isinstance(value, torch.Tensor)
        return value.dtype, value.shape[-1]
    return id(value) if isinstance(value, torch.Tensor) and value.dim() > 1 else _shape(value)
