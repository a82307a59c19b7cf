"""Tables of a plan, and its recommendation."""

from rich.console import Console
from rich.table import Table

from specpool.drafting.plans import DraftMethod
from specpool.planning.next_worker import NextWorker
from specpool.planning.plan import METHODS, DraftPlan, Plan
from specpool.protocol.worker_info import readable_name

MIB, GIB = 2**20, 2**30
SOURCES = {
    DraftMethod.MODEL: "draft model alone",
    DraftMethod.NGRAM: "prompt lookup alone",
    DraftMethod.BEST: "both, the default",
}
SETTINGS = {
    DraftMethod.MODEL: "--draft-method model",
    DraftMethod.NGRAM: "--draft none",
    DraftMethod.BEST: "--draft-method best, the default",
}


def show(plan: Plan, console: Console) -> None:
    """Print the tables and the recommendation."""
    for draft in plan.drafts:
        console.print(_speed_table(draft))
        if draft.sources:
            console.print(_source_table(draft))
    if plan.scaling is not None:
        table = Table("parameters without embeddings", "agreement", title="drafts of other sizes, by log-linear fit")
        for size, agreement in plan.agreement_of_other_sizes().items():
            table.add_row(f"{size:,}", f"{agreement:.1%}")
        console.print(table)
    console.print(_capacity_table(plan))
    console.print(_workers_table(plan.next_worker))
    console.print(recommendation(plan))


def _speed_table(draft: DraftPlan) -> Table:
    lengths = draft.acceptance.lengths[1:]
    columns = [f"k = {k}" for k in range(1, len(lengths) + 1)]
    last_column = "draft worker" if draft.pair.carried else "groups"
    table = Table("batch", "plain tokens/s", *columns, "best k", "tokens/s", last_column)
    table.title = (
        f"{readable_name(draft.model.name)}: agrees with {draft.acceptance.agreement:.1%} of the target's greedy tokens"
    )
    table.caption = "k columns: predicted speed with k draft tokens in each round, relative to plain decoding"
    if draft.pair.carried:
        table.caption += ", if the target worker carries the draft; last column: tokens/s with a draft worker instead"
    table.add_row("all k accepted", "", *(f"{share:.1%}" for share in draft.acceptance.by_position))
    table.add_row("tokens per round", "", *(f"{length:.2f}" for length in lengths), end_section=True)
    for batch, best in draft.best.items():
        plain, *others = [speed for speed in draft.speeds if speed.batch == batch]
        ratios = [f"{speed.of_plain:.2f}" for speed in others]
        first, last = f"{plain.tokens_per_second:.1f}", f"{best.tokens_per_second:.1f}"
        separate = draft.best_separate(batch)
        other = str(best.groups) if separate is None else f"{separate:.1f}"
        table.add_row(str(batch), first, *ratios, str(best.k), last, other)
    return table


def _source_table(draft: DraftPlan) -> Table:
    """Return the speed of each draft method by batch."""
    table = Table("requests at a time", *map(str, draft.best))
    table.title = "adaptive drafts by draft method: predicted tokens/s, and speed relative to plain decoding"
    table.add_row("plain decoding", *(f"{speed.tokens_per_second:.1f}" for speed in draft.speeds if not speed.k))
    by_method = {method: [each for each in draft.sources if each.method is method] for method in METHODS}
    for method, name in SOURCES.items():
        cells = (f"{each.tokens_per_second:.1f} {each.of_plain:.2f}x" for each in by_method[method])
        table.add_row(f"{name} ({method})", *cells, end_section=method is DraftMethod.BEST)
    both = by_method[DraftMethod.BEST]
    table.add_row("both: tokens per round", *(f"{each.tokens_per_round:.2f}" for each in both))
    table.add_row("  from the draft model", *(f"{each.from_model:.2f}" for each in both))
    table.add_row("  from prompt lookup", *(f"{each.from_lookup:.2f}" for each in both))
    return table


def _capacity_table(plan: Plan) -> Table:
    capacity, positions = plan.capacity, plan.terms.positions or plan.target.memory.slot_positions(None)
    table = Table("worker", "weights", "activations", "slots", "a slot", "KV cache", "on the device", "pod memory")
    workers = "one target worker that carries the draft" if plan.is_colocated else "one target and one draft worker"
    table.title = f"a cell: {workers}, {capacity.slots} sequences of {positions} positions at a time"
    for model, needs in ((plan.target, capacity.target), (plan.chosen.model, capacity.draft)):
        memory = model.memory
        sizes = (memory.weights, memory.activations, needs.slot_bytes, needs.kv_bytes, needs.device_bytes)
        weights, activations, slot, kv, device = (f"{size / MIB:,.1f} MiB" for size in sizes)
        pod = f"{needs.request_bytes / GIB:.1f} to {needs.limit_bytes / GIB:.1f} GiB"
        table.add_row(readable_name(model.name), weights, activations, str(capacity.slots), slot, kv, device, pod)
    if (required := plan.terms.throughput) is not None:
        total = capacity.cells * plan.window.tokens_per_second
        table.caption = f"{count_of(capacity.cells, 'cell')} for {required:g} tokens/s: {total:.1f} tokens/s predicted"
    return table


def _workers_table(workers: NextWorker) -> Table:
    table = Table("", "targets", "drafts", "k", "tokens/s", "", "target busy", "draft busy", "bottleneck")
    table.title = f"the next worker: {workers.concurrency} requests at a time, each worker on its own device"
    rows = {"now": workers.now, "+1 target": workers.add_target, "+1 draft": workers.add_draft}
    for name, speed in rows.items():
        gain = "" if speed is workers.now else f"{workers.gain(speed) - 1:+.0%}"
        busy = f"{speed.target_busy:.0%}", f"{speed.draft_busy:.0%}"
        counts = str(speed.targets), str(speed.drafts), str(speed.k)
        table.add_row(name, *counts, f"{speed.tokens_per_second:.1f}", gain, *busy, speed.bottleneck)
    table.caption = (
        f"add a {workers.best} worker next" if workers.best else "neither pays: the workers wait for requests"
    )
    return table


def recommendation(plan: Plan) -> str:
    """Describe the recommended batch, other batches, and the setting to use."""
    window = plan.window
    speed = f"window {window.batch}: {window.tokens_per_second:.1f} tokens/s, "
    if not plan.chosen.sources:
        return speed + _model_drafts(plan)
    if plan.method is None:
        return f"{speed}plain decoding: neither prompt lookup nor {_draft(plan)} is faster"
    if window.method is None:
        lines = [f"{speed}plain decoding is fastest there"]
    else:
        lines = [f"{speed}{window.of_plain:.2f}x plain decoding by {_source(plan, window.method)}"]
    others = [each for each in plan.chosen.choices.values() if each.method is not None and each.batch != window.batch]
    if others:
        gains = (f"{each.of_plain:.2f}x at {each.batch} by {_source(plan, each.method)}" for each in others)
        lines.append(f"other batches: {', '.join(gains)}")
    lines.append(f"recommended: {SETTINGS[plan.method]}: {_source(plan, plan.method)}{_workers(plan)}")
    return "\n".join(lines)


def _model_drafts(plan: Plan) -> str:
    """Describe the speed of model drafts alone, which is all that is known of running workers."""
    window = plan.window
    if window.k == 0:
        return "plain decoding: no number of draft tokens is faster; prompt lookup is not predicted without prompts"
    return f"{window.of_plain:.2f}x plain decoding, k = {window.k} with {_draft(plan)}{_workers(plan)}"


def _draft(plan: Plan) -> str:
    name = f" {readable_name(plan.chosen.model.name)}" if len(plan.drafts) > 1 else ""
    return f"the draft model{name}"


def _source(plan: Plan, method: DraftMethod | None) -> str:
    match method:
        case DraftMethod.NGRAM:
            return "prompt lookup"
        case DraftMethod.MODEL:
            return _draft(plan)
        case _:
            return f"prompt lookup and {_draft(plan)}"


def _workers(plan: Plan) -> str:
    """Say how many workers to run for a draft model."""
    workers, batch = plan.workers, plan.window.batch
    if not plan.capacity.drafts:
        return ""
    if (separate := plan.chosen.best_separate(batch)) is not None:
        instead = f" ({separate:.1f} tokens/s with a draft worker)" if plan.window.k else ""
        return f", which the target worker carries{instead}"
    if not workers.draft:
        return ""
    counts = f"{count_of(workers.draft, 'draft worker')} per {count_of(workers.target, 'target worker')}"
    return f"; {counts}" + ", each with a share of the sequences" * (workers.draft > 1)


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number > 1)
