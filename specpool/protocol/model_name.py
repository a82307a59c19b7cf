"""The readable name of a model."""

from pathlib import PurePath

HUB_CACHE_PREFIX, HUB_CACHE_SEPARATOR = "models--", "--"


def readable_name(model: str) -> str:
    """Return a hub id as it is, and of a path its last part: without .gguf, and as the hub id in the hub's cache."""
    path = PurePath(model)
    for part in path.parts:  # models--Qwen--Qwen3-8B/snapshots/COMMIT
        if part.startswith(HUB_CACHE_PREFIX):
            return part.removeprefix(HUB_CACHE_PREFIX).replace(HUB_CACHE_SEPARATOR, "/")
    if path.suffix == ".gguf":
        return path.stem
    is_hub_id = not path.is_absolute() and len(path.parts) <= 2 and path.parts[:1] != ("..",)
    return str(path) if is_hub_id else path.name or model
