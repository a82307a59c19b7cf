"""Messages between the coordinator and its prompt processes, and the limits of a process.

A message is a length, a kind and a body. Requests are trusted and use `marshal`; replies are bytes of untrusted code.
"""

import struct
import sys
from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

HEADER = struct.Struct("<IB")
MIB = 2**20
MAX_REASON_CHARACTERS = 1000


class Kind(IntEnum):
    # Requests
    LOAD = 1
    TEXT = 2
    CHAT = 3
    TEMPLATE = 4
    """Compile a template."""
    GRAMMARS = 5
    """Load the tokenizer for llguidance."""
    CONSTRAINT = 6
    """Convert a constraint to a grammar, and compile it."""
    # Replies
    DONE = 16
    """Success. After LOAD, the body is a description in JSON; after CONSTRAINT, the grammar."""
    TOKEN_IDS = 17
    REFUSED = 18
    """The process refuses the prompt, the constraint or the files. The body is the reason."""
    TOO_LONG = 19
    """The prompt has too many tokens. The body is their number, or empty if counting stopped at the limit."""
    ENDS = 20
    """The process exits after its next reply."""
    BEGINS = 21
    """The next stage of a request begins. The body is the number of bytes to work on. Another reply follows."""
    EXHAUSTED = 22
    """The request takes too much memory. The body is the reason."""


@dataclass(frozen=True)
class Allowance:
    seconds: float
    """Processor time."""
    memory: int
    """Bytes on top of the memory in use."""

    @classmethod
    def load(cls, size: int) -> Self:
        """For loading a tokenizer.json of `size` bytes."""
        return cls(60.0, 512 * MIB + 32 * size)

    @classmethod
    def prompt(cls, size: int, seconds: float) -> Self:
        """For rendering or tokenizing `size` bytes. Ordinary text needs 1 us and 200 bytes of memory per byte."""
        return cls(seconds + size * 1e-5, 256 * MIB + 256 * size)

    @classmethod
    def constraint(cls, seconds: float) -> Self:
        return cls(seconds, 256 * MIB)

    @property
    def shown_memory(self) -> str:
        return f"{self.memory // MIB} MiB"


def frame(kind: Kind, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind) + body


def pack_ids(ids: list[int]) -> bytes:
    """Return token ids as little-endian integers of four bytes."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(body: bytes) -> list[int]:
    """Return the token ids. Raises ValueError unless the length is a multiple of four."""
    ids = array("I")
    ids.frombytes(body)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
