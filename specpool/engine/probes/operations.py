"""Finds the tensor operations of a forward pass that are not batch-invariant.

A kernel may split elements among threads, compute the tail of a vector differently, or add in another order for
another number of rows. While a pass runs, the probe repeats its operations with the same numbers in every row, chosen
to reveal such a difference. All rows of a result must have the same bits, in every pass.

This works for operations that compute each row independently. Only whole passes test the others; `skipped` names them.
`specpool.engine.probes.batch_invariance` probes GEMM with wide weights and attention further.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from specpool.engine.probes.inputs import ProbeInputs

Key = tuple[object, ...]
# Fills per operation: a single sum may round to the same value in either order.
FILLS = 4
# Numbers to search for one whose result changes if it is computed alone.
CANDIDATES = 4096
# An operation works row by row if equal rows give results within this share of the largest value.
ROUNDING = 0.02
# Attention rows see different positions, and uninitialized memory is arbitrary: neither can be probed.
_NOT_PROBED = {
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class OperationProbe(TorchDispatchMode):
    """Probes the operations of passes within this context."""

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        """`constants`: weights, tables and caches, which repeated operations receive unchanged."""
        super().__init__()
        self.unequal: dict[str, None] = {}
        """Names of operations that gave equal rows different bits."""
        self.skipped: dict[str, None] = {}
        """Names of floating-point operations that were not probed."""
        self._constants = {
            tensor.untyped_storage().data_ptr() for tensor in constants if tensor.layout == torch.strided
        }
        self._probed: set[Key] = set()
        self._ordinary: dict[Key, torch.Tensor] = {}
        self._fills: dict[Key, list[list[torch.Tensor]]] = {}
        self._rows: dict[Key, list[torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and probe it the first time it occurs in this shape."""
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        collective = func.namespace == "c10d"  # one rank cannot repeat it alone
        if not (func.is_view or random or collective or func._schema.name in _NOT_PROBED):
            call = _Call(func, args, kwargs, self._constants)
            if call.filled and (shape := call.shape) not in self._probed:
                self._probed.add(shape)
                if not self._was_probed(call):
                    self.skipped[func._schema.name] = None
        return func(*args, **kwargs)

    def _was_probed(self, call: "_Call") -> bool:
        """Probe an operation in a new shape. False if it does not seem to work row by row."""
        if call.moves_by_index or call.changes_constants:
            return False
        key = call.key
        try:
            rows = call.rows(call.ordinary())
            if rows is None or not _is_close(rows, self._ordinary.setdefault(key, rows[:1].clone())):
                return False
            if key not in self._fills:
                self._fills[key] = call.revealing()
            known = self._rows.setdefault(key, [])
            for index, fill in enumerate(self._fills[key]):
                self._compare(call, fill, index, known)
        except (RuntimeError, IndexError, ValueError):  # the operation rejects the numbers
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
    """One call of an operation, which can be repeated with other numbers."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], constants: set[int]) -> None:
        self.name: str = func._schema.name
        self._func, self._constants = func, constants
        is_flat = not (kwargs or any(isinstance(value, (list, tuple)) for value in args))
        self._leaves: list[Any] = list(args)
        self._structure: Any = None
        if not is_flat:
            self._leaves, self._structure = tree_flatten((args, kwargs))
        self.filled = [index for index, leaf in enumerate(self._leaves) if self._is_filled(leaf)]
        """Indexes of the arguments that are replaced."""

    @property
    def shape(self) -> Key:
        """Everything that may select a kernel."""
        return (self._func, *map(_shape, self._leaves))

    @property
    def key(self) -> Key:
        """Everything that the result of a row may depend on."""
        return (self._func, *(self._row_shape(index) for index in range(len(self._leaves))))

    @property
    def moves_by_index(self) -> bool:
        """Whether a mask or indexes determine the result of each row."""
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        return any(not (tensor.is_floating_point() or self._is_constant(tensor)) for tensor in tensors)

    @property
    def changes_constants(self) -> bool:
        """Whether the operation writes to a constant."""
        first = self._leaves[0] if self._leaves else None
        return isinstance(first, torch.Tensor) and self._is_constant(first) and self._func._schema.is_mutable

    def rows(self, fill: list[torch.Tensor]) -> torch.Tensor | None:
        """The result [rows, width] with these rows everywhere; None if it lacks one row per filled row."""
        filled = (_alike(self._leaves[i], row) for i, row in zip(self.filled, fill, strict=True))
        result = _floating(self._run(filled))
        given = max(self._leaves[index].numel() // self._leaves[index].shape[-1] for index in self.filled)
        return result.reshape(given, -1) if result.dim() and result.numel() == given * result.shape[-1] else None

    def ordinary(self) -> list[torch.Tensor]:
        """Rows whose result hardly depends on the order of computation."""
        leaves = [self._leaves[index] for index in self.filled]
        return [(torch.arange(leaf.shape[-1]) % 7 / 4 + 0.5).to(leaf) for leaf in leaves]

    def revealing(self) -> list[list[torch.Tensor]]:
        """Sets of rows that are likely to reveal the order of computation, or a single set that is certain to."""
        leaves = [self._leaves[index] for index in self.filled]
        inputs, widths = ProbeInputs(leaves[0]), [leaf.shape[-1] for leaf in leaves]
        if torch.Tag.pointwise in self._func.tags and len(leaves) == 1:
            sensitive = self._sensitive(inputs)
            if sensitive is not None:
                return [[sensitive.repeat(-(-widths[0] // len(sensitive)))[: widths[0]]]]
        weighted = any(
            isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and self._is_constant(leaf) for leaf in self._leaves
        )
        count = 1 if weighted else FILLS  # each output of a GEMM is a sum of its own
        fills = [[_cancelling(inputs, width) for width in widths] for _ in range(count)]
        return fills if weighted else [*fills, [inputs.normal(width) for width in widths]]

    def _sensitive(self, inputs: ProbeInputs) -> torch.Tensor | None:
        """Numbers whose result changes if they are computed alone; None if the search finds none."""
        numbers = inputs.cancelling(CANDIDATES)
        together, alone = self._run([numbers]), [self._run([number]) for number in numbers.split(1)]
        if together.shape != numbers.shape or any(one.shape != (1,) for one in alone):
            return None  # another argument fixes the shape
        sensitive = numbers[(together != torch.cat(alone)) & together.isfinite()]
        return sensitive if len(sensitive) else None

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
            and not self._is_constant(leaf)
        )

    def _is_constant(self, leaf: torch.Tensor) -> bool:
        return leaf.layout != torch.strided or leaf.untyped_storage().data_ptr() in self._constants


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
    """Whether rows nearly equal the result of one row."""
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
