"""Finds tensor operations of a forward pass that give equal rows different bits.

A kernel may divide elements among threads, compute the elements left over after whole vectors in another way, or add in
another order for another number of rows. So while a pass runs, its operations are repeated with the same numbers in
every row, chosen so that such a difference shows. All rows of a result must then have the same bits, in a pass of one
row as in a pass of hundreds.

Only operations that work on each row by itself can be probed so: `skipped` names the others, which whole passes test.
Products with wide weights and attention are probed further in `specpool.engine.probes.exactness`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from specpool.engine.probes.inputs import ProbeInputs

Key = tuple[object, ...]
# Fills per operation: the sum of a single row may happen to round to the same value in either order.
FILLS = 4
# Numbers that are searched for some whose result depends on whether they are computed alone.
CANDIDATES = 4096
# An operation counts as one on rows if ordinary equal rows give rows that differ by at most this share of the largest.
ROUNDING = 0.02
# Rows that see different numbers of positions rightly differ, and so does memory that nothing was written to.
_UNLIKE = {"aten::scaled_dot_product_attention", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class OperationProbe(TorchDispatchMode):
    """A context in which the operations of passes are probed."""

    def __init__(self, kept: Iterable[torch.Tensor]) -> None:
        """`kept`: weights, tables and caches, which operations receive unchanged."""
        super().__init__()
        self.unequal: dict[str, None] = {}
        """Names of the operations that gave equal rows different bits."""
        self.skipped: dict[str, None] = {}
        """Names of floating-point operations that were not probed."""
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.layout == torch.strided}
        self._probed: set[Key] = set()
        self._ordinary: dict[Key, torch.Tensor] = {}
        self._fills: dict[Key, list[list[torch.Tensor]]] = {}
        self._rows: dict[Key, list[torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation as requested, and probes it unless it was probed in this shape before."""
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        collective = func.namespace == "c10d"  # only all ranks together could repeat it
        if not (func.is_view or random or collective or func._schema.name in _UNLIKE):
            call = _Call(func, args, kwargs, self._kept)
            if call.filled and (shape := call.shape) not in self._probed:
                self._probed.add(shape)
                if not self._was_probed(call):
                    self.skipped[func._schema.name] = None
        return func(*args, **kwargs)

    def _was_probed(self, call: "_Call") -> bool:
        """Probes an operation in a new shape. False if it does not seem to work on each row by itself."""
        if call.moves_by_index or call.changes_kept:
            return False
        key = call.key
        try:
            rows = call.rows(call.ordinary())
            if rows is None or not _is_close(rows, self._ordinary.setdefault(key, rows[:1].clone())):
                return False
            if key not in self._fills:
                self._fills[key] = call.telling()
            known = self._rows.setdefault(key, [])
            for index, fill in enumerate(self._fills[key]):
                self._compare(call, fill, index, known)
        except (RuntimeError, IndexError, ValueError):  # an operation that refuses numbers of ours
            return False
        return True

    def _compare(self, call: "_Call", fill: list[torch.Tensor], index: int, known: list[torch.Tensor]) -> None:
        rows = call.rows(fill)
        assert rows is not None
        if index == len(known):
            known.append(rows[:1].clone())
        if not _are_same(rows, known[index]):
            self.unequal[call.name] = None


class _Call:
    """One call of an operation, and how to repeat it with other numbers."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: set[int]) -> None:
        self.name: str = func._schema.name
        self._func, self._kept = func, kept
        is_flat = not (kwargs or any(isinstance(value, (list, tuple)) for value in args))
        self._leaves: list[Any] = list(args)
        self._structure: Any = None
        if not is_flat:
            self._leaves, self._structure = tree_flatten((args, kwargs))
        self.filled = [index for index, leaf in enumerate(self._leaves) if self._is_filled(leaf)]
        """Indexes of the arguments that are repeated with other numbers."""

    @property
    def shape(self) -> Key:
        """What a kernel may be chosen by."""
        return (self._func, *map(_shape, self._leaves))

    @property
    def key(self) -> Key:
        """What the result for a row may depend on."""
        return (self._func, *(self._row_shape(index) for index in range(len(self._leaves))))

    @property
    def moves_by_index(self) -> bool:
        """Whether a mask or indexes decide what becomes of each row."""
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        return any(not (tensor.is_floating_point() or self._is_kept(tensor)) for tensor in tensors)

    @property
    def changes_kept(self) -> bool:
        """Whether it writes to something that is kept."""
        kept = any(isinstance(leaf, torch.Tensor) and self._is_kept(leaf) for leaf in self._leaves[:1])
        return kept and self._func._schema.is_mutable

    def rows(self, fill: list[torch.Tensor]) -> torch.Tensor | None:
        """The result [rows, width] with these rows everywhere; None if it has not one row for each that was filled."""
        filled = (_alike(self._leaves[i], row) for i, row in zip(self.filled, fill, strict=True))
        result = _floating(self._run(filled))
        given = max(self._leaves[index].numel() // self._leaves[index].shape[-1] for index in self.filled)
        return result.reshape(given, -1) if result.dim() and result.numel() == given * result.shape[-1] else None

    def ordinary(self) -> list[torch.Tensor]:
        """Rows whose result hardly depends on how it is computed."""
        leaves = [self._leaves[index] for index in self.filled]
        return [(torch.arange(leaf.shape[-1]) % 7 / 4 + 0.5).to(leaf) for leaf in leaves]

    def telling(self) -> list[list[torch.Tensor]]:
        """Rows whose result differs if it is computed in another way: several sets, or one that surely tells."""
        leaves = [self._leaves[index] for index in self.filled]
        inputs, widths = ProbeInputs(leaves[0]), [leaf.shape[-1] for leaf in leaves]
        if torch.Tag.pointwise in self._func.tags and len(leaves) == 1:
            told = self._told_apart(inputs)
            if told is not None:
                return [[told.repeat(-(-widths[0] // len(told)))[: widths[0]]]]
        weighted = any(
            isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and self._is_kept(leaf) for leaf in self._leaves
        )
        count = 1 if weighted else FILLS  # a product has a sum for every output already
        fills = [[_cancelling(inputs, width) for width in widths] for _ in range(count)]
        return fills if weighted else [*fills, [inputs.normal(width) for width in widths]]

    def _told_apart(self, inputs: ProbeInputs) -> torch.Tensor | None:
        """Numbers whose result depends on whether they are computed alone or among others; None if none was found."""
        numbers = inputs.cancelling(CANDIDATES)
        together, alone = self._run([numbers]), [self._run([number]) for number in numbers.split(1)]
        if together.shape != numbers.shape or any(one.shape != (1,) for one in alone):
            return None  # another argument has a shape of its own
        found = numbers[(together != torch.cat(alone)) & together.isfinite()]
        return found if len(found) else None

    def _run(self, values: Iterable[torch.Tensor]) -> Any:
        leaves = list(self._leaves)
        for index, value in zip(self.filled, values, strict=True):
            leaves[index] = value.clone() if self._func._schema.is_mutable else value
        if self._structure is None:
            return self._func(*leaves)
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self._func(*args, **kwargs)

    def _row_shape(self, index: int) -> object:
        leaf = self._leaves[index]
        if index in self.filled:
            return leaf.dtype, leaf.shape[-1]
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            return leaf.untyped_storage().data_ptr(), leaf.storage_offset(), _shape(leaf)
        return id(leaf) if isinstance(leaf, torch.Tensor) else _shape(leaf)

    def _is_filled(self, leaf: object) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.is_floating_point()
            and leaf.layout == torch.strided
            and leaf.numel() > 0
            and leaf.dim() > 0
            and not self._is_kept(leaf)
        )

    def _is_kept(self, leaf: torch.Tensor) -> bool:
        return leaf.layout != torch.strided or leaf.untyped_storage().data_ptr() in self._kept


def _cancelling(inputs: ProbeInputs, width: int) -> torch.Tensor:
    return inputs.cancelling(width)[inputs.order(width)] if width > 1 else inputs.normal(width)


def _alike(leaf: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory layout with this row everywhere."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    copy = torch.empty(reach, dtype=leaf.dtype, device=leaf.device).as_strided(leaf.shape, leaf.stride())
    once = copy[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in leaf.stride())]
    once.copy_(row[: once.shape[-1]])
    return copy


def _floating(output: Any) -> torch.Tensor:
    """The first floating-point result. ValueError if there is none."""
    for value in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0:
            return value
    raise ValueError("no floating-point result")


def _is_close(rows: torch.Tensor, one: torch.Tensor) -> bool:
    """Whether rows are nearly what one row gave."""
    if rows.shape[1] != one.shape[1]:
        return False
    largest = rows.float().abs().amax()
    return bool(((rows.amax(0) - one).abs() + (one - rows.amin(0)).abs()).float().amax() <= ROUNDING * largest)


def _are_same(rows: torch.Tensor, one: torch.Tensor) -> bool:
    bits = _BITS[rows.element_size()]
    if torch.equal(rows.view(bits), one.view(bits).expand(rows.shape)):
        return True
    return bool(((rows.view(bits) == one.view(bits)) | (rows.isnan() & one.isnan())).all())


def _shape(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return leaf.dtype, leaf.shape, leaf.stride() if leaf.layout == torch.strided else leaf.layout
