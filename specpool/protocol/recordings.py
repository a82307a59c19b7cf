"""File format of recorded answers, written by coordinators and read by `specpool distill --from`.

A shard is a JSON Lines file with a header line and one answer per line. It is plain text, so operators can audit it.
"""

import json
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT, VERSION = "specpool-answers", 1
PREFIX, FINISHED, UNFINISHED = "answers-", ".jsonl", ".jsonl.part"
"""Parts of shard file names. An unfinished shard may still grow."""


class InvalidShardError(ValueError):
    """The file is not a shard, or it is damaged."""


@dataclass(frozen=True)
class Header:
    """The target that generated the answers of a shard."""

    model: str
    tokenizer_fingerprint: str
    weights_fingerprint: str

    def encode(self) -> bytes:
        return _line({"format": FORMAT, "version": VERSION, **asdict(self)})


@dataclass(frozen=True)
class RecordedAnswer:
    client: str
    """Keyed hash of the client id. The key exists only while the coordinator runs."""
    token_ids: tuple[int, ...]

    def encode(self) -> bytes:
        return _line(vars(self))  # `asdict` copies each token id


def shards_in(folder: Path) -> list[Path]:
    """Return the shards in a folder, sorted by name. Raises OSError."""
    suffixes = (FINISHED, UNFINISHED)
    return sorted(path for path in folder.iterdir() if path.name.startswith(PREFIX) and path.name.endswith(suffixes))


def read_shard(path: Path) -> tuple[Header, list[RecordedAnswer]] | None:
    """Return the header and the answers of a shard; None if it has no complete line yet.

    Ignores an incomplete last line, which a killed coordinator or a full disk may leave. Raises InvalidShardError and
    OSError.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        return None
    return _header(path, lines[0]), list(_answers(path, lines[1:]))


def _header(path: Path, line: bytes) -> Header:
    fields = _object(path, 1, line)
    if fields.pop("format", None) != FORMAT:
        raise InvalidShardError(f"{path} is not a shard of recorded answers")
    if (version := fields.pop("version", None)) != VERSION:
        raise InvalidShardError(f"{path} has version {version!r} of the format, but this release reads {VERSION}")
    try:
        header = Header(**fields)
    except TypeError:
        raise InvalidShardError(f"{path}, line 1: invalid header") from None
    if not all(isinstance(value, str) for value in asdict(header).values()):
        raise InvalidShardError(f"{path}, line 1: invalid header")
    return header


def _answers(path: Path, lines: Iterable[bytes]) -> Iterator[RecordedAnswer]:
    for number, line in enumerate(lines, 2):
        match _object(path, number, line):
            case {"client": str(client), "token_ids": list(token_ids), **others} if not others and _are_ids(token_ids):
                yield RecordedAnswer(client, tuple(token_ids))
            case _:
                raise InvalidShardError(f"{path}, line {number}: not a recorded answer")


def _are_ids(values: Items[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**32 for value in values)


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidShardError(f"{path}, line {number}: not a JSON object")
    return fields


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
