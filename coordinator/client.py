"""An asynchronous client of a coordinator, for Python services and for the commands."""

from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Self

from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

from rpc.channel import open_channel

Prompt = str | Iterable[Mapping[str, str]]
"""A text, or a conversation of {"role": ..., "content": ...}."""


class Client:
    """Use as an async context manager. Every call raises `grpc.aio.AioRpcError` if the server refuses it."""

    def __init__(self, address: str) -> None:
        """`address`: "host:port" of a coordinator."""
        self._channel = open_channel(address)
        self.stub: generation_pb2_grpc.GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(
            self._channel
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def generate(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        num_speculative_tokens: int | None = None,
        timeout_seconds: float | None = None,
    ) -> pb.GenerateResponse:
        """The whole answer. Cancelling the task, or the timeout, frees the request on the server."""
        request = make_request(prompt, max_tokens, num_speculative_tokens)
        return await self.stub.Generate(request, timeout=timeout_seconds)

    async def stream(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        num_speculative_tokens: int | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """The answer in pieces; the last message is `complete`."""
        request = make_request(prompt, max_tokens, num_speculative_tokens)
        async for message in self.stub.GenerateStream(request, timeout=timeout_seconds):
            yield message


def make_request(
    prompt: Prompt, max_tokens: int | None = None, num_speculative_tokens: int | None = None
) -> pb.GenerateRequest:
    """A request message; what is None is left to the server."""
    request = pb.GenerateRequest(
        sampling_params=pb.SamplingParams(max_tokens=max_tokens),
        speculative=pb.SpeculativeParams(num_speculative_tokens=num_speculative_tokens),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        messages = [pb.ChatMessage(role=message["role"], content=message["content"]) for message in prompt]
        request.chat.messages.extend(messages)
    return request
