"""Output formats of a plan: JSON, a plot, and values of the Helm chart in deploy/helm/specpool."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool.drafting.plans import DraftMethod
from specpool.engine.config.options import FLOAT32, INT8, MTP
from specpool.planning.plan import DraftPlan, Plan, WorkerNeeds
from specpool.planning.prediction import Model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIGNIFICANT_DIGITS = 4
MIB = 2**20
BUSY = 0.75
"""Window utilization at which an autoscaler adds a cell."""


def as_json(plan: Plan) -> dict[str, Any]:
    """Convert the plan to plain data."""
    chosen, window = plan.chosen, plan.window
    scaling = plan.scaling and {**asdict(plan.scaling), "agreement": plan.agreement_of_other_sizes()}
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
                    "sources": [asdict(source) for source in draft.sources],
                }
                for draft in plan.drafts
            ],
            "scaling": scaling,
            "recommended": {
                "draft": chosen.model.name,
                "k": {batch: speed.k for batch, speed in chosen.best.items()},
                "choices": {batch: asdict(choice) for batch, choice in chosen.choices.items()},
                "window": window.batch,
                "method": plan.method,
                "tokens_per_second": window.tokens_per_second,
                "of_plain": window.of_plain,
                "draft_workers": plan.workers.draft,
                "target_workers": plan.workers.target,
                "colocated": plan.is_colocated,
                "separate_tokens_per_second": chosen.best_separate(window.batch),
            },
            "next_worker": {**asdict(plan.next_worker), "best": plan.next_worker.best},
            "capacity": asdict(plan.capacity),
        }
    )
    return result


def _model(model: Model) -> dict[str, Any]:
    return {name: value for name, value in asdict(model).items() if name != "tokenizer_fingerprint"}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value


def plan_figure(plan: Plan) -> "Figure":
    """Plot speed-up over batch for every k, one plot per draft, and the fit of agreement over size if there is one."""
    from matplotlib.figure import Figure  # an optional dependency

    plots = len(plan.drafts) + (plan.scaling is not None)
    figure = Figure(figsize=(4.8 * plots, 3.8), layout="constrained")
    all_axes = figure.subplots(1, plots, squeeze=False)[0]
    for axes, draft in zip(all_axes, plan.drafts, strict=False):
        _plot_speed_up(axes, draft)
    if plan.scaling is not None:
        sizes = [draft.model.size for draft in plan.drafts]
        axes, spread = all_axes[-1], max(sizes) / min(sizes)
        line = [min(sizes) * spread ** (i / 50) for i in range(-10, 61)]
        axes.plot(sizes, [draft.acceptance.agreement for draft in plan.drafts], "o")
        axes.plot(line, [plan.scaling(size) for size in line], "--", color="gray")
        axes.set(xscale="log", xlabel="draft parameters without embeddings", ylabel="agreement", ylim=(0, 1))
    return figure


def _plot_speed_up(axes: "Axes", draft: DraftPlan) -> None:
    for k in range(1, len(draft.pair.lengths)):
        speeds = [speed for speed in draft.speeds if speed.k == k]
        axes.plot([speed.batch for speed in speeds], [speed.of_plain for speed in speeds], marker="o", label=f"k = {k}")
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(title=Path(draft.model.name).name, xscale="log", xlabel="batch", ylim=(0, None))
    axes.set_ylabel("predicted tokens/s relative to plain decoding")
    axes.set_xticks(list(draft.best), labels=map(str, draft.best))
    axes.minorticks_off()
    axes.legend(fontsize="x-small")


def helm_values(plan: Plan) -> str:
    """Write YAML values, with comments that explain the numbers."""
    capacity, window = plan.capacity, plan.window
    target, draft = (" ".join(model.device.split()) for model in (plan.target, plan.chosen.model))
    return f"""\
# Written by `specpool plan`. Predicted for each cell: {window.tokens_per_second:.1f} tokens/s with {window.batch} \
sequences at a time,
# {window.of_plain:.2f}x plain decoding. Measured on: {target} and {draft}.
cells: {capacity.cells}

coordinator:
  settings:
    max_num_seqs: {capacity.slots}
    max_batch_size: {capacity.slots}
    draft_method: {plan.method or DraftMethod.BEST}

{_pair_values(plan) if plan.is_colocated else _separate_values(plan)}
autoscaling:
  runningPerCell: {max(1, math.floor(BUSY * capacity.slots))}
"""


def _separate_values(plan: Plan) -> str:
    return f"""\
{_worker_values("target", plan, plan.target, plan.capacity.target)}
{_worker_values("draft", plan, plan.chosen.model, plan.capacity.draft)}"""


def _pair_values(plan: Plan) -> str:
    """Return the values of a target worker that carries the draft. Its pod has memory for both."""
    draft = plan.chosen.model
    return f"""\
{_worker_values("target", plan, plan.target, plan.capacity.target, plan.capacity.draft)}
draft:
  enabled: true
  colocated: true
  model: {json.dumps(draft.name)}
  revision: {json.dumps(draft.revision or "")}
"""


def _worker_values(role: str, plan: Plan, model: Model, needs: WorkerNeeds, carried: WorkerNeeds | None = None) -> str:
    """Return the values of a worker. `carried`: memory of the draft that it carries."""
    memory, slots = model.memory, plan.capacity.slots
    positions = plan.terms.positions or plan.target.memory.slot_positions(None)
    is_chosen = not model.on_gpu and model.activations in (FLOAT32, INT8)  # other passes use the dtype
    activations = f"\n    activations: {model.activations}" if is_chosen else ""
    enabled = f"\n  enabled: {json.dumps(plan.capacity.drafts)}" if role == "draft" else ""
    states = f" and {_mi(memory.state_per_slot)}B of recurrent states per sequence" if memory.state_per_slot else ""
    revision, target_model = model.revision, ""
    if model.name == MTP:
        revision, target_model = plan.target.revision, f"\n    target_model: {json.dumps(plan.target.name)}"
    request, limit, draft_memory = needs.request_bytes, needs.limit_bytes, ""
    if carried is not None:
        request, limit = request + carried.request_bytes, limit + carried.limit_bytes
        draft_memory = f"\n    draft_kv_memory: {_mi(carried.kv_bytes)}B"
    return f"""\
# {_mi(needs.device_bytes)}B on the device: weights {_mi(memory.weights)}B, activations \
{_mi(memory.activations)}B, KV cache{" with recurrent states" if states else ""} {_mi(needs.kv_bytes)}B
# ({slots} sequences of {positions} positions, {memory.kv_per_position} bytes each{states}, or one full-length \
sequence).
{role}:{enabled}
  model: {json.dumps(model.name)}
  revision: {json.dumps(revision or "")}
  gpus: {int(model.on_gpu)}
  device: {"cuda" if model.on_gpu else "cpu"}
  settings:
    dtype: {model.dtype}{activations}{target_model}
    max_model_len: {memory.max_model_len}
    max_sequences: {slots}
    kv_memory: {_mi(needs.kv_bytes)}B{draft_memory}
  resources:
    requests:
      memory: {_mi(request)}
    limits:
      memory: {_mi(limit)}
"""


def _mi(size: int) -> str:
    """Format a size as a Kubernetes quantity, rounded up. With "B" appended, it is a valid worker setting."""
    return f"{math.ceil(size / MIB)}Mi"
