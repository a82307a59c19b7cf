"""Exchange between GPU ranks by NCCL, and the stores where its ranks find each other."""

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from specpool.engine.config.sources import first_line

Store = Any  # torch does not export the types of its stores
_stores: Any = distributed

# Renamed in torch 2.13.
_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
# Never time out: ranks load for different times, and the connection to a rank reports when it ends.
TIMEOUT = timedelta(days=365)


class NcclExchange:
    """One rank's membership in torch's process group."""

    def __init__(self, rank: int, ranks: int, store: Store, device: torch.device) -> None:
        """Wait for all ranks to join. Raises OSError if they are unreachable."""
        try:
            distributed.init_process_group(
                "nccl",
                store=store,
                rank=rank,
                world_size=ranks,
                timeout=TIMEOUT,
                device_id=device,  # connects eagerly, because graph capture forbids it
            )
        except RuntimeError as error:
            raise OSError(f"ranks cannot reach each other: {first_line(error)}") from error

    def all_gather(self, x: torch.Tensor, stack: torch.Tensor) -> None:
        """Fill `stack` [ranks, ...] with the contiguous tensors `x` [...] of all ranks."""
        _all_gather(stack.view(-1), x.view(-1))

    def close(self) -> None:
        """Leave the process group; other ranks may have ended already."""
        world = distributed.group.WORLD
        if world is not None:
            world.abort()  # a regular shutdown would wait for the other ranks
        distributed.destroy_process_group()


def new_file() -> int:
    """Create an in-memory file for the store of one node. Returns its descriptor, which the ranks inherit.

    The file has no name, so no other process can open it, and it vanishes with the ranks.
    """
    return os.memfd_create("specpool-ranks")


def file_store(descriptor: int, ranks: int) -> tuple[Store, str]:
    """Open rank 0's store in such a file. Returns the store and its address for the other ranks."""
    address = f"/proc/self/fd/{descriptor}"
    return _patient(_stores.FileStore(address, ranks)), address


def tcp_store(host: str) -> tuple[Store, str]:
    """Open rank 0's store on a free port of this host. Returns the store and its address for the other ranks.

    Raises OSError.
    """
    try:
        store = _stores.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise OSError(f"cannot open a port for GPU ranks at {host}: {first_line(error)}") from error
    return _patient(store), f"{host} {store.port}"


def open_store(address: str, ranks: int) -> Store:
    """Open the store of rank 0 at its address. Raises OSError if it cannot be reached."""
    if " " not in address:
        return _patient(_stores.FileStore(address, ranks))
    host, port = address.split()
    try:
        return _patient(_stores.TCPStore(host, int(port), is_master=False))
    except RuntimeError as error:
        raise OSError(f"cannot reach the GPU ranks' port {port} of {host}: {first_line(error)}") from error


def _patient(store: Store) -> Store:
    store.set_timeout(TIMEOUT)  # not in the constructor, whose timeout also limits the time to connect
    return store
