"""Tables of benchmarks that run only now and then: their results are older than those of `COMMANDS`."""

from typing import Any

from benchmarks.figures.blocks import table
from benchmarks.figures.pages import Results

Row = dict[str, Any]


def throughput(results: Results) -> str:
    """Ratios of all draft methods to plain decoding, by requests in flight."""
    rows = {(row["concurrency"], row["kind"]): row for row in results["throughput"]["rows"] if row["category"] is None}
    kinds = {"k2": "k = 2", "adaptive": "adaptive", "ngram": "prompt lookup", "best": "both (default)"}
    lengths, times = ("adaptive", "ngram", "best"), ("plain", "best")
    body = [
        (
            *(str(n), f"{rows[n, 'plain']['tokens_per_s']:.1f}"),
            *(f"{rows[n, kind]['ratio']:.2f}x ({rows[n, kind]['ratio_min']:.2f})" for kind in kinds),
            " / ".join(f"{rows[n, kind]['acceptance_length']:.2f}" for kind in lengths),
            " / ".join(f"{rows[n, kind]['token_p50_ms']:.1f}" for kind in times),
        )
        for n in dict.fromkeys(n for n, _ in rows)
    ]
    length = "mean acceptance length: adaptive / lookup / both"
    latency = "ms a token, p50: plain / both"
    return table(("at a time", "plain tokens/s", *kinds.values(), length, latency), *body)


def realign(results: Results) -> str:
    """Tokens/s of every grouping policy and layout by batch, and the share of realignment."""
    rows = {(row["decoding"], row["batch"]): row for row in results["realign"]["rows"]}
    batches = list(dict.fromkeys(batch for _, batch in rows))
    body = [
        (kind, *(_speed(rows[kind, batch]) for batch in batches), _realignment([rows[kind, n] for n in (1, 8, 16)]))
        for kind in dict.fromkeys(kind for kind, _ in rows)
    ]
    headings = ("decoding", *(f"batch {batch}" for batch in batches), "realignment at batch 1 / 8 / 16, % of a round")
    return table(headings, *body)


def _speed(row: Row) -> str:
    ratio = "" if row["decoding"] == "plain" else f" ({row['of_plain']:.2f}x)"
    return f"{row['tokens_per_s']:.1f}{ratio}"


def _realignment(rows: list[Row]) -> str:
    return " / ".join(f"{100 * row['realign_share']:.2f}" for row in rows if row["realign_share"] is not None)


def vllm(results: Results) -> str:
    """Ratios of every kind of drafts to plain vLLM, by concurrency."""
    rows = {(row["concurrency"], row["drafts"]): row for row in results["vllm"]["rows"]}
    kinds = [kind for kind in dict.fromkeys(kind for _, kind in rows) if kind != "plain"]
    body = [
        (str(n), f"{rows[n, 'plain']['tokens_per_s']:.1f}", *(_spread(rows[n, kind]) for kind in kinds))
        for n in dict.fromkeys(n for n, _ in rows)
    ]
    return table(("concurrency", "plain, tokens/s", *kinds), *body)


def _spread(row: Row) -> str:
    return f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"


def attacks(results: Results) -> str:
    """What each attack costs a well-behaved client: times in ms, as multiples of those in a quiet minute."""
    columns = ("median", "p95", "new_median", "new_p95")
    body = [
        (row["attack"], *(f"{row[f'{name}_ms']:.0f} ({row[f'{name}_ratio']:.2f}x)" for name in columns))
        for row in results["attacks"]["rows"]
        if row["attack"] != "none"
    ]
    return table(("attack", "median ms", "95%", "new connection: median ms", "95%"), *body)


def structured(results: Results) -> str:
    """Tokens/s of constrained answers by requests in flight, here and in vLLM."""
    found = results["structured"]
    rows = {(row["concurrency"], row["kind"]): row for row in found["rows"]}
    peer = {(row["concurrency"], row["kind"]): row for row in found["vllm"]}
    body = [
        (
            *(str(n), f"{rows[n, 'plain']['tokens_per_s']:.1f}"),
            *(f"{rows[n, kind]['ratio']:.2f}x ({rows[n, kind]['ratio_min']:.2f})" for kind in ("default", "lookup")),
            *(f"{peer[n, kind]['tokens_per_s']:.1f}" for kind in ("plain", "ngram")),
        )
        for n in dict.fromkeys(n for n, _ in rows)
    ]
    headings = ("at a time", "plain tokens/s", "default", "prompt lookup", "vLLM tokens/s", "vLLM n-gram tokens/s")
    return table(headings, *body)


def memory(results: Results) -> str:
    """Generation memory and speed, by memory limit."""
    found = results["memory"]
    body = [
        (row["system"], f"{row['generation_mib']:.1f}", f"{row['tokens_per_s']:.1f}", f"{row['of_first']:.2f}")
        for row in found["rows"]
    ]
    return table(("system", "generation memory, MiB", "tokens/s", "of no limit"), *body)


RECORDS = {
    "attacks": attacks, "throughput": throughput, "realign": realign, "vllm": vllm, "structured": structured,
    "memory": memory,
}  # fmt: skip
