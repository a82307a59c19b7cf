"""The activity of a server between two looks at its counters, as rates and shares. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from specpool.v1 import generation_pb2 as pb

Totals: TypeAlias = dict[str, dict[str, float]]
"""Counters by group and key. None of them ever goes back while a server runs, the seconds of its uptime included."""

COUNTS = ("requests", "rounds", "completion_tokens", "prompt_tokens", "cached_tokens", "cache_misses")


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of one draft method, or of all."""

    tokens_per_s: float
    acceptance_rate: float | None
    """Accepted / drafted; None if nothing was drafted."""


@dataclass(frozen=True)
class Activity:
    """What a server did in `seconds`. A share or a mean of nothing is None, or missing from its mapping."""

    seconds: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    cached_share: float | None
    """Share of the prompt tokens that were not prefilled."""
    requests_per_s: float
    rounds_per_s: float
    cache_misses_per_s: float
    finished_per_s: Mapping[str, float]
    """Samples that ended, by finish reason."""
    refused_per_s: Mapping[str, float]
    """Calls that ended in an error, by status code."""
    drafts: Drafts
    methods: Mapping[str, Drafts]
    """By draft method."""
    mean_acceptance_length: float | None
    """Tokens gained per verified proposal, bonus included."""
    draft_lengths: Mapping[int, float]
    """By draft length: its share of the verifications of sequences."""
    group_sizes: Mapping[int, float]
    """By group size: its share of the rounds."""
    mean_group_size: float | None
    same_length_share: float | None
    """Share of the rounds of several sequences in which all had the same length."""
    stage_shares: Mapping[str, float]
    """Share of each stage in the time that rounds took."""


def activity(later: pb.GetServerInfoResponse, earlier: pb.GetServerInfoResponse | None = None) -> Activity:
    """What the server did since the earlier look; since its start without one, or if it was restarted in between."""
    totals = _totals(later)
    if earlier is None:
        return _activity(totals)
    before = _totals(earlier)
    gained = {
        group: {key: value - before[group].get(key, 0.0) for key, value in values.items()}
        for group, values in totals.items()
    }
    restarted = any(value < 0 for values in gained.values() for value in values.values())
    return _activity(totals if restarted else gained)


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
        "draft_lengths": {str(length): times for length, times in enumerate(counters.draft_lengths)},
        "group_sizes": {str(index + 1): rounds for index, rounds in enumerate(grouping.group_sizes)},
        "lengths": {"same": grouping.same_length_rounds, "mixed": grouping.mixed_rounds},
    }


def _activity(gained: Totals) -> Activity:
    counts = gained["counts"]
    seconds = counts["seconds"]

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    def drafts(drafted: float, accepted: float) -> Drafts:
        return Drafts(rate(drafted), _ratio(accepted, drafted))

    drafted, accepted = gained["drafted"], gained["accepted"]
    proposals = sum(times for length, times in gained["draft_lengths"].items() if length != "0")
    sizes = gained["group_sizes"]
    sequences = sum(int(size) * rounds for size, rounds in sizes.items())
    return Activity(
        seconds=seconds,
        tokens_per_s=rate(counts["completion_tokens"]),
        prompt_tokens_per_s=rate(counts["prompt_tokens"]),
        cached_share=_ratio(counts["cached_tokens"], counts["prompt_tokens"]),
        requests_per_s=rate(counts["requests"]),
        rounds_per_s=rate(counts["rounds"]),
        cache_misses_per_s=rate(counts["cache_misses"]),
        finished_per_s={reason: rate(count) for reason, count in gained["finished"].items() if count},
        refused_per_s={code: rate(count) for code, count in gained["refused"].items() if count},
        drafts=drafts(sum(drafted.values()), sum(accepted.values())),
        methods={method: drafts(count, accepted[method]) for method, count in sorted(drafted.items()) if count},
        mean_acceptance_length=1 + sum(accepted.values()) / proposals if proposals else None,
        draft_lengths={int(length): share for length, share in _shares(gained["draft_lengths"]).items()},
        group_sizes={int(size): share for size, share in _shares(sizes).items()},
        mean_group_size=_ratio(sequences, sum(sizes.values())),
        same_length_share=_ratio(gained["lengths"]["same"], sum(gained["lengths"].values())),
        stage_shares=_shares(gained["stages"]),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _shares(counts: Mapping[str, float]) -> dict[str, float]:
    """The share of each count in the sum, without counts of 0."""
    whole = sum(counts.values())
    return {key: count / whole for key, count in counts.items() if count}
