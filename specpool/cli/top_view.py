"""The numbers that `specpool top` shows, from one look at a server and the one before. Pure."""

from dataclasses import dataclass

from specpool.cli.activity import Activity, activity
from specpool.cli.equivalence import equivalence_name
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Pool:
    """Load of the pool and its queue; `draft_length` and `max_model_len` bound its requests."""

    running: int
    max_num_seqs: int
    queued: int
    queue_size: int
    policy: str
    draft_length: int | None
    """Draft tokens per round of a request that sets no number; None: as many as save time."""
    max_model_len: int | None
    """None while the target is not known."""


@dataclass(frozen=True)
class Plan:
    """What the server expects of the draft lengths that it chooses."""

    draft_steps: int
    expected_tokens_per_s: float
    plain_tokens_per_s: float


@dataclass(frozen=True)
class Worker:
    """One worker. What is not known is None, or ""."""

    role: str
    address: str
    state: str
    reason: str
    model: str
    device: str
    ranks: int | None
    """Processes among which the model is divided; 1 if it is not."""
    dtype: str
    """Of the weights, and the kinds in which they are kept if these are others."""
    equivalence: str
    notes: tuple[str, ...]
    slots_in_use: int | None
    slots_total: int | None
    kv_usage: float | None
    """Share of the KV cache's positions that are reserved for sequences."""
    kv_bytes: int | None
    """Size of the KV cache."""


@dataclass(frozen=True)
class View:
    """Everything that is shown of a server."""

    address: str
    version: str
    uptime_s: float
    pool: Pool
    plan: Plan
    workers: tuple[Worker, ...]
    now: Activity | None
    """Activity since the look before; None if there was none."""
    since_start: Activity


def view_of(
    address: str,
    info: pb.GetServerInfoResponse,
    models: pb.GetModelInfoResponse | None,
    earlier: pb.GetServerInfoResponse | None,
) -> View:
    """The view of a server at `address`. `models`: None while the target is not known."""
    plan = info.speculation
    fixed = models is not None and models.HasField("num_speculative_tokens")
    workers = [("target", info.target), *([("draft", info.draft)] if info.HasField("draft") else [])]
    return View(
        address=address,
        version=info.version,
        uptime_s=info.uptime_s,
        pool=Pool(
            running=info.running,
            max_num_seqs=info.max_num_seqs,
            queued=info.queued,
            queue_size=info.queue_size,
            policy=info.policy,
            draft_length=models.num_speculative_tokens if models is not None and fixed else None,
            max_model_len=models.max_model_len if models is not None else None,
        ),
        plan=Plan(plan.draft_steps, plan.expected_tokens_per_s, plan.plain_tokens_per_s),
        workers=tuple(_worker(role, state) for role, state in workers),
        now=activity(info, earlier) if earlier is not None else None,
        since_start=activity(info),
    )


def _dtype(model: common_pb2.ModelInfo) -> str:
    others = sorted(kind for kind in model.weight_kinds if kind != model.dtype)
    return f"{model.dtype}, kept as {', '.join(others)}" if others else model.dtype


def _worker(role: str, state: pb.WorkerState) -> Worker:
    model, load = state.model, state.load if state.HasField("load") else None
    positions = load.kv_positions_total if load is not None else 0
    return Worker(
        role=role,
        address=state.address,
        state=state.state,
        reason=state.reason,
        model=model.model,
        device=model.device,
        ranks=max(1, model.tensor_parallel) if state.HasField("model") else None,
        dtype=_dtype(model),
        equivalence=equivalence_name(model) if state.HasField("model") else "",
        notes=tuple(model.notes),
        slots_in_use=load.slots_in_use if load is not None else None,
        slots_total=load.slots_total if load is not None else None,
        kv_usage=1 - load.kv_positions_free / positions if load is not None and positions else None,
        kv_bytes=load.kv_bytes_total or None if load is not None else None,
    )
