"""Work on weights, one for each thread, instead of threads that work on one together."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

AT_A_TIME = 1 << 18
"""Weights that a thread works on at a time, at most: what is in between stays in a processor's cache."""

T = TypeVar("T")
R = TypeVar("R")


def in_pieces(work: Callable[[slice], None], count: int, weights: int) -> None:
    """Does the work on `count` things, of so many weights each, in slices of them, on threads."""
    step = max(1, AT_A_TIME // weights)
    on_threads(lambda first: work(slice(first, first + step)), range(0, count, step))


def on_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results for all items, in their order, computed on as many threads as torch uses.

    Torch's own threads wait for each other in every operation, and so for other processes whenever one of them has to
    share its core: where a draft worker was starting on the same two cores, a target took four times as long to load.
    """
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    if threads == 1:  # also on one of these threads
        return [function(item) for item in items]

    def result(item: T) -> R:
        with torch.inference_mode(inference):
            return function(item)

    return list(_pool(threads).map(result, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that live on, since there are many small weights."""
    pool, all_there = ThreadPoolExecutor(threads, "weights", _use_one_thread), Barrier(threads)
    list(pool.map(lambda _: all_there.wait(), range(threads)))
    torch.set_num_threads(threads)  # the last number that was set is also that of threads that begin later
    return pool


def _use_one_thread() -> None:
    torch.get_num_threads()  # gives this thread the number of all, which otherwise would happen in a later operation
    torch.set_num_threads(1)
