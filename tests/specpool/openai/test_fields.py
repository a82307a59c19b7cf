"""Every row of the table of fields in docs/openai.md, with the real client."""

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_type_hints

import openai
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai_service import MODEL, OpenAIService, openai_service
from scripted_target import ScriptedTarget

from specpool.openai.bodies import UNSUPPORTED, ChatBody, CompletionBody

PAGE = (Path(__file__).parents[3] / "docs/openai.md").read_text()
TABLE = PAGE.partition("| field of the request |")[2].partition("\n\n")[0]
ROWS = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in TABLE.splitlines()[2:]]
CHAT = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["size"],
    "additionalProperties": False,
}

Check = Callable[[OpenAIService, ScriptedTarget], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def row(check: Check) -> Check:
    """Register the check of a row, which is named like the row's first field."""
    CHECKS[check.__name__.removesuffix("_")] = check
    return check


async def chat(service: OpenAIService, messages: Any = CHAT, **fields: Any) -> Any:
    """Return the answer to a chat. Fields that the client does not know go into the body."""
    known = get_type_hints(chat_params.CompletionCreateParamsBase).keys() | {"stream"}
    extra = {name: fields.pop(name) for name in list(fields) if name not in known}
    fields = {"model": MODEL, "temperature": 0, **fields}
    return await service.client.chat.completions.create(messages=messages, extra_body=extra, **fields)


async def text_of(service: OpenAIService, **fields: Any) -> str:
    return str((await chat(service, **fields)).choices[0].message.content)


async def refusal(answer: Awaitable[Any], param: str, code: str = "invalid_value", status: int = 400) -> str:
    """Return the message of a refused request."""
    with pytest.raises(openai.APIStatusError) as caught:
        await answer
    assert (caught.value.status_code, caught.value.param, caught.value.code) == (status, param, code)
    return str(caught.value.body["message"])


@row
async def model(service: OpenAIService, target: ScriptedTarget) -> None:
    answer = await chat(service)
    assert (answer.model, answer.choices[0].message.content) == (MODEL, "Hello")
    await refusal(chat(service, model="other"), "model", "model_not_found", 404)


@row
async def messages(service: OpenAIService, target: ScriptedTarget) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    roles = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "user", "content": "Hi"},
    ]
    await chat(service, roles)
    assert target.prompt.startswith("system: Be kind.\nuser: one\ntwo\nassistant: \ntool: 3\nuser: Hi\n")
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    message = await refusal(chat(service, [{"role": "user", "content": [image]}]), "messages[0].content[0]")
    assert "'image_url' are not supported" in message


@row
async def prompt(service: OpenAIService, target: ScriptedTarget) -> None:
    completions = service.client.completions
    options = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    text = (await completions.create(prompt="abc", **options)).choices[0].text
    ids = list(target.requests[0].items[0].token_ids)
    assert (await completions.create(prompt=ids, **options)).choices[0].text == text
    several = await completions.create(prompt=[ids, ids, [1]], n=2, **{**options, "temperature": 1})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3, 4, 5]
    assert several.choices[0].text == several.choices[2].text == text
    assert several.usage.prompt_tokens == 2 * len(ids) + 1
    streamed = [""] * 6
    async for chunk in await completions.create(
        prompt=[ids, ids, [1]], n=2, stream=True, **{**options, "temperature": 1}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in several.choices]
    await refusal(completions.create(prompt=["x"] * 129, **options), "prompt")


@row
async def stream(service: OpenAIService, target: ScriptedTarget) -> None:
    usage = {"include_usage": True}
    chunks = [chunk async for chunk in await chat(service, stream=True, stream_options=usage)]
    whole = await chat(service)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "Hello"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    await refusal(chat(service, stream_options=usage), "stream_options")
    assert not any(chunk.usage for chunk in [chunk async for chunk in await chat(service, stream=True)])
    await refusal(chat(service, stream_options=usage), "stream_options")


@row
async def max_tokens(service: OpenAIService, target: ScriptedTarget) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await chat(service, **{name: 2})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("He", "length")
        await refusal(chat(service, **{name: 10**6}), name)
    target.script("x" * 1000)
    assert (await chat(service)).usage.completion_tokens == 256


@row
async def temperature(service: OpenAIService, target: ScriptedTarget) -> None:
    for given, used in ((openai.NOT_GIVEN, 1), (0.5, 0.5), (0, 0)):
        await chat(service, temperature=given)
        assert target.sampling.temperature == used
    await refusal(chat(service, temperature=1000), "temperature")


@row
async def top_p(service: OpenAIService, target: ScriptedTarget) -> None:
    values = {"top_p": 0.5, "top_k": 3, "min_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    values |= {"repetition_penalty": 1.5, "min_tokens": 2}
    await chat(service, **values, stop_token_ids=[5], logit_bias={"7": 1})
    assert {name: getattr(target.sampling, name) for name in values} == values
    assert (5 in target.sampling.stop_token_ids, dict(target.sampling.logit_bias)) == (True, {7: 1})
    for name, value in {**dict.fromkeys(values, -100), "stop_token_ids": [10**6], "logit_bias": {"7": 1000}}.items():
        if name != "min_tokens":
            await refusal(chat(service, **{name: value}), name)
    await refusal(chat(service, min_tokens=-1), "min_tokens")


@row
async def seed(service: OpenAIService, target: ScriptedTarget) -> None:
    for value in (7, -1):
        await chat(service, seed=value)
        assert target.sampling.seed == value % 2**64


@row
async def n(service: OpenAIService, target: ScriptedTarget) -> None:
    answer = await chat(service, n=3, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 3 * 6
    indices = {c.choices[0].index async for c in await chat(service, n=3, temperature=1, stream=True)}
    assert indices == {0, 1, 2}
    await refusal(chat(service, n=2), "n")


@row
async def stop(service: OpenAIService, target: ScriptedTarget) -> None:
    for stops in ("l", ["x", "l"]):
        [choice] = (await chat(service, stop=stops)).choices
        assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("He", "stop", "l")
    assert (await chat(service)).choices[0].stop_reason is None
    await refusal(chat(service, stop=["", "x"]), "stop[0]")


@row
async def logprobs(service: OpenAIService, target: ScriptedTarget) -> None:
    [choice] = (await chat(service, logprobs=True, top_logprobs=2)).choices
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == "Hello<eos>"
    assert tokens[0].bytes == list(b"H")
    assert [len(token.top_logprobs) for token in tokens] == [2] * 6
    streamed = [
        token
        async for chunk in await chat(service, logprobs=True, top_logprobs=2, stream=True)
        for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == tokens
    completion = service.client.completions.create
    options = {"model": MODEL, "prompt": "ANSWER:", "logprobs": 1, "temperature": 0}
    found = (await completion(**options)).choices[0].logprobs
    assert (found.tokens, found.text_offset) == ([*"Hello", "<eos>"], [0, 1, 2, 3, 4, 5])
    parts = [chunk.choices[0].logprobs async for chunk in await completion(**options, stream=True)]
    assert [offset for part in parts if part for offset in part.text_offset] == found.text_offset
    await refusal(chat(service, logprobs=True, top_logprobs=21), "top_logprobs")
    await refusal(chat(service, top_logprobs=2), "top_logprobs")


@row
async def ignore_eos(service: OpenAIService, target: ScriptedTarget) -> None:
    async def text(**extra: Any) -> str:
        options = {"model": MODEL, "prompt": "ANSWER:", "max_tokens": 7, "temperature": 0}
        answer = await service.client.completions.create(**options, extra_body={"ignore_eos": True, **extra})
        return str(answer.choices[0].text)

    assert await text() == "Hello"
    assert await text(skip_special_tokens=False) == "Hello<eos><eos>"


@row
async def response_format(service: OpenAIService, target: ScriptedTarget) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA, "strict": True}}
    assert json.loads(await text_of(service, response_format=schema))["size"] in range(1, 10)
    assert await text_of(service, response_format={"type": "text"}) == "Hello"
    text = await text_of(service, response_format={"type": "json_object"}, max_tokens=1)
    assert text == "{"
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    await refusal(chat(service, response_format=broken), "response_format.json_schema.schema")
    await refusal(chat(service, response_format={"type": "json_schema"}), "response_format")


@row
async def structured_outputs(service: OpenAIService, target: ScriptedTarget) -> None:
    tag = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"], "at_least_one": True}
    expected = {
        "json": (SCHEMA, r'\{"size":\d\}'),
        "regex": ("a{3}", "aaa"),
        "choice": (["yes", "no"], "yes|no"),
        "grammar": ('start: "ab"', "ab"),
        "structural_tag": (tag | {"stop_after_first": True}, r'<a>\{"size":\d\}</a>'),
    }
    for name, (value, pattern) in expected.items():
        assert re.fullmatch(pattern, await text_of(service, structured_outputs={name: value})), name
    assert await text_of(service, structured_outputs={"json_object": True}, max_tokens=1) == "{"
    two = {"regex": "a", "json_object": True}
    await refusal(chat(service, structured_outputs=two), "structured_outputs")
    with_format = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    await refusal(chat(service, **with_format), "response_format")
    await refusal(chat(service, structured_outputs={"regex": "("}), "structured_outputs.regex")


@row
async def json_whitespace(service: OpenAIService, target: ScriptedTarget) -> None:
    texts = [
        await text_of(service, structured_outputs={"json": SCHEMA}, json_whitespace=True, temperature=1, seed=seed)
        for seed in range(3)
    ]
    assert any(re.search(r"\s", text) for text in texts)


@row
async def tools(service: OpenAIService, target: ScriptedTarget) -> None:
    await chat(service, tools=[TOOL], tool_choice="none")
    assert '"name": "f"' not in target.prompt
    await chat(service, tools=[TOOL])
    assert '"name": "f"' in target.prompt
    target.script('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')
    [choice] = (await chat(service, tools=[TOOL])).choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "f")
    assert json.loads(call.function.arguments) == {"x": 1}
    for tool_choice in ("required", {"type": "function", "function": {"name": "f"}}):
        options = {"tools": [TOOL], "tool_choice": tool_choice, "parallel_tool_calls": False}
        [call] = (await chat(service, **options)).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {})
    await refusal(
        chat(service, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice.function.name",
    )


@row
async def chat_template_kwargs(service: OpenAIService, target: ScriptedTarget) -> None:
    await chat(service, chat_template_kwargs={"enable_thinking": False})
    assert "enable_thinking=False\n" in target.prompt
    await chat(service, reasoning_effort="high")
    assert "reasoning_effort=high\n" in target.prompt
    await refusal(chat(service, chat_template_kwargs={"unread": 1}), "chat_template_kwargs")


@row
async def prediction(service: OpenAIService, target: ScriptedTarget) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    for content in ("Hello", parts):
        predicted: dict[str, Any] = {"prediction": {"type": "content", "content": content}}
        answer = await chat(service, **predicted)
        assert answer.choices[0].message.content == "Hello"
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
    streamed = await chat(service, stream=True, stream_options={"include_usage": True}, **predicted)
    *_, last = [chunk async for chunk in streamed]
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0
    await chat(service, n=2, logprobs=True, tools=[TOOL], presence_penalty=1, **{**predicted, "temperature": 1})
    await service.client.completions.create(model=MODEL, prompt="Hi", extra_body=predicted)
    part, nothing = {"type": "text"}, "missing_required_parameter"
    for wrong, param, code in (
        ({"type": "text", "content": "x"}, "prediction.type", "invalid_value"),
        ({"type": "content", "content": "x", "mode": 1}, "prediction.mode", "unknown_parameter"),
        ({"type": "content"}, "prediction.content", nothing),
        ({"type": "content", "content": 5}, "prediction.content", "invalid_type"),
        ({"type": "content", "content": ""}, "prediction.content", "invalid_value"),
        ({"type": "content", "content": []}, "prediction.content", "invalid_value"),
        ({"type": "content", "content": "x" * 9999}, "prediction.content", "invalid_value"),
        ({"type": "content", "content": [part]}, "prediction.content[0].text", nothing),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]", "invalid_value"),
    ):
        await refusal(chat(service, prediction=wrong), param, code)
    message = await refusal(chat(service, prediction="x"), "prediction", "invalid_type")
    assert message == "prediction: must be an object"


@row
async def include_reasoning(service: OpenAIService, target: ScriptedTarget) -> None:
    target.script("<think>Hm.</think>Yes")
    message = (await chat(service)).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes")
    deltas = [chunk.choices[0].delta async for chunk in await chat(service, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes"
    message = (await chat(service, include_reasoning=False)).choices[0].message
    assert (hasattr(message, "reasoning_content"), message.content) == (False, "Yes")


@row
async def max_thinking_tokens(service: OpenAIService, target: ScriptedTarget) -> None:
    await chat(service, max_thinking_tokens=3)
    assert target.sampling.reasoning.max_tokens == 3
    first = {"structured_outputs": {"regex": "a"}, "constraint_after_reasoning": False}
    await refusal(chat(service, max_thinking_tokens=3, **first), "max_thinking_tokens")


@row
async def constraint_after_reasoning(service: OpenAIService, target: ScriptedTarget) -> None:
    for value, is_after in ((None, True), (False, False)):
        await chat(service, structured_outputs={"regex": "a"}, constraint_after_reasoning=value, max_tokens=1)
        assert target.sampling.HasField("reasoning") is is_after


@row
async def cache_salt(service: OpenAIService, target: ScriptedTarget) -> None:
    long = [{"role": "user", "content": "x" * 200}]
    await chat(service, long)
    cached = [(await chat(service, long, cache_salt=salt)).usage.prompt_tokens_details for salt in ("", "a", "a")]
    assert [each.cached_tokens > 0 for each in cached] == [True, False, True]
    await chat(service, priority=-1)
    await refusal(chat(service, priority=2**40), "priority")


@row
async def modalities(service: OpenAIService, target: ScriptedTarget) -> None:
    await chat(service, modalities=["text"])
    await refusal(chat(service, modalities=["audio"]), "modalities[0]")


@row
async def user(service: OpenAIService, target: ScriptedTarget) -> None:
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "x"}
    ignored |= {"prompt_cache_key": "x", "prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h"}
    assert await text_of(service, **ignored) == "Hello"


@row
async def audio(service: OpenAIService, target: ScriptedTarget) -> None:
    for name in UNSUPPORTED:
        await refusal(chat(service, **{name: "x"}), name, "unsupported_parameter")
    assert await text_of(service, suffix=None) == "Hello"


@pytest.mark.parametrize("fields", ROWS, ids=lambda fields: fields[0])
async def test_a_field_behaves_as_documented(fields: list[str]) -> None:
    target = ScriptedTarget()
    async with openai_service(target=target, reasoning_tags="<think>,</think>") as service:
        await CHECKS[fields[0]](service, target)


def test_the_table_has_all_fields_of_this_server_and_of_openai() -> None:
    documented = sorted(field for fields in ROWS for field in fields)
    own = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys() | UNSUPPORTED.keys()
    assert documented == sorted(own)
    hints = {**get_type_hints(chat_params.CompletionCreateParamsBase), **get_type_hints(CompletionCreateParamsBase)}
    assert hints.keys() - own == set()


async def test_unknown_fields_are_refused_by_name() -> None:
    async with openai_service() as service:
        assert await refusal(chat(service, colour=1), "colour", "unknown_parameter") == "Unknown parameter: 'colour'."
        nested = [{"role": "user", "content": "Hi", "colour": 1}]
        await refusal(chat(service, nested), "messages[0].colour", "unknown_parameter")
