"""A plan as values of the Helm chart in deploy/helm/specpool. Pure."""

import json
import math

from specpool.planning.capacity import WorkerNeeds
from specpool.planning.plan import Model, Plan

MIB = 2**20
BUSY = 0.75
"""Share of the window that is in use in each cell when an autoscaler adds a cell."""


def helm_values(plan: Plan) -> str:
    """YAML of the values, with comments that give the figures behind them."""
    capacity, window = plan.capacity, plan.window
    positions = plan.terms.positions or plan.target.memory.longest
    return f"""\
# Written by `specpool plan`. Predicted for each cell: {window.tokens_per_second:.1f} tokens/s with {window.batch} \
sequences at a time,
# {window.of_plain:.2f} of plain decoding, with k = {window.k}. Measured on: {_device(plan.target)} and \
{_device(plan.chosen.model)}.
cells: {capacity.cells}

coordinator:
  settings:
    max_num_seqs: {capacity.slots}
    max_batch_size: {capacity.slots}

{_worker("target", plan.target, capacity.target, capacity.slots, positions)}
{_worker("draft", plan.chosen.model, capacity.draft, capacity.slots, positions, capacity.drafts)}
autoscaling:
  runningPerCell: {max(1, math.floor(BUSY * capacity.slots))}
"""


def _worker(
    role: str, model: Model, needs: WorkerNeeds, slots: int, positions: int, enabled: bool | None = None
) -> str:
    switch = "" if enabled is None else f"\n  enabled: {json.dumps(enabled)}"
    return f"""\
# {_mib(needs.device_bytes)} on the device: weights {_mib(model.memory.weights)}, activations \
{_mib(model.memory.activations)}, KV cache {_mib(needs.kv_bytes)}
# ({slots} sequences of {positions} positions, {model.memory.kv_per_position} bytes each, or one of full length).
{role}:{switch}
  model: {json.dumps(model.name)}
  revision: {json.dumps(model.revision or "")}
  gpus: {int(model.on_gpu)}
  settings:
    dtype: {model.dtype}
    max_model_len: {model.memory.max_model_len}
    max_sequences: {slots}
    kv_memory: {_mib(needs.kv_bytes)}
  resources:
    requests:
      memory: {_mi(needs.request_bytes)}
    limits:
      memory: {_mi(needs.limit_bytes)}
"""


def _device(model: Model) -> str:
    return " ".join(model.device.split())


def _mib(count: int) -> str:
    """Bytes as a setting of a worker, rounded up."""
    return f"{math.ceil(count / MIB)}MiB"


def _mi(count: int) -> str:
    """Bytes as a quantity of Kubernetes, rounded up."""
    return f"{math.ceil(count / MIB)}Mi"
