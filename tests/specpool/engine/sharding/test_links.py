"""CPU ranks gather tensors over links, in rank order."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch

from specpool.engine.sharding.links import Link, LinkExchange

PATIENCE_SECONDS = 30


def pair(rank: int) -> tuple[Link, Link]:
    """Both ends of a rank's link: rank 0's, and its own."""
    own, other = socket.socketpair()
    return Link(f"rank {rank}", own), Link("rank 0", other)


def exchanges(ranks: int) -> list[LinkExchange]:
    """The exchanges of all ranks."""
    pairs = [pair(rank) for rank in range(1, ranks)]
    others = [LinkExchange(rank, [other]) for rank, (_, other) in enumerate(pairs, 1)]
    return [LinkExchange(0, [own for own, _ in pairs]), *others]


def on_all(group: list[LinkExchange], call: Callable[[int, LinkExchange], torch.Tensor]) -> list[torch.Tensor]:
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

    def gather(rank: int, exchange: LinkExchange) -> torch.Tensor:
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

    def gather(rank: int, exchange: LinkExchange) -> torch.Tensor:
        with pytest.raises(EOFError, match=rf"^rank {2 - 2 * rank} has ended$"):
            exchange.all_gather(torch.ones(size), torch.empty(3, size))
        exchange.close()
        return torch.empty(0)

    on_all(group, gather)


def test_messages_and_tensors_take_turns() -> None:
    own, other = pair(1)
    own.send(b"command")
    own.send_data(memoryview(b"tensor"))
    own.send(b"next")
    data = bytearray(6)
    assert other.receive() == b"command"
    other.receive_data(memoryview(data))
    assert (data, other.receive()) == (b"tensor", b"next")
    own.hang_up()
    other.hang_up()


def test_both_ends_notice_a_hangup() -> None:
    closed, ends = SimpleQueue[str](), pair(1)
    for link in ends:
        link.watch(closed.put)
    ends[1].hang_up()
    assert {closed.get(timeout=PATIENCE_SECONDS) for _ in ends} == {"rank 0", "rank 1"}
    with pytest.raises(EOFError, match="rank 1 has ended"):
        ends[0].receive()
    ends[0].hang_up()
