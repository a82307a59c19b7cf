"""The `openai` client: blocking, asyncio, raw responses, and its helpers for streams and pydantic models."""

import asyncio

import openai
from openai import OpenAI
from openai_service import KEY, MODEL, openai_service
from pydantic import BaseModel
from scripted_target import ScriptedTarget

CHAT = [{"role": "user", "content": "Hi"}]
OPTIONS = {"model": MODEL, "messages": CHAT, "temperature": 0}


class Size(BaseModel):
    width: int


def ask_blocking(url: str) -> tuple[str, str]:
    """Return the text of an answer and of a stream."""
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(**OPTIONS).choices[0].message.content
        with client.chat.completions.create(**OPTIONS, stream=True) as chunks:
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return str(answer), streamed


async def test_the_blocking_client_generates() -> None:
    async with openai_service(target=ScriptedTarget("Hello")) as service:
        assert await asyncio.to_thread(ask_blocking, service.url) == ("Hello", "Hello")


async def test_the_helpers_read_streams_and_models() -> None:
    async with openai_service(target=ScriptedTarget("Hello"), reasoning_tags="none") as service:
        chats = service.client.chat.completions
        async with chats.stream(**OPTIONS, stream_options={"include_usage": True}) as stream:
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        assert "".join(deltas) == final.choices[0].message.content == "Hello"
        assert final.usage.completion_tokens == 6
        parsed = (await chats.parse(**OPTIONS, response_format=Size, max_tokens=200)).choices[0].message.parsed
        assert isinstance(parsed, Size)
        async with chats.stream(**OPTIONS, response_format=Size, max_tokens=200) as stream:
            assert isinstance((await stream.get_final_completion()).choices[0].message.parsed, Size)


async def test_a_response_format_yields_only_to_required_calls() -> None:
    tool = openai.pydantic_function_tool(Size, name="measure")
    async with openai_service(target=ScriptedTarget("Hello")) as service:
        chats = service.client.chat.completions
        options = {**OPTIONS, "tools": [tool], "response_format": Size, "max_tokens": 200}
        message = (await chats.parse(**options)).choices[0].message
        assert isinstance(message.parsed, Size)
        assert not message.tool_calls
        message = (await chats.parse(**options, tool_choice="required")).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["measure"]
        assert all(isinstance(call.function.parsed_arguments, Size) for call in message.tool_calls)


async def test_streamed_tool_calls_are_those_of_the_whole_answer() -> None:
    text = 'Sure.<tool_call>\n{"name": "f", "arguments": {"x": [1, "two"]}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
    async with openai_service(target=ScriptedTarget(text)) as service:
        chats = service.client.chat.completions
        tool["function"].pop("strict")
        whole = (await chats.create(**OPTIONS, tools=[tool])).choices[0]
        async with chats.stream(**OPTIONS, tools=[tool]) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == whole.finish_reason == "tool_calls"
        assert streamed.message.content == whole.message.content == "Sure."
        [ours], [theirs] = whole.message.tool_calls, streamed.message.tool_calls
        assert (ours.function.name, ours.function.arguments) == ("f", '{"x": [1, "two"]}')
        assert theirs.function.arguments == ours.function.arguments
        # The answer and the result of its call are valid messages.
        messages = [*CHAT, whole.message, {"role": "tool", "tool_call_id": ours.id, "content": "3"}]
        assert (await chats.create(model=MODEL, messages=messages, temperature=0)).choices[0].message.content


async def test_raw_responses_have_the_id_of_the_request() -> None:
    async with openai_service(target=ScriptedTarget()) as service:
        raw = await service.client.chat.completions.with_raw_response.create(**OPTIONS)
        assert raw.headers["x-request-id"] == raw.parse().id
        assert "server" not in raw.headers
