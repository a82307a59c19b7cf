"""Comparison of draft models for `specpool top`. Pure."""

from dataclasses import dataclass

from specpool.v1 import generation_pb2 as pb

NO_DRAFT = pb.DraftModelState()


@dataclass(frozen=True)
class Draft:
    """One of several draft models. Rates cover a period, or since the start if idle. None: undefined."""

    name: str
    model: str
    weights_fingerprint: str
    ready_workers: int
    share: float
    """Share of new samples assigned to this draft."""
    running: int
    """Running samples assigned to this draft."""
    acceptance_rate: float | None
    tokens_per_round: float | None
    """Tokens per round of its samples, including rounds without draft tokens."""
    gain: float | None
    """Expected speed relative to plain decoding, if this draft served all samples."""


def drafts_of(info: pb.GetServerInfoResponse, earlier: pb.GetServerInfoResponse | None) -> tuple[Draft, ...]:
    """Return the draft models if there are several. `earlier`: state at the start of the period; None: server start."""
    if len(info.drafts) < 2:
        return ()
    before = {each.weights_fingerprint + each.name: each for each in earlier.drafts} if earlier is not None else {}
    plain = info.speculation.plain_tokens_per_s
    return tuple(
        _draft(each, before.get(each.weights_fingerprint + each.name, NO_DRAFT), plain) for each in info.drafts
    )


def _draft(now: pb.DraftModelState, before: pb.DraftModelState, plain_tokens_per_s: float) -> Draft:
    def ratio(part: str, total: str) -> float | None:
        since = before if getattr(now, total) > getattr(before, total) else NO_DRAFT
        difference = getattr(now, total) - getattr(since, total)
        return (getattr(now, part) - getattr(since, part)) / difference if difference else None

    return Draft(
        name=now.name,
        model=now.model,
        weights_fingerprint=now.weights_fingerprint,
        ready_workers=now.ready_workers,
        share=now.share,
        running=now.running,
        acceptance_rate=ratio("accepted_draft_tokens", "draft_tokens"),
        tokens_per_round=ratio("completion_tokens", "rounds"),
        gain=now.expected_tokens_per_s / plain_tokens_per_s if plain_tokens_per_s else None,
    )
