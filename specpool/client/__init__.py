"""Typed Python clients of a coordinator: `Client` and, for asyncio, `AsyncClient`."""

from specpool.client.aio import AsyncClient
from specpool.client.chats import Chat
from specpool.client.requests import GenerateOptions, Prompt, make_request
from specpool.client.retries import DivergedError
from specpool.client.sync import Client

__all__ = ["AsyncClient", "Chat", "Client", "DivergedError", "GenerateOptions", "Prompt", "make_request"]
