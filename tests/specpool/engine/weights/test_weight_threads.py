"""Parallel work on weights gives the same results and leaves torch's thread settings alone."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from specpool.engine.weights.quantized import map_on_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_keep_their_order_and_use_all_threads() -> None:
    together = threading.Barrier(3, timeout=60)

    def square(number: int) -> tuple[int, int]:
        if number < 3:
            together.wait()  # passes only if three threads are running
        return number**2, torch.get_num_threads()

    assert map_on_threads(square, range(20)) == [(number**2, 1) for number in range(20)]


def test_callers_and_new_threads_keep_their_thread_count() -> None:
    def fail(_: int) -> None:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        map_on_threads(fail, range(4))
    counts = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert counts == [3, 3]


@pytest.mark.parametrize("inference", [True, False])
def test_inference_mode_is_inherited(inference: bool) -> None:
    with torch.inference_mode(inference):
        tensors = map_on_threads(torch.zeros, range(1, 5))
    assert [tensor.is_inference() for tensor in tensors] == [inference] * 4


def test_one_thread_works_in_the_caller() -> None:
    torch.set_num_threads(1)
    assert map_on_threads(lambda _: threading.current_thread(), range(3)) == [threading.current_thread()] * 3
    assert map_on_threads(abs, []) == []


def test_new_pool_threads_use_one_torch_thread_each_and_can_nest() -> None:
    """Torch assigns the full thread count in a thread's first operation, however late that is."""
    torch.set_num_threads(7)  # a count that no other test uses, so the pool is new
    map_on_threads(lambda _: time.sleep(0.001), range(20))
    assert set(map_on_threads(lambda _: torch.get_num_threads(), range(20))) == {1}
    assert map_on_threads(lambda size: map_on_threads(abs, range(size)), range(20)) == [[*range(n)] for n in range(20)]
