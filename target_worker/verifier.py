"""Verification: one forward pass over each sequence's new tokens and its draft, then acceptance."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.run.sequences import Choices, SequenceEngine, States
from specpool.protocol.errors import WorkerFailedError
from specpool.protocol.rounds import Continuation, ItemStatus, Verdict, VerifyItem, VerifyRound
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo


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


def rounds_with_features(rounds: Sequence[VerifyRound]) -> dict[SequenceKey, VerifyRound]:
    """Return the round of each sequence whose features are requested."""
    asking = (round_ for round_ in rounds if round_.feature_layers)
    return {
        (round_.coordinator_id, item.sequence_id): round_
        for round_ in asking
        for item in round_.items
        if item.want_features
    }


def pack_features(states: States, layers: tuple[int, ...], wanted: tuple[int, ...]) -> bytes:
    """Return the states after the layers `wanted`, as on the wire. `states`: after all `layers`."""
    if wanted != layers:
        rows = states.reshape(len(states), len(layers), -1)
        states = rows[:, [layers.index(layer) for layer in wanted]]
    return states.tobytes()


class Verifier(SequenceEngine):
    requires_grammars = True

    def info(self) -> WorkerInfo:
        return replace(super().info(), returns_features=self.engine.has_states)

    def tokenizer(self) -> TokenizerFiles:
        return self.engine.loaded.tokenizer

    def verify(self, rounds: Sequence[VerifyRound]) -> list[list[Verdict]]:
        """Verify rounds of different coordinators in one forward pass. An error in one round fails all.

        One verdict for each item, in item order. WorkerFailedError: the logits of a sequence are not finite.
        """
        continued = {key: found for round_ in rounds for key, found in self._continue(round_)}
        realigned = [self.realign(round_.coordinator_id, round_.round_id, round_.items) for round_ in rounds]
        ready = {
            (round_.coordinator_id, item.sequence_id): item
            for round_, states in zip(rounds, realigned, strict=True)
            for item, state in zip(round_.items, states, strict=True)
            if state is ItemStatus.OK
        }
        for key in continued.keys() & ready.keys():
            self.engine.slots[key].continued = continued[key]
        forced = {key: self._forced(key, item) for key, item in ready.items()}
        layers = tuple(sorted({layer for round_ in rounds for layer in round_.feature_layers}))
        asking = rounds_with_features(rounds)
        windows = {key: round_.feature_window for key, round_ in asking.items()}
        spans = {key: self._span(key, item, forced[key], windows.get(key, 0)) for key, item in ready.items()}
        num_logprobs = {key: item.logprobs for key, item in ready.items()}
        choices = self.choose(spans, num_logprobs=num_logprobs, state_layers=layers)
        verdicts = {key: self._judge(key, item, choices[key], forced[key]) for key, item in ready.items()}
        for key in asking.keys() & verdicts.keys():
            self._add_features(verdicts[key], ready[key], choices[key], layers, asking[key])
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
        limit = item.max_draft_tokens - len(item.draft_token_ids)
        if item.prefill_only or limit <= 0:
            return ()
        return self.forced(key, item.token_ids + item.draft_token_ids, limit)

    def _span(self, key: SequenceKey, item: VerifyItem, forced: tuple[int, ...], feature_window: int) -> Span:
        draft = item.draft_token_ids + forced
        num_logits = 0 if item.prefill_only else len(draft) + 1
        num_states = item.num_features(feature_window, len(draft))
        return self.span(key, item.token_ids + draft, num_logits, num_states=num_states)

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
        # Rejected positions stay in their pages until overwritten. `num_cached_tokens` marks the valid ones.
        num_cached_tokens = item.base_length + len(item.token_ids) + max(0, len(gained) - 1)
        self.keep(key, num_cached_tokens, gained[-1] if gained else None, max(0, len(gained) - 1))
        logprobs, num_forced = choices.logprobs, len(forced)
        found = self.engine.slots[key].prefix_length
        return Verdict(item.sequence_id, ItemStatus.OK, tuple(gained), num_cached_tokens, logprobs, num_forced, found)

    @staticmethod
    def _add_features(
        verdict: Verdict, item: VerifyItem, choices: Choices, layers: tuple[int, ...], round_: VerifyRound
    ) -> None:
        """Add the states of the kept positions. `layers`: the layers of `choices.states`."""
        if choices.states is not None and verdict.status is ItemStatus.OK:
            count = item.num_features(round_.feature_window, max(0, len(verdict.token_ids) - 1))
            verdict.features = pack_features(choices.states[:count], layers, round_.feature_layers)
