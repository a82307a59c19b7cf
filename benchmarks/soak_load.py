"""The load of a soak: requests of all kinds, what becomes of each, and whether that is right."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import grpc

from benchmarks.tiny_pair import MAX_MODEL_LEN
from specpool.client import AsyncClient
from specpool.rpc.status import status_line
from specpool.testing import EOS_TOKEN_ID
from specpool.v1 import generation_pb2 as pb

MOST_PROMPT, MOST_TOKENS = 120, 48
CANCELLED, LATE = 0.1, 0.05
"""Share of requests that are cancelled, and share of requests with a deadline that most of them miss."""
LONGEST_CANCEL_SECONDS, LONGEST_DEADLINE_SECONDS = 1.0, 0.2
PATIENCE_SECONDS = 3600.0
# Beginnings that many prompts share.
SHARED_PREFIXES = [tuple(range(start, start + 60)) for start in (0, 50, 100)]

Tokens = dict[int, list[int]]
"""The tokens of each sample of a request by its index."""


@dataclass(frozen=True)
class Case:
    """A request, and what its client does."""

    request: pb.GenerateRequest
    is_stream: bool
    cancelled_after: float | None = None
    """Seconds after which the client cancels."""
    deadline: float | None = None
    """Seconds that the call may take."""


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of requests by outcome: "answered", "cancelled", "late", or the status of a failure."""
    samples: int = 0
    """Samples that were answered."""
    tokens: int = 0
    """Tokens of the answered samples."""
    answered_ids: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """What was wrong, one sentence each."""
    kept: list[tuple[pb.GenerateRequest, Tokens]] = field(default_factory=list)
    """Some requests and their tokens, to be compared with plain decoding."""

    @property
    def done(self) -> int:
        """Number of requests that have ended."""
        return self.outcomes.total()


def random_case(chance: random.Random, number: int) -> Case:
    """A request with random prompt, lengths, sampling and speculation; some are to be cancelled, some come too late."""
    prefix = chance.choice([(), *SHARED_PREFIXES])
    prompt = [*prefix, *(chance.randrange(EOS_TOKEN_ID) for _ in range(chance.randint(1, MOST_PROMPT - len(prefix))))]
    is_sampled = chance.random() < 0.5
    params = pb.SamplingParams(max_tokens=chance.randint(1, min(MOST_TOKENS, MAX_MODEL_LEN - len(prompt))))
    if is_sampled:
        params.temperature, params.seed = chance.choice([0.3, 0.7, 1.2]), chance.getrandbits(63)
        params.top_k, params.top_p = chance.choice([-1, 5, 50]), chance.choice([1.0, 0.9])
        params.n = chance.choice([1, 1, 1, 1, 2, 3])
    if chance.random() < 0.1:
        params.logprobs = chance.randint(0, 3)
    if chance.random() < 0.1:
        params.repetition_penalty, params.presence_penalty = 1.1, 0.5
    if chance.random() < 0.2:
        params.stop_token_ids.append(chance.randrange(EOS_TOKEN_ID))
    request = pb.GenerateRequest(
        request_id=f"soak-{number}",
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=params,
        speculative=pb.SpeculativeParams(num_speculative_tokens=chance.choice([None, None, *range(9)])),
    )
    fate, is_stream = chance.random(), chance.random() < 0.5
    if fate < CANCELLED:
        return Case(request, is_stream, cancelled_after=chance.uniform(0, LONGEST_CANCEL_SECONDS))
    if fate < CANCELLED + LATE:
        return Case(request, is_stream, deadline=chance.uniform(0.001, LONGEST_DEADLINE_SECONDS))
    return Case(request, is_stream)


async def run_case(client: AsyncClient, case: Case, tally: Tally, keep: bool) -> None:
    """Sends a request, and notes what becomes of it. `keep`: whether its tokens are to be compared later."""
    asking = asyncio.ensure_future(ask(client, case.request, case.is_stream, case.deadline or PATIENCE_SECONDS))
    if case.cancelled_after is not None:
        await asyncio.wait([asking], timeout=case.cancelled_after)
        asking.cancel()
    try:
        tokens = await asking
    except asyncio.CancelledError:
        tally.outcomes["cancelled"] += 1
    except WrongAnswerError as error:
        tally.outcomes["wrong"] += 1
        tally.faults.append(f"{case.request.request_id}: {error}")
    except grpc.aio.AioRpcError as error:
        is_late = error.code().name == "DEADLINE_EXCEEDED" and case.deadline is not None
        tally.outcomes["late" if is_late else error.code().name] += 1
        if not is_late:
            tally.faults.append(f"{case.request.request_id}: {status_line(error)}")
    else:
        tally.outcomes["answered"] += 1
        tally.answered_ids[case.request.request_id] += 1
        tally.samples += len(tokens)
        tally.tokens += sum(map(len, tokens.values()))
        if keep:
            tally.kept.append((case.request, tokens))


class WrongAnswerError(Exception):
    """An answer contradicts itself or its request."""


async def ask(client: AsyncClient, request: pb.GenerateRequest, is_stream: bool, seconds: float) -> Tokens:
    """The tokens of all samples of a request. AioRpcError, WrongAnswerError."""
    completes: list[pb.GenerateResponse] = []
    if is_stream:
        pieces: dict[int, list[int]] = {}
        async for message in client.stub.GenerateStream(request, timeout=seconds):
            if message.HasField("complete"):
                completes.append(message.complete)
            else:
                pieces.setdefault(message.chunk.index, []).extend(message.chunk.token_ids)
        if any(pieces.get(sample.index, []) != list(sample.token_ids) for sample in completes):
            raise WrongAnswerError("the pieces of a stream are not its whole")
    else:
        response = await client.stub.Generate(request, timeout=seconds)
        completes = [response, *response.other_samples]
    return check_samples(request, completes)


def check_samples(request: pb.GenerateRequest, completes: list[pb.GenerateResponse]) -> Tokens:
    """The tokens of the samples by index. WrongAnswerError unless each sample is there once and as long as asked."""
    number = request.sampling_params.n or 1
    if sorted(sample.index for sample in completes) != list(range(number)):
        raise WrongAnswerError(f"it has {len(completes)} answers for {number} samples")
    for sample in completes:
        if sample.request_id != request.request_id:
            raise WrongAnswerError(f"it was answered as {sample.request_id}")
        if sample.finish_reason not in ("stop", "length"):
            raise WrongAnswerError(f"it ended by {sample.finish_reason}")
        is_full = len(sample.token_ids) == request.sampling_params.max_tokens
        if is_full < (sample.finish_reason == "length") or len(sample.token_ids) > request.sampling_params.max_tokens:
            raise WrongAnswerError(f"it has {len(sample.token_ids)} tokens")
    return {sample.index: list(sample.token_ids) for sample in completes}


async def compare(client: AsyncClient, request: pb.GenerateRequest, tokens: Tokens) -> bool:
    """Whether the tokens are those of plain decoding of the same request."""
    plain = pb.GenerateRequest()
    plain.CopyFrom(request)
    plain.request_id += "-plain"
    plain.speculative.num_speculative_tokens = 0
    return await ask(client, plain, False, PATIENCE_SECONDS) == tokens
