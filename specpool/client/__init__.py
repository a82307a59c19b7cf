"""Typed Python clients of a coordinator: `Client` and, for asyncio, `AsyncClient`."""

from specpool.client.aio import AsyncClient
from specpool.client.requests import Chat, GenerateOptions, Prompt, make_request
from specpool.client.sync import Client
from specpool.errors import DivergedError

__all__ = ["AsyncClient", "Chat", "Client", "DivergedError", "GenerateOptions", "Prompt", "make_request"]
