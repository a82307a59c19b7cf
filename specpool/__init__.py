"""Batch speculative decoding as a gRPC service. The names below are the client library."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpool.client import AsyncClient, Chat, Client, DivergedError, GenerateOptions, Prompt

__all__ = ["AsyncClient", "Chat", "Client", "DivergedError", "GenerateOptions", "Prompt"]


def __getattr__(name: str) -> Any:
    """Import the client library on first use, so that other parts of the package do not load it."""
    if name in __all__:
        return getattr(import_module("specpool.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
