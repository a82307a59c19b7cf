"""Divides the memory of a process between a target and the draft that it carries.

The target asks for its limit once its weights are loaded. At that point, the draft is loaded and reserves its cache.
Both caches are thus sized with the weights of both models in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specpool.engine.cache.memory import Footprint, KVLimit
from specpool.engine.run.engine import Engine
from specpool.engine.run.reservation import CacheNeeds, LimitCache, kv_limit


class PairMemory:
    """The memory limits of both KV caches. They hold the same number of positions, unless the draft's size is set."""

    def __init__(
        self, load_draft: Callable[[CacheNeeds, LimitCache], Engine], draft_kv_memory: int | None = None
    ) -> None:
        """`load_draft`: loads the draft, given the target's needs. `draft_kv_memory`: bytes of the draft's cache."""
        self._load_draft, self._draft_kv_memory = load_draft, draft_kv_memory
        self._draft: Engine | None = None

    @property
    def draft(self) -> Engine:
        """The draft, once the target is loaded."""
        assert self._draft is not None
        return self._draft

    def limit_target(self, needs: CacheNeeds) -> KVLimit:
        """Load the draft, unless an earlier start of the target has loaded it, and limit the target's cache."""
        self._target = needs
        if self._draft is None:
            self._draft = self._load_draft(needs, self._limit_draft)
        limit = _counting(self._shared, self._counted)
        if needs.options.kv_memory is not None:
            return limit
        caches: dict[str, int] = {}
        if self._draft_kv_memory is not None:
            caches = {"kv": self._draft.footprint.kv, "states": self._draft.footprint.states}
        if limit.included is None:  # a share of the free memory
            return replace(limit, beside=Footprint(0, 0, **caches))
        included = replace(needs.others, base=limit.included.base)
        beside = replace(_beside(included, self._draft_others, needs.facts.device), **caches)
        return replace(limit, included=included, beside=beside)

    def _limit_draft(self, needs: CacheNeeds) -> KVLimit:
        target = self._target
        # Models with vocabularies of the same size share their grammars.
        grammars = 0 if needs.facts.vocab_size == target.facts.vocab_size else target.others.grammars
        self._draft_others = replace(needs.others, grammars=grammars)
        device = needs.facts.device
        beside = _beside(self._draft_others, target.others, device)
        self._shared = kv_limit(target.options, self._draft_others, device, beside)
        if self._draft_kv_memory is not None:
            self._counted = [target]
            limit = _counting(KVLimit("draft_kv_memory", self._draft_kv_memory), [needs])
        else:  # `kv_memory` is the size of the target's cache alone
            self._counted = [target] if target.options.kv_memory is not None else [target, needs]
            limit = _counting(self._shared, self._counted)
        return replace(limit, max_model_len=target.facts.max_model_len)


def _counting(limit: KVLimit, caches: Sequence[CacheNeeds]) -> KVLimit:
    """Return the limit with the positions and recurrent states of these caches counted against it."""
    position_bytes, states = sum(each.position_bytes for each in caches), sum(each.state_bytes for each in caches)
    return replace(limit, position_bytes=position_bytes, states=states)


def _beside(own: Footprint, other: Footprint, device: torch.device) -> Footprint:
    """Return the memory that the other model needs in addition to this one.

    On a CPU, the passes of both models reuse the memory of activations. On a GPU, captured passes keep theirs.
    """
    if device.type != "cpu":
        return other
    return replace(other, activations=max(0, other.activations - own.activations))
