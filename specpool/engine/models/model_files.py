"""Reads and checks a model's files within limits, before other libraries read them. Imports no torch."""

import json
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from specpool.engine.config.sources import CONFIG, UnsupportedModelError
from specpool.engine.models.config_values import check_sizes, check_types
from specpool.engine.models.eagle_format import flattened
from specpool.engine.models.vision_language import text_part

MAX_CONFIG_BYTES, MAX_FILE_BYTES = 2**22, 2**26
"""Maximum size of config.json, and of any other file that is read into memory, such as tokenizer.json."""
MAX_HEADER_BYTES, MAX_INDEX_BYTES = 2**24, 2**25
"""Maximum size of the header of a safetensors file, and of the index of several."""
SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Suffixes of files that are read into memory."""
MAX_NESTED = 32


def read_config_file(model: str, revision: str | None) -> dict[str, Any]:
    """Return the config.json of a model in a folder or on the hub, and check the sizes of the files beside it.

    Speculators are flattened (see `flattened`), and vision-language models reduced to their text part. Raises
    UnsupportedModelError, also for sizes beyond their limits.
    """
    file = Path(model) / CONFIG
    if not file.is_file():
        from specpool.engine.config.hub import hub_config  # takes a while to import

        file = hub_config(model, revision)
    config = text_part(flattened(read_json(file, MAX_CONFIG_BYTES), str(file)))
    check_types(config, str(file))
    check_sizes(config, str(file))
    for other in sorted(file.parent.iterdir()):
        if other.suffix in SUFFIXES and other.is_file():
            check_file_size(other, MAX_FILE_BYTES)
    return config


def find_file(model: str, revision: str | None, name: str) -> Path | None:
    """Return a file of a local model, or of a hub model from the local cache."""
    path = Path(model)
    if path.exists():
        return path / name if (path / name).is_file() else None
    from specpool.engine.config.hub import cached_file

    return cached_file(model, revision, name)


def stored_names(model: str, revision: str | None) -> Collection[str] | None:
    """Return the names of the weights of a local or cached model; None if its files are missing or unreadable."""
    with suppress(OSError, ValueError, struct.error, RecursionError, UnsupportedModelError):
        if (single := find_file(model, revision, "model.safetensors")) is not None:
            with single.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length <= MAX_HEADER_BYTES else None
            return header if isinstance(header, dict) else None
        if (index := find_file(model, revision, "model.safetensors.index.json")) is not None:
            names = read_json(index, MAX_INDEX_BYTES).get("weight_map")
            return names if isinstance(names, dict) else None
    return None


def read_json(file: Path, max_bytes: int) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnsupportedModelError."""
    check_file_size(file, max_bytes)
    try:
        content = json.loads(file.read_bytes(), parse_constant=_refuse_nan)
        _check_nesting(content)
    except RecursionError:
        raise UnsupportedModelError(f"{file} is nested too deeply; the maximum is {MAX_NESTED}") from None
    except ValueError as error:
        raise UnsupportedModelError(f"{file} is not a JSON file: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{file} does not contain a JSON object")
    return content


def check_file_size(file: Path, max_bytes: int) -> None:
    size = file.stat().st_size
    if size > max_bytes:
        raise UnsupportedModelError(f"{file} has {size:,} bytes; the maximum is {max_bytes:,}")


def _refuse_nan(constant: str) -> float:
    if constant == "NaN":
        raise ValueError("it contains NaN")
    return float(constant)


def _check_nesting(value: object, depth: int = 0) -> None:
    """Raise RecursionError for a value that is nested too deeply."""
    if depth > MAX_NESTED:
        raise RecursionError
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_nesting(part, depth + 1)
