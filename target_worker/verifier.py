"""Verification: one forward pass over each sequence's new tokens and its draft, then acceptance."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from draft_worker.proposer import Proposer
from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.run.device_round import SpanResult
from specpool.engine.run.engine import Engine
from specpool.engine.run.sequences import Choices, SequenceEngine, own_items
from specpool.protocol.errors import WorkerFailedError
from specpool.protocol.rounds import Continuation, ItemStatus, RoundLimits, Verdict, VerifyItem, VerifyRound
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo
from target_worker.features import add_features, rounds_with_features, select_layers
from target_worker.own_draft import OwnDrafts


def accept(draft: Sequence[int], choices: Iterable[int]) -> list[int]:
    """Return the tokens that a sequence gains: the longest common prefix of `draft` and `choices`, then one choice.

    The last token is the recovered token after a mismatch, or the bonus token after full acceptance. `choices[i]` is
    the target's choice given `draft[:i]`. Choices after the first mismatch are not read. Without a
    mismatch, too few choices are all accepted draft tokens.
    """
    gained: list[int] = []
    for choice in choices:
        gained.append(choice)
        if len(gained) > len(draft) or choice != draft[len(gained) - 1]:
            break
    return gained


def _choices_of(result: SpanResult) -> Choices:
    return Choices(result.choices, finite=result.is_finite, states=result.states)


class Verifier(SequenceEngine):
    requires_grammars = True
    drafts: OwnDrafts | None = None
    """The worker's own drafts; None if it carries no draft."""

    def __init__(self, engine: Engine, proposer: Proposer | None = None) -> None:
        """`proposer`: the draft that the worker carries."""
        super().__init__(engine)
        if proposer is not None:
            self.drafts = OwnDrafts(engine, proposer)
            if proposer.engine.vocab_size == engine.vocab_size:
                proposer.grammars = self.grammars

    def verify(self, rounds: Sequence[VerifyRound]) -> list[list[Verdict]]:
        """Verify rounds of different coordinators in one forward pass. An error in one round fails all.

        One verdict for each item, in item order. WorkerFailedError: the logits of a sequence are not finite.
        """
        rounds = [replace(round_, items=own_items(round_.items)) for round_ in rounds]
        continued = {key: found for round_ in rounds for key, found in self._continue(round_)}
        for item in (item for round_ in rounds for item in round_.items):
            item.draft_token_ids = item.draft_token_ids[: self.engine.slots.max_draft_tokens]
        found = {} if self.drafts is None else self.drafts.select(rounds)
        realigned = [self.realign(round_.coordinator_id, round_.round_id, round_.items) for round_ in rounds]
        ready = {
            (round_.coordinator_id, item.sequence_id): item
            for round_, states in zip(rounds, realigned, strict=True)
            for item, state in zip(round_.items, states, strict=True)
            if state is ItemStatus.OK
        }
        for key in continued.keys() & ready.keys():
            self.engine.slots[key].continued = continued[key]
        for key in found.keys() & ready.keys():
            self.engine.slots[key].carried.found = found[key][0]
        forced = {key: self._forced(key, item) for key, item in ready.items()}
        asking = rounds_with_features(rounds)
        layers = self._state_layers(rounds, ready.values())
        windows = {key: round_.feature_window for key, round_ in asking.items()}
        spans = {key: self._span(key, item, forced[key], windows.get(key, 0)) for key, item in ready.items()}
        num_logprobs = {key: item.logprobs for key, item in ready.items()}
        results = {} if self.drafts is None else self.drafts.device_rounds.run(rounds, ready, spans, layers)
        choices = {key: _choices_of(result) for key, result in results.items()}
        choices = choices or self.choose(spans, num_logprobs=num_logprobs, state_layers=layers)
        verdicts = {key: self._judge(key, item, choices[key], forced[key]) for key, item in ready.items()}
        add_features(asking, spans, ready, verdicts, choices, layers)
        if self.drafts is not None:
            judged = {key: item for key, item in ready.items() if verdicts[key].status is ItemStatus.OK}
            self._keep_states(self.drafts, judged, choices, layers)
            num_tokens = sum(len(span.token_ids) for span in spans.values())
            for key, draft in self.drafts.draft(rounds, judged, found, num_tokens, results).items():
                verdicts[key].own_draft = draft
        return [
            [
                verdicts.get((round_.coordinator_id, item.sequence_id)) or self._refusal(item, state)
                for item, state in zip(round_.items, states, strict=True)
            ]
            for round_, states in zip(rounds, realigned, strict=True)
        ]

    def _continue(self, round_: VerifyRound) -> Iterator[tuple[SequenceKey, tuple[int, Continuation]]]:
        """Fill in position, last token and draft tokens of continued items, and yield their continuations.

        Items that cannot continue are left without tokens.
        """
        for item in round_.items:
            if item.after_round_id is not None:
                key = round_.coordinator_id, item.sequence_id
                found = self.engine.slots.continuation(key, round_.round_id, item.after_round_id)
                if found is None:
                    continue
                item.base_length, item.token_ids = found.base_length, (found.token_id,)
                item.select_branch(found.num_accepted, found.token_id)
                yield key, (item.after_round_id, found)

    def _refusal(self, item: VerifyItem, state: ItemStatus) -> Verdict:
        failed = state is ItemStatus.GRAMMAR_FAILED and item.sampling is not None
        error = self.grammars.error_of(item.sampling.grammar) if failed and item.sampling is not None else ""
        return Verdict(item.sequence_id, state, error=error)

    def _forced(self, key: SequenceKey, item: VerifyItem) -> tuple[int, ...]:
        """Return the forced tokens after an item's draft tokens. Leaves the item as it is, for a repeated round."""
        limit = min(item.max_draft_tokens, self.engine.slots.max_draft_tokens) - len(item.draft_token_ids)
        if item.prefill_only or limit <= 0:
            return ()
        return self.forced(key, item.token_ids + item.draft_token_ids, limit)

    def _span(self, key: SequenceKey, item: VerifyItem, forced: tuple[int, ...], feature_window: int) -> Span:
        draft = item.draft_token_ids + forced
        num_logits = 0 if item.prefill_only else len(draft) + 1
        num_states = item.num_features(feature_window, len(draft))
        if self.drafts is not None and self.drafts.reads(item):
            num_states = len(item.token_ids) + len(draft)
        return self.span(key, item.token_ids + draft, num_logits, num_states=num_states, num_tentative=len(draft))

    def _judge(self, key: SequenceKey, item: VerifyItem, choices: Choices, forced: tuple[int, ...]) -> Verdict:
        if not choices.finite:
            raise WorkerFailedError(f"sequence {item.sequence_id}: the model's logits are not finite")
        rules = self.engine.slots[key].sampling
        grammar = None if rules is None else rules.grammar
        if grammar is not None and not item.prefill_only:
            choices = choices.first(grammar.num_masks)
            if not choices.token_ids:
                self.keep(key, item.base_length)
                status = ItemStatus.GRAMMAR_FAILED if grammar.failure else ItemStatus.GRAMMAR_NOT_READY
                return Verdict(item.sequence_id, status, error=grammar.failure)
        gained = [] if item.prefill_only else accept(item.draft_token_ids + forced, choices.token_ids)
        # Rejected positions stay in their pages until overwritten. `num_cached_tokens` counts the valid ones.
        num_cached_tokens = item.base_length + len(item.token_ids) + max(0, len(gained) - 1)
        self.keep(key, num_cached_tokens, gained[-1] if gained else None, max(0, len(gained) - 1))
        slots = self.engine.slots
        return Verdict(
            item.sequence_id,
            ItemStatus.OK,
            tuple(gained),
            num_cached_tokens,
            choices.logprobs,
            len(forced),
            slots[key].prefix_length,
            reusable_length=slots.reusable_length(key),
        )

    def _state_layers(self, rounds: Sequence[VerifyRound], items: Iterable[VerifyItem]) -> tuple[int, ...]:
        """Return the numbers of the layers whose states coordinators or the carried draft read."""
        layers = {layer for round_ in rounds for layer in round_.feature_layers}
        if self.drafts is not None and any(map(self.drafts.reads, items)):
            layers.update(self.drafts.layers)
        return tuple(sorted(layers))

    def _keep_states(
        self,
        drafts: OwnDrafts,
        judged: Mapping[SequenceKey, VerifyItem],
        choices: Mapping[SequenceKey, Choices],
        layers: tuple[int, ...],
    ) -> None:
        """Keep the states of the kept positions for the carried draft. `layers`: as in `add_features`."""
        for key, item in judged.items():
            if drafts.reads(item) and (states := choices[key].states) is not None:
                kept = states[: self.engine.slots[key].num_cached_tokens - item.base_length]
                drafts.keep_states(key, item.base_length, select_layers(kept, layers, drafts.layers))

    # --- Both models

    def info(self) -> WorkerInfo:
        draft = None if self.drafts is None else self.drafts.proposer.info()
        return replace(super().info(), returns_features=self.engine.has_states, draft=draft)

    def tokenizer(self) -> TokenizerFiles:
        return self.engine.loaded.tokenizer

    @property
    def limits(self) -> RoundLimits:
        return replace(super().limits, carries_draft=self.drafts is not None)

    @property
    def passes(self) -> int:
        return super().passes + (0 if self.drafts is None else self.drafts.proposer.passes)

    @property
    def realign_ns(self) -> int:
        return super().realign_ns + (0 if self.drafts is None else self.drafts.proposer.realign_ns)

    @property
    def draft_ns(self) -> int:
        return 0 if self.drafts is None else self.drafts.draft_ns

    @property
    def draft_rows(self) -> Sequence[int]:
        """Tokens run by each pass of the carried draft after the last rounds."""
        return () if self.drafts is None else self.drafts.rows

    @property
    def carried_draft(self) -> Proposer | None:
        return None if self.drafts is None else self.drafts.proposer

    def release(self, coordinator_id: str, sequence_ids: list[int] | None) -> int:
        if self.drafts is not None:
            self.drafts.proposer.release(coordinator_id, sequence_ids)
        return super().release(coordinator_id, sequence_ids)

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        super().renew_lease(coordinator_id, now)
        if self.drafts is not None:
            self.drafts.proposer.renew_lease(coordinator_id, now)

    def orphan(self, coordinator_id: str) -> None:
        super().orphan(coordinator_id)
        if self.drafts is not None:
            self.drafts.proposer.orphan(coordinator_id)

    def expire(self, now: float, lease_seconds: float) -> int:
        if self.drafts is not None:
            self.drafts.proposer.expire(now, lease_seconds)
        return super().expire(now, lease_seconds)

    def shrink_passes(self) -> bool:
        shrunk = self.drafts is not None and self.drafts.proposer.shrink_passes()
        return super().shrink_passes() or shrunk
