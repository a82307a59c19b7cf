"""Batch speculative decoding as a gRPC service: the public names of its client library."""

from specpool.client import AsyncClient, Chat, Client, DivergedError, GenerateOptions, Prompt

__all__ = ["AsyncClient", "Chat", "Client", "DivergedError", "GenerateOptions", "Prompt"]
