"""A constant load of streams, each compared with what plain decoding gave while the network was good."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import cycle

import grpc

from benchmarks.pair import MAX_MODEL_LEN
from deploy.trial.timeline import Timeline
from specpool.client import AsyncClient, DivergedError, GenerateOptions
from specpool.rpc.status import status_line
from specpool.testing import EOS_TOKEN_ID

MOST_PROMPT, LEAST_TOKENS, MOST_TOKENS = 80, 20, 400
DRAFT_LENGTHS = (None, 2, 4)
"""Draft tokens per round that requests ask for; None: as many as save time."""
PAUSE_SECONDS = 0.2
"""Pause of a stream after a failed request."""


@dataclass
class Case:
    """A request, and its correct tokens once they are known."""

    prompt: list[int]
    options: GenerateOptions
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Tally:
    """Numbers of requests that have ended."""

    answered: int = 0
    wrong: int = 0
    failed: int = 0


def random_cases(number: int, seed: int) -> list[Case]:
    """Requests that differ in prompt, length, sampling and draft length."""
    rng = random.Random(seed)
    return [_random_case(rng) for _ in range(number)]


def _random_case(rng: random.Random) -> Case:
    prompt = [rng.randrange(EOS_TOKEN_ID) for _ in range(rng.randint(1, MOST_PROMPT))]
    most = min(MOST_TOKENS, MAX_MODEL_LEN - len(prompt))
    options = GenerateOptions(max_tokens=rng.randint(LEAST_TOKENS, most), ignore_eos=True)
    if rng.random() < 0.5:
        options["temperature"], options["seed"] = 0.8, rng.getrandbits(63)
    options["num_speculative_tokens"] = rng.choice(DRAFT_LENGTHS)
    return Case(prompt, options)


class Load:
    """A constant number of requests in flight, taken from the same cases in turn."""

    def __init__(self, client: AsyncClient, cases: list[Case]) -> None:
        self.timeline = Timeline()
        self.faults: list[str] = []
        """Answers that were wrong and requests that failed, one sentence each."""
        self._client, self._cases, self._next = client, cases, cycle(cases)
        self._answered = self._wrong = self._failed = 0
        self._is_over = False
        self._began = time.monotonic()

    @property
    def tally(self) -> Tally:
        """The requests so far."""
        return Tally(self._answered, self._wrong, self._failed)

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began

    async def decode_plainly(self) -> None:
        """Finds the correct tokens of all cases, by plain decoding."""

        async def decode(case: Case) -> None:
            plain: GenerateOptions = {**case.options, "num_speculative_tokens": 0}
            response = await self._client.generate(case.prompt, **plain)
            case.tokens = list(response.token_ids)

        await asyncio.gather(*map(decode, self._cases))

    def start(self, concurrency: int) -> "asyncio.Future[list[None]]":
        """Keeps `concurrency` streams going; the future is done when the load is over and they have ended."""
        self._began = time.monotonic()
        return asyncio.gather(*(self._stream() for _ in range(concurrency)))

    def finish(self) -> None:
        """Lets each stream end after its present request."""
        self._is_over = True

    async def _stream(self) -> None:
        while True:
            case = next(self._next)
            try:
                tokens, whole = await self._ask(case)
            except DivergedError as error:
                self._wrong += 1
                self.faults.append(f"at {self.now:.1f} s: {error}")
            except grpc.RpcError as error:
                self._failed += 1
                self.faults.append(f"at {self.now:.1f} s: {status_line(error)}")
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._answered += 1
                if tokens != case.tokens or whole != case.tokens:
                    self._wrong += 1
                    self.faults.append(f"at {self.now:.1f} s: other tokens than those of plain decoding")
            if self._is_over:
                return

    async def _ask(self, case: Case) -> tuple[list[int], list[int]]:
        """Tokens of an answer's pieces, and those that its end repeats. RpcError, DivergedError."""
        tokens: list[int] = []
        whole: list[int] = []
        async for message in self._client.stream(case.prompt, **case.options):
            if message.HasField("complete"):
                whole = list(message.complete.token_ids)
            else:
                tokens += message.chunk.token_ids
                self.timeline.add(self.now, len(message.chunk.token_ids))
        return tokens, whole
