"""The fake draft worker."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from specpool.testing.fake_drafter import FakeDrafter
from specpool.testing.fake_grammars import VOCAB_SIZE
from specpool.testing.fake_target import FakeTarget
from specpool.testing.fake_worker import Key
from specpool.v1 import common_pb2, draft_worker_pb2, draft_worker_pb2_grpc


class FakeDraft(FakeDrafter):
    """A draft worker. Its first branch matches with probability `acceptance`.

    Each further branch matches in half of the remaining cases.
    """

    def __init__(
        self,
        target: FakeTarget,
        acceptance: float = 0.7,
        max_branches: int = 64,
        weights: str = "",
        translation: str = "",
        **knobs: Any,
    ) -> None:
        """`max_branches`: see `WorkerLoad`. `weights`: fingerprint of the weights.

        `translation`: see `ModelInfo.tokenizer_translation`; empty: refuse to translate.
        """
        super().__init__(acceptance, **knobs)
        self.weights, self.max_branches, self.translation = weights, max_branches, translation
        self.tokenizers: list[bytes] = []
        """Tokenizers received from coordinators."""
        self.drafts_for(target.choose_legal, self.grammars)

    @property
    def weights_fingerprint(self) -> str:
        """Fingerprint of the weights; empty: unknown."""
        return self.weights

    def _register(self, server: grpc.aio.Server) -> None:
        draft_worker_pb2_grpc.add_DraftWorkerServiceServicer_to_server(self, server)  # type: ignore[arg-type]

    async def Propose(self, request: draft_worker_pb2.ProposeRequest, context: Any) -> draft_worker_pb2.ProposeResponse:
        """Drafts every item."""
        began = time.perf_counter_ns()
        lengths = self._lengths(request)
        await self._begin_round(context, self._passes(request, lengths))
        results = [
            self._propose((request.coordinator_id, item.sequence_id), item, length)
            for item, length in zip(request.items, lengths, strict=True)
        ]
        forward_ns = time.perf_counter_ns() - began
        return draft_worker_pb2.ProposeResponse(
            round_id=request.round_id, results=results, forward_ns=forward_ns, instance_id=self.instance_id
        )

    async def ProposeStream(
        self, requests: AsyncIterator[draft_worker_pb2.ProposeRequest], context: Any
    ) -> AsyncIterator[draft_worker_pb2.ProposeResponse]:
        """Drafts round after round."""
        async for request in requests:
            yield await self.Propose(request, context)

    async def UseTokenizer(
        self, request: draft_worker_pb2.UseTokenizerRequest, context: Any
    ) -> draft_worker_pb2.UseTokenizerResponse:
        """Accept any tokenizer, or refuse all. The fake always drafts in the target's tokens."""
        self.tokenizers.append(request.tokenizer_json)
        if not self.translation:
            return draft_worker_pb2.UseTokenizerResponse(instance_id=self.instance_id, refusal="the fake has none")
        return draft_worker_pb2.UseTokenizerResponse(
            instance_id=self.instance_id,
            translation_id="fake",
            method=self.translation,
            vocabulary_coverage=0.5,
        )

    @staticmethod
    def _passes(request: draft_worker_pb2.ProposeRequest, lengths: Sequence[int]) -> list[int]:
        """New tokens of each pass. Branches begin after a pass that appends the items' tokens."""
        branching = sum(
            len(item.token_ids) - item.expected_prefix_length for item in request.items if item.num_branches
        )
        drafts = [
            sum(max(1, item.num_branches) for item, k in zip(request.items, lengths, strict=True) if k > j)
            for j in range(max(lengths, default=0))
        ]
        return [branching, *drafts] if branching else drafts

    def _lengths(self, request: draft_worker_pb2.ProposeRequest) -> list[int]:
        """Number of draft tokens per item."""
        if any(item.num_branches for item in request.items):
            return [item.num_draft_tokens for item in request.items]
        return self.draft_lengths([(item, item.num_draft_tokens) for item in request.items], request.step_cost)

    def _num_drafted(self, item: draft_worker_pb2.ProposeItem) -> int:
        return 0 if item.num_branches else max(0, item.num_draft_tokens - 1)

    def _propose(self, key: Key, item: draft_worker_pb2.ProposeItem, length: int) -> draft_worker_pb2.ProposeResult:
        status, _ = self._realign(key, item)
        if status != common_pb2.ITEM_STATUS_OK:
            return draft_worker_pb2.ProposeResult(sequence_id=item.sequence_id, status=status)
        tokens = self.caches[key]
        self.keep(key)
        if item.num_branches:
            branches = self._branches(key, tokens, item)
            return draft_worker_pb2.ProposeResult(
                sequence_id=item.sequence_id, status=status, cached_length=len(tokens), branches=branches
            )
        draft = self.draft(key, tokens, length)
        self.caches[key] = [*tokens, *draft[:-1]]
        return draft_worker_pb2.ProposeResult(
            sequence_id=item.sequence_id,
            status=status,
            draft_token_ids=draft,
            cached_length=len(self.caches[key]),
            confidences=self.confidences(item, draft),
        )

    def _branches(self, key: Key, tokens: Sequence[int], item: draft_worker_pb2.ProposeItem) -> list[common_pb2.Branch]:
        """Branches of different outcomes, of which at most one matches."""
        start = len(tokens) - item.num_unverified
        num_accepted = next(
            (i for i, token in enumerate(tokens[start:]) if token != self.choose(key, tokens[: start + i])),
            item.num_unverified,
        )
        context = tokens[: start + num_accepted]
        truth, rank = self.choose(key, context), 0
        while rank < item.num_branches and self._rng.random() >= (self.acceptance if rank == 0 else 0.5):
            rank += 1
        branches = []
        for index in range(item.num_branches):
            token_id = truth if index == rank else (truth + 1 + index) % VOCAB_SIZE
            draft = self.draft(key, [*context, token_id], item.num_draft_tokens)
            branch = common_pb2.Branch(
                num_accepted=num_accepted,
                token_id=token_id,
                draft_token_ids=draft,
                confidences=self.confidences(item, draft),
            )
            branches.append(branch)
        return branches
