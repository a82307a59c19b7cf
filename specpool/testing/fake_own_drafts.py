"""The draft that a fake target carries. A round verifies the draft's tokens, then the draft makes new ones."""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from specpool.drafting.acceptance import likely_tokens
from specpool.testing.fake_draft import FakeDraft
from specpool.testing.fake_worker import FakeWorker
from specpool.v1 import common_pb2, draft_worker_pb2, target_worker_pb2

Key = tuple[str, int]
OK = common_pb2.ITEM_STATUS_OK


class Kept(NamedTuple):
    """Draft tokens for a sequence with `base_length` cached positions, followed by the committed token `token_id`."""

    base_length: int
    token_id: int
    token_ids: Sequence[int] = ()
    confidences: Sequence[float] = ()

    def rest(self, gained: Sequence[int]) -> "Kept | None":
        """What is left after a round that gained these tokens. None if they differ or leave nothing."""
        count = len(gained)
        if not count or len(self.token_ids) <= count or [*self.token_ids[:count]] != [*gained]:
            return None
        return Kept(self.base_length + count, gained[-1], self.token_ids[count:], self.confidences[count:])


NOTHING = Kept(0, 0)


class FakeOwnDrafts:
    """The drafts of all sequences, by a `FakeDraft` without a server of its own.

    Its knobs work as those of a draft worker: too few slots, lost caches, slow passes.
    """

    def __init__(self, target: FakeWorker, draft: FakeDraft) -> None:
        self.draft = draft
        self._target = target
        self._made: dict[Key, Kept] = {}
        """Drafts for the next round."""
        self._found: dict[Key, Kept] = {}
        """Drafts that the last rounds found. A repeated round finds the same one."""
        self._contacts: dict[Key, target_worker_pb2.VerifyItem] = {}
        """The first item of each sequence, with its sampling parameters and cache namespace."""

    def find(self, key: Key, item: target_worker_pb2.VerifyItem) -> Kept:
        """Return the draft that begins where an item begins."""
        begins = item.base_length, item.token_ids[0] if len(item.token_ids) == 1 else None
        kept = (self._made.get(key), self._found.get(key))
        return next((draft for draft in kept if draft is not None and draft[:2] == begins), NOTHING)

    def verified(self, key: Key, item: target_worker_pb2.VerifyItem) -> Sequence[int]:
        """Return the own draft tokens that an item verifies."""
        own, draft = item.own_draft, self.find(key, item)
        end = item.base_length + len(item.token_ids)
        room = max(0, min(own.max_verified, min(own.max_length, self._target.max_model_len) - end))
        return likely_tokens(tuple(draft.token_ids[:room]), draft.confidences, own.min_chance)

    def begin(self, key: Key, item: target_worker_pb2.VerifyItem) -> target_worker_pb2.OwnDraftResult:
        """Begin a round of a sequence, before its verification. Return what it reports of the draft that it finds."""
        own = item.own_draft
        if item.HasField("own_draft"):
            assert not (item.prefill_only and own.max_verified), "a prompt chunk verifies nothing"
            assert own.max_length or not (own.max_verified or own.num_draft_tokens), "drafts need a maximum length"
        if item.HasField("sampling"):
            self._contacts[key] = item
        found, num_verified = NOTHING, 0
        if item.HasField("own_draft"):
            found, num_verified = self.find(key, item), len(self.verified(key, item))
        self._made.pop(key, None)
        self._found[key] = found
        return target_worker_pb2.OwnDraftResult(
            draft_token_ids=found.token_ids, confidences=found.confidences, num_verified=num_verified
        )

    def finish(
        self, request: target_worker_pb2.VerifyRequest, results: Iterable[target_worker_pb2.VerifyResult]
    ) -> list[int]:
        """Draft for the next round, and complete the results. Return the rows of each pass."""
        pairs = zip(request.items, results, strict=True)
        judged = [(item, result) for item, result in pairs if item.HasField("own_draft") and result.status == OK]
        asked = draft_worker_pb2.ProposeRequest(coordinator_id=request.coordinator_id, step_cost=request.step_cost)
        for item, result in judged:
            key = request.coordinator_id, item.sequence_id
            if item.own_draft.num_draft_tokens:
                asked.items.extend(self._next_items(key, item.own_draft, result))
            elif (rest := self._found[key].rest(result.token_ids)) is not None:
                self._made[key] = rest
        proposals, rows = self.draft.propose(asked) if asked.items else ([], [])
        answered = {proposal.sequence_id: proposal for proposal in proposals}
        for item, result in judged:
            self._complete((request.coordinator_id, item.sequence_id), result, answered.get(item.sequence_id))
        return rows

    def release(self, key: Key) -> None:
        """Forget a sequence."""
        self.draft.release(key)
        for kept in (self._made, self._found, self._contacts):
            kept.pop(key, None)

    def forget(self) -> None:
        """Lose everything, like a restart."""
        self.draft.forget()
        for kept in (self._made, self._found, self._contacts):
            kept.clear()

    def _next_items(
        self, key: Key, own: target_worker_pb2.OwnDraftItem, result: target_worker_pb2.VerifyResult
    ) -> list[draft_worker_pb2.ProposeItem]:
        """Return the item that lets the draft catch up and continue, if there is any."""
        tokens = [*self._target.caches[key], *result.token_ids[-1:]]
        room = min(own.max_length, self.draft.max_model_len) - len(tokens)
        if len(tokens) > self.draft.max_model_len or (result.token_ids and room <= 0):
            return []
        base = min(self._agreed(key, tokens), len(tokens) - 1)
        item = draft_worker_pb2.ProposeItem(
            sequence_id=key[1],
            base_length=base,
            token_ids=tokens[base:],
            num_draft_tokens=min(own.num_draft_tokens, room) if result.token_ids else 0,
            min_chance=own.min_chance,
        )
        if own.HasField("next_chance"):
            item.next_chance = own.next_chance
        contact = self._contacts[key]
        if not base:
            item.sampling.CopyFrom(contact.sampling)
            if contact.HasField("cache_namespace"):
                item.cache_namespace = contact.cache_namespace
        return [item]

    def _agreed(self, key: Key, tokens: Sequence[int]) -> int:
        """Return the number of leading positions in the draft's cache that hold these tokens."""
        pairs = zip(self.draft.caches.get(key, ()), tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _complete(
        self,
        key: Key,
        result: target_worker_pb2.VerifyResult,
        proposal: draft_worker_pb2.ProposeResult | None,
    ) -> None:
        """Keep a proposal for the next round, and report the state of the draft's cache."""
        tokens = [*self._target.caches[key], *result.token_ids[-1:]]
        missed = common_pb2.ITEM_STATUS_CACHE_MISS
        result.own_draft.status = OK if key in self.draft.caches else missed
        if proposal is not None:
            result.own_draft.status = proposal.status
            if proposal.draft_token_ids:
                drafted = [*proposal.draft_token_ids], [*proposal.confidences]
                self._made[key] = Kept(len(tokens) - 1, tokens[-1], *drafted)
        result.own_draft.cached_length = self._agreed(key, tokens)
