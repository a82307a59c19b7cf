"""CPU ranks gather tensors over sockets, in rank order."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specpool.engine.sharding.sockets import SocketExchange


def exchanges(ranks: int) -> list[SocketExchange]:
    """The exchanges of all ranks."""
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    others = [SocketExchange(rank, [other]) for rank, (_, other) in enumerate(pairs, 1)]
    return [SocketExchange(0, [own for own, _ in pairs]), *others]


def on_all(group: list[SocketExchange], call: Callable[[int, SocketExchange], torch.Tensor]) -> list[torch.Tensor]:
    """Call a function on a thread for each rank, then close the exchanges."""
    with ThreadPoolExecutor(len(group)) as pool:
        results = list(pool.map(call, range(len(group)), group))
    for exchange in group:
        exchange.close()
    return results


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (600, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_tensors_of_all(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The largest shape exceeds the buffers of a socket."""
    tensors = [torch.randn(shape).to(dtype) for _ in range(ranks)]

    def gather(rank: int, exchange: SocketExchange) -> torch.Tensor:
        with torch.inference_mode():
            for x in (tensors[rank], -tensors[rank]):  # of passes that follow each other
                stack = x.new_empty(ranks, *x.shape)
                exchange.all_gather(x, stack)
        return stack

    expected = -torch.stack(tensors)
    assert all(torch.equal(stack, expected) for stack in on_all(exchanges(ranks), gather))


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_rank_that_ends_ends_the_gather_of_the_others(size: int) -> None:
    group = exchanges(3)
    group.pop().close()

    def gather(rank: int, exchange: SocketExchange) -> torch.Tensor:
        with pytest.raises(EOFError, match=rf"^rank {2 - 2 * rank} has ended$"):
            exchange.all_gather(torch.ones(size), torch.empty(3, size))
        exchange.close()
        return torch.empty(0)

    on_all(group, gather)
