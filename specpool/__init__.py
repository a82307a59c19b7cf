"""Batch speculative decoding as a gRPC service: what a user of it imports."""

from specpool.client import AsyncClient, Chat, Client, DivergedError, GenerateOptions, Prompt

__all__ = ["AsyncClient", "Chat", "Client", "DivergedError", "GenerateOptions", "Prompt"]
