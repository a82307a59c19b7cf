"""The Python clients: every option reaches the server, and retries never deliver anything twice."""

import asyncio
import itertools
import json
import math
import re
import reprlib
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from unittest import mock

import grpc
import pytest
from pydantic import BaseModel
from serving import RecordingTarget, Serving, expected_tokens, free_address, make_request, serving

from coordinator.server import CoordinatorServer
from specpool import client as library
from specpool.client import AsyncClient, Client, GenerateOptions
from specpool.errors import QueueFullError
from specpool.v1 import generation_pb2 as pb

PROMPT = [5, 6, 7]
CHAT_OPTIONS = {"tools", "chat_template_kwargs"}
SPECULATIVE_OPTIONS = {"num_speculative_tokens", "draft_method", "prediction"}
OTHER_OPTIONS = SPECULATIVE_OPTIONS | {"request_id", "priority", "cache_salt"} | CHAT_OPTIONS
"""Options other than sampling parameters."""


def test_the_blocking_client_is_up_to_date(tmp_path: Path) -> None:
    root, generated = Path(__file__).parents[3], tmp_path / "sync.py"
    subprocess.run([sys.executable, ".ci/generate_client.py", generated], cwd=root, check=True)
    assert generated.read_text() == (root / "specpool/client/sync.py").read_text(), "run `make client`"


# --- Addresses and requests


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("address", "example"),
    [
        ("localhost", "localhost:50050"),
        ("gpu-a:", "gpu-a:50050"),
        ("10.0.0.1", "10.0.0.1:50050"),
        ("::1", "[::1]:50050"),
        ("[::1]", "[::1]:50050"),
    ],
)
def test_addresses_need_a_port(kind: type[Client], address: str, example: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{address} has no port: use HOST:PORT, such as ")) as caught:
        kind(address)
    assert str(caught.value).endswith(f"such as {example}")


def test_every_protocol_field_is_an_option() -> None:
    sampling = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert set(GenerateOptions.__annotations__) == sampling | OTHER_OPTIONS
    others = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields if field.containing_oneof is None}
    speculative = {field.name for field in pb.SpeculativeParams.DESCRIPTOR.fields}
    assert speculative == SPECULATIVE_OPTIONS - {"draft_method"} | {"method"}
    assert {field.name for field in pb.ChatInput.DESCRIPTOR.fields} == CHAT_OPTIONS | {"messages"}
    assert others == OTHER_OPTIONS - CHAT_OPTIONS - SPECULATIVE_OPTIONS | {"sampling_params", "speculative"}


def test_options_become_request_fields() -> None:
    options: GenerateOptions = {
        "max_tokens": 5, "min_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 4, "min_p": 0.125,
        "repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": -0.25, "logit_bias": {3: 1.5},
        "stop": ["x", "y"], "stop_token_ids": [9], "ignore_eos": True, "seed": 11, "logprobs": 2, "n": 3,
        "num_speculative_tokens": 0, "draft_method": "ngram", "request_id": "r", "priority": -1,
        "cache_salt": "s", "constraint_after_reasoning": True, "json_whitespace": True, "max_thinking_tokens": 0,
        "skip_special_tokens": False,
    }  # fmt: skip
    request = library.make_request("hello", **options)
    assert (request.text, request.request_id, request.speculative.num_speculative_tokens) == ("hello", "r", 0)
    assert (request.priority, request.cache_salt) == (-1, "s")
    assert request.speculative.method == pb.DRAFT_METHOD_NGRAM
    params = request.sampling_params
    for name in set(options) - OTHER_OPTIONS:
        value = getattr(params, name)
        assert (dict(value) if name == "logit_bias" else list(value) if name.startswith("stop") else value) == (
            options[name]  # type: ignore[literal-required]
        )


def test_prompts_are_text_chat_or_token_ids() -> None:
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(), speculative=pb.SpeculativeParams(), text="hello")
    assert library.make_request("hello", max_tokens=None, temperature=None) == request
    assert library.make_request([1, 2]).tokenized.input_ids == [1, 2]
    (message,) = library.make_request([{"role": "user", "content": "hi"}]).chat.messages
    assert (message.role, message.content) == ("user", "hi")
    assert library.make_request("a", stop="END").sampling_params.stop == ["END"]


def test_predictions_are_text_or_token_ids() -> None:
    assert library.make_request("a", prediction="b").speculative.prediction == pb.Prediction(text="b")
    for token_ids in ([1, 2], (1, 2), array("I", [1, 2])):
        prediction = library.make_request("a", prediction=token_ids).speculative.prediction
        assert prediction == pb.Prediction(tokenized=pb.TokenizedInput(input_ids=[1, 2]))
    assert library.make_request("a", prediction="").speculative.HasField("prediction")
    assert not library.make_request("a", prediction=None).speculative.HasField("prediction")


def test_only_sampling_requests_get_a_seed() -> None:
    drawn = {library.make_request("a", temperature=1.0).sampling_params.seed for _ in range(9)}
    assert len(drawn) == 9
    assert not library.make_request("a", temperature=0.0).sampling_params.HasField("seed")
    assert library.make_request("a", temperature=1.0, seed=0).sampling_params.seed == 0


@pytest.mark.parametrize(
    "prompt",
    [
        b"bytes",
        5,
        {"role": "user", "content": "a"},
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": "user", "content": None}],
        [[1]],
    ],
)
def test_invalid_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        library.make_request(prompt)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("unknown option: temprature", 1.0),
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", 2**31),
        ("cache_salt", 5),
        ("cache_salt", "\ud800"),
        ("request_id", 5),
        ("seed", -1),
        ("stop", 5),
        ("logit_bias", {"a": 1}),
        ("num_speculative_tokens", -1),
        ("draft_method", "magic"),
        ("prediction", b"text"),
        ("prediction", 5),
        ("prediction", [-1]),
        ("prediction", ["text"]),
        ("prediction", {"type": "content", "content": "text"}),
        ("prediction", "\ud800"),
        ("tools", []),
        ("chat_template_kwargs", {}),
    ],
)
def test_invalid_options_are_named(option: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{option}\b"):
        library.make_request("a", **{option.split()[-1]: value})


# --- Both clients with a real coordinator


class Blocking:
    """The blocking client with an asyncio interface, so that both clients run the same tests."""

    def __init__(self, address: str, retry_seconds: float = 30.0) -> None:
        self._client = Client(address, retry_seconds)

    async def __aenter__(self) -> "Blocking":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *args, **options: asyncio.to_thread(method, *args, **options)

    async def stream(self, prompt: Any, **options: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        messages = self._client.stream(prompt, **options)
        try:
            while (message := await asyncio.to_thread(next, messages, None)) is not None:
                yield message
        finally:
            await asyncio.to_thread(messages.close)  # type: ignore[attr-defined]


CLIENTS = pytest.mark.parametrize("make_client", [AsyncClient, Blocking])


@CLIENTS
async def test_all_calls(make_client: Any) -> None:
    async with serving() as served, make_client(served.address) as client:
        expected = expected_tokens(served.target, make_request(PROMPT, 24))
        assert list((await client.generate(PROMPT, max_tokens=24)).token_ids) == expected
        messages = [message async for message in client.stream(PROMPT, max_tokens=24)]
        assert [token for message in messages for token in message.chunk.token_ids] == expected
        assert list(messages[-1].complete.token_ids) == expected
        assert (await client.model_info()).max_model_len == 4096
        assert (await client.server_info()).counters.requests == 2
        with pytest.raises(grpc.RpcError) as caught:
            await client.abort("nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@CLIENTS
async def test_closing_a_stream_aborts_the_request(make_client: Any) -> None:
    async with serving() as served, make_client(served.address) as client:
        messages = client.stream(PROMPT, max_tokens=4000)
        await anext(messages)
        await messages.aclose()
        await served.until_idle()


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_a_deadline_covers_all_attempts(make_client: Any, call: str) -> None:
    target = RecordingTarget()
    target.open.clear()
    async with serving(target) as served, make_client(served.address) as client:
        with pytest.raises(grpc.RpcError) as caught:
            await all_of(client, call, timeout_seconds=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        target.open.set()


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_permanent_errors_are_not_retried(make_client: Any, call: str) -> None:
    async with serving() as served, make_client(served.address) as client:
        with pytest.raises(grpc.RpcError) as caught:
            await all_of(client, call, temperature=-1.0)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_retries_end_after_retry_seconds(make_client: Any, call: str) -> None:
    async with make_client("127.0.0.1:1", retry_seconds=0.3) as client:
        with pytest.raises(grpc.RpcError) as caught:
            await all_of(client, call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def all_of(client: Any, call: str, **options: Any) -> list[int]:
    """Token ids of an answer, by either call."""
    if call == "generate":
        return list((await client.generate(PROMPT, **options)).token_ids)
    return [token async for message in client.stream(PROMPT, **options) for token in message.chunk.token_ids]


@CLIENTS
async def test_timeouts_are_positive_or_infinite(make_client: Any) -> None:
    async with serving() as served, make_client(served.address) as client:
        assert len(await all_of(client, "generate", timeout_seconds=math.inf, max_tokens=5)) == 5
        for seconds, call in itertools.product((0.0, -1.0, math.nan), ("generate", "stream")):
            with pytest.raises(ValueError, match="timeout_seconds must be above 0"):
                await all_of(client, call, timeout_seconds=seconds)


@asynccontextmanager
async def restarting(served: Serving, after_calls: int) -> AsyncIterator[None]:
    """Restart the coordinator without a drain after this many calls of the target."""

    async def restart() -> None:
        while served.target.calls < after_calls:  # noqa: ASYNC110 - a fake has no event for it
            await asyncio.sleep(0.001)
        served.process.server.stop(drain=False)
        await served.process.wait_stopped()
        port = int(served.address.rpartition(":")[2])
        settings = served.process.coordinator.settings.model_copy(update={"port": port})
        served.process = CoordinatorServer(settings)
        await served.process.start()

    task = asyncio.create_task(restart())
    try:
        yield
        await task
    finally:
        task.cancel()


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_a_coordinator_restart_causes_no_duplicates(make_client: Any, call: str) -> None:
    async with serving() as served, make_client(served.address) as client:
        expected = expected_tokens(served.target, make_request(PROMPT, 300))
        async with restarting(served, after_calls=20):
            assert await all_of(client, call, max_tokens=300, request_id="mine") == expected
        assert served.target.calls > 25


@CLIENTS
@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_clients_wait_for_a_full_queue(make_client: Any, call: str) -> None:
    target = RecordingTarget()
    with mock.patch("coordinator.requests.in_flight.FIRST_RETRY", 0.1):
        async with serving(target, queue_size=1, max_num_seqs=1) as served, make_client(served.address) as client:
            target.open.clear()
            others = asyncio.gather(*(served.expect(make_request(max_tokens=3)) for _ in range(2)))
            await served.until(lambda info: (info.running, info.queued) == (1, 1))
            async with make_client(served.address, retry_seconds=0) as impatient:
                with pytest.raises(QueueFullError) as caught:
                    await all_of(impatient, call)
                assert caught.value.retry_after
            answer = asyncio.create_task(all_of(client, call, max_tokens=5))
            await asyncio.sleep(0.3)
            target.open.set()
            await others
            assert await answer == expected_tokens(target, make_request(PROMPT, 5))


def test_a_closed_client_does_not_retry() -> None:
    async def serve() -> grpc.StatusCode:
        target = RecordingTarget()
        async with serving(target) as served:
            target.open.clear()
            client = Client(served.address)
            answer = asyncio.create_task(asyncio.to_thread(client.generate, PROMPT))
            await served.until(lambda info: info.running == 1)
            await asyncio.to_thread(client.__exit__, None, None, None)
            with pytest.raises(grpc.RpcError) as caught:
                await answer
            target.open.set()
            return caught.value.code()

    assert asyncio.run(serve()) is grpc.StatusCode.CANCELLED


# --- Constraints

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}


class Switch(BaseModel, extra="forbid"):
    """A model whose answers are short."""

    on: bool
    level: Literal[1, 2] = 1


class Lamp(BaseModel):
    """A model that ignores other properties."""

    on: bool


class Room(BaseModel):
    """A model with models in it."""

    lamps: list[Lamp]
    switch: Switch
    properties: dict[str, int] = {"properties": 1}


def constraint_of(**options: Any) -> tuple[str | None, Any]:
    params = library.make_request("a", **options).sampling_params
    kind = params.WhichOneof("constraint")
    return kind, getattr(params, kind) if kind else None


def test_constraints_become_request_fields() -> None:
    nested = MappingProxyType({**SCHEMA, "properties": MappingProxyType({"on": MappingProxyType({"type": "boolean"})})})
    for schema in (SCHEMA, json.dumps(SCHEMA), MappingProxyType(SCHEMA), nested):
        kind, text = constraint_of(json_schema=schema)
        assert (kind, json.loads(text)) == ("json_schema", SCHEMA)
    assert json.loads(constraint_of(json_schema=Switch)[1]) == Switch.model_json_schema()
    open_, closed = Room.model_json_schema(), json.loads(constraint_of(json_schema=Room)[1])
    assert closed != open_
    assert [closed.pop("additionalProperties"), closed["$defs"]["Lamp"].pop("additionalProperties")] == [False, False]
    assert closed == open_
    assert constraint_of(json_schema=True) == ("json_schema", "true")
    tag = {"structures": [], "triggers": []}
    assert constraint_of(structural_tag=tag) == ("structural_tag", json.dumps(tag))
    assert constraint_of(structural_tag="{}") == ("structural_tag", "{}")
    assert constraint_of(regex="a+") == ("regex", "a+")
    assert constraint_of(grammar="start: /a/") == ("grammar", "start: /a/")
    assert constraint_of(json_object=True) == ("json_object", True)
    assert constraint_of(choice=("a", "b")) == ("choice", pb.ChoiceConstraint(choices=["a", "b"]))
    assert constraint_of(choice="ab") == ("choice", pb.ChoiceConstraint(choices=["ab"]))
    assert constraint_of(regex=None, choice=None) == (None, None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_schema": 5}, "json_schema: must be a dict, JSON text or a pydantic model class, not 5"),
        (
            {"json_schema": Lamp(on=True)},
            "json_schema: must be a dict, JSON text or a pydantic model class, not Lamp(on",
        ),
        ({"json_schema": {"a": {1}}}, "json_schema: Object of type set"),
        ({"json_schema": {"a": float("nan")}}, "json_schema: Out of range"),
        ({"structural_tag": []}, "structural_tag: must be a dict"),
        ({"choice": b"ab"}, "choice: must be a list of texts, not bytes"),
        ({"choice": {"ab"}}, "choice: must be a list of texts, not set"),
        ({"choice": ["a", 1]}, "choice[1]: must be a string, not int"),
        ({"choice": [b"a"]}, "choice[0]: must be a string, not bytes"),
        ({"choice": ["\ud800"]}, "choice: "),
        ({"regex": 5}, "regex: "),
        ({"regex": "a", "json_schema": {}}, "json_schema: cannot be combined with regex"),
    ],
    ids=str,
)
def test_invalid_constraints_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(reason)}"):
        library.make_request("a", **options)


@pytest.mark.parametrize("model", [None, {"type": "object"}, int, Lamp(on=True), list[Lamp]], ids=str)
async def test_parse_needs_a_model_class(model: Any) -> None:
    reason = "^" + re.escape(f"model: must be a pydantic model class, not {reprlib.repr(model)}")
    # Without a server, a request would fail with another error.
    with Client(free_address()) as blocking, pytest.raises(TypeError, match=reason):
        blocking.parse("a", model)
    async with AsyncClient(free_address()) as client:
        with pytest.raises(TypeError, match=reason):
            await client.parse("a", model)


def test_parse_refuses_answers_with_reasoning() -> None:
    with (
        Client(free_address()) as client,
        pytest.raises(ValueError, match=r"^constraint_after_reasoning: the text would"),
    ):
        client.parse("a", Lamp, constraint_after_reasoning=True)


async def test_answers_are_parsed_as_pydantic_models() -> None:
    async with serving(with_draft=False) as served, AsyncClient(served.address) as client:
        switch = await client.parse(PROMPT, Switch, max_tokens=200)
        assert isinstance(switch, Switch)
        with Client(served.address) as blocking:
            assert await asyncio.to_thread(blocking.parse, PROMPT, Switch, max_tokens=200) == switch
        response = await client.generate(PROMPT, json_schema=Switch, n=2, temperature=1.0, max_tokens=200)
        for sample in (response, *response.other_samples):
            assert library.parsed(sample, Switch).level in (1, 2)
        with pytest.raises(ValueError, match="the answer is incomplete: it ended after 3 tokens with reason 'length'"):
            await client.parse(PROMPT, Switch, max_tokens=3)
