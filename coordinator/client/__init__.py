"""Typed Python clients of a coordinator: `Client`, and `AsyncClient` for asyncio."""

from coordinator.client.aio import AsyncClient
from coordinator.client.requests import Chat, GenerateOptions, Prompt, make_request
from coordinator.client.retries import DivergedError
from coordinator.client.sync import Client

__all__ = ["AsyncClient", "Chat", "Client", "DivergedError", "GenerateOptions", "Prompt", "make_request"]
