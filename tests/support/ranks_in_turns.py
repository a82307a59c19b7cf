"""Ranks of a divided model as threads of one process that take turns, so that kernels are interpreted one at a time."""

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
SECONDS = 120  # a rank that waits longer is alone


class Table:
    """Where ranks put what they exchange."""

    def __init__(self, ranks: int) -> None:
        self.turn, self.barrier = Lock(), Barrier(ranks)
        self.given: list[torch.Tensor | None] = [None] * ranks

    def exchanged(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """What all ranks put here."""
        self.given[rank] = x
        self.turn.release()
        self.barrier.wait(SECONDS)
        stack = torch.stack([its for its in self.given if its is not None])
        self.barrier.wait(SECONDS)
        self.turn.acquire()
        return stack


class GroupInTurns(Group):
    """A group whose ranks are threads."""

    def __init__(self, rank: int, sharding: Sharding, table: Table) -> None:
        self.rank, self.ranks, self.sharding = rank, sharding.ranks, sharding
        self.in_parts = sharding.sums == "parts"
        self.exchanged: list[tuple[int, ...]] = []
        """Shapes of what this rank has given."""
        self._borders = torch.tensor(sharding.shares["tokens"].firsts[1:])
        self._table = table
        self._releases: list[Release] = []

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.exchanged.append(tuple(x.shape))
        return self._table.exchanged(self.rank, x)


def run_ranks(folder: Path, ranks: int, sums: Sums, run: Callable[[FusedModel, GroupInTurns], Result]) -> list[Result]:
    """What `run` returns on each rank, given its share of a saved model."""
    options = EngineOptions(model=str(folder), device="cpu", tensor_parallel=ranks, tensor_parallel_sums=sums)
    sharding, table = load_sharding(options, sums), Table(ranks)

    def run_rank(rank: int) -> Result:
        try:
            with table.turn, torch.inference_mode():
                group = GroupInTurns(rank, sharding, table)
                return run(FusedModel(load_model(options, Share(sharding, rank)).model, group), group)
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(run_rank, rank) for rank in range(ranks)]]
