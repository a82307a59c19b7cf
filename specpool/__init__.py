"""Batch speculative decoding as a gRPC service. The names below are the client library."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpool import errors
    from specpool.client import AsyncClient, Chat, Client, GenerateOptions, Prompt
    from specpool.errors import DivergedError, RequestError, SpecpoolError

__all__ = [
    "AsyncClient",
    "Chat",
    "Client",
    "DivergedError",
    "GenerateOptions",
    "Prompt",
    "RequestError",
    "SpecpoolError",
    "errors",
]

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported: its lines may quote callers


def __getattr__(name: str) -> Any:
    """Import the client library on first use, so that other parts of the package do not load it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    errors = import_module("specpool.errors")
    if name == "errors":
        return errors
    return getattr(errors if name in errors.__all__ else import_module("specpool.client"), name)
