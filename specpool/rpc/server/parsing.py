"""Parses the requests of a method, after estimating the memory that this takes."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from specpool.protocol.errors import InvalidArgumentError
from specpool.rpc.server.message_memory import memory_of

R = TypeVar("R")


class RequestParser(Generic[R]):
    """Parses the requests of one method."""

    def __init__(self, deserialize: Callable[[bytes], R]) -> None:
        """`deserialize`: of a protobuf message, its `FromString`."""
        message: Any = getattr(deserialize, "__self__", None)
        self._kind: Descriptor | None = getattr(message, "DESCRIPTOR", None)
        self._deserialize = deserialize

    def memory_of(self, payload: bytes) -> int:
        """Return an upper bound on the memory of a parsed request."""
        return memory_of(payload, self._kind)

    def parse(self, payload: bytes) -> R:
        """Return the request. Raises InvalidArgumentError."""
        try:
            return self._deserialize(payload)
        except DecodeError as error:
            raise InvalidArgumentError("request", f"not a message of the expected type ({error})") from None
