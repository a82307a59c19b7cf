"""Plots of results, one function per benchmark, from the rows that it prints."""

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]
TICKS_MS = (10, 20, 50, 100, 200, 500)


def by_count(axes: Axes, counts: Iterable[int], xlabel: str, ylabel: str, **limits: Any) -> None:
    """Label axes whose logarithmic x axis has a tick for each count, and add the legend."""
    ticks = sorted(set(counts))
    axes.set(xscale="log", xlabel=xlabel, ylabel=ylabel, **limits)
    axes.set_xticks(ticks, labels=map(str, ticks))
    axes.minorticks_off()
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")


def realign_figure(rows: list[Row]) -> Figure:
    """Speed relative to plain decoding, and the share of realignment, by batch."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    speed, share = figure.subplots(1, 2)
    for kind in dict.fromkeys(row["decoding"] for row in rows):
        selected = [row for row in rows if row["decoding"] == kind]
        batches = [row["batch"] for row in selected]
        style = {"marker": "o", "linestyle": "--" if "padded" in kind else "-"}
        if kind != "plain":
            speed.plot(batches, [row["of_plain"] for row in selected], label=kind, **style)
        if "/" in kind:
            share.plot(batches, [100 * row["realign_share"] for row in selected], label=kind, **style)
    speed.axhline(1, color="gray", linewidth=1)
    counts = [row["batch"] for row in rows]
    by_count(speed, counts, "batch", "tokens/s, relative to plain decoding here", ylim=(0, None))
    by_count(share, counts, "batch", "realignment, % of a round")
    return figure


def throughput_figure(rows: list[Row]) -> Figure:
    """Speed relative to plain decoding by concurrency, with a line for each kind; bars span the repeats."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    mixed = [row for row in rows if row["category"] is None and row["kind"] != "plain"]
    for kind in dict.fromkeys(row["kind"] for row in mixed):
        selected = [row for row in mixed if row["kind"] == kind]
        ratios = [row["ratio"] for row in selected]
        bars = [[abs(row["ratio"] - row[end]) for row in selected] for end in ("ratio_min", "ratio_max")]
        style = "o--" if kind.startswith("k") else "o-"
        axes.errorbar([row["concurrency"] for row in selected], ratios, bars, fmt=style, capsize=2, label=kind)
    axes.axhline(1, color="gray", linewidth=1)
    counts = (row["concurrency"] for row in mixed)
    by_count(axes, counts, "requests at a time", "tokens/s, relative to plain decoding", ylim=(0, None))
    return figure


def engine_figure(rows: list[Row]) -> Figure:
    """Milliseconds of plain and verify steps by sequences and cached length, with the limit and transformers."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    plain, verify = figure.subplots(1, 2)
    for color, length in enumerate(sorted({row["cached"] for row in rows})):
        selected = [row for row in rows if row["cached"] == length]
        for name, style in (("plain_ms", "-"), ("limit_ms", ":"), ("transformers_ms", "--"), ("verify_ms", "-")):
            axes = verify if name == "verify_ms" else plain
            measured = [row for row in selected if row[name] is not None]
            label = f"{length} cached" if style == "-" else None
            points = [row["sequences"] for row in measured], [row[name] for row in measured]
            axes.plot(*points, color=f"C{color}", linestyle=style, marker="o", label=label)
    plain.set(title="plain; dashed: transformers, dotted: reading all once")
    verify.set(title="verify, 4 draft tokens each")
    for axes in (plain, verify):
        by_count(axes, (row["sequences"] for row in rows), "sequences", "ms a step", yscale="log")
        axes.set_yticks(TICKS_MS, labels=map(str, TICKS_MS))
        axes.minorticks_off()
    return figure


def gpu_figure(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Steps and verifications as shares of their limit; tokens/s relative to plain decoding, by concurrency."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    steps, speed = figure.subplots(1, 2)
    rows = results.get("steps", {}).get("steps", ())
    for drafted in dict.fromkeys(row["drafted"] for row in rows):
        selected = [row for row in rows if row["drafted"] == drafted]
        names = [f"{row['sequences']}\n{row['cached']}" for row in selected]
        steps.plot(names, [row["of_limit"] for row in selected], "o", label=f"{drafted + 1} rows per sequence")
    steps.set(xlabel="sequences, cached", ylabel="limit / time of a step", ylim=(0, None))
    steps.tick_params(axis="x", labelsize="xx-small")
    runs = [row for row in results.get("pair", {}).get("runs", ()) if row["kind"] != "plain"]
    for kind in dict.fromkeys(row["kind"] for row in runs):
        selected = [row for row in runs if row["kind"] == kind]
        speed.plot([str(row["concurrency"]) for row in selected], [row["ratio"] for row in selected], "o-", label=kind)
    speed.axhline(1, color="gray", linewidth=1)
    speed.set(xlabel="requests at a time", ylabel="tokens/s, relative to plain decoding", ylim=(0, None))
    for axes, lines in ((steps, rows), (speed, runs)):
        if lines:
            axes.legend(fontsize="x-small")
    return figure


def devices_figure(rows: list[Row]) -> Figure:
    """Shares of the bounds and of the target's time, by the number of sequences."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes, counts = figure.subplots(), [row["sequences"] for row in rows]
    for measure, style in (("of_bound", "o-"), ("busy", "o--")):
        for kind in ("plain", "default"):
            shares = [row[f"{kind}_{measure}"] for row in rows]
            axes.plot(counts, shares, style, label=f"{kind}, {measure}".replace("_", " "))
    by_count(axes, counts, "requests at a time", "share", ylim=(0, 1))
    return figure


def grouping_figure(rows: list[Row], batch: int) -> Figure:
    """Hit rate and group size over the window."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    cases = ("acceptance", "min_group", "admission")
    for case in dict.fromkeys(tuple(row[name] for name in cases) for row in rows):
        selected = [row for row in rows if tuple(row[name] for name in cases) == case]
        acceptance, min_group, admission = case
        label = f"acceptance {acceptance}, groups of {min_group}+" + ", by length" * (admission == "length")
        for each, measure in zip(axes, ("same_length_hit_rate", "mean_group_size"), strict=True):
            each.plot([row["window"] for row in selected], [row[measure] for row in selected], marker="o", label=label)
    axes[0].set(xscale="log", xlabel="window, sequences", ylabel="rounds of equal length, share", ylim=(0, 1.02))
    axes[1].set(xscale="log", xlabel="window, sequences", ylabel="sequences in a round", ylim=(0, batch + 0.3))
    axes[0].legend(fontsize="small")
    return figure


def memory_figure(rows: list[Row]) -> Figure:
    """Speed over generation memory, one point per system."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        axes.plot(row["generation_mib"], row["tokens_per_s"], "o", label=row["system"])
    axes.set(xlabel="generation memory, MiB", ylabel="tokens/s", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize="x-small")
    return figure
