"""Sends rounds to a target worker that carries a draft like a coordinator, one at a time."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from specpool.protocol.rounds import ItemStatus, OwnDraftItem, Verdict, VerifyItem, VerifyRound
from specpool.protocol.sampling import SamplingParams, TokenLogprobs
from target_worker.verifier import Verifier

NUM_TOKENS = 24


@dataclass(eq=False)
class Generation:
    """A sequence that a worker generates."""

    sequence_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams | None = None
    num_logprobs: int | None = None
    cache_namespace: bytes | None = None
    coordinator_id: str = "c"
    token_ids: list[int] = field(default_factory=list)
    """The prompt and the generated tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    last_round: int | None = None
    """Id of the round that yielded the last token."""
    num_verified: int = 0
    num_accepted: int = 0
    """Numbers of own draft tokens verified and accepted."""

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or [*self.prompt]

    @property
    def answer(self) -> list[int]:
        """The tokens generated so far, at most `NUM_TOKENS`."""
        return self.token_ids[len(self.prompt) :][:NUM_TOKENS]

    @property
    def is_finished(self) -> bool:
        return len(self.answer) == NUM_TOKENS

    @property
    def max_length(self) -> int:
        return len(self.prompt) + NUM_TOKENS

    def item(
        self, own: OwnDraftItem | None, *, base: int | None = None, end: int | None = None, **fields: Any
    ) -> VerifyItem:
        """Return the next item. `base`: default: all cached positions. `end`: end of a prompt chunk."""
        base = self.num_cached_tokens if base is None else base
        if base == 0:
            fields |= {"sampling": self.sampling, "cache_namespace": self.cache_namespace}
        return VerifyItem(
            self.sequence_id,
            base,
            tuple(self.token_ids[base:end]),
            own_draft=own and own._replace(max_length=own.max_length or self.max_length),
            logprobs=None if end else self.num_logprobs,
            prefill_only=end is not None,
            **fields,
        )

    def continued(self, own: OwnDraftItem | None, **fields: Any) -> VerifyItem:
        """Return the next item, as sent before the last result has arrived."""
        item = self.item(own, **fields)
        item.base_length, item.token_ids, item.after_round_id = 0, (), self.last_round
        return item

    def take(self, item: VerifyItem, verdict: Verdict, round_id: int) -> None:
        """Commit the tokens of a verdict. `item`: as it was sent."""
        self.last_round = None
        if verdict.status is ItemStatus.CACHE_MISS:
            self.num_cached_tokens = 0
            return
        assert verdict.status is ItemStatus.OK, verdict
        self.num_cached_tokens = verdict.num_cached_tokens
        if verdict.token_ids:
            end = len(self.token_ids)
            self.token_ids += verdict.token_ids
            self.logprobs += verdict.logprobs
            self.last_round = round_id
            assert verdict.num_cached_tokens == end + len(verdict.token_ids) - 1
        assert (verdict.own_draft is None) == (item.own_draft is None)
        if verdict.own_draft is not None and item.own_draft is not None:
            verified = verdict.own_draft.num_verified
            assert verified <= min(item.own_draft.max_verified, len(verdict.own_draft.draft_token_ids))
            if verified:
                accepted = min(len(verdict.token_ids) - 1, verified)
                assert verdict.token_ids[:accepted] == verdict.own_draft.draft_token_ids[:accepted]
                self.num_verified += verified
                self.num_accepted += accepted


class Rounds:
    """Sends rounds to a worker, one after the other."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.round_id = verifier, 0

    def send(self, items: Sequence[tuple[Generation, VerifyItem]], **fields: Any) -> list[Verdict]:
        """Send the items in one pass, as one round per coordinator, and commit the results."""
        self.round_id += 1
        verdicts = self.repeat(items, **fields)
        for (generation, item), verdict in zip(items, verdicts, strict=True):
            generation.take(item, verdict, self.round_id)
        return verdicts

    def repeat(self, items: Sequence[tuple[Generation, VerifyItem]], **fields: Any) -> list[Verdict]:
        """Send the last round again, without committing its results."""
        owners = sorted({generation.coordinator_id for generation, _ in items})
        rounds = [
            VerifyRound(
                owner, self.round_id, [copy(item) for each, item in items if each.coordinator_id == owner], **fields
            )
            for owner in owners
        ]
        verdicts = dict(zip(owners, map(iter, self.verifier.verify(rounds)), strict=True))
        return [next(verdicts[generation.coordinator_id]) for generation, _ in items]

    def generate(self, generations: Sequence[Generation], k: int, **fields: Any) -> None:
        """Generate all tokens with own drafts of `k` tokens. Each round is sent before the last result has arrived."""
        own = OwnDraftItem(k, k) if k else None
        while unfinished := [each for each in generations if not each.is_finished]:
            make = [each.item if each.last_round is None else each.continued for each in unfinished]
            self.send([(each, build(own, **fields)) for each, build in zip(unfinished, make, strict=True)])
