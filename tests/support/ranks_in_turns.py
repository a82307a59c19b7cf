"""The ranks of a sharded model as threads that take turns, because kernels are interpreted one at a time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock
from typing import TypeVar

import torch

from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import load_model
from specpool.engine.passes.fused import FusedModel
from specpool.engine.sharding.group import Group, Release
from specpool.engine.sharding.shares import Sharding, Share, Sums
from specpool.engine.startup.sharded import load_sharding

Result = TypeVar("Result")
TIMEOUT_SECONDS = 120


class Exchange:
    """The shared memory of all ranks."""

    def __init__(self, ranks: int) -> None:
        self.turn, self.barrier = Lock(), Barrier(ranks)
        self.tensors: list[torch.Tensor | None] = [None] * ranks

    def all_gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """Stack the tensors of all ranks."""
        self.tensors[rank] = x
        self.turn.release()
        self.barrier.wait(TIMEOUT_SECONDS)
        stack = torch.stack([tensor for tensor in self.tensors if tensor is not None])
        self.barrier.wait(TIMEOUT_SECONDS)
        self.turn.acquire()
        return stack


class GroupInTurns(Group):
    """A group whose ranks are threads."""

    def __init__(self, rank: int, sharding: Sharding, exchange: Exchange) -> None:
        self.rank, self.ranks, self.sharding = rank, sharding.ranks, sharding
        self.in_parts = sharding.sums == "parts"
        self.exchanged: list[tuple[int, ...]] = []
        """Shapes of the tensors that this rank has sent."""
        self._borders = torch.tensor(sharding.shares["tokens"].firsts[1:])
        self._memory = exchange
        self._releases: list[Release] = []

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.exchanged.append(tuple(x.shape))
        return self._memory.all_gather(self.rank, x)


def run_ranks(folder: Path, ranks: int, sums: Sums, run: Callable[[FusedModel, GroupInTurns], Result]) -> list[Result]:
    """Call `run` on each rank with its shard of a saved model. Returns the results by rank."""
    options = EngineOptions(model=str(folder), device="cpu", tensor_parallel=ranks, tensor_parallel_sums=sums)
    sharding, exchange = load_sharding(options, sums), Exchange(ranks)

    def run_rank(rank: int) -> Result:
        try:
            with exchange.turn, torch.inference_mode():
                group = GroupInTurns(rank, sharding, exchange)
                return run(FusedModel(load_model(options, Share(sharding, rank)).model, group), group)
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(run_rank, rank) for rank in range(ranks)]]
