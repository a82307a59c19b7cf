"""Plots of a plan."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specpool.planning.plan import DraftPlan, Plan


def plan_figure(plan: Plan) -> Figure:
    """Speed-up over batch for every draft length, a plot for each draft, and agreement over size if it was fitted."""
    plots = len(plan.drafts) + (plan.scaling is not None)
    figure = Figure(figsize=(4.8 * plots, 3.8), layout="constrained")
    every_axes = figure.subplots(1, plots, squeeze=False)[0]
    for axes, draft in zip(every_axes, plan.drafts, strict=False):
        _speed_up(axes, draft)
    if plan.scaling is not None:
        sizes = [draft.model.parameters for draft in plan.drafts]
        axes, spread = every_axes[-1], max(sizes) / min(sizes)
        line = [min(sizes) * spread ** (i / 50) for i in range(-10, 61)]
        axes.plot(sizes, [draft.acceptance.agreement for draft in plan.drafts], "o")
        axes.plot(line, [plan.scaling(size) for size in line], "--", color="gray")
        axes.set(xscale="log", xlabel="draft's parameters without embeddings", ylabel="agreement", ylim=(0, 1))
    return figure


def _speed_up(axes: Axes, draft: DraftPlan) -> None:
    for k in range(1, len(draft.pair.lengths)):
        mine = [speed for speed in draft.speeds if speed.k == k]
        axes.plot([speed.batch for speed in mine], [speed.of_plain for speed in mine], marker="o", label=f"k = {k}")
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(title=Path(draft.model.name).name, xscale="log", xlabel="batch", ylim=(0, None))
    axes.set_ylabel("predicted tokens/s, of plain decoding")
    axes.set_xticks(list(draft.best), labels=map(str, draft.best))
    axes.minorticks_off()
    axes.legend(fontsize="x-small")
