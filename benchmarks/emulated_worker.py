"""A worker whose device waits instead of computing. Its server, model thread, rounds and cache are real.

    python -m benchmarks.emulated_worker target --port 50051 --pass-ms 6 0.03
    python -m benchmarks.emulated_worker draft --port 50052 --pass-ms 0.8 0.01 --acceptance 0.75
    python -m benchmarks.emulated_worker target --port 50051 --pass-ms 4.8 0.015 --draft-ms 1.25 0 --acceptance 0.7

The target chooses tokens like `specpool.testing.FakeTarget`. The draft's first guess of a token is right with
probability `--acceptance`. If all guesses so far are wrong, the next one is right with probability `--second-guess`.
With `--draft-ms`, the target carries a draft, which runs on the same device. Other settings of workers may follow, such
as `--log-level info`.
"""

import asyncio
import mmap
import sys
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.emulated_device import EmulatedDevice, open_meter, pass_seconds, token_of
from benchmarks.report import PassMs, chance, milliseconds, parser_of, whole
from draft_worker.server import DraftWorkerServicer
from draft_worker.translating import TranslatingProposer
from draft_worker.translation.translations import Translations
from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.sampling.ranking import Ranking
from specpool.protocol.rounds import MAX_ITEM_BRANCHES
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE
from specpool.v1 import draft_worker_pb2_grpc, target_worker_pb2_grpc
from specpool.worker.process import run_worker
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings
from target_worker.own_draft import OwnDrafts
from target_worker.server import TargetWorkerServicer
from target_worker.verifier import Verifier


class EmulatedDraft(EmulatedDevice, TranslatingProposer):
    translations = Translations(TokenizerFiles(b"", "", {}, ()), VOCAB_SIZE)

    def __init__(
        self,
        seconds: Callable[[int], float],
        acceptance: float,
        device: str,
        meter: mmap.mmap,
        second_guess: float,
    ) -> None:
        """`second_guess`: probability that a further guess is right if those before it are wrong."""
        super().__init__(seconds, acceptance, device, meter)
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
            right, rank = token_of(digest), 0
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


class EmulatedTarget(EmulatedDevice, Verifier):
    """The target worker's backend."""

    def __init__(
        self, seconds: Callable[[int], float], device: str, meter: mmap.mmap, draft: EmulatedDraft | None
    ) -> None:
        """`draft`: the draft that the worker carries."""
        super().__init__(seconds, 1.0, device, meter)
        self.drafts = None if draft is None else OwnDrafts(self.engine, draft)

    def info(self) -> WorkerInfo:
        return replace(super().info(), draft=None if self.drafts is None else self.drafts.proposer.info())


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
    parser.add_argument("--draft-ms", action=PassMs, help="milliseconds of a draft step; the target carries a draft")
    parser.add_argument("--acceptance", type=chance, default=1.0, help="acceptance rate of the draft")
    parser.add_argument("--meter", type=Path, help="file that records the seconds of all passes")
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
    times, meter = pass_seconds(*options.pass_ms), open_meter(options.meter)

    def draft(times: Callable[[int], float], device: str) -> EmulatedDraft:
        return EmulatedDraft(times, options.acceptance, device, meter, options.second_guess)

    def backend(report: Callable[[str], None]) -> EmulatedDevice:
        if not is_target:
            return draft(times, "cuda:1")
        steps = options.draft_ms
        carried = None if steps is None else draft(pass_seconds(*steps), "cuda:0")
        return EmulatedTarget(times, "cuda:0", meter, carried)

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
