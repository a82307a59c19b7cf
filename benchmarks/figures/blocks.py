"""The text of every block of figures, from the results."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.figures.pages import COMMANDS, Results
from specpool.cli.demo import DemoSettings

Rows = Iterable[tuple[str, ...]]
DEMOS = {1: "demo_1", 4: "demo", 8: "demo_8"}
"""Results of the demo by requests in flight."""


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row has the headings."""
    head, *others = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def peers(results: Results) -> str:
    """How much faster plain decoding is than llama.cpp, from the lowest to the highest ratio."""
    ratios = _peer_ratios(results).values()
    return f"{min(ratios):.1f} to {max(ratios):.1f} times"


def gains(results: Results) -> str:
    """Ratios of the default to plain decoding."""
    ratios = default_ratios(results)
    return f"{_ratios(ratios.values())} the speed of plain decoding for {_list(ratios)} requests at a time"


def _peer_ratios(results: Results) -> dict[int, float]:
    """Median ratio of plain decoding to llama.cpp, by requests in flight."""
    return {row["concurrency"]: row["ratio"] for row in results["llamacpp"]["rows"] if row["system"] == "plain"}


def default_ratios(results: Results) -> dict[int, float]:
    """Median ratio of the default to plain decoding, by requests in flight."""
    rows = results["default"]["rows"]
    return {row["concurrency"]: row["ratio"] for row in rows if row["kind"] == "best" and row["category"] is None}


def measured(results: Results) -> str:
    """Where and when the current results were measured. ValueError: on different machines."""
    runs = [results[name]["run"] for name in COMMANDS if name != "monitoring"]  # its pictures show their date
    machines = {run["machine"] for run in runs}
    if len(machines) > 1:
        raise ValueError(f"results come from different machines: {', '.join(sorted(machines))}")
    dates = sorted({run["date"] for run in runs})
    when = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
    versions = runs[0]["versions"]
    software = f"Specpool {versions['specpool']}, torch {versions['torch'].partition('+')[0]}"
    return f"Measured {when} on {machines.pop()} with the embedded pair, {software}."


def until_first_token(results: Results) -> str:
    """Seconds from `specpool up` to the first token, on a new machine and later."""
    first, later = (_start_seconds(results[name]) for name in ("start_first", "start"))
    return f"{later:.0f} s, or {first:.0f} s on a new machine"


def _start_seconds(result: dict[str, Any]) -> float:
    return next(float(row["median"]) for row in result["seconds"] if row["until"] == "first token")


def summary(results: Results) -> str:
    return table(("measure", "figure"), *((measure, figure) for measure, figure, _ in _summary(results)))


def summary_with_commands(results: Results) -> str:
    """The table of the README, with the command behind each row."""
    rows = ((measure, figure, f"`{COMMANDS[name]}`") for measure, figure, name in _summary(results))
    return table(("measure", "figure", "command"), *rows)


def _summary(results: Results) -> Rows:
    """Rows of measure, figure, and the name of the result."""
    equality, demo, ratios, to_peer = (
        results["equality"],
        results["demo"],
        default_ratios(results),
        _peer_ratios(results),
    )
    prompts = equality["prompts"]
    yield (
        f"token ids equal to decoding alone with `k = 0` ({prompts} chats, {equality['max_tokens']} tokens, batches of "
        f"{equality['concurrency']}, k = {equality['num_speculative_tokens']})",
        f"{round(equality['exact_match_alone'] * prompts)} of {prompts}",
        "equality",
    )
    yield (
        f"plain decoding against llama.cpp with the same file, {_list(to_peer)} requests at a time",
        _ratios(to_peer.values()),
        "llamacpp",
    )
    yield (
        f"default speculation against plain decoding, answers of up to {results['default']['max_tokens']} tokens, "
        f"{_list(ratios)} requests at a time",
        _ratios(ratios.values()),
        "default",
    )
    default, plain, peer = (_sustained(results, kind) for kind in ("default", "plain", "llama.cpp"))
    shortest, longest = results["sustained"]["lengths"]
    speeds, gaps = (
        " and ".join(_list(round(row[name]) for row in rows.values()) for rows in (plain, default))
        for name in ("tokens_per_s", "longest_gap_ms")
    )
    load = f"clients that stream answers of {shortest} to {longest} tokens for one minute"
    yield f"{_list(plain)} {load}: plain and default", f"{speeds} tokens/s", "sustained"
    yield "the same: longest gap between two messages of an answer", f"{gaps} ms", "sustained"
    ratios_to_peer = [row["tokens_per_s"] / peer[clients]["tokens_per_s"] for clients, row in plain.items()]
    yield "the same: plain against llama.cpp's server", _ratios(ratios_to_peer), "sustained"
    for concurrency, name in DEMOS.items():
        yield _demo(results[name], concurrency), _speeds(results[name]), name
    assert all(results[name]["exact_match"] == demo["exact_match"] == 1 for name in DEMOS.values())
    yield "seconds from `specpool up` to the first token", f"{_start_seconds(results['start']):.1f}", "start"
    first = f"{_start_seconds(results['start_first']):.1f}"
    yield "the same on a new machine: download, compilation and self-test included", first, "start_first"
    cost = results["coordinator"]
    yield (
        f"coordinator and wire, per round of {cost['sequences']} sequences, k = {cost['num_speculative_tokens']}, "
        "fake workers",
        f"{cost['round_ms']:.2f} ms, of which {cost['schedule_ms']:.2f} ms coordinator",
        "coordinator",
    )


def _demo(result: dict[str, Any], concurrency: int) -> str:
    chats = f"{result['prompts']} chats of up to {DemoSettings.model_fields['max_tokens'].default} tokens"
    return f"{chats} on a freshly started service, {concurrency} at a time: plain and default"


def _speeds(result: dict[str, Any]) -> str:
    plain, default = result["plain_tokens_per_s"], result["speculative_tokens_per_s"]
    return f"{plain:.1f} and {default:.1f} tokens/s, {result['speedup']:.2f}x"


def by_concurrency(results: Results) -> str:
    """Ratios to plain decoding with their minimum."""
    rows = [row for row in results["default"]["rows"] if row["category"] is None]
    kinds = {"best": "both (default)", "adaptive": "draft model"}
    cells = {(row["kind"], row["concurrency"]): f"{row['ratio']:.2f}x ({row['ratio_min']:.2f})" for row in rows}
    body = [(str(n), *(cells[kind, n] for kind in kinds)) for n in default_ratios(results)]
    return table(("at a time", *kinds.values()), *body)


def llamacpp(results: Results) -> str:
    """Tokens/s of llama.cpp and of the service, with ratios to llama.cpp."""
    rows = results["llamacpp"]["rows"]
    found = {(row["system"], row["concurrency"]): row for row in rows}

    def cell(system: str, concurrency: int) -> str:
        row = found[system, concurrency]
        return f"{row['tokens_per_s']:.1f} ({row['ratio']:.2f})"

    body = [
        (str(n), f"{found['llama.cpp', n]['tokens_per_s']:.1f}", cell("plain", n), cell("default", n))
        for n in dict.fromkeys(row["concurrency"] for row in rows)
    ]
    return table(("at once", "llama.cpp", "plain", "default"), *body)


def sustained(results: Results) -> str:
    """Speed, gaps and shares of a sustained load."""

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield from (str(row["clients"]), row["decoding"], f"{row['tokens_per_s']:.1f}")
        yield from (f"{row[f'{name}_ms']:.1f}" for name in ("gap_p50", "gap_p99", "longest_gap"))
        yield from ("" if row[name] is None else f"{row[name]:g}%" for name in ("realign_%", "cached_%"))

    heads = (
        "clients",
        "decoding",
        "tokens/s",
        "gap ms: median",
        "99%",
        "longest",
        "realignment",
        "cached prompt tokens",
    )
    return table(heads, *(tuple(cells(row)) for row in results["sustained"]["rows"]))


def _sustained(results: Results, kind: str) -> dict[int, dict[str, Any]]:
    """Rows of the sustained load by number of clients."""
    return {row["clients"]: row for row in results["sustained"]["rows"] if row["decoding"] == kind}


def attacks(results: Results) -> str:
    """What each attack costs a well-behaved client: times in ms, as multiples of those in a quiet minute."""
    columns = ("median", "p95", "new_median", "new_p95")
    body = [
        (row["attack"], *(f"{row[f'{name}_ms']:.0f} ({row[f'{name}_ratio']:.2f}x)" for name in columns))
        for row in results["attacks"]["rows"]
        if row["attack"] != "none"
    ]
    return table(("attack", "median ms", "95%", "new connection: median ms", "95%"), *body)


def _list(numbers: Iterable[int]) -> str:
    return " / ".join(map(str, numbers))


def _ratios(ratios: Iterable[float]) -> str:
    return " / ".join(f"{ratio:.2f}x" for ratio in ratios)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "peers": peers,
    "gains": gains,
    "measured": measured,
    "until_first_token": until_first_token,
    "summary": summary,
    "summary_with_commands": summary_with_commands,
    "by_concurrency": by_concurrency,
    "llamacpp": llamacpp,
    "sustained": sustained,
    "attacks": attacks,
}
