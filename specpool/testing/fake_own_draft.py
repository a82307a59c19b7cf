"""The draft that a fake target carries."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from specpool.drafting.acceptance import likely_tokens
from specpool.protocol.rounds import ItemStatus, ProposeItem
from specpool.protocol.sampling import SamplingParams
from specpool.testing.fake_drafter import FakeDrafter
from specpool.testing.fake_worker import Key
from specpool.v1 import common_pb2, target_worker_pb2


class KeptDraft(NamedTuple):
    """Draft tokens that follow `base_length` cached positions and the token `token_id`."""

    base_length: int
    token_id: int
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]

    def begins(self, item: target_worker_pb2.VerifyItem) -> bool:
        """Whether the draft continues an item."""
        return (self.base_length, [self.token_id]) == (item.base_length, [*item.token_ids])

    def rest(self, gained: Sequence[int]) -> "KeptDraft | None":
        """Return the rest after a round gained these tokens; None if they differ or nothing is left."""
        count = len(gained)
        if not gained or self.token_ids[:count] != tuple(gained) or len(self.token_ids) == count:
            return None
        return KeptDraft(self.base_length + count, gained[-1], self.token_ids[count:], self.confidences[count:])


class FakeOwnDraft(FakeDrafter):
    """A draft for `FakeTarget(draft=...)` to carry. It has a worker's knobs, but no server.

    With `forget_every`, only the draft loses its caches.
    """

    model = "carried"

    def __init__(self, acceptance: float = 0.7, **knobs: Any) -> None:
        super().__init__(acceptance, **knobs)
        self.drafts: dict[Key, list[KeptDraft]] = {}
        """By sequence: the draft for the next round, and the draft that the last round found."""

    def select(self, key: Key, item: target_worker_pb2.VerifyItem) -> target_worker_pb2.OwnDraftResult:
        """Replace an item's draft tokens with own draft tokens. Return the draft found."""
        own, found = item.own_draft, target_worker_pb2.OwnDraftResult()
        assert not (item.prefill_only and own.max_verified), "a prompt chunk verifies nothing"
        draft = next((draft for draft in self.drafts.get(key, ()) if draft.begins(item)), None)
        if draft is None or not item.HasField("own_draft"):
            return found
        room = min(own.max_verified, own.max_length - item.base_length - 1)
        verified = likely_tokens(draft.token_ids[: max(0, room)], draft.confidences, own.min_chance)
        if verified:
            item.draft_token_ids[:] = verified
        found.draft_token_ids[:], found.confidences[:] = draft.token_ids, draft.confidences
        found.num_verified = len(verified)
        return found

    async def follow(
        self,
        request: target_worker_pb2.VerifyRequest,
        verified: Mapping[Key, tuple[target_worker_pb2.VerifyItem, target_worker_pb2.VerifyResult]],
        committed: Mapping[Key, Sequence[int]],
    ) -> list[int]:
        """Catch up with the committed tokens of verified items, draft, and report. Return the tokens of each pass."""
        for key in committed.keys() - verified.keys():
            self.drafts.pop(key, None)
        asked = {key: item for key, (item, _) in verified.items() if item.own_draft.num_draft_tokens}
        following = {key: item for key, item in asked.items() if len(committed[key]) <= self.max_model_len}
        maxima = [self._maximum(item, len(committed[key])) for key, item in following.items()]
        own = [item.own_draft for item in following.values()]
        lengths = self.draft_lengths([*zip(own, maxima, strict=True)], request.step_cost)
        passes = [sum(len(committed[key]) - self._base_length(key, committed[key]) for key in following)]
        passes += [sum(length > step for length in lengths) for step in range(1, max(lengths, default=0))]
        if following:
            self._count_round()
        made: dict[Key, KeptDraft | None] = {}
        for (key, item), length in zip(following.items(), lengths, strict=True):
            status, made[key] = self._extend(key, item, committed[key], length)
            verified[key][1].own_draft.status = status
        for key, (item, result) in verified.items():
            found = [draft for draft in self.drafts.get(key, ()) if draft.begins(item)]
            if key not in asked and found:
                made[key] = found[0].rest(result.token_ids)
            self.drafts[key] = [draft for draft in (made.get(key), *found[:1]) if draft is not None]
            if key not in following:
                is_cached = key in self.caches
                status = common_pb2.ITEM_STATUS_OK if is_cached else common_pb2.ITEM_STATUS_CACHE_MISS
                result.own_draft.status = status
            result.own_draft.cached_length = self._num_agreed(key, committed[key])
        await self._run(passes)  # last: the target may release sequences meanwhile
        return passes if any(lengths) else []

    def release(self, key: Key) -> bool:
        self.drafts.pop(key, None)
        return super().release(key)

    def _maximum(self, item: target_worker_pb2.VerifyItem, length: int) -> int:
        """Return the maximum number of tokens to draft after `length` committed tokens."""
        own = item.own_draft
        room = min(own.max_length, self.max_model_len) - length
        return 0 if item.prefill_only else max(0, min(own.num_draft_tokens, room))

    def _num_agreed(self, key: Key, committed: Sequence[int]) -> int:
        """Return the number of cached positions that hold committed tokens."""
        pairs = zip(self.caches.get(key, ()), committed, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _base_length(self, key: Key, committed: Sequence[int]) -> int:
        """Return the number of cached positions to keep. The last token runs again for its logits."""
        return min(self._num_agreed(key, committed), len(committed) - 1)

    def _extend(
        self, key: Key, item: target_worker_pb2.VerifyItem, committed: Sequence[int], length: int
    ) -> tuple[Any, KeptDraft | None]:
        """Catch up with the committed tokens of a sequence, and draft. Return the status and the draft, if any."""
        base = self._base_length(key, committed)
        sampling = None if base else SamplingParams()
        proposed = ProposeItem(key[1], base, tuple(committed[base:]), sampling=sampling)
        status, _ = self.realign(key, proposed, len(committed) + max(0, length - 1))
        if status is not ItemStatus.OK or not length:
            return common_pb2.ItemStatus.Value(f"ITEM_STATUS_{status.name}"), None
        draft = self.draft(key, committed, length)
        self.caches[key] = [*committed, *draft[:-1]]
        confidences = tuple(self.confidences(item.own_draft, draft))
        return common_pb2.ITEM_STATUS_OK, KeptDraft(len(committed) - 1, committed[-1], tuple(draft), confidences)
