"""Fake target worker. It hashes the context to choose each token, so one lost token changes all later ones.

It asserts that the coordinator follows the protocol. `FakeTarget.continuation` returns the tokens of plain decoding.
"""

import time
import zlib
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from specpool.testing.fake_draft import FakeDraft
from specpool.testing.fake_grammars import EOS_TOKEN_ID, byte_tokenizer, forced_tokens, legal_tokens
from specpool.testing.fake_own_drafts import FakeOwnDrafts
from specpool.testing.fake_worker import FakeWorker
from specpool.v1 import common_pb2, target_worker_pb2, target_worker_pb2_grpc

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if enable_thinking is defined %}thinking: {{ enable_thinking }}\n{% endif %}"
)
Key = tuple[str, int]
Yielded = tuple[int, list[int]]
"""A round that yielded tokens, and the tokens."""


class FakeTarget(FakeWorker):
    """A target that chooses tokens by a hash."""

    def __init__(self, eos_rate: float = 0.0, **knobs: Any) -> None:
        """`eos_rate`: share of contexts that end the sequence."""
        super().__init__(**knobs)
        self.rounds_to_compile = 0
        """Rounds during which the grammar of a new sequence is not ready."""
        self._compiling: dict[tuple[str, int], int] = {}
        self._eos_rate = eos_rate
        self.own_drafts: FakeOwnDrafts | None = None
        self._continued: dict[Key, tuple[int, int, Yielded]] = {}
        """How the last round of a continued sequence began: its id, the cached positions, and the round before."""

    def carry(self, draft: FakeDraft) -> None:
        """Let the worker carry a draft, which needs no server of its own."""
        self.own_drafts = FakeOwnDrafts(self, draft)

    @property
    def _abilities(self) -> dict[str, Any]:
        return {"max_rounds_ahead": self.max_rounds_ahead}

    @property
    def weights_fingerprint(self) -> str:
        """A digest of some choices, different for targets that choose differently."""
        return ",".join(str(self.choose([token])) for token in range(8))

    def _register(self, server: grpc.aio.Server) -> None:
        target_worker_pb2_grpc.add_TargetWorkerServiceServicer_to_server(self, server)  # type: ignore[arg-type]

    def choose(self, context: Sequence[int]) -> int:
        """The next token after a context, without a grammar."""
        digest = zlib.crc32(array("I", context))
        return EOS_TOKEN_ID if digest % 10_000 < self._eos_rate * 10_000 else digest // 10_000 % EOS_TOKEN_ID

    def continuation(self, prompt: Sequence[int], count: int, grammar: str = "") -> list[int]:
        """The tokens of plain decoding: `count`, or fewer if the sequence ends."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count and EOS_TOKEN_ID not in tokens[len(prompt) :]:
            tokens.append(self.choose_legal(tokens, grammar, len(prompt)))
        return tokens[len(prompt) :]

    def choose_legal(self, context: Sequence[int], grammar: str, prompt_length: int) -> int:
        """The next token that a grammar allows after a context. ValueError if it allows none."""
        if not grammar:
            return self.choose(context)
        legal = legal_tokens(grammar, context[prompt_length:])
        return legal[zlib.crc32(array("I", context)) // 10_000 % len(legal)]

    async def GetTokenizer(self, request: Any, context: Any) -> target_worker_pb2.GetTokenizerResponse:
        """Return the byte tokenizer."""
        return target_worker_pb2.GetTokenizerResponse(
            tokenizer_json=byte_tokenizer().to_str().encode(),
            chat_template=CHAT_TEMPLATE,
            eos_token_ids=[EOS_TOKEN_ID],
            instance_id=self.instance_id,
        )

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        """Describes the fake, and the draft that it carries."""
        info = await super().GetWorkerInfo(request, context)
        if self.own_drafts is not None:
            info.draft.CopyFrom(await self.own_drafts.draft.GetWorkerInfo(request, context))
            info.draft.instance_id = self.instance_id
        return info

    async def Verify(self, request: target_worker_pb2.VerifyRequest, context: Any) -> target_worker_pb2.VerifyResponse:
        """Verify every item, then draft for the next round."""
        began = time.perf_counter_ns()
        evicted = self.take_evicted(request.coordinator_id)
        await self._begin_round(context, [sum(len(self.tokens_of(request, item)) for item in request.items)])
        results = [
            self._verify((request.coordinator_id, item.sequence_id), item, request.round_id) for item in request.items
        ]
        verified = time.perf_counter_ns()
        response = target_worker_pb2.VerifyResponse(
            round_id=request.round_id,
            results=results,
            forward_ns=verified - began,
            instance_id=self.instance_id,
            evicted_pages=evicted,
        )
        if self.own_drafts is not None:
            response.draft_rows.extend(self.own_drafts.finish(request, response.results))
            await self.own_drafts.draft.spend(response.draft_rows)
            response.draft_ns = time.perf_counter_ns() - verified
        return response

    async def VerifyStream(
        self, requests: AsyncIterator[target_worker_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_worker_pb2.VerifyResponse]:
        """Verify round after round."""
        async for request in requests:
            yield await self.Verify(request, context)

    def _verify(self, key: Key, item: target_worker_pb2.VerifyItem, round_id: int) -> target_worker_pb2.VerifyResult:
        assert self.own_drafts is not None or not item.HasField("own_draft"), "the worker carries no draft"
        before = self._continues(key, item, round_id)
        item = self._resolved(key, item, round_id)
        status, prefix_length = common_pb2.ITEM_STATUS_CACHE_MISS, 0
        if self._is_compiling(key, item):
            status = common_pb2.ITEM_STATUS_GRAMMAR_NOT_READY
            return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status)
        if item.token_ids:
            own_draft = None if self.own_drafts is None else self.own_drafts.begin(key, item)
            status, prefix_length = self._realign(key, item)
            self.yielded.pop(key, None)
            self._continued.pop(key, None)
        if status != common_pb2.ITEM_STATUS_OK:
            return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status)
        if before is not None:
            self._continued[key] = round_id, *before
        tokens = self.caches[key]
        gained: list[int] = []
        forced: list[int] = []
        if not item.prefill_only:
            forced = self._forced(key, tokens, item)
            try:
                for draft in (*item.draft_token_ids, *forced):
                    if draft != self.choose_legal(tokens, *self.grammars[key]):
                        break
                    tokens.append(draft)
                    gained.append(draft)
                gained.append(self.choose_legal(tokens, *self.grammars[key]))
            except ValueError as error:
                status = common_pb2.ITEM_STATUS_GRAMMAR_FAILED
                return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status, error=str(error))
            self.yielded[key] = round_id, gained
        self.keep(key)
        return target_worker_pb2.VerifyResult(
            sequence_id=item.sequence_id,
            status=status,
            token_ids=gained,
            cached_length=len(tokens),
            logprobs=[_logprobs(item.logprobs)] * len(gained) if item.HasField("logprobs") else [],
            num_forced_tokens=len(forced),
            prefix_length=prefix_length,
            own_draft=own_draft if item.HasField("own_draft") else None,
        )

    def _resolved(self, key: Key, item: target_worker_pb2.VerifyItem, round_id: int) -> target_worker_pb2.VerifyItem:
        """The item with its position, tokens and draft tokens. Without tokens if its sequence cannot continue."""
        resolved = target_worker_pb2.VerifyItem()
        resolved.CopyFrom(item)
        if item.HasField("after_round_id"):
            assert not item.token_ids, "the worker knows where the sequence continues"
            if (before := self._continues(key, item, round_id)) is None:
                return resolved
            resolved.base_length, (_, gained) = before
            resolved.token_ids.append(gained[-1])
            resolved.draft_token_ids.extend(_selected(item, gained))
        if self.own_drafts is not None and (own := self.own_drafts.verified(key, resolved)):
            resolved.draft_token_ids[:] = own
        return resolved

    def _is_compiling(self, key: tuple[str, int], item: target_worker_pb2.VerifyItem) -> bool:
        """Whether a sequence has a grammar that is not ready yet."""
        if not item.sampling.grammar:
            return False
        self._compiling[key] = self._compiling.get(key, 0) + 1
        return self._compiling[key] <= self.rounds_to_compile

    def _forced(self, key: tuple[str, int], tokens: Sequence[int], item: target_worker_pb2.VerifyItem) -> list[int]:
        """The forced tokens after an item's draft tokens."""
        (grammar, prompt_length), room = self.grammars[key], item.max_draft_tokens - len(item.draft_token_ids)
        if not grammar or room <= 0:
            return []
        return forced_tokens(grammar, [*tokens[prompt_length:], *item.draft_token_ids])[:room]

    def _continues(self, key: Key, item: target_worker_pb2.VerifyItem, round_id: int) -> tuple[int, Yielded] | None:
        """The cached positions and the round after which an item continues. A repeated round gets the same."""
        if key not in self.caches or not item.HasField("after_round_id"):
            return None
        base_length, yielded = len(self.caches[key]), self.yielded.get(key)
        if key in self._continued and self._continued[key][0] == round_id:
            _, base_length, yielded = self._continued[key]
        return (base_length, yielded) if yielded is not None and yielded[0] == item.after_round_id else None

    def tokens_of(self, request: target_worker_pb2.VerifyRequest, item: target_worker_pb2.VerifyItem) -> list[int]:
        """The tokens that an item runs, including the one with which its sequence continues."""
        resolved = self._resolved((request.coordinator_id, item.sequence_id), item, request.round_id)
        return [*resolved.token_ids[item.expected_prefix_length :], *resolved.draft_token_ids]

    def release(self, key: Key) -> bool:
        """Free the slots of a sequence."""
        if self.own_drafts is not None:
            self.own_drafts.release(key)
        return super().release(key)

    def forget(self) -> None:
        """Lose all caches, like a restart."""
        super().forget()
        self._continued.clear()
        if self.own_drafts is not None:
            self.own_drafts.forget()


def _selected(item: target_worker_pb2.VerifyItem, gained: Sequence[int]) -> list[int]:
    """The draft tokens of the branch that matches the sequence's last round."""
    outcome = len(gained) - 1, gained[-1]
    matching = (branch for branch in item.branches if (branch.num_accepted, branch.token_id) == outcome)
    return list(branch.draft_token_ids) if (branch := next(matching, None)) is not None else []


def _logprobs(count: int) -> common_pb2.TokenLogprobs:
    """Log-probabilities in the form of a real target's; all are equal."""
    return common_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=range(count), top_logprobs=[-1.0] * count)
