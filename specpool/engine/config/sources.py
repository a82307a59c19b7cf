"""Model locations: a hub id, a folder, or a GGUF file."""

import re
from pathlib import Path
from typing import Any

CONFIG = "config.json"
GGUF_MAGIC = b"GGUF"
GGUF_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
"""Names of the parts of a split GGUF file."""
MAX_REASON = 300
"""Maximum length of another library's reason in an error message."""


class UnsupportedModelError(Exception):
    """The model cannot be served; the message says why."""


def source_of(model: str, revision: str | None) -> dict[str, Any]:
    """Return the `from_pretrained` arguments that locate a model and forbid its own code.

    Raises UnsupportedModelError if a local path holds no model.
    """
    path, safe = Path(model), {"trust_remote_code": False}
    if not path.exists():
        if path.suffix == ".gguf" or path.is_absolute():
            raise UnsupportedModelError(f"{model}: no such file or folder")
        pinned = {} if revision is None else {"revision": revision}
        return {**safe, **pinned, "pretrained_model_name_or_path": model}
    gguf = None if (path / CONFIG).is_file() else gguf_file_of(model)
    if path.is_dir() and not (path / CONFIG).is_file() and gguf is None:
        raise UnsupportedModelError(f"{model} is not a model folder: it has no {CONFIG}")
    if not path.is_dir() and gguf is None:
        raise UnsupportedModelError(f"{model} is neither a model folder nor a .gguf file")
    if revision is not None:
        raise UnsupportedModelError(f"revision {revision}: {model} is local; only hub models have revisions")
    if gguf is not None:
        return {**safe, "pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    return {**safe, "pretrained_model_name_or_path": model}


def gguf_file_of(model: str) -> Path | None:
    """Return the GGUF file with a model's weights: the model itself, or the only one in its folder; None without one.

    For a split file, return its first part. For a folder with safetensors files, return None. Raises
    UnsupportedModelError if a folder has several GGUF files.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not any(path.glob("*.safetensors")) else []
    parts = [GGUF_PART.fullmatch(file.name) for file in files]
    if len({part.groups() if part else file for part, file in zip(parts, files, strict=True)}) > 1:
        names = ", ".join(file.name for file in files)
        raise UnsupportedModelError(f"{model} has several GGUF files ({names}); name one of them as the model")
    return files[0] if files else None


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, short enough for our own message."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    line = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}..."
