"""4-bit weights with compensated errors keep the outputs of a matrix and of a student."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_distill import student_of

from specpool.distill.examples import TOP, Example, collate
from specpool.distill.rounding import round_matrix, round_student, second_moments
from specpool.engine.weights.rounding import BLOCK

INDEPENDENT = torch.eye(4 * BLOCK)
"""Moments of inputs without correlations: nothing can be compensated."""


def examples_of(count: int, seed: int = 0) -> list[Example]:
    """Random text with answers."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 257, (count, 30), generator=generator)
    return [Example(row, 10, torch.zeros(20, TOP, dtype=torch.int64), torch.zeros(20, TOP)) for row in tokens]


def correlated(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(rows, BLOCK, generator=generator) @ torch.randn(BLOCK, 4 * BLOCK, generator=generator)
    return few + 0.3 * torch.randn(rows, 4 * BLOCK, generator=generator)


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=st.integers(0, 2**16))
def test_compensation_lowers_the_error_of_outputs(seed: int) -> None:
    inputs = correlated(2000, seed)
    calibration, unseen = inputs[:1000], inputs[1000:]
    weight = torch.randn(48, 4 * BLOCK, generator=torch.Generator().manual_seed(seed))

    def error(moments: torch.Tensor) -> float:
        difference = round_matrix(weight, moments).dequantized() - weight
        return (unseen @ difference.T).norm().item()

    assert error(calibration.T @ calibration) < 0.7 * error(INDEPENDENT)


def test_without_correlations_errors_are_below_half_a_step() -> None:
    weight = torch.randn(40, 4 * BLOCK)
    difference = (round_matrix(weight, INDEPENDENT).dequantized() - weight).unflatten(1, (-1, BLOCK))
    ranges = weight.unflatten(1, (-1, BLOCK)).amax(2) - weight.unflatten(1, (-1, BLOCK)).amin(2)
    assert (difference.square().mean(2).sqrt() < ranges / 15 / 2).all()


@pytest.mark.parametrize("inputs", [torch.zeros(5, 64), torch.ones(5, 64), (torch.arange(64) > 31).float().diag()])
def test_unused_and_equal_inputs_give_finite_weights(inputs: torch.Tensor) -> None:
    weight, moments = torch.randn(8, 64), inputs.T @ inputs
    rounded = round_matrix(weight, moments)
    assert rounded.is_finite()
    assert (rounded.dequantized() - weight).abs().max() < 1
    assert torch.equal(round_matrix(torch.zeros(8, 64), moments).dequantized(), torch.zeros(8, 64))


def test_moments_are_those_of_the_inputs(tiny_pair: tuple[Path, Path]) -> None:
    student, examples = student_of(tiny_pair), examples_of(3)
    moments = second_moments(student, examples)
    matrices = {name for name, weight in student.trained().items() if weight.dim() == 2}
    assert moments.keys() == {name for name in matrices if "self_attn" not in name}
    tokens = torch.stack([example.token_ids for example in examples])
    inputs_of_mlp: list[torch.Tensor] = []
    with torch.inference_mode():
        hook = student.body.layers[0].mlp.register_forward_pre_hook(lambda _, args: inputs_of_mlp.append(args[0]))
        hidden = student.body(input_ids=tokens).last_hidden_state[:, 9:-1].flatten(0, 1)
    hook.remove()
    for name, inputs in (("body.layers.0.mlp.up_proj.weight", inputs_of_mlp[0].flatten(0, 1)), ("head", hidden)):
        scaled = inputs / inputs.norm(dim=1, keepdim=True)
        torch.testing.assert_close(moments[name], scaled.T @ scaled, rtol=1e-3, atol=1e-3)
    assert not any(module._forward_pre_hooks for module in student.modules())


def test_a_rounded_student_has_similar_logits(tiny_pair: tuple[Path, Path]) -> None:
    student, (example,) = student_of(tiny_pair), examples_of(1, seed=1)
    rounded = round_student(student, examples_of(20))
    batch = collate([example])
    with torch.inference_mode():
        before = student.unroll(batch)[0].logits
        student.learn({**student.trained(), **{name: weight.dequantized() for name, weight in rounded.items()}})
        after = student.unroll(batch)[0].logits
    assert 0 < (after - before).norm() / before.norm() < 0.4
