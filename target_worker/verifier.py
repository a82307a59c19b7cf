"""Verification: one forward pass over each sequence's new tokens and its draft, then acceptance."""

from collections.abc import Sequence

from specpool.engine.run.sequences import Choices, SequenceEngine
from specpool.engine.sampling.sampler import token_logprobs
from specpool.protocol.errors import WorkerFailedError
from specpool.protocol.rounds import ItemStatus, Verdict, VerifyItem
from specpool.protocol.sampling import TokenLogprobs
from specpool.protocol.tokenizer import TokenizerFiles
from target_worker.acceptance import accept


class Verifier(SequenceEngine):
    """The target worker's backend."""

    def tokenizer(self) -> TokenizerFiles:
        """The target's tokenizer."""
        return self.engine.loaded.tokenizer

    def verify(self, coordinator_id: str, round_id: int, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict for each item, in item order. WorkerFailedError: the logits of a sequence are not finite."""
        realigned = self.realign(coordinator_id, round_id, items)
        ready = [item for item, state in zip(items, realigned, strict=True) if state is ItemStatus.OK]
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
            verdicts.get(item.sequence_id, Verdict(item.sequence_id, state))
            for item, state in zip(items, realigned, strict=True)
        ]

    def _judge(self, coordinator_id: str, item: VerifyItem, choices: Choices) -> Verdict:
        if not choices.finite:
            raise WorkerFailedError(f"sequence {item.sequence_id}: the model's logits are not finite")
        gained = [] if item.prefill_only else accept(item.draft_token_ids, choices.token_ids)
        # Rejected positions stay in the slot until overwritten. Only the length tells which positions are valid.
        num_cached_tokens = item.base_length + len(item.token_ids) + max(0, len(gained) - 1)
        self.keep(coordinator_id, item.sequence_id, num_cached_tokens)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if item.logprobs is not None:
            assert choices.pass_logits is not None
            rows = self.engine.over_vocabulary(choices.pass_logits[choices.first :][: len(gained)])
            chosen = zip(rows, gained, strict=True)
            logprobs = tuple(token_logprobs(row, token, item.logprobs) for row, token in chosen)
        return Verdict(item.sequence_id, ItemStatus.OK, tuple(gained), num_cached_tokens, logprobs)
