"""The auditor: replays some answers by plain decoding while there is room, and compares the tokens.

Replays yield to requests, and appear in no count, latency or trace of theirs. The log never has their text or prompt.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from coordinator.requests.generation import Generation, Sample
from coordinator.scheduling.audits import Answer, Backlog, Difference, SpareRoom, first_difference
from coordinator.scheduling.sequence import FinishReason, GenerationRequest, Sequence
from specpool.protocol.errors import ServiceError
from specpool.rpc.observability import logs

log = logging.getLogger(__name__)

EQUAL, DIFFERENT, DROPPED, ABORTED = RESULTS = ("equal", "different", "dropped", "aborted")
# Share of the answers that are audited by default if the target's tokens are exact.
DEFAULT_SHARE = 0.001
# How often to look for room while answers wait.
POLL_SECONDS = 0.1

Generate = Callable[[GenerationRequest, float], AbstractAsyncContextManager[Generation]]


class Auditor:
    def __init__(
        self, room: SpareRoom, generate: Generate, abort: Callable[[Sequence], None], share: Callable[[], float]
    ) -> None:
        """`generate`, `abort`: of the coordinator. `share`: the present share of answers to audit, 0 to 1."""
        self.results: Counter[str] = Counter()
        """Samples selected for an audit, by result."""
        self._room, self._generate, self._abort, self._share = room, generate, abort, share
        self._backlog = Backlog()
        self._has_answers = asyncio.Event()
        self._replaying: Sequence | None = None
        self._stopped = False

    def offer(self, sequence: Sequence) -> None:
        """Select a share of the sequences that finished for an audit."""
        share = 0.0 if self._stopped or sequence.request.is_background else self._share()
        if random.random() >= share:
            return
        if (answer := Answer.of(sequence)) is not None:
            self.results[DROPPED] += self._backlog.add(answer)
            self._has_answers.set()

    def yield_room(self) -> None:
        """Abort the replay if requests need its room."""
        if self._replaying is not None and not self._room.may_stay():
            self._abort(self._replaying)

    def clear(self) -> None:
        """Drop all answers, since the target's model may have changed."""
        self.results[DROPPED] += self._backlog.clear()
        if self._replaying is not None:
            self._abort(self._replaying)

    def stop(self) -> None:
        self._stopped = True
        self.clear()

    async def run(self) -> None:
        """Audit the selected answers. Never returns."""
        while True:
            await self._has_answers.wait()
            if not self._backlog:
                self._has_answers.clear()
            elif self._room.may_enter(self._backlog.first.max_length):
                self.results[await self._audit(self._backlog.pop())] += 1
            else:
                await asyncio.sleep(POLL_SECONDS)

    async def _audit(self, answer: Answer) -> str:
        """Replay an answer and return the result. A replay that fails proves nothing."""
        try:
            async with self._generate(answer.replay, time.monotonic()) as generation:
                (self._replaying,) = (sample.sequence for sample in generation.samples)
                (sample,) = await generation.finished()
        except ServiceError:
            return ABORTED
        except Exception:  # a bug here must not stop the service
            log.exception("audit failed")
            return ABORTED
        finally:
            self._replaying = None
        finish = sample.sequence.finish
        if finish is None or finish.reason is FinishReason.ABORT:
            return ABORTED
        difference = first_difference(answer.token_ids, sample.sequence.generated_ids)
        if difference is None:
            return EQUAL
        await _report(answer.request.request_id, difference, sample)
        return DIFFERENT


async def _report(request_id: str, difference: Difference, sample: Sample) -> None:
    margins = [top[0] - top[1] async for part in sample.logprobs() for top in (entry.top_logprobs for entry in part)]
    margin = margins[difference.position] if difference.position < len(margins) else float("nan")
    log.warning(
        "audit of request %r: plain decoding gives another token at position %d of the answer: %s instead of %s, "
        "top-2 margin of the logits %.3g",
        request_id,
        difference.position,
        difference.plain_token_id,
        difference.token_id,
        margin,
        extra=logs.about(request_id),
    )
