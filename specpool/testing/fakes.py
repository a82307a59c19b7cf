"""Fakes of both workers: real gRPC servers whose caches are lists of token ids.

The fake target hashes the context to choose each token, so one lost, repeated or reordered token changes all later
ones. Both fakes assert that the coordinator follows the protocol. `FakeTarget.continuation` returns the tokens of plain
decoding.
"""

import asyncio
import math
import random
import time
import uuid
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specpool.protocol.rounds import ItemStatus
from specpool.rpc.status import ANSWERED
from specpool.testing.fake_caches import PAGE_SIZE, FakeCaches
from specpool.testing.fake_grammars import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer, forced_tokens, legal_tokens
from specpool.v1 import common_pb2, draft_worker_pb2, draft_worker_pb2_grpc, target_worker_pb2, target_worker_pb2_grpc

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if enable_thinking is defined %}thinking: {{ enable_thinking }}\n{% endif %}"
)


class FakeWorker(FakeCaches):
    """A worker with knobs for faults."""

    _interceptors: Sequence[Any] = ()

    def __init__(
        self,
        slots: int = 16,
        max_model_len: int = 4096,
        fingerprint: str = "fake",
        device: str = "cpu",
        pass_seconds: Callable[[int], float] | None = None,
        notes: Sequence[str] = (),
        rank_devices: Sequence[str] = (),
        kv_positions: int = 0,
        max_rounds_ahead: int = 2,
        max_branches: int = 64,
        supports_grammars: bool = find_spec("llguidance") is not None,
    ) -> None:
        """`pass_seconds`: duration of a pass with a number of new tokens; None: no delay.

        `notes`: notes about the model. `rank_devices`: devices of a sharded worker's ranks, two or more.
        `kv_positions`: capacity of the cache; 0: only `slots` limits it. `max_rounds_ahead`: see
        `WorkerLoad`; draft workers ignore it. `max_branches`: likewise; target workers ignore it.
        `supports_grammars`: whether to follow grammars, which needs llguidance.
        """
        super().__init__(slots, kv_positions)
        self.max_branches = max_branches
        self.supports_grammars = supports_grammars
        self.max_rounds_ahead = max_rounds_ahead
        self.grammars: dict[tuple[str, int], tuple[str, int]] = {}
        """Grammar and prompt length of each constrained sequence."""
        self.notes, self.rank_devices = notes, rank_devices
        self.max_model_len, self.fingerprint, self.device = max_model_len, fingerprint, device
        self.pass_seconds = pass_seconds
        self.busy = False
        """Whether a round is running."""
        self.yielded: dict[tuple[str, int], tuple[int, list[int]]] = {}
        """Last round of each sequence that yielded tokens, and the tokens."""
        self.calls = 0
        self.forget_every = 0
        """Loses all caches, like a restart, every `forget_every` rounds. 0: never."""
        self.fail_next: list[grpc.StatusCode] = []
        """Status codes with which the worker ends the next rounds."""
        self.loading = False
        """Whether health checks report NOT_SERVING from the next start on, until `loaded` is called."""
        self.instance_id = uuid.uuid4().hex
        """Id of the process; new after each start. Part of every answer."""
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Start serving. Return the address."""
        self.instance_id = uuid.uuid4().hex
        self._server = grpc.aio.server(interceptors=self._interceptors, options=[("grpc.so_reuseport", 0)])
        self._register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.NOT_SERVING if self.loading else status.SERVING)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def loaded(self) -> None:
        """End the loading: health checks report SERVING."""
        self.loading = False
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Stop at once, like a killed process, and lose all caches."""
        if self._server is not None:
            await self._server.stop(None)
        self.forget()  # after the stop: a running round may still add to the caches

    @property
    def weights_fingerprint(self) -> str:
        """Fingerprint of weights and logits; empty: unknown."""
        return ""

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def WatchStartup(
        self, request: common_pb2.WatchStartupRequest, context: Any
    ) -> AsyncIterator[common_pb2.WatchStartupResponse]:
        """End at once: the fake has no phases."""
        return
        yield

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        """Describes the fake."""
        return common_pb2.GetWorkerInfoResponse(
            instance_id=self.instance_id,
            model=common_pb2.ModelInfo(
                model="fake",
                architecture="fake",
                dtype="float32",
                activations="float32",
                device=self.device,
                vocab_size=VOCAB_SIZE,
                max_model_len=self.max_model_len,
                tokenizer_fingerprint=self.fingerprint,
                equivalence=common_pb2.EQUIVALENCE_BITWISE,
                notes=self.notes,
                tensor_parallel=len(self.rank_devices) or 1,
                tensor_parallel_sums="whole" if self.rank_devices else "",
                weights_fingerprint=self.weights_fingerprint,
                numerics_fingerprint=self.weights_fingerprint,
            ),
            load=common_pb2.WorkerLoad(
                slots_total=self.slots,
                slots_in_use=len(self.caches),
                kv_positions_total=self.kv_positions,
                kv_positions_free=self.free_pages * PAGE_SIZE,
                kv_positions_multiple=PAGE_SIZE,
                max_rounds_ahead=self.max_rounds_ahead if isinstance(self, FakeTarget) else 0,
                max_branches=self.max_branches if isinstance(self, FakeDraft) else 0,
                supports_grammars=self.supports_grammars,
                ranks=[common_pb2.RankMemory(device=device) for device in self.rank_devices],
            ),
            costs=common_pb2.StepCosts(rows=MEASURED_ROWS, seconds=map(self.pass_seconds, MEASURED_ROWS))
            if self.pass_seconds is not None
            else None,
        )

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseResponse:
        """Free sequences."""
        keys = [(request.coordinator_id, sequence_id) for sequence_id in request.sequence_ids]
        if request.all:
            keys = [key for key in self.caches if key[0] == request.coordinator_id]
        released = sum(map(self.release, keys))
        return common_pb2.ReleaseResponse(released=released, instance_id=self.instance_id)

    def forget(self) -> None:
        """Lose all caches, like a restart."""
        super().forget()
        self.yielded.clear()

    async def _begin_round(self, context: Any, passes: Iterable[int]) -> None:
        """Wait for the duration of the passes; fails on demand. `passes`: number of new tokens per pass."""
        if self.pass_seconds is not None:
            self.busy = True
            await asyncio.sleep(sum(map(self.pass_seconds, passes)))
            self.busy = False
        self.calls += 1
        if self.forget_every and self.calls % self.forget_every == 0:
            self.forget()
        if self.fail_next:
            await context.abort(self.fail_next.pop(0), "told to fail", (ANSWERED,))

    def _realign(self, key: tuple[str, int], item: Any) -> tuple[Any, int]:
        """Return the status of an item, and the tokens that the prefix cache held."""
        status, prefix_length = self.realign(key, item, _length(item))
        if status is ItemStatus.OK and item.HasField("sampling"):
            grammar = item.sampling.grammar if self.supports_grammars else ""
            self.grammars[key] = grammar, item.sampling.prompt_length
        return common_pb2.ItemStatus.Value(f"ITEM_STATUS_{status.name}"), prefix_length


def _length(item: Any) -> int:
    """Positions that an item needs."""
    is_proposal = isinstance(item, draft_worker_pb2.ProposeItem)
    if is_proposal:
        drafts = 0 if item.num_branches else max(0, item.num_draft_tokens - 1)
    else:
        drafts = max(len(item.draft_token_ids), item.max_draft_tokens)
    return int(item.base_length + len(item.token_ids) + drafts)


class FakeTarget(FakeWorker):
    """A target that chooses tokens by a hash."""

    def __init__(self, eos_rate: float = 0.0, **knobs: Any) -> None:
        """`eos_rate`: share of contexts that end the sequence."""
        super().__init__(**knobs)
        self.rounds_to_compile = 0
        """Rounds during which the grammar of a new sequence is not ready."""
        self._compiling: dict[tuple[str, int], int] = {}
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
        return target_worker_pb2.VerifyResponse(
            round_id=request.round_id,
            results=results,
            forward_ns=forward_ns,
            instance_id=self.instance_id,
            evicted_pages=evicted,
        )

    async def VerifyStream(
        self, requests: AsyncIterator[target_worker_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_worker_pb2.VerifyResponse]:
        """Verify round after round."""
        async for request in requests:
            yield await self.Verify(request, context)

    def _verify(
        self, key: tuple[str, int], item: target_worker_pb2.VerifyItem, round_id: int
    ) -> target_worker_pb2.VerifyResult:
        if item.HasField("after_round_id"):
            assert not item.token_ids, "the worker knows where the sequence continues"
            if not self._continues(key, item):
                status = common_pb2.ITEM_STATUS_CACHE_MISS
                return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status)
            base_length, token_ids = len(self.caches[key]), self.yielded[key][1][-1:]
            drafts = self._selected(key, item)
            continued = target_worker_pb2.VerifyItem(
                base_length=base_length, token_ids=token_ids, draft_token_ids=drafts
            )
            continued.MergeFrom(item)
            item = continued
        if self._is_compiling(key, item):
            status = common_pb2.ITEM_STATUS_GRAMMAR_NOT_READY
            return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status)
        status, prefix_length = self._realign(key, item)
        self.yielded.pop(key, None)
        if status != common_pb2.ITEM_STATUS_OK:
            return target_worker_pb2.VerifyResult(sequence_id=item.sequence_id, status=status)
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
        )

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

    def _continues(self, key: tuple[str, int], item: target_worker_pb2.VerifyItem) -> bool:
        """Whether the item continues the sequence's last round."""
        return key in self.caches and key in self.yielded and self.yielded[key][0] == item.after_round_id

    def _selected(self, key: tuple[str, int], item: target_worker_pb2.VerifyItem) -> list[int]:
        """The draft tokens of the branch that matches the sequence's last round."""
        gained = self.yielded[key][1]
        outcome = len(gained) - 1, gained[-1]
        matching = (branch for branch in item.branches if (branch.num_accepted, branch.token_id) == outcome)
        return list(branch.draft_token_ids) if (branch := next(matching, None)) is not None else []

    def tokens_of(self, request: target_worker_pb2.VerifyRequest, item: target_worker_pb2.VerifyItem) -> list[int]:
        """The tokens that an item runs, including the one with which its sequence continues."""
        key = request.coordinator_id, item.sequence_id
        own: list[int] = []
        if item.HasField("after_round_id") and self._continues(key, item):
            own = [*self.yielded[key][1][-1:], *self._selected(key, item)]
        return [*own, *item.token_ids[item.expected_prefix_length :], *item.draft_token_ids]


def _logprobs(count: int) -> common_pb2.TokenLogprobs:
    """Log-probabilities in the form of a real target's; all are equal."""
    return common_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=range(count), top_logprobs=[-1.0] * count)


class FakeDraft(FakeWorker):
    """A draft worker that drafts the target's choice with probability `acceptance`, and another token otherwise.

    Its first branch matches with the same probability, and each further one in half of the remaining cases.
    """

    def __init__(self, target: FakeTarget, acceptance: float = 0.7, **knobs: Any) -> None:
        super().__init__(**knobs)
        self._target, self._acceptance = target, acceptance
        self._rng = random.Random(0)

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
        return self._acceptance**step * next_chance - item.min_chance if item.min_chance else math.inf

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
            confidences=[self._acceptance] * len(draft) if item.min_chance else [],
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
            draft.append(choice if self._rng.random() < self._acceptance else (choice + 1) % VOCAB_SIZE)
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
        while rank < item.num_branches and self._rng.random() >= (self._acceptance if rank == 0 else 0.5):
            rank += 1
        branches = []
        for index in range(item.num_branches):
            token_id = truth if index == rank else (truth + 1 + index) % VOCAB_SIZE
            draft = self._draft(key, [*context, token_id], item.num_draft_tokens)
            confidences = [self._acceptance] * len(draft) if item.min_chance else []
            branch = common_pb2.Branch(
                num_accepted=num_accepted, token_id=token_id, draft_token_ids=draft, confidences=confidences
            )
            branches.append(branch)
        return branches
