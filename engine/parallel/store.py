"""Where ranks find each other: a store of torch.distributed, in a file for one node, or behind a port for several."""

from pathlib import Path
from typing import Any

from torch import distributed

Store = Any  # torch does not export the types of its stores
_stores: Any = distributed


def new_store(folder: Path, host: str | None, ranks: int) -> tuple[Store, str]:
    """Rank 0's store, and its place for the others. `folder`: of this user alone. `host`: None for one node."""
    if host is None:
        place = str(folder / "store")
        return _stores.FileStore(place, ranks), place
    store = _stores.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host} {store.port}"


def open_store(place: str, ranks: int) -> Store:
    """The store at a place."""
    if " " not in place:
        return _stores.FileStore(place, ranks)
    host, port = place.split()
    return _stores.TCPStore(host, int(port), is_master=False)
