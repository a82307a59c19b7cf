"""Experts on interpreted GPU kernels: close to float64, and batch-invariant."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton")

from specpool.engine.passes import fused_experts
from specpool.engine.passes.gpu import grouped_gemm, routing
from specpool.engine.passes.gpu.experts import GpuExperts
from specpool.engine.passes.gpu.gemm import split_k_gemm
from specpool.engine.passes.gpu.grouped_gemm import group_choices
from specpool.engine.passes.gpu.routing import choose_experts
from specpool.engine.passes.gpu.rows import Addend
from specpool.engine.passes.kinds import SILU, Activation, Routing
from specpool.engine.passes.modules import activated
from specpool.engine.probes.kernels import experts_agree
from specpool.engine.sharding.group import SINGLE_RANK

EXPERTS, HIDDEN, SIZE, ROWS = 12, 60, 24, 16
PLAIN = Routing(3, "softmax", renormalizes=True)
ROUTINGS = {
    "softmax": PLAIN,
    "not renormalized": Routing(3, "softmax", renormalizes=False),
    "sigmoid, in groups": Routing(4, "sigmoid", renormalizes=True, scale=2.5, groups=3, top_groups=2),
    "sigmoid, large epsilon": Routing(2, "sigmoid", renormalizes=True, epsilon=0.5),
    "softmax, in groups of one best": Routing(2, "softmax", renormalizes=False, groups=3, top_groups=1, ranked_by=1),
}
GPT_OSS = Activation("silu", alpha=1.7, limit=1.0, shift=1.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm, "GROUPED", 16)
    monkeypatch.setattr(routing, "COMBINED", 32)
    torch.manual_seed(0)


def random_experts(
    chosen_by: Routing,
    activation: Activation = SILU,
    biased: bool = False,
    has_shared: bool = False,
    is_gated: bool = False,
    hidden: int = HIDDEN,
    size: int = SIZE,
) -> Any:
    """Experts as `FusedExperts` describes them, with a correction if the scores are sigmoids."""

    def linear(outputs: int, inputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=biased).requires_grad_(requires_grad=False)

    shared = SimpleNamespace(activation=activation, gate_up=linear(2 * size, hidden), down=linear(hidden, size))
    return SimpleNamespace(
        shared=shared if has_shared else None, routing=chosen_by, activation=activation, router=linear(EXPERTS, hidden),
        shared_gate=nn.Linear(hidden, 1, bias=False) if is_gated else None,
        correction=torch.randn(EXPERTS) / 10 if chosen_by.scores == "sigmoid" else None,
        gate_ups=[linear(2 * size, hidden) for _ in range(EXPERTS)],
        downs=[linear(hidden, size) for _ in range(EXPERTS)],
    )  # fmt: skip


def run(experts: GpuExperts, rows: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Return the branch of rows that padding follows. Padding holds numbers that would show in other rows."""
    x = torch.cat([rows, torch.full((padding, rows.shape[1]), torch.nan, dtype=rows.dtype)])
    slots = torch.tensor([0] * len(rows) + [-1] * padding)
    branch = experts(x, slots)
    assert branch.partials.dtype == torch.float32
    assert branch.bias is branch.norm is None
    return branch.partials.sum(0)[: len(rows)]


def expected(fused: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the experts, in float64."""

    def apply(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, linear.weight.double(), None if linear.bias is None else linear.bias.double())

    def mlp(gate_up: nn.Linear, down: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return apply(down, activated(apply(gate_up, x), fused.activation))

    x = rows.double()
    chosen, weights = fused_experts.choose_experts(apply(fused.router, x), fused.routing, fused.correction)
    branch = torch.zeros_like(x) if fused.shared is None else mlp(fused.shared.gate_up, fused.shared.down, x)
    if fused.shared_gate is not None:
        branch *= apply(fused.shared_gate, x).sigmoid()
    for row, rank in torch.cartesian_prod(torch.arange(len(x)), torch.arange(fused.routing.top_k)).tolist():
        expert = int(chosen[row, rank])
        branch[row] += weights[row, rank] * mlp(fused.gate_ups[expert], fused.downs[expert], x[row : row + 1])[0]
    return branch


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("activation", [SILU, GPT_OSS])
def test_experts_match_float64(name: str, activation: Activation) -> None:
    fused, rows = random_experts(ROUTINGS[name], activation, biased=activation is GPT_OSS), torch.randn(ROWS, HIDDEN)
    assert_near(run(GpuExperts(fused, None, SINGLE_RANK), rows, padding=2), expected(fused, rows))


@pytest.mark.parametrize("is_gated", [False, True])
def test_split_experts_and_a_shared_mlp_match_float64(is_gated: bool) -> None:
    fused = random_experts(PLAIN, biased=True, has_shared=True, is_gated=is_gated, hidden=512, size=256)
    experts, rows = GpuExperts(fused, None, SINGLE_RANK), torch.randn(2, 512)
    assert (experts.router_splits, experts.gate_up.split_k, experts.down.split_k) == (4, 4, 2)
    assert_near(run(experts, rows), expected(fused, rows))


@given(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=20), st.integers(0, 3))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_experts_are_batch_invariant(numbers: list[int], padding: int) -> None:
    experts, rows, alone = alone_and_together()
    assert torch.equal(run(experts, rows[numbers], padding), alone[numbers])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_passes_are_batch_invariant(dtype: torch.dtype) -> None:
    """Experts have more rows than a tile, and one of them has all rows; others have none."""
    fused = random_experts(PLAIN)
    fused.router.bias = nn.Parameter(torch.tensor([9.0, *[0.0] * (EXPERTS - 3), -99, -99]), requires_grad=False)
    experts, rows = GpuExperts(fused, None, SINGLE_RANK).to(dtype), torch.randn(300, HIDDEN).to(dtype)
    together = run(experts, rows)
    for part in (slice(0, 1), slice(150, 170), slice(299, 300)):
        assert torch.equal(run(experts, rows[part]), together[part])


def test_experts_whose_bits_depend_on_other_rows_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, _, _ = alone_and_together()
    assert experts_agree(experts, (2, 5))
    run_experts = GpuExperts.forward

    def depend(experts: GpuExperts, normed: torch.Tensor, slots: torch.Tensor) -> Addend:
        branch = run_experts(experts, normed, slots)
        return replace(branch, partials=branch.partials * (1 + 1e-6 * (len(normed) == 2)))

    monkeypatch.setattr(GpuExperts, "forward", depend)
    assert not experts_agree(experts, (2, 5))


def test_the_last_split_may_be_short() -> None:
    x, weight = torch.randn(3, 330), torch.randn(EXPERTS, 330)
    assert_near(split_k_gemm(x, weight, 2, torch.float32).sum(0) / 9, x.double() @ weight.double().T / 9)


@pytest.mark.parametrize("name", ROUTINGS)
def test_of_equal_scores_the_lower_expert_comes_first(name: str) -> None:
    logits, slots = torch.randint(0, 2, (ROWS, EXPERTS)).float(), torch.zeros(ROWS, dtype=torch.int64)
    chosen, weights = choose_experts(logits[None], None, None, slots, ROUTINGS[name], logits.shape[1])
    reference, factors = fused_experts.choose_experts(logits, ROUTINGS[name], None)
    assert torch.equal(chosen.long(), reference)
    torch.testing.assert_close(weights, factors)


def test_nan_scores_spoil_only_their_row() -> None:
    logits, slots = torch.randn(2, EXPERTS), torch.zeros(2, dtype=torch.int64)
    logits[0, 3] = torch.nan
    chosen, weights = choose_experts(logits[None], None, None, slots, PLAIN, logits.shape[1])
    assert ((chosen >= 0) & (chosen < EXPERTS)).all()
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


@given(st.lists(st.lists(st.integers(-1, 4), min_size=3, max_size=3), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_groups_hold_every_choice_once(numbers: list[list[int]]) -> None:
    chosen, experts, tile_rows = torch.tensor(numbers, dtype=torch.int32), 5, 4
    groups = group_choices(chosen, experts, tile_rows)
    assert groups.tiles.shape[1] == min(chosen.numel(), experts) + chosen.numel() // tile_rows
    found: list[tuple[int, int]] = []
    for expert, first, end in groups.tiles.T.tolist():
        if expert >= 0:
            assert 0 < end - first <= tile_rows
            found += [(expert, choice) for choice in groups.order[first:end].tolist()]
    assert found == sorted((expert, choice) for choice, expert in enumerate(chosen.flatten().tolist()) if expert >= 0)


@cache
def alone_and_together() -> tuple[GpuExperts, torch.Tensor, torch.Tensor]:
    """Return experts, rows, and the result of each row in its own pass."""
    torch.manual_seed(0)
    fused = random_experts(PLAIN, GPT_OSS, biased=True, has_shared=True)
    experts, rows = GpuExperts(fused, None, SINGLE_RANK), torch.randn(ROWS, HIDDEN)
    return experts, rows, torch.cat([run(experts, row) for row in rows.split(1)])


def assert_near(result: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), reference, atol=1e-5, rtol=1e-5)
