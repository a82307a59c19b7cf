"""Fake draft worker, for a server of its own or for `FakeTarget.carry`."""

import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

from specpool.testing.fake_grammars import EOS_TOKEN_ID, VOCAB_SIZE
from specpool.testing.fake_worker import FakeWorker
from specpool.v1 import common_pb2, draft_worker_pb2, draft_worker_pb2_grpc


class Chooser(Protocol):
    """A target, such as `FakeTarget`."""

    def choose_legal(self, context: Sequence[int], grammar: str, prompt_length: int) -> int:
        """The next token that a grammar allows after a context. ValueError if it allows none."""


class FakeDraft(FakeWorker):
    """A draft worker that drafts the target's choice with probability `acceptance`, and another token otherwise.

    Its first branch matches with the same probability, and each further one in half of the remaining cases.
    """

    def __init__(self, target: Chooser, acceptance: float = 0.7, **knobs: Any) -> None:
        super().__init__(**knobs)
        self._target, self.acceptance = target, acceptance
        self._rng = random.Random(0)

    @property
    def _abilities(self) -> dict[str, Any]:
        return {"max_branches": self.max_branches}

    def _register(self, server: grpc.aio.Server) -> None:
        draft_worker_pb2_grpc.add_DraftWorkerServiceServicer_to_server(self, server)  # type: ignore[arg-type]

    async def Propose(self, request: draft_worker_pb2.ProposeRequest, context: Any) -> draft_worker_pb2.ProposeResponse:
        """Drafts every item."""
        began = time.perf_counter_ns()
        await self._begin_round(context, self._passes(request, self._lengths(request)))
        results = self._propose_all(request)
        forward_ns = time.perf_counter_ns() - began
        return draft_worker_pb2.ProposeResponse(
            round_id=request.round_id, results=results, forward_ns=forward_ns, instance_id=self.instance_id
        )

    def propose(
        self, request: draft_worker_pb2.ProposeRequest
    ) -> tuple[list[draft_worker_pb2.ProposeResult], list[int]]:
        """Draft every item for the target that carries the draft, at once. Return the new tokens of each pass, too."""
        self.count_round()
        return self._propose_all(request), self._passes(request, self._lengths(request))

    def _propose_all(self, request: draft_worker_pb2.ProposeRequest) -> list[draft_worker_pb2.ProposeResult]:
        return [
            self._propose((request.coordinator_id, item.sequence_id), item, length)
            for item, length in zip(request.items, self._lengths(request), strict=True)
        ]

    async def ProposeStream(
        self, requests: AsyncIterator[draft_worker_pb2.ProposeRequest], context: Any
    ) -> AsyncIterator[draft_worker_pb2.ProposeResponse]:
        """Drafts round after round."""
        async for request in requests:
            yield await self.Propose(request, context)

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
        """Number of draft tokens per item: the requested number, or fewer if another token gains too little."""
        if any(item.num_branches for item in request.items):
            return [item.num_draft_tokens for item in request.items]
        lengths = [min(1, item.num_draft_tokens) for item in request.items]
        for step in range(1, max((item.num_draft_tokens for item in request.items), default=0)):
            gains = {
                index: self._gain(item, step)
                for index, item in enumerate(request.items)
                if item.num_draft_tokens > step == lengths[index] and self._gain(item, step) >= 0
            }
            if not gains or sum(gains.values()) < request.step_cost:
                break
            for index in gains:
                lengths[index] += 1
        return lengths

    def _gain(self, item: draft_worker_pb2.ProposeItem, step: int) -> float:
        next_chance = item.next_chance if item.HasField("next_chance") else 1.0
        return self.acceptance**step * next_chance - item.min_chance if item.min_chance else math.inf

    def _propose(
        self, key: tuple[str, int], item: draft_worker_pb2.ProposeItem, length: int
    ) -> draft_worker_pb2.ProposeResult:
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
        draft = self._draft(key, tokens, length)
        self.caches[key] = [*tokens, *draft[:-1]]
        return draft_worker_pb2.ProposeResult(
            sequence_id=item.sequence_id,
            status=status,
            draft_token_ids=draft,
            cached_length=len(self.caches[key]),
            confidences=[self.acceptance] * len(draft) if item.min_chance else [],
        )

    def _choose(self, key: tuple[str, int], context: Sequence[int]) -> int:
        """The target's choice after a context, or an arbitrary token if the context is illegal."""
        try:
            return self._target.choose_legal(context, *self.grammars[key])
        except ValueError:
            return EOS_TOKEN_ID

    def _draft(self, key: tuple[str, int], context: Sequence[int], length: int) -> list[int]:
        draft: list[int] = []
        for _ in range(length):
            choice = self._choose(key, [*context, *draft])
            draft.append(choice if self._rng.random() < self.acceptance else (choice + 1) % VOCAB_SIZE)
        return draft

    def _branches(
        self, key: tuple[str, int], tokens: Sequence[int], item: draft_worker_pb2.ProposeItem
    ) -> list[common_pb2.Branch]:
        """Branches of different outcomes, of which at most one matches."""
        start = len(tokens) - item.num_unverified
        num_accepted = next(
            (i for i, token in enumerate(tokens[start:]) if token != self._choose(key, tokens[: start + i])),
            item.num_unverified,
        )
        context = tokens[: start + num_accepted]
        truth, rank = self._choose(key, context), 0
        while rank < item.num_branches and self._rng.random() >= (self.acceptance if rank == 0 else 0.5):
            rank += 1
        branches = []
        for index in range(item.num_branches):
            token_id = truth if index == rank else (truth + 1 + index) % VOCAB_SIZE
            draft = self._draft(key, [*context, token_id], item.num_draft_tokens)
            confidences = [self.acceptance] * len(draft) if item.min_chance else []
            branch = common_pb2.Branch(
                num_accepted=num_accepted, token_id=token_id, draft_token_ids=draft, confidences=confidences
            )
            branches.append(branch)
        return branches
