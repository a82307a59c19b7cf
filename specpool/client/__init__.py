"""Typed Python clients of a coordinator: `Client` and, for asyncio, `AsyncClient`."""

from specpool.client.aio import AsyncClient
from specpool.client.chats import Chat
from specpool.client.constraints import parsed
from specpool.client.requests import GenerateOptions, Prompt, make_request
from specpool.client.sync import Client
from specpool.errors import DivergedError, NotReadyError

__all__ = [
    "AsyncClient",
    "Chat",
    "Client",
    "DivergedError",
    "GenerateOptions",
    "NotReadyError",
    "Prompt",
    "make_request",
    "parsed",
]
