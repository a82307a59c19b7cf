"""OpenAI's client, the real gateway and a coordinator with the tiny pair give the results of our own client."""

import asyncio
import contextlib
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from gateway import gateway
from pair_service import PairService, serving_pair
from scraping import http
from serving import PATIENCE_SECONDS, Serving, free_address, serving
from smg.launch_router import parse_router_args
from tiny_tokenizers import ascii_tokenizer

from benchmarks.pair import save_tokenizer
from specpool.client import AsyncClient
from specpool.rpc.ports import free_port
from specpool.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = (Path(__file__).parents[3] / "docs" / "smg.md").read_text()
MODEL = "target"
CHAT: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why is the sky blue"}]
TEXT = "once upon a time"
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.5, "presence_penalty": -0.5}
METRICS_REQUEST = "GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
IN_EXTRA_BODY = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True}
RULES: list[dict[str, Any]] = [{"temperature": 0}, {**SAMPLED, **IN_EXTRA_BODY}]


@dataclass
class Fronted:
    """A running service, our own client, and OpenAI's client of the gateway."""

    service: PairService
    openai: openai.AsyncOpenAI

    @property
    def ours(self) -> AsyncClient:
        return self.service.client

    async def chat(self, **options: Any) -> Any:
        return await self.openai.chat.completions.create(model=MODEL, messages=CHAT, **as_extra(options))

    async def completion(self, **options: Any) -> Any:
        return await self.openai.completions.create(model=MODEL, prompt=TEXT, **as_extra(options))

    async def aborted(self) -> int:
        """Wait until nothing is in flight. Return the number of aborted samples."""
        await self.service.wait_idle()
        info = await self.ours.server_info()
        assert (info.running, info.queued) == (0, 0)
        assert (info.target.load.slots_in_use, info.draft.load.slots_in_use) == (0, 0)
        return info.counters.finished["abort"]


def as_extra(options: dict[str, Any]) -> dict[str, Any]:
    """Move the options that OpenAI's client does not know to `extra_body`."""
    return {
        **{name: value for name, value in options.items() if name not in IN_EXTRA_BODY},
        "extra_body": {name: value for name, value in options.items() if name in IN_EXTRA_BODY},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fronted(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fronted]:
    folders = [Path(shutil.copytree(folder, tmp_path_factory.mktemp("ascii") / folder.name)) for folder in tiny_pair]
    for folder in folders:
        save_tokenizer(folder, ascii_tokenizer())
    address = free_address()
    port = int(address.rpartition(":")[2])
    async with (
        serving_pair(*folders, smg=True, port=port, num_speculative_tokens=3) as service,
        gateway(address) as client,
    ):
        yield Fronted(service, client)


@pytest.mark.parametrize("rules", RULES, ids=["greedy", "sampled"])
async def test_text_equals_that_of_our_own_client(fronted: Fronted, rules: dict[str, Any]) -> None:
    for ask, prompt in ((fronted.chat, CHAT), (fronted.completion, TEXT)):
        ours = await fronted.ours.generate(prompt, max_tokens=40, **rules)
        answer = await ask(max_tokens=40, **rules)
        (choice,) = answer.choices
        assert text_of(choice) == ours.text
        assert (choice.finish_reason, choice.index) == (ours.finish_reason, 0)
        assert answer.usage.prompt_tokens == ours.usage.prompt_tokens
        assert answer.usage.completion_tokens == ours.usage.completion_tokens
        chunks = [chunk async for chunk in await ask(max_tokens=40, stream=True, **rules)]
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(map(text_of, pieces)) == ours.text
        assert pieces[-1].finish_reason == ours.finish_reason


def text_of(choice: Any) -> str:
    """Return the text of a choice of any endpoint."""
    if hasattr(choice, "text"):
        return str(choice.text)
    part = choice.message if hasattr(choice, "message") else choice.delta
    return part.content or ""


async def test_usage_of_a_stream_counts_draft_tokens(fronted: Fronted) -> None:
    options = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await fronted.chat(stream=True, **options)]
    usage = chunks[-1].usage
    assert usage.completion_tokens == 30
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0


async def test_stop_strings_end_the_text_where_they_begin(fronted: Fronted) -> None:
    unstopped = (await fronted.ours.generate(CHAT, max_tokens=40)).text
    stop = unstopped[11:14]
    ours = await fronted.ours.generate(CHAT, max_tokens=40, stop=stop)
    assert ours.text == unstopped[: unstopped.index(stop)]
    (choice,) = (await fronted.chat(max_tokens=40, temperature=0, stop=[stop, "never"])).choices
    assert (choice.message.content, choice.finish_reason) == (ours.text, "stop")
    stream = await fronted.completion(max_tokens=40, temperature=0, stop="e", stream=True)
    pieces = [chunk.choices[0] async for chunk in stream if chunk.choices]
    expected = await fronted.ours.generate(TEXT, max_tokens=40, stop="e")
    assert ("".join(map(text_of, pieces)), pieces[-1].finish_reason) == (expected.text, expected.finish_reason)


async def test_logprobs_equal_those_of_our_own_client(fronted: Fronted) -> None:
    ours = await fronted.ours.generate(CHAT, max_tokens=12, logprobs=3)
    answer = await fronted.chat(max_tokens=12, temperature=0, logprobs=True, top_logprobs=3)
    stream = await fronted.chat(max_tokens=12, temperature=0, logprobs=True, top_logprobs=3, stream=True)
    chunks = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices]
    streamed = [entry for logprobs in chunks if logprobs for entry in logprobs.content or ()]
    for entries in (answer.choices[0].logprobs.content, streamed):
        assert "".join(entry.token for entry in entries) == ours.text
        assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in ours.logprobs])
        top = [[one.logprob for one in entry.top_logprobs] for entry in entries]
        assert top == [pytest.approx(list(entry.top_logprobs)) for entry in ours.logprobs]


async def test_samples_equal_those_of_our_own_client(fronted: Fronted) -> None:
    ours = await fronted.ours.generate(CHAT, n=3, max_tokens=16, temperature=0.9, seed=11)
    texts = [sample.text for sample in (ours, *ours.other_samples)]
    answer = await fronted.chat(n=3, max_tokens=16, temperature=0.9, seed=11)
    assert [choice.message.content for choice in answer.choices] == texts
    streamed = ["", "", ""]
    async for chunk in await fronted.chat(n=3, max_tokens=16, temperature=0.9, seed=11, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += text_of(choice)
    assert streamed == texts
    assert len(set(texts)) == 3


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 9999}, "sampling_params.max_tokens: 9999 exceeds"),
        ({"stop": "x" * 300}, "sampling_params.stop[0]: has 300 characters"),
        (
            {"response_format": as_format({"type": "foo"})},
            "sampling_params.json_schema: does not compile: Invalid type",
        ),
        ({"temperature": 7}, "temperature"),  # the gateway's own limit
    ],
    ids=str,
)
async def test_bad_parameters_are_named_in_client_errors(
    fronted: Fronted, options: dict[str, Any], reason: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await fronted.chat(stream=stream, **options)
    assert reason in refused.value.message


async def test_unsupported_endpoints_do_not_trip_the_gateways_circuit_breaker(fronted: Fronted) -> None:
    with pytest.raises(openai.NotFoundError):
        await fronted.openai.chat.completions.create(model="another", messages=CHAT)
    for _ in range(12):  # above the threshold of the circuit breaker
        with pytest.raises(openai.InternalServerError, match="Embed: this server generates text"):
            await fronted.openai.embeddings.create(model=MODEL, input="hi")
    assert (await fronted.chat(max_tokens=1)).choices


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnected_client_frees_its_slots(fronted: Fronted, stream: bool) -> None:
    before = await fronted.aborted()
    asking = asyncio.create_task(fronted.chat(max_tokens=400, ignore_eos=True, stream=stream))
    if stream:
        answer = await asking
        await anext(aiter(answer))
        await answer.close()
    else:
        while not (await fronted.ours.server_info()).running:  # noqa: ASYNC110 - the state is read over a connection
            await asyncio.sleep(0.005)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    assert await fronted.aborted() == before + 1


async def test_responses_and_messages_endpoints_give_the_same_text(fronted: Fronted) -> None:
    expected = (await fronted.ours.generate(CHAT, max_tokens=12)).text
    response = await fronted.openai.responses.create(model=MODEL, input=CHAT, max_output_tokens=12, temperature=0)
    assert response.output_text == expected
    system, user = CHAT
    body = {"model": MODEL, "system": system["content"], "messages": [user], "max_tokens": 12, "temperature": 0}
    message: Any = await fronted.openai.post("/messages", cast_to=object, body=body)
    assert [block["text"] for block in message["content"]] == [expected]


async def test_known_limits_of_this_gateway_version(fronted: Fronted) -> None:
    """If this fails, a newer gateway has fixed a limit: update docs/smg.md."""
    plain = await fronted.completion(max_tokens=12, temperature=0, logprobs=2)
    assert plain.choices[0].logprobs is None
    biased = await fronted.chat(max_tokens=12, temperature=0, logit_bias={"1": 100})
    assert biased.choices[0].message.content == (await fronted.ours.generate(CHAT, max_tokens=12)).text
    largest = await fronted.ours.generate(TEXT, max_tokens=12, temperature=1, seed=2**31 - 1)
    for seed in (2**31 - 1, 2**31, 2**40):
        assert (await fronted.completion(max_tokens=12, seed=seed)).choices[0].text == largest.text


async def test_commands_of_the_docs(fronted: Fronted) -> None:
    base = str(fronted.openai.base_url).removesuffix("/v1/")
    commands = [["bash", "-c", command] for command in re.findall(r"^    (curl (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)]
    assert len(commands) >= 2
    for command in commands:
        typed = re.sub(r'"model": "[^"]+"', f'"model": "{MODEL}"', command[-1].replace("http://127.0.0.1:30000", base))
        done = await asyncio.to_thread(
            subprocess.run, [*command[:-1], typed], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert '"error"' not in done.stdout


async def test_gateway_accepts_the_flags_of_the_docs() -> None:
    commands = re.findall(r"^    smg launch ((?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    assert commands
    for command in commands:
        assert parse_router_args(command.replace("\\\n", " ").split()).worker_urls


@pytest.mark.slow
async def test_the_gateway_renders_the_coordinators_template_with_options(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}")
    options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "max_tokens": 1}
    async with serving(with_draft=False, smg=True, chat_template=file) as served, gateway(served.address) as client:
        (model,) = (await client.models.list()).data
        for given, tokens in (({"max_tokens": 1}, 7), (options, 8)):
            answer = await client.chat.completions.create(
                model=model.id, messages=[{"role": "user", "content": "because"}], **given
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == tokens


async def test_gateway_prefers_the_coordinator_that_has_cached_the_prompt() -> None:
    """The gateway has never seen the prompts, so it learns from the coordinators only."""
    metrics_port = free_port()
    async with serving(with_draft=False, smg=True) as first, serving(with_draft=False, smg=True) as second:
        urls = [f"grpc://{served.address}" for served in (first, second)]
        flags = ("--worker-urls", *urls, "--policy", "cache_aware", "--prometheus-port", str(metrics_port))
        async with gateway(first.address, *flags) as client:
            (model,) = {model.id for model in (await client.models.list()).data}
            for served, letter in ((first, "a"), (second, "b"), (first, "c")):
                before = served.process.coordinator.counters.rounds
                prompt = letter * 100
                await served.stub.Generate(pb.GenerateRequest(text=prompt, sampling_params={"max_tokens": 1}))
                await until_known(metrics_port, served)
                direct = served.process.coordinator.counters.rounds
                await client.completions.create(model=model, prompt=prompt + "?", max_tokens=1)
                assert served.process.coordinator.counters.rounds > direct > before


async def until_known(metrics_port: int, served: Serving) -> None:
    """Wait until the gateway knows all pages that a coordinator has cached."""
    events = served.process.coordinator.cache_events
    assert events is not None
    line = f'smg_kv_index_blocks{{worker="grpc://{served.address}"}} {len(events._pages)}\n'
    async with asyncio.timeout(PATIENCE_SECONDS):
        while line not in (await http(metrics_port, METRICS_REQUEST))[2]:  # noqa: ASYNC110 - read over a connection
            await asyncio.sleep(0.02)
