"""A constant number of streams, each compared with plain decoding on a good network."""

import asyncio
import random
import time
from dataclasses import dataclass, field, replace
from itertools import cycle

import grpc

from benchmarks.pair import MAX_MODEL_LEN
from deploy.trial.timeline import Timeline
from specpool.client import AsyncClient, DivergedError, GenerateOptions
from specpool.rpc.status import status_line
from specpool.testing import EOS_TOKEN_ID

MAX_PROMPT, MIN_TOKENS, MAX_TOKENS = 80, 20, 400
DRAFT_LENGTHS = (None, 2, 4)
"""Draft tokens per round that requests ask for; None: adaptive."""
PAUSE_SECONDS = 0.2
"""Pause after a failed request."""


@dataclass
class Case:
    """A request, and the tokens of plain decoding once they are known."""

    prompt: list[int]
    options: GenerateOptions
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Tally:
    """Numbers of finished requests."""

    answered: int = 0
    wrong: int = 0
    failed: int = 0


def random_cases(number: int, seed: int) -> list[Case]:
    """Requests with different prompts, lengths, sampling and draft lengths."""
    rng = random.Random(seed)
    return [_random_case(rng) for _ in range(number)]


def _random_case(rng: random.Random) -> Case:
    prompt = [rng.randrange(EOS_TOKEN_ID) for _ in range(rng.randint(1, MAX_PROMPT))]
    max_tokens = rng.randint(MIN_TOKENS, min(MAX_TOKENS, MAX_MODEL_LEN - len(prompt)))
    options = GenerateOptions(max_tokens=max_tokens, ignore_eos=True)
    if rng.random() < 0.5:
        options["temperature"], options["seed"] = 0.8, rng.getrandbits(63)
    options["num_speculative_tokens"] = rng.choice(DRAFT_LENGTHS)
    return Case(prompt, options)


class Load:
    """A constant number of streams that send the same cases in turn."""

    def __init__(self, client: AsyncClient, cases: list[Case]) -> None:
        self.timeline, self.tally = Timeline(), Tally()
        self.faults: list[str] = []
        """Wrong answers and failed requests, one sentence each."""
        self._client, self._cases, self._next = client, cases, cycle(cases)
        self._is_over = False
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began

    async def decode_plainly(self) -> None:
        """Decode all cases without speculation and store their tokens."""

        async def decode(case: Case) -> None:
            plain: GenerateOptions = {**case.options, "num_speculative_tokens": 0}
            case.tokens = list((await self._client.generate(case.prompt, **plain)).token_ids)

        await asyncio.gather(*map(decode, self._cases))

    def start(self, concurrency: int) -> "asyncio.Future[list[None]]":
        """Start `concurrency` streams; the future is done when `finish` was called and they have ended."""
        self._began = time.monotonic()
        return asyncio.gather(*(self._stream() for _ in range(concurrency)))

    def finish(self) -> None:
        """End each stream after its current request."""
        self._is_over = True

    async def _stream(self) -> None:
        while True:
            await self._send(next(self._next))
            if self._is_over:
                return

    async def _send(self, case: Case) -> None:
        """Send a request and count its outcome."""
        fault = None
        try:
            if not await self._is_right(case):
                fault = "the tokens differ from plain decoding"
        except DivergedError as error:
            fault = str(error)
        except grpc.RpcError as error:
            self.tally = replace(self.tally, failed=self.tally.failed + 1)
            self.faults.append(f"at {self.now:.1f} s: {status_line(error)}")
            await asyncio.sleep(PAUSE_SECONDS)
            return
        self.tally = replace(self.tally, answered=self.tally.answered + 1, wrong=self.tally.wrong + (fault is not None))
        if fault is not None:
            self.faults.append(f"at {self.now:.1f} s: {fault}")

    async def _is_right(self, case: Case) -> bool:
        """Whether the chunks of an answer, and its result, equal plain decoding. RpcError, DivergedError."""
        chunks: list[int] = []
        result: list[int] = []
        async for message in self._client.stream(case.prompt, **case.options):
            if message.HasField("complete"):
                result = list(message.complete.token_ids)
            else:
                chunks += message.chunk.token_ids
                self.timeline.add(self.now, len(message.chunk.token_ids))
        return chunks == result == case.tokens
