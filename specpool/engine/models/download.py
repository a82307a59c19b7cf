"""Downloads a hub model's weights before they are loaded, so that a startup can tell the two apart."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from specpool.engine.config.options import EngineOptions

FILES = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "model-*-of-*.safetensors"]


def download_weights(options: EngineOptions, report: Callable[[str], None]) -> None:
    """Download the weights of a hub model that are not in its cache, and report that first."""
    if Path(options.model).exists() or _are_cached(options):
        return
    report("downloading weights")
    with suppress(Exception):  # loading the model raises it again, and explains it
        snapshot_download(options.model, revision=options.revision, allow_patterns=FILES)


def _are_cached(options: EngineOptions) -> bool:
    def cached(name: str) -> str | None:
        path = try_to_load_from_cache(options.model, name, revision=options.revision)
        return path if isinstance(path, str) else None

    if (index := cached(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return cached(SAFE_WEIGHTS_NAME) is not None
    return all(map(cached, set(json.loads(Path(index).read_bytes())["weight_map"].values())))
