"""Verification: one forward pass over every sequence's new tokens and its draft, then acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.loading import TokenizerFiles
from engine.sequences import Extension, SequenceEngine
from engine.slots import Realignment
from target_worker.acceptance import accept


@dataclass(frozen=True)
class VerifyItem(Extension):
    """One sequence's part of a round."""

    draft_token_ids: tuple[int, ...] = ()
    prefill_only: bool = False


@dataclass(frozen=True)
class Verdict:
    """`token_ids`: accepted draft tokens and one of the target's own; empty for a prompt chunk or if not realigned."""

    realignment: Realignment
    token_ids: list[int]
    cached_length: int


class Verifier(SequenceEngine):
    """The target worker's backend."""

    def tokenizer(self) -> TokenizerFiles:
        """The target's tokenizer."""
        return self.engine.loaded.tokenizer

    def verify(self, coordinator_id: str, round_id: int, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict for each item, in their order."""
        realigned = self.realign(coordinator_id, round_id, items)
        ready = [item for item, state in zip(items, realigned, strict=True) if state is Realignment.OK]
        choices = self.engine.choose(
            [
                self.span(
                    coordinator_id,
                    item.sequence_id,
                    item.token_ids + item.draft_token_ids,
                    num_logits=0 if item.prefill_only else len(item.draft_token_ids) + 1,
                )
                for item in ready
            ]
        )
        verdicts = {
            item.sequence_id: self._judge(coordinator_id, item, chosen)
            for item, chosen in zip(ready, choices, strict=True)
        }
        return [
            verdicts.get(item.sequence_id, Verdict(state, [], 0)) for item, state in zip(items, realigned, strict=True)
        ]

    def _judge(self, coordinator_id: str, item: VerifyItem, choices: list[int]) -> Verdict:
        gained = [] if item.prefill_only else accept(item.draft_token_ids, choices)
        # The rejected positions stay in the slot and are overwritten: only the length says what counts.
        cached_length = item.base_length + len(item.token_ids) + max(0, len(gained) - 1)
        self.keep(coordinator_id, item.sequence_id, cached_length)
        return Verdict(Realignment.OK, gained, cached_length)
