"""Finds the files of hub models: in the local cache, or on the hub with a single request. Imports no torch.

huggingface_hub itself retries for half a minute if it cannot reach the hub.
"""

import logging
import os
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.constants as hub
from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specpool.engine.config.sources import CONFIG, UnsupportedModelError, first_line

log = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0
"""Time for a connection to the hub, which is a content delivery network."""


def cached_file(model: str, revision: str | None, name: str) -> Path | None:
    """Return a file of a hub model from the local cache."""
    try:
        path = try_to_load_from_cache(model, name, revision=revision)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


@cache
def hub_config(model: str, revision: str | None) -> Path:
    """Return a hub model's config.json, downloaded if necessary.

    If the hub cannot be reached, use only the local cache from now on. UnsupportedModelError: no such model, or neither
    the hub nor a cached copy is available.
    """
    cached = cached_file(model, revision, CONFIG)
    if hub.HF_HUB_OFFLINE:
        if cached is None:
            raise UnsupportedModelError(f"{model} is not in the local cache, and HF_HUB_OFFLINE forbids a download")
        return cached
    host = urlsplit(hub.ENDPOINT).netloc
    try:
        _request(hf_hub_url(model, CONFIG, revision=revision))
        return Path(hf_hub_download(model, CONFIG, revision=revision))
    except HFValidationError:
        raise UnsupportedModelError(f"{model} is neither a local file or folder nor a valid hub id") from None
    except GatedRepoError:
        raise UnsupportedModelError(f"{model} is gated: accept its terms at {host}, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        reason = f"{model} is neither a local file or folder nor a public model at {host}; private ones need HF_TOKEN"
        raise UnsupportedModelError(reason) from None
    except RevisionNotFoundError:
        raise UnsupportedModelError(f"{model} has no revision {revision} at {host}") from None
    except EntryNotFoundError:
        raise UnsupportedModelError(f"{model} has no {CONFIG} at {host}; download GGUF files first") from None
    except Exception as error:  # the HTTP library depends on the version of huggingface_hub
        failed = f"{host} {'returned an error' if isinstance(error, HfHubHTTPError) else 'cannot be reached'}"
        reason = f"{failed} ({first_line(error)})"
        if cached is None:
            raise UnsupportedModelError(f"{model} is neither a local file or folder nor cached, and {reason}") from None
        log.warning("%s; using the cached copy of %s", reason, model)
        _go_offline()
        return cached


def _request(url: str) -> None:
    """Raise an error if the hub cannot be reached, or has no such file."""
    seconds = hub.HF_HUB_ETAG_TIMEOUT
    timeout = (min(CONNECT_SECONDS, seconds), seconds, seconds, seconds)  # connect, read, write, pool
    get_hf_file_metadata(url, timeout=timeout)  # type: ignore[arg-type]  # the HTTP library accepts it


def _go_offline() -> None:
    """Make huggingface_hub use the local cache only, in this process and in those that it starts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    hub.HF_HUB_OFFLINE = True
