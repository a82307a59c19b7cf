"""Seeded mutations of files: of bytes, and of values in JSON."""

import copy
import json
import random
import struct
from typing import Any

VALUES: tuple[Any, ...] = (
    -1, 0, 1, 3, 100_000, 2**31, 2**63, 10**40, 0.5, -1e308, 1e999, True, None, "", "x", "\ud800", "full_attention",
    [], [0], [-1, "x"], [[[1]]], {}, {"x": -1}, {"rope_type": "linear"}, ["x"] * 100,
)  # fmt: skip


def mutate_bytes(content: bytes, chance: random.Random, header: int) -> bytes:
    """Change, insert, delete or cut some bytes, mostly among the first `header`."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(min(header, len(changed)) if chance.random() < 0.9 else len(changed))
        number = chance.choice((0, 1, 2**7, 2**16, 2**24, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
        match chance.randrange(6):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at : at + 4] = struct.pack("<I", number % 2**32)
            case 2:
                changed[at : at + 8] = struct.pack("<Q", number)
            case 3:
                changed[at:at] = chance.randbytes(chance.randint(1, 16))
            case 4:
                del changed[at : at + chance.randint(1, 16)]
            case _:
                end = chance.randint(at, at + 64)
                changed[at:at] = changed[at:end]
    return bytes(changed[: chance.randrange(1, len(changed))] if chance.random() < 0.05 else changed)


def mutate_json(content: bytes, chance: random.Random) -> bytes:
    """Replace, delete or add some values of an object, in any of its parts."""
    values = json.loads(content)
    for _ in range(chance.randint(1, 2)):
        part: Any = values
        while True:
            keys = list(part) if isinstance(part, dict) else [*range(len(part))]
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(part[key], dict | list) and chance.random() < 0.8:
                part = part[key]
                continue
            if chance.random() < 0.15:
                del part[key]
            else:
                part[key] = copy.deepcopy(chance.choice(VALUES))
            break
    return json.dumps(values).encode()
