"""The HTTP server with the real client."""

from openai_service import MODEL, openai_service

CHAT = [{"role": "user", "content": "Hello"}]


async def test_a_chat_is_answered_at_once_and_as_a_stream() -> None:
    async with openai_service() as service:
        chats = service.client.chat.completions
        options = {"model": MODEL, "messages": CHAT, "max_tokens": 12, "temperature": 0}
        answer = await chats.create(**options)
        text = answer.choices[0].message.content
        assert text
        assert answer.usage.completion_tokens == 12
        chunks = [chunk async for chunk in await chats.create(**options, stream=True)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "length"


async def test_models_are_listed() -> None:
    async with openai_service() as service:
        assert [model.id async for model in service.client.models.list()] == [MODEL]
        assert (await service.client.models.retrieve(MODEL)).id == MODEL
