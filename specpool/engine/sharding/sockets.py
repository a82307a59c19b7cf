"""Exchange between CPU ranks: a star of stream sockets around rank 0, so that no rank listens on a port."""

import socket
from collections.abc import Sequence

import torch


class SocketExchange:
    """One rank's end of the star. Rank 0 gathers the tensors of all ranks, then sends each rank those it lacks."""

    def __init__(self, rank: int, peers: Sequence[socket.socket]) -> None:
        """`peers`: blocking sockets, to the other ranks in rank order for rank 0, otherwise to rank 0."""
        self._rank, self._peers = rank, peers

    def all_gather(self, x: torch.Tensor, stack: torch.Tensor) -> None:
        """Fill `stack` [ranks, ...] with the contiguous tensors `x` [...] of all ranks. EOFError: a rank has ended."""
        stack[self._rank] = x
        shares, size = _bytes_of(stack), x.nbytes
        own = range(self._rank * size, (self._rank + 1) * size)
        if self._rank == 0:
            for rank, peer in enumerate(self._peers, 1):
                _receive(peer, shares[rank * size : (rank + 1) * size], rank)
            for rank, peer in enumerate(self._peers, 1):
                _send(peer, shares[: rank * size], rank)
                _send(peer, shares[(rank + 1) * size :], rank)
        else:
            # All other ranks send before they receive, so nobody waits in a circle.
            [leader] = self._peers
            _send(leader, shares[own.start : own.stop], 0)
            _receive(leader, shares[: own.start], 0)
            _receive(leader, shares[own.stop :], 0)

    def close(self) -> None:
        """Close the sockets."""
        for peer in self._peers:
            peer.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any data type."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _send(peer: socket.socket, data: memoryview, rank: int) -> None:
    if not data:
        return
    try:
        peer.sendall(data)
    except OSError as error:
        raise EOFError(f"rank {rank} has ended") from error


def _receive(peer: socket.socket, data: memoryview, rank: int) -> None:
    while data:
        try:
            received = peer.recv_into(data, 0, socket.MSG_WAITALL)
        except OSError as error:
            raise EOFError(f"rank {rank} has ended") from error
        if not received:
            raise EOFError(f"rank {rank} has ended")
        data = data[received:]
