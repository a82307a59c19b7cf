"""Plots of what benchmarks measured."""

from typing import Any

from matplotlib.figure import Figure


def realign_figure(rows: list[dict[str, Any]]) -> Figure:
    """Speed against plain decoding, and the share of realignment, by batch."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    speed, share = figure.subplots(1, 2)
    kinds = dict.fromkeys(row["decoding"] for row in rows)
    for kind in kinds:
        mine = [row for row in rows if row["decoding"] == kind]
        batches = [row["batch"] for row in mine]
        style = {"marker": "o", "linestyle": "--" if "padded" in kind else "-"}
        if kind != "plain":
            speed.plot(batches, [row["of_plain"] for row in mine], label=kind, **style)
        if "/" in kind:
            share.plot(batches, [100 * row["realign_share"] for row in mine], label=kind, **style)
    speed.axhline(1, color="gray", linewidth=1)
    speed.set(xscale="log", xlabel="batch", ylabel="tokens/s, of plain decoding here", ylim=(0, None))
    share.set(xscale="log", xlabel="batch", ylabel="realignment, % of a round", ylim=(0, None))
    batches = sorted({row["batch"] for row in rows})
    for axes in (speed, share):
        axes.set_xticks(batches, labels=map(str, batches))
        axes.minorticks_off()
        axes.legend(fontsize="x-small")
    return figure
