"""Simulated clients: send requests to the real coordinator, and compare every token with the right answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.requests.generation import Generation
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import FinishReason, GenerationRequest
from coordinator.serving.coordinator import Coordinator
from simulator.model import EOS, ToyPair
from simulator.setup import Request
from specpool.drafting.plans import DraftMethod
from specpool.protocol.errors import ServiceError
from specpool.protocol.sampling import SamplingParams

READ_BEFORE_PAUSE = 3
"""Commits that a slow client reads before it pauses."""


@dataclass
class Outcome:
    """Progress and end of a request as its client has seen them."""

    request: Request
    sent: float
    delivered: list[list[int]] = field(default_factory=list)
    """Tokens of each sample so far."""
    end: str = ""
    """"answered", "aborted", "left", or the class of the error. Empty: it still runs."""
    error: ServiceError | None = None
    is_aborted: bool = False
    """Whether somebody has aborted the request."""
    seconds: float = 0.0
    """Duration of the request."""


class Client:
    """Runs one request."""

    def __init__(self, coordinator: Coordinator, pair: ToyPair, request: Request, fail: Callable[[str], None]) -> None:
        """`fail`: reports a violation."""
        self.outcome = Outcome(request, asyncio.get_running_loop().time(), [[] for _ in range(request.n)])
        self._coordinator, self._request, self._report = coordinator, request, fail
        seeds = [request.seed + i if request.seed else 0 for i in range(request.n)]
        self._answers = [pair.answer(request.prompt, request.max_tokens, seed) for seed in seeds]

    async def run(self) -> None:
        """Send the request, and check what comes back."""
        outcome = self.outcome
        try:
            async with asyncio.timeout(self._request.leaves_after):
                async with self._coordinator.generate(self._generation_request(), outcome.sent) as generation:
                    await self._read(generation)
                outcome.end = "aborted" if outcome.is_aborted else "answered"
        except TimeoutError:
            outcome.end = "left"
        except ServiceError as error:
            outcome.end, outcome.error = type(error).__name__, error
        finally:
            outcome.seconds = asyncio.get_running_loop().time() - outcome.sent

    async def _read(self, generation: Generation) -> None:
        task, stalled = asyncio.current_task(), list[ServiceError]()
        assert task is not None

        def fail(error: ServiceError) -> None:
            stalled.append(error)
            task.cancel()

        commits = 0
        try:
            async for sample, commit in generation.stream(fail):
                if commit is None:
                    finish = sample.sequence.finish
                    self._check_end(sample.index, finish.reason if finish is not None else None)
                    continue
                self._check(sample.index, commit)
                commits += 1
                if self._request.reads_slowly and commits == READ_BEFORE_PAUSE:
                    await asyncio.sleep(self._request.reads_slowly)
        except asyncio.CancelledError:
            if not stalled:
                raise
            task.uncancel()
            raise stalled[0] from None

    def _check(self, index: int, commit: Commit) -> None:
        """Compare the tokens so far with the right ones."""
        delivered, expected = self.outcome.delivered[index], self._answers[index]
        delivered += commit.token_ids
        if delivered != expected[: len(delivered)]:
            place = next(i for i, token in enumerate(delivered) if expected[i : i + 1] != [token])
            self._fail(index, f"token {place} is {delivered[place]} instead of {expected[place : place + 1]}")

    def _check_end(self, index: int, reason: FinishReason | None) -> None:
        delivered, expected = self.outcome.delivered[index], self._answers[index]
        if reason is FinishReason.ABORT:
            if not self.outcome.is_aborted:
                self._fail(index, "it ended by an abort that nobody asked for")
            return
        if delivered != expected:
            self._fail(index, f"it ended after {len(delivered)} of {len(expected)} tokens")
        if reason is not (FinishReason.STOP if expected[-1] == EOS else FinishReason.LENGTH):
            self._fail(index, f"its finish reason is {reason}")

    def _fail(self, index: int, problem: str) -> None:
        self._report(f"{self._request.name}, sample {index}: {problem}")

    def _generation_request(self) -> GenerationRequest:
        request = self._request
        return GenerationRequest(
            request_id=request.name,
            prompt_ids=request.prompt,
            max_tokens=request.max_tokens,
            stop_token_ids=frozenset({EOS}),
            num_speculative_tokens=16 if request.k is None else request.k,
            sampling=SamplingParams(temperature=1.0 if request.seed else 0.0, seed=request.seed),
            n=request.n,
            adaptive=request.k is None,
            method=DraftMethod(request.method),
            prediction=request.prediction,
            cache_salt=request.salt,
            client=request.client,
        )
