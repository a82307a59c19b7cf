"""Verification: one forward pass over every sequence's new tokens and its draft, then acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.slots import Realignment
from engine.models.loading import TokenizerFiles
from engine.sampling import TokenLogprobs, token_logprobs
from engine.sequences import Choices, Extension, SequenceEngine
from target_worker.acceptance import accept


@dataclass(frozen=True)
class VerifyItem(Extension):
    """One sequence's part of a round. `logprobs`: log-probabilities wanted per token beside its own; None: none."""

    draft_token_ids: tuple[int, ...] = ()
    prefill_only: bool = False
    logprobs: int | None = None


@dataclass(frozen=True)
class Verdict:
    """`token_ids`: accepted draft tokens and one of the target's own; empty for a prompt chunk or if not realigned.
    `logprobs`: those of each, if they were wanted."""

    realignment: Realignment
    token_ids: list[int]
    cached_length: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Verifier(SequenceEngine):
    """The target worker's backend."""

    def tokenizer(self) -> TokenizerFiles:
        """The target's tokenizer."""
        return self.engine.loaded.tokenizer

    def verify(self, coordinator_id: str, round_id: int, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict for each item, in their order."""
        realigned = self.realign(coordinator_id, round_id, items)
        ready = [item for item, state in zip(items, realigned, strict=True) if state is Realignment.OK]
        spans = {
            item.sequence_id: self.span(
                coordinator_id,
                item.sequence_id,
                item.token_ids + item.draft_token_ids,
                num_logits=0 if item.prefill_only else len(item.draft_token_ids) + 1,
            )
            for item in ready
        }
        choices = self.choose(coordinator_id, spans)
        verdicts = {item.sequence_id: self._judge(coordinator_id, item, choices[item.sequence_id]) for item in ready}
        return [
            verdicts.get(item.sequence_id, Verdict(state, [], 0)) for item, state in zip(items, realigned, strict=True)
        ]

    def _judge(self, coordinator_id: str, item: VerifyItem, choices: Choices) -> Verdict:
        gained = [] if item.prefill_only else accept(item.draft_token_ids, choices.token_ids)
        # The rejected positions stay in the slot and are overwritten: only the length says what counts.
        cached_length = item.base_length + len(item.token_ids) + max(0, len(gained) - 1)
        self.keep(coordinator_id, item.sequence_id, cached_length)
        logprobs = []
        if item.logprobs is not None:
            rows = zip(self.engine.over_vocabulary(choices.logits[: len(gained)]), gained, strict=True)
            logprobs = [token_logprobs(row, token, item.logprobs) for row, token in rows]
        return Verdict(Realignment.OK, gained, cached_length, logprobs)
