"""Random requests to the public API: each is answered, or refused with the name of the invalid field."""

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from pair_service import PairService, serving_pair
from serving import violated_fields

from specpool.v1 import generation_pb2 as pb

REQUESTS, CONCURRENCY = 600, 48
MAX_MODEL_LEN = 64
VOCAB = 257
CANCELLED_SHARE, GARBAGE_SHARE = 0.05, 0.05
NOT_FINITE = [math.nan, math.inf, -math.inf]

Draw = Callable[[random.Random], Any]

# Rounding to float32 may push a value across its limit.
VALID: dict[str, Draw] = {
    "temperature": lambda c: c.choice([0.0, 0.0, 0.01, 100.0, -1e-8, c.uniform(0.02, 3)]),
    "top_p": lambda c: c.choice([1.0, 1.0000001, 1e-5, c.uniform(0.01, 1)]),
    "top_k": lambda c: c.choice([-1, 0, 1, VOCAB, 2**31 - 1, c.randint(1, 50)]),
    "min_p": lambda c: c.choice([0.0, -1e-8, 1.0, 1.0000002, c.random()]),
    "repetition_penalty": lambda c: c.choice([0.01, 1.0, 100.0, c.uniform(0.5, 2)]),
    "frequency_penalty": lambda c: c.choice([-2.0, 2.0, 0.0, c.uniform(-2, 2)]),
    "presence_penalty": lambda c: c.choice([-2.0, 2.0, 0.0, c.uniform(-2, 2)]),
    "stop": lambda c: [c.choice(["a", "é", "\n", "x" * 256, "\ufffd"]) for _ in range(c.choice([0, 1, 16]))],
    "stop_token_ids": lambda c: [c.randrange(VOCAB) for _ in range(c.choice([0, 1, 5, 1024]))],
    "ignore_eos": lambda c: c.random() < 0.5,
    "seed": lambda c: c.choice([0, 2**64 - 1, c.getrandbits(64)]),
    "logprobs": lambda c: c.choice([0, 1, 20]),
    "logit_bias": lambda c: {c.randrange(VOCAB): c.choice([-100.0, 100.0, c.uniform(-9, 9)]) for _ in range(3)},
}
INVALID: dict[str, Draw] = {
    "temperature": lambda c: c.choice([-0.1, 0.005, 101.0, *NOT_FINITE]),
    "top_p": lambda c: c.choice([0.0, -0.1, 1.001, *NOT_FINITE]),
    "top_k": lambda c: c.choice([-2, -(2**31)]),
    "min_p": lambda c: c.choice([-0.01, 1.01, *NOT_FINITE]),
    "repetition_penalty": lambda c: c.choice([0.0, -1.0, 100.1, *NOT_FINITE]),
    "frequency_penalty": lambda c: c.choice([-2.01, 2.01, *NOT_FINITE]),
    "presence_penalty": lambda c: c.choice([-2.01, 2.01, *NOT_FINITE]),
    "max_tokens": lambda c: c.choice([0, MAX_MODEL_LEN, 2**32 - 1]),
    "min_tokens": lambda c: c.choice([MAX_MODEL_LEN, 2**32 - 1]),
    "stop": lambda c: c.choice([[""], ["x" * 257], ["a"] * 17]),
    "stop_token_ids": lambda c: c.choice([[VOCAB], [2**32 - 1], [1] * 1025]),
    "logprobs": lambda c: c.choice([-1, 21, 2**31 - 1]),
    "logit_bias": lambda c: c.choice([{VOCAB: 1.0}, {3: 100.1}, {3: math.nan}, dict.fromkeys(range(1025), 0.0)]),
    "n": lambda c: c.choice([0, 65, 2**32 - 1]),
}


def sampling_params(chance: random.Random, prompt_length: int) -> tuple[dict[str, Any], set[str]]:
    """Random fields, and the names of those that are invalid."""
    max_tokens = chance.randint(1, min(8, MAX_MODEL_LEN - prompt_length))
    fields = {"max_tokens": max_tokens, "min_tokens": chance.randint(0, max_tokens)}
    fields |= {name: draw(chance) for name, draw in VALID.items() if chance.random() < 0.3}
    if fields.get("temperature", 0) > 0.001 and chance.random() < 0.3:
        fields["n"] = chance.randint(1, 4)
    wrong = set(chance.sample(sorted(INVALID), chance.choice([0, 0, 0, 1, 2])))
    fields |= {name: INVALID[name](chance) for name in sorted(wrong)}
    if fields.get("n", 1) > 1 and not fields.get("temperature", 0) > 0.001:
        wrong.add("n")
    return fields, wrong


def prompt(chance: random.Random) -> tuple[dict[str, Any], int, set[str]]:
    """A random input, its length, and the names of its invalid fields."""
    length = chance.randint(1, MAX_MODEL_LEN - 9)
    kind = chance.choice(["tokenized", "tokenized", "text", "none", "empty", "long", "unknown", "chat"])
    ids = [chance.randrange(VOCAB) for _ in range(length)]
    if kind == "tokenized":
        return {"tokenized": pb.TokenizedInput(input_ids=ids)}, length, set()
    if kind == "text":
        return {"text": "".join(chance.choice("ab c\n") for _ in range(length))}, length, set()
    if kind == "none":
        return {}, 1, {"input"}
    if kind == "empty":
        return {"text": ""}, 1, {"text"}
    if kind == "chat":
        role = chance.choice(["user", "assistant", ""])
        option, tool = chance.choice(["", "", "enable_thinking", "enable_thinkin"]), chance.choice(["", "", "{}", "{"])
        options = {option: True} if option else None
        chat = pb.ChatInput(
            messages=[{"role": role, "content": "abc"}], chat_template_kwargs=options, tools=[tool] if tool else []
        )
        wrong = set() if role else {"chat.messages"}
        wrong |= {"chat.chat_template_kwargs"} if option == "enable_thinkin" else set()
        return {"chat": chat}, MAX_MODEL_LEN - 9, wrong | ({"chat.tools"} if tool == "{" else set())
    ids = [1] * MAX_MODEL_LEN if kind == "long" else [*ids, VOCAB]
    return {"tokenized": pb.TokenizedInput(input_ids=ids)}, 1, {"tokenized.input_ids"}


def speculation(chance: random.Random) -> tuple[pb.SpeculativeParams, set[str]]:
    """Return random speculation parameters, and the names of the invalid ones."""
    wrong, params = set[str](), pb.SpeculativeParams(method=chance.choice([*[0] * 9, *pb.DraftMethod.values()]))
    if (k := chance.choice([None, None, 0, 4, 4, 16, 16, 17])) is not None:
        params.num_speculative_tokens = k
        wrong |= {"num_speculative_tokens"} if k == 17 else set()
    kind = chance.choice([*[""] * 12, "text", "text", "tokenized", "none", "long", "unknown"])
    if not kind:
        return params, wrong | ({"method"} if params.method == pb.DRAFT_METHOD_PREDICTION else set())
    params.prediction.SetInParent()
    if kind == "text":
        params.prediction.text = chance.choice(["a", "ab c\n" * 9])
    elif kind != "none":
        ids = {"tokenized": [5, 6], "long": [1] * MAX_MODEL_LEN, "unknown": [1, VOCAB]}[kind]
        params.prediction.tokenized.input_ids.extend(ids)
    # Plain decoding ignores unknown ids.
    wrong |= {"prediction.tokenized.input_ids"} if kind == "long" or (kind == "unknown" and k != 0) else set()
    no_method = params.method in (pb.DRAFT_METHOD_MODEL, pb.DRAFT_METHOD_NGRAM, pb.DRAFT_METHOD_SUFFIX)
    return params, wrong | ({"prediction"} if kind == "none" or no_method else set())


def random_request(chance: random.Random) -> tuple[pb.GenerateRequest, set[str]]:
    """A random request, and the fields that a refusal may name (none: it is valid)."""
    form, length, wrong = prompt(chance)
    fields, wrong_fields = sampling_params(chance, length)
    speculative, wrong_speculative = speculation(chance)
    wrong |= {f"sampling_params.{name}" for name in wrong_fields}
    wrong |= {f"speculative.{name}" for name in wrong_speculative}
    request_id = "x" * chance.choice([0, 0, 0, 0, 0, 129])
    wrong |= {"request_id"} if request_id else set()
    return pb.GenerateRequest(
        request_id=request_id,
        sampling_params=pb.SamplingParams(**fields),
        speculative=speculative,
        **form,
    ), wrong


async def answer(call: Any) -> Any:
    """The response, or the fields that the refusal names."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return {field.partition("[")[0] for field in violated_fields(error)}


async def send(service: PairService, request: pb.GenerateRequest, wrong: set[str]) -> None:
    """Send a request. Assert an answer if it is valid, and a refusal otherwise."""
    response = await answer(service.client.stub.Generate(request, timeout=60))
    if isinstance(response, set):
        assert response
        assert response <= wrong, request
        return
    assert wrong == set(), request
    samples = [response, *response.other_samples]
    assert len(samples) == (request.sampling_params.n or 1)
    for sample in samples:
        assert 1 <= len(sample.token_ids) <= request.sampling_params.max_tokens
        assert sample.finish_reason in ("stop", "length")
        assert len(sample.logprobs) == (len(sample.token_ids) if request.sampling_params.HasField("logprobs") else 0)


async def send_and_cancel(service: PairService, request: pb.GenerateRequest, after_seconds: float) -> None:
    call = service.client.stub.Generate(request)
    await asyncio.sleep(after_seconds)
    call.cancel()


async def send_garbage(service: PairService, payload: bytes) -> None:
    """Send bytes that are rarely a valid message."""
    call = service.client._connections[0].channel.unary_unary("/specpool.v1.GenerationService/Generate")
    assert await answer(call(payload, timeout=60)) != set()


async def test_every_request_is_answered_or_refused_by_name(tiny_pair: tuple[Path, Path]) -> None:
    chance = random.Random(0)
    free = asyncio.Semaphore(CONCURRENCY)
    worker = {"max_model_len": MAX_MODEL_LEN, "max_sequences": 16}

    async def one(service: PairService) -> None:
        request, wrong = random_request(chance)
        fate = chance.random()
        cut = chance.randint(0, request.ByteSize())
        async with free:
            if fate < CANCELLED_SHARE:
                await send_and_cancel(service, request, fate)
            elif fate < CANCELLED_SHARE + GARBAGE_SHARE:
                await send_garbage(service, request.SerializeToString()[cut:])
            else:
                await send(service, request, wrong)

    async with serving_pair(*tiny_pair, worker=worker, max_batch_size=16) as service:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(REQUESTS):
                tasks.create_task(one(service))
        await service.wait_idle()
        coordinator = service.process.coordinator
        assert coordinator.queue.is_empty
        assert not coordinator.lanes.first.window.occupied
        assert coordinator.in_flight._samples == {}
        assert "error" not in coordinator.in_flight.finished
        assert coordinator.in_flight.requests >= REQUESTS / 10
        for host in (service.target, service.draft):
            assert host is not None
            await host.run(lambda backend: backend.engine.slots.check_integrity())
        assert (await service.client.generate("still here", max_tokens=3)).token_ids
