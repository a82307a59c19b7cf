"""Exchange between GPU ranks by NCCL, and the TCPStore of rank 0, where ranks find each other."""

import socket
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from specpool.engine.config.sources import first_line

Store = Any  # torch does not export the types of its stores
_stores: Any = distributed

# Renamed in torch 2.13.
_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
# Never time out: ranks load for different times, and the link to a rank reports when it ends.
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


def serve_store(server: socket.socket) -> Store:
    """Serve rank 0's store on a listening socket, which the store takes over. torch alone would listen everywhere."""
    host, port, *_ = server.getsockname()
    number = server.detach()
    return _patient(_stores.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=number))


def open_store(host: str, port: int) -> Store:
    """Open the store of rank 0. Raises OSError if it cannot be reached."""
    socket.create_connection((host, port), timeout=5.0).close()  # torch retries with a stack trace
    try:
        return _patient(_stores.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5)))
    except RuntimeError as error:
        raise OSError(f"no torch store at {host}:{port}: {first_line(error)}") from error


def _patient(store: Store) -> Store:
    store.set_timeout(TIMEOUT)  # not in the constructor, whose timeout also limits the time to connect
    return store
