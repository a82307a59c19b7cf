"""Work on weights is spread over threads without a trace: same results, same settings afterwards."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from specpool.engine.weights.threads import on_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_their_items_from_as_many_threads_as_torch_has() -> None:
    together = threading.Barrier(3, timeout=60)

    def square(number: int) -> tuple[int, int]:
        if number < 3:
            together.wait()  # ends only if three threads are at work
        return number**2, torch.get_num_threads()

    assert on_threads(square, range(20)) == [(number**2, 1) for number in range(20)]


def test_later_operations_have_their_threads_again_here_and_in_new_threads() -> None:
    def fails(_: int) -> None:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        on_threads(fails, range(4))
    found = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [3, 3]


@pytest.mark.parametrize("inference", [True, False])
def test_inference_mode_is_that_of_the_caller(inference: bool) -> None:
    with torch.inference_mode(inference):
        made = on_threads(torch.zeros, range(1, 5))
    assert [tensor.is_inference() for tensor in made] == [inference] * 4


def test_a_single_thread_needs_no_other_one() -> None:
    def where(_: int) -> threading.Thread:
        return threading.current_thread()

    torch.set_num_threads(1)
    assert on_threads(where, range(3)) == [threading.current_thread()] * 3
    assert on_threads(where, []) == []


def test_threads_that_began_without_an_operation_keep_one_torch_thread_each() -> None:
    """Torch gives a thread the number of all in its first operation, however late that is."""
    torch.set_num_threads(7)  # as in no other test, so that the threads are new ones
    on_threads(lambda _: time.sleep(0.001), range(20))
    assert set(on_threads(lambda _: torch.get_num_threads(), range(20))) == {1}
    assert on_threads(lambda size: on_threads(abs, range(size)), range(20)) == [[*range(size)] for size in range(20)]


def test_work_that_is_spread_may_spread_work() -> None:
    assert on_threads(lambda size: on_threads(abs, range(size)), range(40)) == [[*range(size)] for size in range(40)]
