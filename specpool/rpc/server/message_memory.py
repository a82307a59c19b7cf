"""Estimates the memory of a protobuf message once it is parsed. Small elements grow most."""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from specpool.protocol.errors import InvalidArgumentError

# Upper bounds on protobuf's memory for a message and for an element of a repeated scalar field.
MESSAGE_BYTES, SCALAR_BYTES = 128, 16
# An empty message takes two bytes on the wire.
MAX_GROWTH = MESSAGE_BYTES // 2
# Maximum number of fields that are looked at one by one.
MAX_VISITED = 16_384

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
"""Wire types."""
_SIZES = {
    FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FIXED64: 8, FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_FIXED32: 4, FieldDescriptor.TYPE_SFIXED32: 4,
}  # fmt: skip
"""Wire sizes of scalars other than varints."""
_CONTINUED = bytes(range(0x80, 0x100))
"""Bytes of a varint before its last one."""

R = TypeVar("R")


class _Field(NamedTuple):
    cost: int
    """Memory of each occurrence on the wire."""
    message: Descriptor | None = None
    packed_size: int | None = None
    """Bytes of each element of a packed field; 0 for varints."""


def memory_of(payload: bytes, kind: Descriptor | None) -> int:
    """Return an upper bound on the memory of a parsed message, its payload included.

    `kind`: type of the message; None if it is not a protobuf message.
    """
    if kind is None:
        return len(payload)
    try:
        grown = _growth(payload, kind)
    except IndexError:  # malformed
        grown = None
    return len(payload) + (grown if grown is not None else MAX_GROWTH * len(payload))


def _growth(payload: bytes, kind: Descriptor) -> int | None:
    """Sum the memory of all elements. None: too many elements, or a wire type that is not in use."""
    total, visited = 0, 0
    ranges = [(kind, 0, len(payload))]
    for message, first, end in ranges:  # `ranges` grows
        fields, position = _fields(message), first
        while position < end:
            if (visited := visited + 1) > MAX_VISITED:
                return None
            tag, position = _varint(payload, position)
            field, wire_type = fields.get(tag >> 3), tag & 7
            total += field.cost if field is not None else 0
            if wire_type == _VARINT:
                _, position = _varint(payload, position)
            elif wire_type == _DELIMITED:
                length, start = _varint(payload, position)
                position = start + length
                if field is None:
                    continue
                if field.message is not None:
                    ranges.append((field.message, start, min(position, end)))
                elif field.packed_size is not None:
                    total += SCALAR_BYTES * _elements(payload, start, position, field.packed_size)
            elif wire_type in (_FIXED32, _FIXED64):
                position += 4 if wire_type == _FIXED32 else 8
            else:
                return None
    return total


@cache
def _fields(message: Descriptor) -> dict[int, _Field]:
    """Return the fields that need more memory than their bytes on the wire, by number."""
    return {number: field for number, each in message.fields_by_number.items() if (field := _field(each)) is not None}


def _field(field: Any) -> _Field | None:
    inner: Descriptor | None = field.message_type
    if inner is not None:
        return _Field(MESSAGE_BYTES, inner)
    if not field.is_repeated:
        return None
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return _Field(MESSAGE_BYTES)
    return _Field(SCALAR_BYTES, packed_size=_SIZES.get(field.type, 0))


def _elements(payload: bytes, start: int, end: int, size: int) -> int:
    """Return the number of elements of a packed field."""
    return (end - start) // size if size else len(payload[start:end].translate(None, _CONTINUED))


def _varint(payload: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it. Raises IndexError."""
    byte = payload[position]
    if byte < 0x80:
        return byte, position + 1
    number = byte & 0x7F
    for shift in range(7, 70, 7):
        position += 1
        byte = payload[position]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position + 1
    raise IndexError


class RequestParser(Generic[R]):
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
