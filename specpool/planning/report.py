"""A plan as tables, as a sentence, and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from specpool.planning.capacity import WorkerNeeds
from specpool.planning.plan import DraftPlan, Model, Plan
from specpool.planning.scaling import other_sizes

SIGNIFICANT_DIGITS = 4


def show(plan: Plan, console: Console) -> None:
    """Prints the tables, and what is recommended."""
    for draft in plan.drafts:
        console.print(_table(draft))
    if plan.scaling is not None:
        console.print(_scaling_table(plan))
    console.print(_capacity_table(plan))
    console.print(_recommendation(plan))


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    chosen, window = plan.chosen, plan.window
    result: dict[str, Any] = _rounded(
        {
            "target": _model(plan.target),
            "drafts": [
                {
                    **_model(draft.model),
                    "agreement": draft.acceptance.agreement,
                    "acceptance_by_position": draft.acceptance.by_position,
                    "mean_acceptance_length": draft.acceptance.lengths[1:],
                    "speeds": [asdict(speed) for speed in draft.speeds],
                }
                for draft in plan.drafts
            ],
            "scaling": None if plan.scaling is None else {**asdict(plan.scaling), "agreement": _predicted(plan)},
            "recommended": {
                "draft": chosen.model.name,
                "k": {batch: speed.k for batch, speed in chosen.best.items()},
                "window": window.batch,
                "tokens_per_second": window.tokens_per_second,
                "of_plain": window.of_plain,
                "draft_workers": plan.workers.draft,
                "target_workers": plan.workers.target,
            },
            "capacity": asdict(plan.capacity),
        }
    )
    return result


def _table(draft: DraftPlan) -> Table:
    """Acceptance by draft length, and below it the predicted speed by batch."""
    lengths = draft.acceptance.lengths[1:]
    drafted = [f"k = {k}" for k in range(1, len(lengths) + 1)]
    table = Table("batch", "plain tokens/s", *drafted, "best k", "groups", "tokens/s")
    table.title = f"{draft.model.name}: agrees with {draft.acceptance.agreement:.1%} of the target's greedy tokens"
    table.caption = "for each batch: predicted tokens/s, of plain decoding"
    table.add_row("all k accepted", "", *(f"{share:.1%}" for share in draft.acceptance.by_position))
    table.add_row("mean acceptance length", "", *(f"{length:.2f}" for length in lengths), end_section=True)
    for batch, best in draft.best.items():
        plain, *others = [speed for speed in draft.speeds if speed.batch == batch]
        table.add_row(
            str(batch),
            f"{plain.tokens_per_second:.1f}",
            *(f"{speed.of_plain:.2f}" for speed in others),
            str(best.k),
            str(best.groups),
            f"{best.tokens_per_second:.1f}",
        )
    return table


def _scaling_table(plan: Plan) -> Table:
    table = Table("parameters without embeddings", "agreement", title="drafts of other sizes, by log-linear fit")
    for size, agreement in _predicted(plan).items():
        table.add_row(f"{size:,}", f"{agreement:.1%}")
    return table


def _capacity_table(plan: Plan) -> Table:
    """Memory of a cell's workers."""
    capacity, positions = plan.capacity, plan.terms.positions
    table = Table("worker", "weights", "activations", "slots", "a slot", "KV cache", "on the device", "pod's memory")
    length = f"{positions or plan.target.memory.longest} positions"
    table.title = f"a cell: one target and one draft worker, {capacity.slots} sequences of {length} at a time"
    for model, needs in ((plan.target, capacity.target), (plan.chosen.model, capacity.draft)):
        table.add_row(model.name, *_needs_row(model, needs, capacity.slots))
    wanted = plan.terms.throughput
    total = capacity.cells * plan.window.tokens_per_second
    if wanted is not None:
        table.caption = f"{_count(capacity.cells, 'cell')} for {wanted:g} tokens/s: {total:.1f} tokens/s predicted"
    return table


def _needs_row(model: Model, needs: WorkerNeeds, slots: int) -> list[str]:
    memory = model.memory
    figures = (memory.weights, memory.activations, needs.slot_bytes, needs.kv_bytes, needs.device_bytes)
    weights, activations, slot, kv, device = (f"{count / 2**20:,.1f} MiB" for count in figures)
    pod = f"{needs.request_bytes / 2**30:.1f} to {needs.limit_bytes / 2**30:.1f} GiB"
    return [weights, activations, str(slots), slot, kv, device, pod]


def _recommendation(plan: Plan) -> str:
    window, workers = plan.window, plan.workers
    speed = f"window {window.batch}: {window.tokens_per_second:.1f} tokens/s"
    if window.k == 0:
        return f"{speed}, by plain decoding: no draft length is faster there"
    counts = f"{_count(workers.draft, 'draft worker')} per {_count(workers.target, 'target worker')}"
    parts = ", each with a part of the sequences" if workers.draft > 1 else ""
    drafting = f"{window.of_plain:.2f} of plain decoding, with k = {window.k} of {plan.chosen.model.name}"
    return f"{speed}, {drafting}; {counts}{parts}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number > 1)


def _predicted(plan: Plan) -> dict[int, float]:
    assert plan.scaling is not None
    sizes = other_sizes([draft.model.parameters for draft in plan.drafts], plan.target.parameters)
    return {size: plan.scaling(size) for size in sizes}


def _model(model: Model) -> dict[str, Any]:
    return {name: value for name, value in asdict(model).items() if name != "tokenizer_fingerprint"}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value
