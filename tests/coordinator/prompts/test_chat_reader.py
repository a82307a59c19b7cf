"""Chats with tools and options: rendered as in transformers, within limits, and checked before any work."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import make_request as token_request
from serving import serving, violated_fields
from template_target import TemplateTarget
from thinking_template import THINKING_TEMPLATE
from tiny_tokenizers import BYTES, make_tokenizer
from transformers import PreTrainedTokenizerFast

from coordinator.config.settings import CoordinatorSettings
from coordinator.prompts.chat_reader import MAX_OPTIONS_BYTES, check_chat, read_chat
from coordinator.prompts.templates import Chat
from specpool.cli.up import services_of
from specpool.cli.up_settings import UpSettings
from specpool.client import make_request
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

USER = {"role": "user", "content": "What is the weather?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ASKS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ulm", "days": 2}'}}
    ],
}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
OPTIONS_TEMPLATE = "{{ options | tojson }}{{ messages[0].content }}"


def rendered(messages: Any, template: str = THINKING_TEMPLATE, **options: Any) -> str:
    """The prompt of a request after its way over the wire."""
    request = make_request(messages, **options)
    chat = pb.GenerateRequest.FromString(request.SerializeToString()).chat
    check_chat(chat)
    ids = make_tokenizer(template).encode_chat(read_chat(chat))
    return str(BYTES.decode(ids, skip_special_tokens=False))


def expected(messages: Any, tools: Any = None, **options: Any) -> str:
    """The prompt of transformers, which takes the arguments of tool calls as objects."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BYTES, chat_template=THINKING_TEMPLATE)
    conversation = []
    for message in messages:
        plain = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" in plain:
            calls = [call["function"] for call in plain["tool_calls"]]
            plain["tool_calls"] = [
                {"function": {"name": call["name"], "arguments": json.loads(call["arguments"])}} for call in calls
            ]
        conversation.append(plain)
    prompt = tokenizer.apply_chat_template(
        conversation, tools=tools, add_generation_prompt=True, tokenize=False, **options
    )
    assert isinstance(prompt, str)
    return prompt


# --- Rendering

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAME = st.text("abcxyz_", min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=4)
CALL = st.builds(lambda name, arguments: {"name": name, "arguments": json.dumps(arguments)}, NAME, OBJECT)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT}, optional={"name": NAME, "tool_call_id": NAME}),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.none() | TEXT,
            "tool_calls": st.lists(st.fixed_dictionaries({"id": NAME, "function": CALL}), min_size=1, max_size=2),
        },
        optional={"reasoning_content": TEXT},
    ),
)
TOOL = st.builds(
    lambda name, parameters: {"type": "function", "function": {"name": name, "parameters": parameters}}, NAME, OBJECT
)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(
    st.tuples(MESSAGE, st.lists(MESSAGE, max_size=4)).map(lambda parts: [parts[0], *parts[1]]),
    st.lists(TOOL, max_size=2),
    st.fixed_dictionaries({}, optional={"enable_thinking": st.booleans()}),
)
def test_chats_render_as_in_transformers(messages: Any, tools: Any, options: Any) -> None:
    assert rendered(messages, tools=tools, chat_template_kwargs=options) == expected(messages, tools or None, **options)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (1.0, "1"),  # protobuf has only doubles
        (-0.5, "-0.5"),
        (2**53, str(2**53)),
        (1e300, "1e+300"),
        (True, "true"),
        (None, "null"),
        ("1", '"1"'),
        ([1, [2.5, {}]], "[1, [2.5, {}]]"),
        ({"b": 1, "a": {"d": [], "c": None}}, '{"a": {"c": null, "d": []}, "b": 1}'),
    ],
)
def test_options_have_their_json_values(value: Any, text: str) -> None:
    assert rendered([USER], OPTIONS_TEMPLATE, chat_template_kwargs={"options": value}) == text + USER["content"]


def test_reasoning_has_both_of_its_names() -> None:
    message = USER | {"reasoning_content": "hm"}
    assert rendered([message], "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}") == "hm hm"


def test_messages_without_content_render_as_empty_unless_they_call_tools() -> None:
    template = "{% for m in messages %}[{{ m.content is defined }}]{% endfor %}"
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(role="a", tool_calls=[pb.ToolCall()])])
    chat.messages[1].tool_calls[0].function.name = "f"
    assert BYTES.decode(make_tokenizer(template).encode_chat(read_chat(chat))) == "[True][False]"


def test_the_template_for_tools_renders_chats_with_tools() -> None:
    tokenizer = make_tokenizer("plain", tool_chat_template="{{ tools | length }} tools")
    assert BYTES.decode(tokenizer.encode_chat(Chat([USER]))) == "plain"
    assert BYTES.decode(tokenizer.encode_chat(Chat([USER], [WEATHER]))) == "1 tools"


# --- Refusals


def chat(**fields: Any) -> pb.ChatInput:
    return pb.ChatInput(**{"messages": [USER], **fields})


def calls(*functions: pb.FunctionCall | None, **fields: Any) -> pb.ChatInput:
    tool_calls = [pb.ToolCall(function=function, **fields) for function in functions]
    return chat(messages=[USER, pb.ChatMessage(role="assistant", tool_calls=tool_calls)])


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 0


def with_number(number: float) -> pb.ChatInput:
    request = chat()
    request.chat_template_kwargs["enable_thinking"] = number
    return request


FUNCTION = pb.FunctionCall(name="f")
CALL_PATH = "chat.messages[1].tool_calls[0]"
OPTIONS = "chat.chat_template_kwargs"
REFUSED = {
    "no messages": (chat(messages=[]), "chat.messages", "must not be empty"),
    "many messages": (chat(messages=[USER] * 1025), "chat.messages", "has more than 1024 entries"),
    "no role": (chat(messages=[{"content": "x"}]), "chat.messages[0].role", "must not be empty"),
    "long role": (chat(messages=[{"role": "r" * 65}]), "chat.messages[0].role", "has more than 64 characters"),
    "long name": (chat(messages=[USER | {"name": "n" * 257}]), "chat.messages[0].name", "more than 256 characters"),
    "long id": (chat(messages=[USER | {"tool_call_id": "n" * 257}]), "chat.messages[0].tool_call_id", "than 256"),
    "many calls": (calls(*[FUNCTION] * 1025), "chat.messages", "has 1025 tool calls, more than 1024"),
    "other type": (calls(FUNCTION, type="custom"), f"{CALL_PATH}.type", 'must be "function"'),
    "long call id": (calls(FUNCTION, id="i" * 257), f"{CALL_PATH}.id", "more than 256 characters"),
    "no function": (calls(None), f"{CALL_PATH}.function.name", "must not be empty"),
    "arguments": (calls(pb.FunctionCall(name="f", arguments="{")), f"{CALL_PATH}.function.arguments", "is not JSON"),
    "list": (calls(pb.FunctionCall(name="f", arguments="[]")), f"{CALL_PATH}.function.arguments", "a JSON object"),
    "many tools": (chat(tools=["{}"] * 129), "chat.tools", "has more than 128 entries"),
    "no JSON": (chat(tools=["{}", "f"]), "chat.tools[1]", "is not JSON"),
    "NaN": (chat(tools=['{"a": NaN}']), "chat.tools[0]", "is not JSON"),
    "infinity": (chat(tools=['{"a": 1e999}']), "chat.tools[0]", "is not JSON"),
    "surrogate": (chat(tools=['{"a": "\\ud800"}']), "chat.tools[0]", "lone surrogate"),
    "no object": (chat(tools=['"f"']), "chat.tools[0]", "must be a JSON object"),
    "deep tool": (chat(tools=[json.dumps({"a": nested(32)})]), "chat.tools[0]", "has more than 32 levels"),
    "very deep tool": (chat(tools=['{"a":' * 100_000]), "chat.tools[0]", "has more than 32 levels"),
    "deep option": (chat(chat_template_kwargs={"enable_thinking": nested(32)}), OPTIONS, "has more than 32 levels"),
    "long option": (chat(chat_template_kwargs={"o" * 65: 1}), OPTIONS, "a name of more than 64 characters"),
    "many options": (chat(chat_template_kwargs={str(i): 1 for i in range(65)}), OPTIONS, "more than 64 entries"),
    "large options": (chat(chat_template_kwargs={"a": "x" * MAX_OPTIONS_BYTES}), OPTIONS, "more than 65536"),
    "infinite option": (with_number(float("inf")), OPTIONS, "inf is not a finite number"),
    "no number": (with_number(float("nan")), OPTIONS, "nan is not a finite number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_chats_name_the_field_and_the_limit(case: str) -> None:
    message, field, reason = REFUSED[case]
    with pytest.raises(InvalidArgumentError) as caught:
        check_chat(message) and read_chat(message)
    assert caught.value.field == field
    assert reason in caught.value.reason


def test_chats_at_the_limits_are_read() -> None:
    message = calls(*[pb.FunctionCall(name="f" * 256, arguments=json.dumps({"a": nested(31)}))] * 1024)
    message.tools.extend([json.dumps({"a": nested(31)})] * 128)
    message.chat_template_kwargs.update({"o" * 64: nested(31)} | {str(i): 1 for i in range(63)})
    assert check_chat(message) == len(USER["content"]) + sum(
        len(json.dumps({"a": nested(31)})) * count for count in (1024, 128)
    )
    assert len(read_chat(message).tools) == 128


@pytest.mark.parametrize(
    ("template", "options", "field", "reason"),
    [
        (THINKING_TEMPLATE, {"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs",
         'the chat template has no option "enable_thinkin"; its options: enable_thinking'),
        (THINKING_TEMPLATE, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", 'no option "messages"'),
        ("{{ messages }}", {"tools": [WEATHER]}, "tools", "the chat template does not support tools"),
        (THINKING_TEMPLATE, {"tools": [{"x": "y" * 30_000}]}, "messages", "has 30029 bytes, more than"),
    ],
)  # fmt: skip
async def test_a_server_refuses_unknown_options_and_unread_tools(
    template: str, options: Any, field: str, reason: str
) -> None:
    async with serving(TemplateTarget(template), with_draft=False) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(make_request([USER], **options))
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT
        assert violated_fields(caught.value) == [f"chat.{field}"]
        assert reason in (caught.value.details() or "")
        await served.expect(token_request())


async def test_a_server_generates_for_chats_with_tools_and_options() -> None:
    async with serving(TemplateTarget(THINKING_TEMPLATE, max_model_len=2000), with_draft=False) as served:
        messages, options = [USER, ASKS, TOLD], {"enable_thinking": False}
        request = make_request(messages, max_tokens=4, tools=[WEATHER], chat_template_kwargs=options)
        response = await served.stub.Generate(request)
        prompt = BYTES.encode(expected(messages, [WEATHER], **options)).ids
        assert list(response.token_ids) == served.target.continuation(prompt, 4)


# --- A template in a file


@pytest.mark.parametrize("own", ["", "{{ messages }}"])
async def test_a_file_replaces_the_models_template(own: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}{{ mark }}{{ tools | length if tools }}", encoding="utf-8")
    async with serving(TemplateTarget(own), with_draft=False, chat_template=file) as served:
        assert (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).has_chat_template
        request = make_request([USER], max_tokens=4, tools=[WEATHER], chat_template_kwargs={"mark": "!"})
        prompt = BYTES.encode(f"{USER['content']}!1").ids
        assert list((await served.stub.Generate(request)).token_ids) == served.target.continuation(prompt, 4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file: FILE"),
        (b"\xff", "FILE is not UTF-8"),
        (b" \n", "FILE is empty"),
        (b"x" * (2**20 + 1), "FILE has more than 1048576 bytes"),
        (b"{{ a }}\n{% for %}", "FILE: the chat template does not compile: line 2: Expected an expression"),
    ],
)
@pytest.mark.parametrize("kind", [CoordinatorSettings, UpSettings])
def test_an_unusable_file_ends_the_start_with_one_line(
    kind: Any, content: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        kind.load("program", ["--chat-template", str(file)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("program: chat-template: " + reason.replace("FILE", str(file)))


def test_up_passes_the_file_to_the_coordinator(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    *_, coordinator = services_of(UpSettings(chat_template=file), "a", "b")
    assert CoordinatorSettings.load("coordinator", coordinator.arguments).chat_template == file
