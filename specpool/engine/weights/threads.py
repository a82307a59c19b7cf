"""Parallel work on weights: each thread works on its own weight."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

SLICE_WEIGHTS = 1 << 18  # per slice, so that intermediate results stay in the processor's cache

T = TypeVar("T")
R = TypeVar("R")


def run_in_slices(work: Callable[[slice], None], count: int, weights_each: int) -> None:
    """Run `work` on threads for slices of `count` items with `weights_each` weights each."""
    step = max(1, SLICE_WEIGHTS // weights_each)
    map_on_threads(lambda first: work(slice(first, first + step)), range(0, count, step))


def map_on_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply a function to all items, on as many threads as torch uses. Results keep the order of the items.

    Torch's own threads synchronize in every operation, so one busy core delays them all. A target took four times as
    long to load while a draft worker started on the same two cores.
    """
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    if threads == 1:  # true on the pool's own threads, too
        return [function(item) for item in items]

    def run(item: T) -> R:
        with torch.inference_mode(inference):
            return function(item)

    return list(_pool(threads).map(run, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool that stays alive, because there are many small weights."""
    pool, all_started = ThreadPoolExecutor(threads, "weights", _use_one_thread), Barrier(threads)
    list(pool.map(lambda _: all_started.wait(), range(threads)))
    torch.set_num_threads(threads)  # later threads inherit the number that was set last
    return pool


def _use_one_thread() -> None:
    torch.get_num_threads()  # initializes this thread, or the next operation would reset its number
    torch.set_num_threads(1)
