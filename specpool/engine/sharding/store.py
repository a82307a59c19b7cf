"""Where ranks find each other: a store of torch.distributed, in a file for one node, or behind a port for several."""

import os
from typing import Any

from torch import distributed

Store = Any  # torch does not export the types of its stores
_stores: Any = distributed


def new_file() -> int:
    """A file in memory for the store of one node, as a number that the ranks inherit.

    It has no name, so that nobody else can open it, and nothing of it is left however the ranks end.
    """
    return os.memfd_create("specpool-ranks")


def file_store(number: int, ranks: int) -> tuple[Store, str]:
    """Rank 0's store in such a file, and its place for the others."""
    place = f"/proc/self/fd/{number}"
    return _stores.FileStore(place, ranks), place


def tcp_store(host: str) -> tuple[Store, str]:
    """Rank 0's store behind a port of this host, and its place for the others."""
    store = _stores.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host} {store.port}"


def open_store(place: str, ranks: int) -> Store:
    """The store at a place."""
    if " " not in place:
        return _stores.FileStore(place, ranks)
    host, port = place.split()
    return _stores.TCPStore(host, int(port), is_master=False)
