"""A worker whose device waits instead of computing. Its server, model thread, rounds and cache are real.

    python -m benchmarks.emulated_worker target --port 50051 --pass-ms 6 0.03
    python -m benchmarks.emulated_worker draft --port 50052 --pass-ms 0.8 0.01 --acceptance 0.75

The target chooses tokens like `specpool.testing.FakeTarget`. The draft's first guess of a token is right with
probability `--acceptance`. If all guesses so far are wrong, the next one is right with probability `--second-guess`.
Other settings of workers may follow, such as `--log-level info`.
"""

import asyncio
import random
import sys
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from benchmarks.report import PassMs, chance, milliseconds, parser_of, whole
from draft_worker.proposer import Proposer
from draft_worker.server import DraftWorkerServicer
from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.slots import SequenceKey, SlotTable
from specpool.engine.cache.spans import Span
from specpool.engine.run.sequences import Choices, SequenceEngine
from specpool.engine.sampling.ranking import Ranking
from specpool.engine.sampling.rows import SequenceRows
from specpool.protocol.rounds import MAX_ITEM_BRANCHES
from specpool.protocol.sampling import NO_LOGPROBS
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import CacheLoad, WorkerInfo
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, MEASURED_ROWS, VOCAB_SIZE, byte_tokenizer
from specpool.v1 import draft_worker_pb2_grpc, target_worker_pb2_grpc
from specpool.worker.process import run_worker
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings
from target_worker.server import TargetWorkerServicer
from target_worker.verifier import Verifier

SLOTS, MAX_MODEL_LEN, MAX_ROWS = 128, 4096, 8192
PAGE_SIZE = 16
MAX_LATENESS, LATENESS_WEIGHT = 0.0003, 0.1


def pass_seconds(first: float, more: float) -> Callable[[int], float]:
    """Seconds of a pass as a function of its rows, from milliseconds of the first row and of each further row."""
    return lambda rows: (first + more * (rows - 1)) / 1000


class EmulatedDevice(SequenceEngine):
    def __init__(self, seconds: Callable[[int], float], acceptance: float, device: str) -> None:
        """`seconds`: of a pass by rows. `acceptance`: probability of choosing the target's token."""
        self._seconds, self._acceptance, self._device = seconds, acceptance, device
        self._rng = random.Random(0)
        self._lateness = 0.0
        """Seconds by which sleeps overrun. Later sleeps are shorter, so that passes take the right time on average."""
        files = byte_tokenizer().to_str().encode()
        self._tokenizer = TokenizerFiles(files, CHAT_TEMPLATE, {}, (EOS_TOKEN_ID,))
        self.engine: Any = SimpleNamespace(
            slots=SlotTable(SLOTS, PageTables(SLOTS, MAX_MODEL_LEN, SLOTS * MAX_MODEL_LEN, PAGE_SIZE)),
            vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_ROWS, passes=0, tokens=0, realign_ns=0, realigning=nullcontext,
            can_draft=lambda drafts: False, supports_branches=True,
            has_states=False, facts=SimpleNamespace(layers=0, hidden_size=0),
            loaded=SimpleNamespace(tokenizer=self._tokenizer, features=None), own_states=None,
        )  # fmt: skip

    @property
    def load(self) -> CacheLoad:
        slots = self.engine.slots
        return CacheLoad(slots.in_use, slots.tables.free)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            model="emulated", architecture="none", dtype="float32", device=self._device, vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN, tokenizer_fingerprint="emulated", bitwise=True, parameters=1,
            embedding_parameters=0, slots_total=SLOTS, kv_bytes_per_token=1, kv_bytes_total=SLOTS * MAX_MODEL_LEN,
            kv_positions_total=SLOTS * MAX_MODEL_LEN, kv_positions_multiple=PAGE_SIZE, kv_layout="slots",
            weight_bytes=1, activation_bytes=1,
            step_seconds={rows: self._seconds(rows) for rows in MEASURED_ROWS}, step_cached=0,
            seconds_per_cached=0.0, max_rows=MAX_ROWS, weights_fingerprint="emulated",
            numerics_fingerprint="emulated", activations="float32", **self.load._asdict(),
        )  # fmt: skip

    def choose_rows(
        self,
        spans: Sequence[Span],
        rows: Sequence[SequenceRows],
        confidences: bool = False,
        state_layers: tuple[int, ...] = (),
    ) -> list[Choices]:
        with self._pass(sum(len(span.token_ids) for span in spans)):
            return [self._choices(each.token_ids, span, confidences) for span, each in zip(spans, rows, strict=True)]

    @contextmanager
    def _pass(self, rows: int) -> Iterator[None]:
        ends = time.perf_counter() + self._seconds(rows)
        self.engine.passes += 1
        self.engine.tokens += rows
        yield
        time.sleep(max(0.0, ends - time.perf_counter() - self._lateness))
        late = max(-MAX_LATENESS, min(time.perf_counter() - ends, MAX_LATENESS))
        self._lateness = max(0.0, self._lateness + LATENESS_WEIGHT * late)

    def _choices(self, token_ids: Sequence[int], span: Span, confidences: bool) -> Choices:
        """The tokens after the last tokens of a span, up to the first that differs from its draft."""
        start = len(token_ids) - span.num_logits + 1
        digest, chosen = zlib.crc32(array("I", token_ids[:start])), list[int]()
        for draft in (*token_ids[start:], -1) if span.num_logits else ():
            chosen.append(_token(digest))
            if self._rng.random() >= self._acceptance:
                chosen[-1] = (chosen[-1] + 1) % EOS_TOKEN_ID
            if chosen[-1] != draft:
                break
            digest = zlib.crc32(array("I", [draft]), digest)
        return Choices(chosen, [self._acceptance] * len(chosen) if confidences else [], NO_LOGPROBS)


class EmulatedTarget(EmulatedDevice, Verifier):
    """The target worker's backend."""


class EmulatedDraft(EmulatedDevice, Proposer):
    def __init__(self, seconds: Callable[[int], float], acceptance: float, device: str, second_guess: float) -> None:
        """`second_guess`: probability that a further guess is right if those before it are wrong."""
        super().__init__(seconds, acceptance, device)
        self._second_guess = second_guess

    def info(self) -> WorkerInfo:
        return replace(super().info(), max_branches=MAX_ITEM_BRANCHES)

    def rank(self, spans: Mapping[SequenceKey, Span], count: int) -> dict[SequenceKey, list[Ranking]]:
        with self._pass(sum(len(span.token_ids) for span in spans.values())):
            return {key: self._rankings(self.engine.slots[key].token_ids, span, count) for key, span in spans.items()}

    def _rankings(self, token_ids: Sequence[int], span: Span, count: int) -> list[Ranking]:
        start, rankings = len(token_ids) - span.num_logits + 1, list[Ranking]()
        digest = zlib.crc32(array("I", token_ids[:start]))
        for draft in (*token_ids[start:], None):
            right, rank = _token(digest), 0
            if draft is None and self._rng.random() >= self._acceptance:
                rank = 1
            elif draft is not None and draft != right:
                rank = 1  # the draft's first guess was wrong
            while 0 < rank < count and self._rng.random() >= self._second_guess:
                rank += 1
            tokens = [(right + 1 + i) % EOS_TOKEN_ID for i in range(count)]
            tokens.insert(rank, right)
            rest = 1 - self._acceptance
            further = (rest * self._second_guess * (1 - self._second_guess) ** i for i in range(count))
            rankings.append([*zip(tokens, (self._acceptance, *further), strict=False)][:count])
            if draft is not None:
                digest = zlib.crc32(array("I", [draft]), digest)
        return rankings


def _token(digest: int) -> int:
    """The target's choice for a context with this digest."""
    return digest // 10_000 % EOS_TOKEN_ID


async def delayed(messages: AsyncIterator[Any], seconds: float) -> AsyncIterator[Any]:
    """Each message some time after it came. Those that follow are taken meanwhile."""
    waiting: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()
    now = asyncio.get_running_loop().time

    async def take() -> None:
        try:
            async for message in messages:
                waiting.put_nowait((now() + seconds, message))
        finally:
            waiting.put_nowait((0.0, None))

    taking = asyncio.create_task(take())
    try:
        while (message := await waiting.get())[1] is not None:
            await asyncio.sleep(message[0] - now())
            yield message[1]
        await taking
    finally:
        taking.cancel()


def behind_network(servicer: type[WorkerServicer], seconds: float) -> type[WorkerServicer]:
    """A servicer whose rounds and responses take some time each way."""

    class Distant(servicer):  # type: ignore[valid-type, misc]
        async def rounds(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for response in delayed(super().rounds(delayed(requests, seconds), context), seconds):
                yield response

    return Distant if seconds else servicer


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("worker", choices=("target", "draft"))
    parser.add_argument("--port", type=whole(0, 65535), required=True)
    parser.add_argument("--pass-ms", action=PassMs, required=True)
    parser.add_argument("--acceptance", type=chance, default=1.0)
    parser.add_argument("--second-guess", type=chance, default=0.5)
    parser.add_argument("--delay-ms", type=milliseconds, default=0.0, help="network delay of a message")
    options, rest = parser.parse_known_args()
    sys.argv[1:] = ["--port", str(options.port), *rest]
    is_target, program = options.worker == "target", f"emulated-{options.worker}"
    register: Callable[[Any, Any], None] = (
        target_worker_pb2_grpc.add_TargetWorkerServiceServicer_to_server
        if is_target
        else draft_worker_pb2_grpc.add_DraftWorkerServiceServicer_to_server
    )
    times = pass_seconds(*options.pass_ms)

    def backend(report: Callable[[str], None]) -> EmulatedDevice:
        if is_target:
            return EmulatedTarget(times, options.acceptance, "cuda:0")
        return EmulatedDraft(times, options.acceptance, "cuda:1", options.second_guess)

    run_worker(
        program,
        WorkerSettings.load(program),
        backend,
        f"specpool.v1.{options.worker.title()}WorkerService",
        register,
        behind_network(TargetWorkerServicer if is_target else DraftWorkerServicer, options.delay_ms / 1000),
        (),
    )


if __name__ == "__main__":
    main()
