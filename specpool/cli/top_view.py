"""The numbers that `specpool top` shows, computed from a server's state and the previous one. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from specpool.cli.top_drafts import Draft, drafts_of
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

Totals: TypeAlias = dict[str, dict[str, float]]
"""Counters by group and key, including the uptime. They only grow during a server's life."""

COUNTS = ("requests", "rounds", "completion_tokens", "prompt_tokens", "cached_tokens", "cache_misses")


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of one draft method, or of all."""

    tokens_per_s: float
    acceptance_rate: float | None
    """Accepted / drafted; None if nothing was drafted."""


@dataclass(frozen=True)
class Activity:
    """Rates and shares over a period. Undefined ratios are None, or missing from their mapping."""

    seconds: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    cached_share: float | None
    """Share of prompt tokens found in the prefix cache."""
    requests_per_s: float
    rounds_per_s: float
    cache_misses_per_s: float
    finished_per_s: Mapping[str, float]
    """Finished samples by finish reason."""
    refused_per_s: Mapping[str, float]
    """Failed calls by status code."""
    drafts: Drafts
    methods: Mapping[str, Drafts]
    """By draft method."""
    tokens_per_round: float | None
    """Tokens that a sequence gains in a round, with or without draft tokens. Plain decoding gains 1."""
    drafted_share: float | None
    """Share of the sequences' rounds with draft tokens."""
    mean_acceptance_length: float | None
    """Tokens that a sequence gains in a round with draft tokens, including the bonus token."""
    draft_lengths: Mapping[int, float]
    """Share of the sequences' rounds by number of draft tokens."""
    group_sizes: Mapping[int, float]
    """Share of rounds by group size."""
    mean_group_size: float | None
    same_length_share: float | None
    """Share of same-length rounds among rounds of several sequences."""
    stage_shares: Mapping[str, float]
    """Share of each stage in the duration of rounds."""


@dataclass(frozen=True)
class Window:
    """Load of the window and its queue, and limits of requests."""

    running: int
    max_num_seqs: int
    queued: int
    queue_size: int
    policy: str
    draft_length: int | None
    """Default number of draft tokens; None: adaptive."""
    max_model_len: int | None
    """None before the target is connected."""


@dataclass(frozen=True)
class Worker:
    """One worker. Unknown values are None or ""."""

    role: str
    address: str
    is_carried: bool
    """Whether this is the draft that the target worker at this address carries."""
    state: str
    reason: str
    model: str
    device: str
    ranks: int | None
    """Number of processes that share the model."""
    dtype: str
    """Dtype of the weights, followed by quantized kinds."""
    activations: str
    """Format of the activations in GEMMs, such as "int8"."""
    equivalence: str
    notes: tuple[str, ...]
    slots_in_use: int | None
    slots_total: int | None
    kv_usage: float | None
    """Share of the KV cache's pages held by sequences."""
    kv_bytes: int | None
    """Size of the KV cache."""
    state_bytes: int
    """Bytes of recurrent states; 0 if the model has none, or before the worker is ready."""


@dataclass(frozen=True)
class View:
    """Everything that the command shows about a server."""

    address: str
    version: str
    uptime_s: float
    window: Window
    workers: tuple[Worker, ...]
    drafts: tuple[Draft, ...] = field(default=(), kw_only=True)
    """The draft models, if there are several."""
    now: Activity | None
    """Activity since the previous state; None without one."""
    since_start: Activity


def view_of(
    address: str,
    info: pb.GetServerInfoResponse,
    models: pb.GetModelInfoResponse | None,
    earlier: pb.GetServerInfoResponse | None,
) -> View:
    """Build the view of a server. `models`: None before the target is connected."""
    fixed = models is not None and models.HasField("num_speculative_tokens")
    standby = [info.standby] if info.HasField("standby") else []
    roles = {"target": info.targets, "draft": info.draft_workers, "standby": standby}
    carriers = {state.address for state in (*info.targets, *standby)}
    return View(
        address=address,
        version=info.version,
        uptime_s=info.uptime_s,
        window=Window(
            running=info.running,
            max_num_seqs=info.max_num_seqs,
            queued=info.queued,
            queue_size=info.queue_size,
            policy=info.policy,
            draft_length=models.num_speculative_tokens if models is not None and fixed else None,
            max_model_len=models.max_model_len if models is not None else None,
        ),
        workers=tuple(
            _worker(role, state, is_carried=role == "draft" and state.address in carriers)
            for role, states in roles.items()
            for state in states
        ),
        drafts=drafts_of(info, earlier),
        now=activity(info, earlier) if earlier is not None else None,
        since_start=activity(info),
    )


def equivalence_name(model: common_pb2.ModelInfo) -> str:
    """Return how closely logits agree across batches: "bitwise", "numeric", or "unspecified"."""
    return common_pb2.Equivalence.Name(model.equivalence).removeprefix("EQUIVALENCE_").lower()


def _worker(role: str, state: pb.WorkerState, is_carried: bool) -> Worker:
    model, load = state.model, state.load if state.HasField("load") else None
    positions = load.kv_positions_total if load is not None else 0
    others = sorted(kind for kind in model.weight_kinds if kind != model.dtype)
    return Worker(
        role=role,
        address=state.address,
        is_carried=is_carried,
        state=state.state,
        reason=state.reason,
        model=model.model,
        device=model.device,
        ranks=max(1, model.tensor_parallel) if state.HasField("model") else None,
        dtype=f"{model.dtype}, weights in {', '.join(others)}" if others else model.dtype,
        activations=model.activations,
        equivalence=equivalence_name(model) if state.HasField("model") else "",
        notes=tuple(model.notes),
        slots_in_use=load.slots_in_use if load is not None else None,
        slots_total=load.slots_total if load is not None else None,
        kv_usage=1 - load.kv_positions_free / positions if load is not None and positions else None,
        kv_bytes=load.kv_bytes_total or None if load is not None else None,
        state_bytes=load.state_bytes_total if load is not None else 0,
    )


def activity(later: pb.GetServerInfoResponse, earlier: pb.GetServerInfoResponse | None = None) -> Activity:
    """Compute the activity between two states, or since the server's start if there is no earlier one."""
    totals = _totals(later)
    if earlier is None:
        return _activity(totals)
    before = _totals(earlier)
    difference = {
        group: {key: value - before[group].get(key, 0.0) for key, value in values.items()}
        for group, values in totals.items()
    }
    restarted = any(value < 0 for values in difference.values() for value in values.values())
    return _activity(totals if restarted else difference)


def _totals(info: pb.GetServerInfoResponse) -> Totals:
    counters = info.counters
    grouping = counters.grouping
    return {
        "counts": {"seconds": info.uptime_s, **{name: getattr(counters, name) for name in COUNTS}},
        "finished": dict(counters.finished),
        "refused": dict(counters.refused),
        "stages": dict(counters.stage_seconds),
        "drafted": {method: drafts.draft_tokens for method, drafts in counters.drafts.items()},
        "accepted": {method: drafts.accepted_draft_tokens for method, drafts in counters.drafts.items()},
        "draft_lengths": {str(length): count for length, count in enumerate(counters.draft_lengths)},
        "group_sizes": {str(index + 1): rounds for index, rounds in enumerate(grouping.group_sizes)},
        "lengths": {"same": grouping.same_length_rounds, "mixed": grouping.mixed_rounds},
    }


def _activity(totals: Totals) -> Activity:
    counts = totals["counts"]
    seconds = counts["seconds"]

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    def drafts(drafted: float, accepted: float) -> Drafts:
        return Drafts(rate(drafted), _ratio(accepted, drafted))

    drafted, accepted = totals["drafted"], totals["accepted"]
    sequence_rounds = sum(totals["draft_lengths"].values())
    drafted_rounds = sequence_rounds - totals["draft_lengths"].get("0", 0.0)
    sizes = totals["group_sizes"]
    sequences = sum(int(size) * rounds for size, rounds in sizes.items())
    return Activity(
        seconds=seconds,
        tokens_per_s=rate(counts["completion_tokens"]),
        prompt_tokens_per_s=rate(counts["prompt_tokens"]),
        cached_share=_ratio(counts["cached_tokens"], counts["prompt_tokens"]),
        requests_per_s=rate(counts["requests"]),
        rounds_per_s=rate(counts["rounds"]),
        cache_misses_per_s=rate(counts["cache_misses"]),
        finished_per_s={reason: rate(count) for reason, count in totals["finished"].items() if count},
        refused_per_s={code: rate(count) for code, count in totals["refused"].items() if count},
        drafts=drafts(sum(drafted.values()), sum(accepted.values())),
        methods={method: drafts(count, accepted[method]) for method, count in sorted(drafted.items()) if count},
        tokens_per_round=_ratio(counts["completion_tokens"], sequence_rounds),
        drafted_share=_ratio(drafted_rounds, sequence_rounds),
        mean_acceptance_length=1 + sum(accepted.values()) / drafted_rounds if drafted_rounds else None,
        draft_lengths={int(length): share for length, share in _shares(totals["draft_lengths"]).items()},
        group_sizes={int(size): share for size, share in _shares(sizes).items()},
        mean_group_size=_ratio(sequences, sum(sizes.values())),
        same_length_share=_ratio(totals["lengths"]["same"], sum(totals["lengths"].values())),
        stage_shares=_shares(totals["stages"]),
    )


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None


def _shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each nonzero count in the total."""
    total = sum(counts.values())
    return {key: count / total for key, count in counts.items() if count}
