"""Work on weights, one for each thread, instead of threads that work on one together."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


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

    try:
        return list(_pool(threads).map(result, items))
    finally:
        torch.set_num_threads(threads)  # threads that begin later would have only one, too


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that live on, since there are many small weights."""
    return ThreadPoolExecutor(threads, "weights", torch.set_num_threads, (1,))
