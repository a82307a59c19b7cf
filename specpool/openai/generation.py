"""Answer one HTTP request: choose a coordinator, call it, and convert its responses."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc

from specpool.openai.answers import Header, chat_answer, completion_answer
from specpool.openai.bodies import ChatBody, CompletionBody
from specpool.openai.calls import Work, chat_prefix, chat_work, completion_prefix, completion_work
from specpool.openai.coordinators import Coordinators, Link, Metadata
from specpool.openai.errors import ApiError, api_error, invalid, unknown_model
from specpool.openai.reply import Reply
from specpool.openai.streams import DONE, ChatStream, CompletionStream, event
from specpool.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Kind:
    """The differences between chats and completions."""

    body: type[Any]
    prefix: Callable[[Any], str]
    work: Callable[[Any, pb.GetModelInfoResponse, str], Work]
    answer: Callable[[Header, Work, Sequence[pb.GenerateResponse]], dict[str, Any]]
    stream: type[ChatStream | CompletionStream]
    id_prefix: str
    object: str
    chunk_object: str


CHAT = Kind(
    ChatBody, chat_prefix, chat_work, chat_answer, ChatStream, "chatcmpl-", "chat.completion", "chat.completion.chunk"
)
COMPLETION = Kind(
    CompletionBody, completion_prefix, completion_work, completion_answer, CompletionStream, "cmpl-", "text_completion",
    "text_completion",
)  # fmt: skip


@dataclass
class Generation:
    """One request."""

    kind: Kind
    body: Any
    metadata: Metadata
    reply: Reply
    on_first_token: Callable[[], None]
    id: str = field(init=False)
    names: Mapping[str, str] = field(default_factory=dict)
    """See `Work.names`."""

    def __post_init__(self) -> None:
        self.id = self.kind.id_prefix + uuid.uuid4().hex

    async def run(self, coordinators: Coordinators) -> None:
        """Answer the request. Raises ApiError if nothing has been sent yet."""
        try:
            await coordinators.call(self._key(), self._answer_by)
        except grpc.RpcError as error:
            raise api_error(error, self.names) from None

    def _key(self) -> bytes:
        """Return a digest of caller, salt and prefix: requests that differ in one share no cached prefix."""
        caller = [value for name, value in self.metadata if name == "authorization"]
        return sha256(repr((caller, self.body.cache_salt, self.kind.prefix(self.body))).encode()).digest()

    async def _answer_by(self, link: Link) -> None:
        """Answer through one coordinator. Raises ApiError, and RpcError if nothing has been sent yet."""
        info = await link.info(self.metadata)
        if self.body.model != info.served_model_name:
            info = await link.info(self.metadata, is_cached=False)
        if self.body.model != info.served_model_name:
            raise unknown_model(self.body.model, info.served_model_name)
        try:
            work = self._work(info)
        except ApiError:
            await link.info(self.metadata, is_cached=False)  # tells strangers nothing about the model
            raise
        async with link.stub() as stub:
            if self.body.stream:
                running = [stub.GenerateStream(each, metadata=self.metadata) for each in work.requests]
                async with aclosing(merged(running)) as messages:
                    await self._stream(messages, work)
            else:
                calls = [stub.Generate(each, metadata=self.metadata) for each in work.requests]
                responses = await gathered(calls)
                answer = self.kind.answer(self._header(self.kind.object), work, responses)
                await self.reply.json(json.dumps(answer, ensure_ascii=False).encode(), headers=self._headers())

    def _work(self, info: pb.GetModelInfoResponse) -> Work:
        try:
            work = self.kind.work(self.body, info, self.id)
        except RecursionError:
            raise invalid(None, "the body is nested too deeply") from None
        self.names = work.names
        return work

    def _header(self, kind: str) -> Header:
        return Header(self.id, kind, self.body.model)

    def _headers(self) -> dict[str, str]:
        return {"x-request-id": self.id}

    async def _stream(self, messages: AsyncGenerator[tuple[int, pb.GenerateStreamResponse]], work: Work) -> None:
        stream = self.kind.stream(self._header(self.kind.chunk_object), work, self.body.includes_usage)
        number, first = await anext(messages)
        self.on_first_token()
        await self.reply.begin_stream(self._headers())
        await self.reply.write(stream.feed(number, first))
        try:
            async for number, message in messages:
                await self.reply.write(stream.feed(number, message))
        except grpc.RpcError as error:
            await self.reply.end(event(api_error(error, self.names).body().decode()) + DONE)
        else:
            await self.reply.end(stream.end())


async def gathered(calls: Sequence[Any]) -> list[pb.GenerateResponse]:
    """Await concurrent calls in order. An error or a cancellation cancels them all."""
    try:
        responses: list[pb.GenerateResponse] = await asyncio.gather(*calls)
        return responses
    finally:
        for call in calls:
            call.cancel()


async def merged(calls: Sequence[Any]) -> AsyncGenerator[tuple[int, pb.GenerateStreamResponse]]:
    """Yield (stream number, message) as messages arrive. Closing the generator cancels the streams."""
    reading: dict[asyncio.Future[Any], int] = {}
    try:
        if len(calls) == 1:
            async for message in calls[0]:
                yield 0, message
            return
        reading |= {asyncio.ensure_future(call.read()): number for number, call in enumerate(calls)}
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                number = reading.pop(read)
                if (message := read.result()) is not grpc.aio.EOF:
                    yield number, message
                    reading[asyncio.ensure_future(calls[number].read())] = number
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
