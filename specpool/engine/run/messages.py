"""Messages between rank 0 and the other ranks: JSON while they start, and 64-bit integers for each pass."""

from collections.abc import Sequence
from enum import IntEnum, auto
from itertools import accumulate, chain, pairwise
from typing import TypeVar

import numpy as np
from pydantic import BaseModel

from specpool.engine.cache.spans import Span
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.sharding.links import Link
from specpool.engine.sharding.shares import Sums

Message = TypeVar("Message", bound=BaseModel)


class Order(BaseModel):
    """To a rank: how to load its shard."""

    sums: Sums
    exact: bool
    store_port: int | None
    """Where rank 0's store lets GPU ranks find each other; None: of CPU ranks."""


class Loaded(BaseModel):
    """From a rank that has loaded its shard."""

    sums: dict[str, str]
    """Hexadecimal checksums of weights by name, for the fingerprint of all weights."""


class Report(BaseModel):
    """From a rank that has built its pass."""

    device: str
    forward_pass: str
    """Class of the pass, which must be the same on all ranks."""
    activations: str
    """Format of the activations, which must be the same on all ranks."""
    tiles: Tiles | None
    """Shapes that make the pass batch invariant; None: no shapes do."""
    agrees: bool
    """Whether the compiled GEMMs, if any, are batch invariant."""
    kv_limit: int
    """Maximum size of this rank's KV cache in bytes."""
    weight_bytes: int
    weight_kinds: dict[str, int]
    """Bytes of weights by storage type."""
    activation_bytes: int


class Begin(BaseModel):
    """To a rank: begin to serve."""

    columns: int
    """Columns of the KV cache."""
    tables: tuple[int, int]
    """Shape of the tables of pages."""
    page_size: int
    tiles: Tiles


class Probed(BaseModel):
    """From a rank: operations that gave equal rows different bits."""

    unequal: list[str]


class Command(IntEnum):
    """Commands of rank 0 while it serves. All arguments are integers."""

    RUN = auto()
    """Run a pass: `encode_run`."""
    ASSIGN = auto()
    """Assign pages to a sequence: its slot, the number of an entry of its table, and the pages from there on."""
    CAPTURE = auto()
    """Capture passes as CUDA graphs: the arguments of `PassRunner.capture_graphs`."""
    PROBE = auto()
    """Begin to probe the operations of passes."""
    END_PROBE = auto()
    """End the probe, and report."""
    END = auto()
    """Exit."""


def send(link: Link, message: BaseModel) -> None:
    """Send a message as JSON."""
    link.send(message.model_dump_json().encode())


def receive(link: Link, kind: type[Message]) -> Message:
    """Wait for a message. EOFError: the other rank has ended."""
    return kind.model_validate_json(link.receive())


def encode(command: Command, *arguments: int) -> bytes:
    """The message of a command."""
    return np.array((command, *arguments), np.int64).tobytes()


def decode(message: bytes) -> tuple[Command, list[int]]:
    """The command of a message, and its arguments."""
    command, *arguments = np.frombuffer(message, np.int64).tolist()
    return Command(command), arguments


def encode_run(spans: Sequence[Span], state_layers: Sequence[int] = ()) -> bytes:
    """The command to run a pass: number of state layers, these layers, number of spans, seven integers per span, and
    all tokens."""
    headers = (
        (
            span.slot, span.start, len(span.token_ids), span.num_logits, span.prefix_length, span.offset,
            span.num_states,
        )
        for span in spans
    )  # fmt: skip
    tokens = chain.from_iterable(span.token_ids for span in spans)
    return encode(Command.RUN, len(state_layers), *state_layers, len(spans), *chain.from_iterable(headers), *tokens)


def decode_run(arguments: list[int]) -> tuple[list[Span], tuple[int, ...]]:
    """The spans of a pass, and the state layers."""
    first = 1 + arguments[0]
    state_layers, count, rest = tuple(arguments[1:first]), arguments[first], arguments[first + 1 :]
    headers = [rest[7 * i : 7 * i + 7] for i in range(count)]
    ends = accumulate((tokens for _, _, tokens, *_ in headers), initial=7 * count)
    spans = [
        Span(slot, start, rest[begin:end], num_logits, prefix_length, offset, num_states)
        for (slot, start, _, num_logits, prefix_length, offset, num_states), (begin, end) in zip(
            headers, pairwise(ends), strict=True
        )
    ]
    return spans, state_layers
