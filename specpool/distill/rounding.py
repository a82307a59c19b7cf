"""Rounds a student's MLPs and output head to Q4_1 blocks.

As in GPTQ (Frantar et al. 2022), columns are rounded in order, and the columns after each one compensate for its error,
according to the inputs of the matrix on calibration text. Then every block is improved, given all others.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import normalize

from specpool.distill.examples import Example, collate
from specpool.distill.student import Student
from specpool.engine.weights.quantized import Quantized
from specpool.engine.weights.rounding import BLOCK, Scales, choose_scales, fit_scales, from_codes, pack, to_codes

DAMPING = 0.01
"""Share of the mean second moment that is added to that of every input, because unseen text differs."""
ATTENTION = "self_attn."
"""Part of the names of matrices that keep int8. They are small, but 4 bits cost much agreement on long prompts."""
PASSES = 4
"""Passes over all blocks that refine them."""


def round_student(student: Student, examples: Sequence[Example]) -> dict[str, Quantized]:
    """Round matrices outside attention whose rows are whole blocks. `examples`: calibration text."""
    weights = student.trained()
    return {
        name: round_matrix(weights[name], moments)
        for name, moments in second_moments(student, examples).items()
        if len(moments) % BLOCK == 0
    }


def round_matrix(weight: torch.Tensor, moments: torch.Tensor) -> Quantized:
    """Round a matrix [outputs, inputs]. `moments`: of its inputs, from `second_moments`."""
    matrix = _Rounding(weight.float(), _damped(moments))
    matrix.compensate()
    for _ in range(PASSES):
        matrix.refine()
    return pack(matrix.codes, matrix.scales, matrix.minimums)


class _Rounding:
    """Codes, scales and minimums of a matrix [rows, columns]. An error e in a row costs e @ moments @ e."""

    def __init__(self, weight: torch.Tensor, moments: torch.Tensor) -> None:
        self._weight, self._moments = weight, moments
        self.codes, self._rounded = torch.empty_like(weight), torch.empty_like(weight)
        self.scales = weight.new_empty(len(weight), weight.shape[1] // BLOCK, dtype=torch.float16)
        self.minimums = torch.empty_like(self.scales)

    def compensate(self) -> None:
        """Round columns in order. Later columns compensate for the error of each."""
        factor, rest = _inverse_factor(self._moments), self._weight.clone()
        importance = factor.diag().square().reciprocal()
        for own in self._blocks():
            scales = choose_scales(rest[:, own], importance[own].diag())
            errors = torch.empty_like(rest[:, own])
            for column in range(own.start, own.stop):
                self._round(column, rest[:, column, None], scales)
                error = (rest[:, column, None] - self._rounded[:, column, None]) / factor[column, column]
                rest[:, column + 1 : own.stop] -= error * factor[column, column + 1 : own.stop]
                errors[:, column - own.start, None] = error
            rest[:, own.stop :] -= errors @ factor[own, own.stop :]
            self._keep(own, scales)

    def refine(self) -> None:
        """Lower the cost of one block after the other, by coordinate descent."""
        for own in self._blocks():
            metric, rounded = self._moments[own, own], self._rounded[:, own]
            slopes = (self._rounded - self._weight) @ self._moments[:, own]
            # The cost is least with these weights, given the errors of other blocks.
            ideal = rounded - torch.linalg.solve(metric, slopes, left=False)
            scales = fit_scales(ideal, self.codes[:, own], metric)
            rounded.copy_(from_codes(self.codes[:, own], *scales))
            for column in range(own.start, own.stop):
                toward = metric[:, column - own.start, None] / metric[column - own.start, column - own.start]
                self._round(column, self._rounded[:, column, None] - (rounded - ideal) @ toward, scales)
            self._keep(own, scales)

    def _blocks(self) -> Iterator[slice]:
        yield from (slice(begin, begin + BLOCK) for begin in range(0, self._weight.shape[1], BLOCK))

    def _round(self, column: int, weights: torch.Tensor, scales: Scales) -> None:
        self.codes[:, column, None] = codes = to_codes(weights, *scales)
        self._rounded[:, column, None] = from_codes(codes, *scales)

    def _keep(self, own: slice, scales: Scales) -> None:
        block = own.start // BLOCK
        self.scales[:, block, None], self.minimums[:, block, None] = scales


@torch.inference_mode()
def second_moments(student: Student, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Sum x x^T over the inputs x of matrices outside attention. Returns [inputs, inputs] by name in `trained`.

    Inputs are scaled to norm 1. Otherwise a few tokens, such as the first, would outweigh all others.
    """
    moments: dict[str, torch.Tensor] = {}

    def add(name: str, inputs: torch.Tensor) -> None:
        rows = normalize(inputs.flatten(0, -2).float())
        moments[name] = moments.get(name, 0) + rows.T @ rows

    def observe(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        add(name, inputs[0])

    hooks = [
        module.register_forward_pre_hook(partial(observe, f"body.{name}.weight"))
        for name, module in student.body.named_modules()
        if isinstance(module, nn.Linear) and ATTENTION not in name
    ]
    for example in examples:
        (step,) = student.unroll(collate([example]).to(student.head.device))
        add("head", step.normed)
    for hook in hooks:
        hook.remove()
    return moments


def _damped(moments: torch.Tensor) -> torch.Tensor:
    mean = moments.diag().mean()
    damping = DAMPING * mean if mean > 0 else torch.ones_like(mean)
    return moments + damping * torch.eye(len(moments), device=moments.device)


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse.

    Row i, divided by its diagonal, says how much of an error in column i to take off each later column.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments.double()))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
