"""The fake target worker."""

import time
import zlib
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from specpool.testing.fake_grammars import EOS_TOKEN_ID, byte_tokenizer, forced_tokens, legal_tokens
from specpool.testing.fake_own_draft import FakeOwnDraft
from specpool.testing.fake_worker import FakeWorker, Key
from specpool.v1 import common_pb2, target_worker_pb2, target_worker_pb2_grpc

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if enable_thinking is defined %}thinking: {{ enable_thinking }}\n{% endif %}"
)

Beginning = tuple[target_worker_pb2.VerifyItem, target_worker_pb2.OwnDraftResult | None]
"""An item with the tokens that it runs and the draft tokens that it verifies, and the own draft found."""


class FakeTarget(FakeWorker):
    """A target that chooses tokens by a hash."""

    def __init__(
        self, eos_rate: float = 0.0, max_rounds_ahead: int = 2, draft: FakeOwnDraft | None = None, **knobs: Any
    ) -> None:
        """`eos_rate`: share of contexts that end the sequence. `max_rounds_ahead`: see `WorkerLoad`.

        `draft`: the draft that the target carries.
        """
        super().__init__(**knobs)
        self.max_rounds_ahead = max_rounds_ahead
        self.draft = draft
        if draft is not None:
            draft.drafts_for(self.choose_legal, self.grammars)
        self._began: dict[Key, tuple[int, Beginning]] = {}
        """How the last round of each sequence began. A repeated round begins in the same way."""
        self.rounds_to_compile = 0
        """Rounds during which the grammar of a new sequence is not ready."""
        self._compiling: dict[Key, int] = {}
        self._eos_rate = eos_rate

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

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        """Describe the target, and the draft that it carries."""
        info = await super().GetWorkerInfo(request, context)
        if self.draft is not None:
            info.draft.CopyFrom(await self.draft.GetWorkerInfo(request, context))
            info.draft.instance_id = self.instance_id
        return info

    async def GetTokenizer(self, request: Any, context: Any) -> target_worker_pb2.GetTokenizerResponse:
        """Return the byte tokenizer."""
        return target_worker_pb2.GetTokenizerResponse(
            tokenizer_json=byte_tokenizer().to_str().encode(),
            chat_template=CHAT_TEMPLATE,
            eos_token_ids=[EOS_TOKEN_ID],
            instance_id=self.instance_id,
        )

    async def Verify(self, request: target_worker_pb2.VerifyRequest, context: Any) -> target_worker_pb2.VerifyResponse:
        """Verify every item."""
        began = time.perf_counter_ns()
        evicted = self.take_evicted(request.coordinator_id)
        await self._begin_round(context, [sum(len(self.tokens_of(request, item)) for item in request.items)])
        results = [
            self._verify((request.coordinator_id, item.sequence_id), item, request.round_id) for item in request.items
        ]
        forward_ns = time.perf_counter_ns() - began
        response = target_worker_pb2.VerifyResponse(
            round_id=request.round_id,
            results=results,
            forward_ns=forward_ns,
            instance_id=self.instance_id,
            evicted_pages=evicted,
        )
        if self.draft is not None:
            began = time.perf_counter_ns()
            response.draft_rows[:] = await self._follow(self.draft, request, response)
            response.draft_ns = time.perf_counter_ns() - began
        return response

    async def _follow(
        self,
        draft: FakeOwnDraft,
        request: target_worker_pb2.VerifyRequest,
        response: target_worker_pb2.VerifyResponse,
    ) -> list[int]:
        """Let the draft follow the verified sequences. Return the number of tokens in each of its passes."""
        verified, committed = {}, {}
        for result in response.results:
            key = request.coordinator_id, result.sequence_id
            if result.status == common_pb2.ITEM_STATUS_OK:
                committed[key] = [*self.caches[key], *result.token_ids[-1:]]
                if result.HasField("own_draft"):
                    verified[key] = self._began[key][1][0], result
        return await draft.follow(request, verified, committed)

    async def VerifyStream(
        self, requests: AsyncIterator[target_worker_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_worker_pb2.VerifyResponse]:
        """Verify round after round."""
        async for request in requests:
            yield await self.Verify(request, context)

    def forget(self) -> None:
        super().forget()
        self._began.clear()
        if self.draft is not None:
            self.draft.forget()
            self.draft.drafts.clear()

    def release(self, key: Key) -> bool:
        self._began.pop(key, None)
        if self.draft is not None:
            self.draft.release(key)
        return super().release(key)

    def _beginning(self, key: Key, item: target_worker_pb2.VerifyItem, round_id: int) -> Beginning | None:
        """Return how an item begins; None if it cannot continue the last round."""
        assert self.draft is not None or not item.HasField("own_draft"), "this target carries no draft"
        last_round_id, last = self._began.get(key, (None, None))
        if last_round_id == round_id:
            return last
        begun = target_worker_pb2.VerifyItem()
        begun.CopyFrom(item)
        if item.HasField("after_round_id"):
            assert not item.token_ids, "the worker knows where the sequence continues"
            if not self._continues(key, item):
                return None
            begun.base_length, begun.token_ids[:] = len(self.caches[key]), self.yielded[key][1][-1:]
            begun.draft_token_ids.extend(self._selected(key, item))
        found = self.draft.select(key, begun) if self.draft is not None else None
        return begun, found

    def _verify(self, key: Key, item: target_worker_pb2.VerifyItem, round_id: int) -> target_worker_pb2.VerifyResult:
        beginning = self._beginning(key, item, round_id)
        if beginning is None:
            status = common_pb2.ITEM_STATUS_CACHE_MISS
            return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status)
        item, found = beginning
        if self._is_compiling(key, item):
            status = common_pb2.ITEM_STATUS_GRAMMAR_NOT_READY
            return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status)
        status, prefix_length = self._realign(key, item)
        self.yielded.pop(key, None)
        if status != common_pb2.ITEM_STATUS_OK:
            return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status)
        self._began[key] = round_id, beginning
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
            own_draft=found if item.HasField("own_draft") else None,
            reusable_length=self.reusable_length(key),
        )

    def _is_compiling(self, key: Key, item: target_worker_pb2.VerifyItem) -> bool:
        """Whether a sequence has a grammar that is not ready yet."""
        if not item.sampling.grammar:
            return False
        self._compiling[key] = self._compiling.get(key, 0) + 1
        return self._compiling[key] <= self.rounds_to_compile

    def _forced(self, key: Key, tokens: Sequence[int], item: target_worker_pb2.VerifyItem) -> list[int]:
        """The forced tokens after an item's draft tokens."""
        (grammar, prompt_length), room = self.grammars[key], item.max_draft_tokens - len(item.draft_token_ids)
        if not grammar or room <= 0:
            return []
        return forced_tokens(grammar, [*tokens[prompt_length:], *item.draft_token_ids])[:room]

    def _continues(self, key: Key, item: target_worker_pb2.VerifyItem) -> bool:
        """Whether the item continues the sequence's last round."""
        return key in self.caches and key in self.yielded and self.yielded[key][0] == item.after_round_id

    def _selected(self, key: Key, item: target_worker_pb2.VerifyItem) -> list[int]:
        """The draft tokens of the branch that matches the sequence's last round."""
        gained = self.yielded[key][1]
        outcome = len(gained) - 1, gained[-1]
        matching = (branch for branch in item.branches if (branch.num_accepted, branch.token_id) == outcome)
        return list(branch.draft_token_ids) if (branch := next(matching, None)) is not None else []

    def tokens_of(self, request: target_worker_pb2.VerifyRequest, item: target_worker_pb2.VerifyItem) -> list[int]:
        """The tokens that an item runs, including the one with which its sequence continues."""
        beginning = self._beginning((request.coordinator_id, item.sequence_id), item, request.round_id)
        begun = item if beginning is None else beginning[0]
        return [*begun.token_ids[begun.expected_prefix_length :], *begun.draft_token_ids]

    def _num_drafted(self, item: target_worker_pb2.VerifyItem) -> int:
        return max(len(item.draft_token_ids), item.max_draft_tokens)


def _logprobs(count: int) -> common_pb2.TokenLogprobs:
    """Log-probabilities in the form of a real target's; all are equal."""
    return common_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=range(count), top_logprobs=[-1.0] * count)
