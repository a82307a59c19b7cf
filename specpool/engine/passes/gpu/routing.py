"""The GPU kernels around the experts of a layer: they choose experts, and add the outputs of each row's experts.

A program handles one row, in float32. A choice is one expert of one row: choice number row * top_k + rank.
"""

import torch

from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton
from specpool.engine.passes.gpu.rows import Addend
from specpool.engine.passes.kinds import Routing

if triton is not None:
    from specpool.engine.passes.gpu.rows import summed

# Features of the sum of a row's experts that one program computes.
COMBINED = 1024


def choose_experts(
    partials: torch.Tensor,  # [splits, rows, experts] router logits, possibly followed by others
    bias: torch.Tensor | None,  # [experts]
    correction: torch.Tensor | None,  # [experts] added to the scores that choose experts
    slots: torch.Tensor,  # [rows]; -1: the row is padding
    routing: Routing,
    experts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each row, in order of their scores, and their weights, both [rows, top_k].

    Padding has experts -1. NaN scores are chosen last, and make a row NaN.
    """
    _, rows, size = partials.shape
    chosen = torch.empty(rows, routing.top_k, dtype=torch.int32, device=partials.device)
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=partials.device)
    _choose_experts[(rows,)](
        partials, bias, correction, slots, chosen, weights, rows, routing.scale, routing.epsilon,
        EXPERTS=experts, SIZE=size, WIDTH=power_of_two(experts),
        TOP_K=routing.top_k, TOP_WIDTH=power_of_two(routing.top_k),
        GROUPS=routing.groups, TOP_GROUPS=routing.top_groups, RANKED_BY=routing.ranked_by, SPLITS=len(partials),
        BIASED=bias is not None, SIGMOID=routing.scores == "sigmoid", RENORMALIZES=routing.renormalizes,
        **launch_options(partials.device), num_warps=1,
    )  # fmt: skip
    return chosen, weights


def combine(
    partials: torch.Tensor,  # [splits, choices, hidden]
    chosen: torch.Tensor,  # [rows, top_k]; -1: the row is padding
    weights: torch.Tensor,  # [rows, top_k]
    shared: Addend | None,
    logits: torch.Tensor | None = None,  # [splits, rows, features]
) -> torch.Tensor:
    """Add the weighted experts of each row in order of rank, then the shared experts: [1, rows, hidden] in float32.

    The experts add nothing to padding. `logits`: the sigmoid of the last feature multiplies the shared experts.
    """
    (rows, top_k), size = chosen.shape, partials.shape[2]
    combined = torch.empty(1, rows, size, dtype=torch.float32, device=partials.device)
    extra, bias = (None, None) if shared is None else (shared.partials, shared.bias)
    _combine[(rows, -(-size // COMBINED))](
        partials, chosen, weights, extra, bias, logits, combined, rows,
        GATES=0 if logits is None else logits.shape[2], GATE_SPLITS=0 if logits is None else len(logits),
        SIZE=size, WIDTH=COMBINED, TOP_K=top_k, SPLITS=len(partials),
        SHARED_SPLITS=0 if extra is None else len(extra), BIASED=bias is not None,
        **launch_options(partials.device), num_warps=4,
    )  # fmt: skip
    return combined


if triton is not None:

    @triton.jit
    def _first_best(scores, index, WIDTH: tl.constexpr):
        """Return the index of the highest score; of equal scores, the lowest index."""
        return tl.min(tl.where(scores == tl.max(scores, 0), index, WIDTH), 0)

    @triton.jit
    def _in_best_groups(
        ranked, expert, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
        RANKED_BY: tl.constexpr,
    ):  # fmt: skip
        """Keep the scores of experts in the best groups, and set others to -inf."""
        group, totals = expert // (EXPERTS // GROUPS), tl.full([WIDTH], float("-inf"), tl.float32)
        for index in tl.static_range(GROUPS):
            own = tl.where(group == index, ranked, float("-inf"))
            total = tl.max(own, 0)
            if RANKED_BY == 2:
                others = tl.where(expert == _first_best(own, expert, WIDTH), float("-inf"), own)
                total += tl.max(others, 0)
            totals = tl.where(group == index, total, totals)
        result = tl.full([WIDTH], float("-inf"), tl.float32)
        for _ in tl.static_range(TOP_GROUPS):
            is_best = group == _first_best(totals, group, WIDTH)
            result = tl.where(is_best, ranked, result)
            totals = tl.where(is_best, float("-inf"), totals)
        return result

    @triton.jit(do_not_specialize=["rows"])
    def _choose_experts(
        partials, bias, correction, slots, chosen, weights, rows, scale, epsilon,
        EXPERTS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, TOP_WIDTH: tl.constexpr,
        GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RANKED_BY: tl.constexpr, SPLITS: tl.constexpr,
        BIASED: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZES: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
        mask = expert < EXPERTS
        if OVERLAP:
            gdc_wait()
        logits = summed(partials, bias, row, expert, mask, rows, SIZE, SPLITS, BIASED)
        logits = tl.where(mask, logits, float("-inf"))
        if SIGMOID:
            scores = 1 / (1 + tl.exp(-logits))
        else:
            powers = tl.exp(logits - tl.max(logits, 0))
            scores = powers / tl.sum(powers, 0)
        ranked = scores
        if correction is not None:
            ranked += tl.load(correction + expert, mask=mask, other=0.0)
        ranked = tl.where(mask & (ranked == ranked), ranked, float("-inf"))
        if GROUPS > 1:
            ranked = _in_best_groups(ranked, expert, EXPERTS, WIDTH, GROUPS, TOP_GROUPS, RANKED_BY)
        rank, total = tl.arange(0, TOP_WIDTH), 0.0
        experts, factors = tl.zeros([TOP_WIDTH], tl.int32), tl.zeros([TOP_WIDTH], tl.float32)
        for index in tl.static_range(TOP_K):
            best = _first_best(ranked, expert, WIDTH)
            factor = tl.sum(tl.where(expert == best, scores, 0.0), 0)
            experts, factors = tl.where(rank == index, best, experts), tl.where(rank == index, factor, factors)
            ranked, total = tl.where(expert == best, float("-inf"), ranked), total + factor
        if RENORMALIZES:
            factors = factors / (total + epsilon)
        experts = tl.where(tl.load(slots + row) >= 0, experts, -1)
        tl.store(chosen + row * TOP_K + rank, experts, mask=rank < TOP_K)
        tl.store(weights + row * TOP_K + rank, factors * scale, mask=rank < TOP_K)

    @triton.jit(do_not_specialize=["rows"])
    def _combine(
        partials, chosen, weights, shared, bias, logits, combined, rows,
        GATES: tl.constexpr, GATE_SPLITS: tl.constexpr,
        SIZE: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
        SHARED_SPLITS: tl.constexpr, BIASED: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        if OVERLAP:
            gdc_wait()
        row, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        mask, total = feature < SIZE, tl.zeros([WIDTH], tl.float32)
        is_row = mask & (tl.load(chosen + row * TOP_K) >= 0)
        for rank in tl.static_range(TOP_K):
            choice = row * TOP_K + rank
            own = summed(partials, None, choice, feature, is_row, rows * TOP_K, SIZE, SPLITS, False)
            total += tl.load(weights + choice) * own
        if SHARED_SPLITS > 0:
            extra = summed(shared, bias, row, feature, mask, rows, SIZE, SHARED_SPLITS, BIASED)
            if GATES > 0:
                gate = summed(logits, None, row, GATES - 1 + 0 * feature, mask, rows, GATES, GATE_SPLITS, False)
                extra = extra / (1 + tl.exp(-gate))
            total += extra
        tl.store(combined + row * SIZE + feature, total, mask=mask)
