"""Load generator: random requests, with the outcome of each and a check of every answer."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from benchmarks.pair import MAX_MODEL_LEN
from specpool.rpc.status import status_line
from specpool.testing import EOS_TOKEN_ID, FakeTarget
from specpool.v1 import generation_pb2 as pb

MAX_PROMPT, MAX_TOKENS = 120, 48
CANCELLED, LATE = 0.1, 0.05
"""Shares of requests: cancelled by the client, and with a deadline that is usually too short."""
CONSTRAINED = 0.2
"""Share of requests with a constraint."""
MAX_CANCEL_SECONDS, MAX_DEADLINE_SECONDS = 1.0, 0.2
PATIENCE_SECONDS = 3600.0
POLL_SECONDS = 0.02
SHARED_PREFIXES = [tuple(range(start, start + 60)) for start in (0, 50, 100)]

CONSTRAINTS = [
    pb.SamplingParams(regex="20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["red", "green", "grey goose"])),
    pb.SamplingParams(grammar='root ::= "a" ("b" | "c")+ "d"'),
    pb.SamplingParams(json_object=True),
    pb.SamplingParams(
        json_schema='{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
    ),
    pb.SamplingParams(
        structural_tag='{"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "<"}], "triggers": ["<"]}'
    ),
]

Tokens = dict[int, list[int]]
"""The tokens of each sample of a request by its index."""


class WrongAnswerError(Exception):
    """An answer contradicts itself, its request, or the tokens of plain decoding."""


class Pulse:
    """The streams in progress, and when each last received something."""

    def __init__(self) -> None:
        self._received: dict[str, float] = {}

    @contextmanager
    def stream(self, name: str) -> Iterator[Callable[[], None]]:
        """A stream in progress. Call the result when it receives a message."""

        def beat() -> None:
            self._received[name] = time.perf_counter()

        beat()
        try:
            yield beat
        finally:
            del self._received[name]

    async def resumed(self, since: float) -> float:
        """Wait until the streams in progress have received something or ended. Return the seconds since then."""
        waiting = set(self._received)
        while waiting := {name for name in waiting & self._received.keys() if self._received[name] <= since}:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        return time.perf_counter() - since


@dataclass(frozen=True)
class Case:
    """A request, and the behaviour of the client. Times are in seconds."""

    request: pb.GenerateRequest
    is_stream: bool = False
    cancelled_after: float | None = None
    deadline: float | None = None
    expected: Tokens | None = None
    """Tokens of plain decoding, if they are known."""


@dataclass
class Tally:
    """The outcomes of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of requests by outcome: "answered", "wrong", "cancelled", "late", or a status code."""
    samples: int = 0
    tokens: int = 0
    """Samples and tokens of answered requests."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of each call."""
    answered_ids: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Everything that went wrong, one sentence each."""
    kept: list[tuple[pb.GenerateRequest, Tokens]] = field(default_factory=list)
    """Answers to compare with plain decoding after the run."""


Send = Callable[[Case], Awaitable[Tokens]]


def sender(stub: Any, pulse: Pulse | None = None) -> Send:
    """Send cases through a stub, without retries."""
    return partial(ask, stub, pulse=pulse or Pulse())


class Load:
    """Keeps `concurrency` requests in flight until the cases run out or `stop` is called."""

    def __init__(
        self,
        send: Send,
        cases: Iterable[Case],
        concurrency: int = 1,
        keep: Callable[[Case], bool] = lambda case: False,
        pause: float = 0.0,
    ) -> None:
        """`keep`: whether to keep a case's answer in the tally. `pause`: seconds between two requests of a client."""
        self.tally = Tally()
        self._send, self._cases, self._concurrency = send, iter(cases), concurrency
        self._keep, self._pause = keep, pause
        self._is_stopped = False

    async def run(self) -> None:
        """Send all cases."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._concurrency):
                clients.create_task(self._client())

    def stop(self) -> None:
        """End the load after the requests in flight."""
        self._is_stopped = True

    async def _client(self) -> None:
        for case in self._cases:
            began = time.perf_counter()
            outcome = await self._outcome(case)
            self.tally.latencies.append(time.perf_counter() - began)
            self.tally.outcomes[outcome] += 1
            if self._is_stopped:
                return
            await asyncio.sleep(self._pause)

    async def _outcome(self, case: Case) -> str:
        name, tally = case.request.request_id, self.tally
        call = asyncio.ensure_future(self._send(case))
        if case.cancelled_after is not None:
            await asyncio.wait([call], timeout=case.cancelled_after)
            call.cancel()
        try:
            tokens = await call
            if case.expected is not None and tokens != case.expected:
                raise WrongAnswerError("the tokens differ from plain decoding")
        except asyncio.CancelledError:
            return "cancelled"
        except WrongAnswerError as error:
            tally.faults.append(f"{name}: {error}")
            return "wrong"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and case.deadline is not None:
                return "late"
            tally.faults.append(f"{name}: {status_line(error)}")
            return str(error.code().name)
        tally.answered_ids[name] += 1
        tally.samples += len(tokens)
        tally.tokens += sum(map(len, tokens.values()))
        if self._keep(case):
            tally.kept.append((case.request, tokens))
        return "answered"


def random_case(rng: random.Random, number: int) -> Case:
    """A request with random prompt, sampling and speculation. The client cancels some; some have a short deadline."""
    prefix = rng.choice([(), *SHARED_PREFIXES])
    prompt = [*prefix, *(rng.randrange(EOS_TOKEN_ID) for _ in range(rng.randint(1, MAX_PROMPT - len(prefix))))]
    is_sampled = rng.random() < 0.5
    params = pb.SamplingParams(max_tokens=rng.randint(1, min(MAX_TOKENS, MAX_MODEL_LEN - len(prompt))))
    if is_sampled:
        params.temperature, params.seed = rng.choice([0.3, 0.7, 1.2]), rng.getrandbits(63)
        params.top_k, params.top_p = rng.choice([-1, 5, 50]), rng.choice([1.0, 0.9])
        params.n = rng.choice([1, 1, 1, 1, 2, 3])
    if rng.random() < 0.1:
        params.logprobs = rng.randint(0, 3)
    if rng.random() < 0.1:
        params.repetition_penalty, params.presence_penalty = 1.1, 0.5
    if rng.random() < 0.2:
        params.stop_token_ids.append(rng.randrange(EOS_TOKEN_ID))
    if rng.random() < CONSTRAINED:
        params.MergeFrom(rng.choice(CONSTRAINTS))
    request = pb.GenerateRequest(
        request_id=f"load-{number}",
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=params,
        speculative=pb.SpeculativeParams(num_speculative_tokens=rng.choice([None, None, *range(9)])),
    )
    if rng.random() < 0.2:
        prediction = [*prompt, *(rng.randrange(EOS_TOKEN_ID) for _ in range(20))]
        request.speculative.prediction.tokenized.input_ids.extend(prediction)
    fate, is_stream = rng.random(), rng.random() < 0.5
    if fate < CANCELLED:
        return Case(request, is_stream, cancelled_after=rng.uniform(0, MAX_CANCEL_SECONDS))
    if fate < CANCELLED + LATE:
        return Case(request, is_stream, deadline=rng.uniform(0.001, MAX_DEADLINE_SECONDS))
    return Case(request, is_stream)


def fake_cases(target: FakeTarget, requests: Iterable[pb.GenerateRequest]) -> Iterator[Case]:
    """Cases with the tokens of a fake target. Every second case is a stream."""
    for number, request in enumerate(requests):
        request.request_id = f"load-{number}"
        expected = target.continuation(request.tokenized.input_ids, request.sampling_params.max_tokens)
        yield Case(request, number % 2 == 1, expected={0: expected})


async def ask(stub: Any, case: Case, pulse: Pulse) -> Tokens:
    """The tokens of all samples of a request. AioRpcError, WrongAnswerError."""
    timeout = case.deadline or PATIENCE_SECONDS
    if not case.is_stream:
        response = await stub.Generate(case.request, timeout=timeout)
        return check_samples(case.request, [response, *response.other_samples])
    samples: list[pb.GenerateResponse] = []
    pieces: dict[int, list[int]] = {}
    with pulse.stream(case.request.request_id) as beat:
        async for message in stub.GenerateStream(case.request, timeout=timeout):
            beat()
            if message.HasField("complete"):
                samples.append(message.complete)
            else:
                pieces.setdefault(message.chunk.index, []).extend(message.chunk.token_ids)
    if any(pieces.get(sample.index, []) != list(sample.token_ids) for sample in samples):
        raise WrongAnswerError("the chunks of a stream differ from its result")
    return check_samples(case.request, samples)


def check_samples(request: pb.GenerateRequest, samples: list[pb.GenerateResponse]) -> Tokens:
    """The tokens of the samples by index. WrongAnswerError: a sample is missing, repeated, or of the wrong length."""
    number, max_tokens = request.sampling_params.n or 1, request.sampling_params.max_tokens
    if sorted(sample.index for sample in samples) != list(range(number)):
        raise WrongAnswerError(f"{len(samples)} answers for {number} samples")
    for sample in samples:
        if sample.request_id != request.request_id:
            raise WrongAnswerError(f"answered as {sample.request_id}")
        if sample.finish_reason not in ("stop", "length"):
            raise WrongAnswerError(f"ended by {sample.finish_reason}")
        is_short = len(sample.token_ids) < max_tokens and sample.finish_reason == "length"
        if is_short or len(sample.token_ids) > max_tokens:
            raise WrongAnswerError(f"{len(sample.token_ids)} tokens")
    return {sample.index: list(sample.token_ids) for sample in samples}


async def equals_plain_decoding(stub: Any, request: pb.GenerateRequest, tokens: Tokens) -> bool:
    """Whether plain decoding of the same request gives the same tokens."""
    plain = pb.GenerateRequest()
    plain.CopyFrom(request)
    plain.request_id += "-plain"
    plain.speculative.num_speculative_tokens = 0
    return await ask(stub, Case(plain), Pulse()) == tokens
