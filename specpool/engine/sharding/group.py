"""The ranks of a sharded model: how they exchange results during a pass.

Nothing uses all-reduce, whose order of addition depends on the size. Ranks gather results and add them in rank order.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.functional import embedding, pad

from specpool.engine.sharding.shares import Dimension, Sharding

Gemm = Callable[[torch.Tensor], torch.Tensor]
Release = Callable[[], None]


class Exchange(Protocol):
    """A rank's connection to the other ranks."""

    def all_gather(self, x: torch.Tensor, stack: torch.Tensor) -> None:
        """Fill `stack` [ranks, ...] with the contiguous tensors `x` [...] of all ranks, which are not empty."""

    def close(self) -> None:
        """Disconnect from the other ranks, which may have ended already."""


class SingleRank:
    """The only rank of a model that is not sharded; it exchanges nothing."""

    ranks = 1
    in_parts = False
    """Whether ranks compute partial sums (`tensor_parallel_sums` is "parts")."""

    def full_size(self, size: int, dimension: Dimension) -> int:
        """Return the full size of a dimension of which this rank has `size`."""
        return size

    def kv_heads_of_ranks(self, own: int) -> tuple[int, ...]:
        """Return the number of KV heads of each rank. `own`: of this rank."""
        return (own,)

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return flag

    def embed(self, weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up tokens [n] in an embedding sharded by tokens. Returns [n, features]."""
        return embedding(token_ids, weight)

    def gather(self, x: torch.Tensor, dimension: Dimension) -> torch.Tensor:
        """Gather all features [..., total] of a dimension from each rank's share [..., size]."""
        return x

    def project(self, gemm: Gemm, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        """Run a GEMM whose result [..., hidden] is added to the hidden states. `x`: this rank's share of inputs."""
        return gemm(x)

    def project_terms(self, gemm: Gemm, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        """Run `project` without the final sum, for a GEMM that returns terms. Returns [terms, n, hidden], by rank."""
        return gemm(x)

    def unsharded_outputs(self, features: int, dimension: Dimension) -> int:
        """Return the output count of the GEMM whose order of summation this rank follows.

        `features`: this rank's outputs, a multiple of its share of the dimension.
        """
        return features

    def on_leave(self, release: Release) -> None:
        """Register a callback that drops objects holding on to the group, such as CUDA graphs."""


class Group(SingleRank):
    """One rank's view of all ranks. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, sharding: Sharding, device: torch.device, exchange: Exchange) -> None:
        self.rank, self.ranks, self.sharding = rank, sharding.ranks, sharding
        self.in_parts = sharding.sums == "parts"
        self.collectives = 0  # number of collectives; a captured graph counts once, when it is captured
        self.collective_ns = 0  # nanoseconds spent in collectives; on a GPU, only their launches
        self._borders = torch.tensor(sharding.shares["tokens"].firsts[1:], device=device)
        self._exchange = exchange
        self._releases: list[Release] = []

    def full_size(self, size: int, dimension: Dimension) -> int:
        return self.sharding.shares[dimension].total

    def kv_heads_of_ranks(self, own: int) -> tuple[int, ...]:
        return self.sharding.kv_heads.sizes

    def any_rank(self, flag: bool) -> bool:
        return bool(self.all_gather(torch.tensor([flag], device=self._borders.device)).any())

    def local_size(self, dimension: Dimension) -> int:
        return self.sharding.shares[dimension].sizes[self.rank]

    def embed(self, weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.select_rows(embedding(self.local_tokens(token_ids), weight), token_ids)

    def local_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return indexes into this rank's share of the tokens, and arbitrary ones for other ranks' tokens."""
        share = self.sharding.shares["tokens"].of(self.rank)
        return (token_ids - share.start).clamp(0, len(share) - 1)

    def select_rows(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return for each of n tokens the row of the rank that owns it. `rows`: [n, features] of `local_tokens`."""
        owners = torch.bucketize(token_ids, self._borders, right=True)
        selected: torch.Tensor = self.all_gather(rows)[owners, torch.arange(len(token_ids), device=token_ids.device)]
        return selected

    def gather(self, x: torch.Tensor, dimension: Dimension) -> torch.Tensor:
        sizes = self.sharding.shares[dimension].sizes
        if len(set(sizes)) == 1:
            return self.all_gather(x).movedim(0, -2).flatten(-2)
        missing = sizes[0] - x.shape[-1]  # collectives need equal sizes
        stack = self.all_gather(pad(x, (0, missing)) if missing else x)
        return torch.cat([share[..., :size] for share, size in zip(stack, sizes, strict=True)], -1)

    def project(self, gemm: Gemm, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        first, *others = self.project_terms(lambda x: gemm(x)[None], x, inputs)
        total: torch.Tensor = first
        for term in others:
            total = total + term
        return total

    def project_terms(self, gemm: Gemm, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        if self.in_parts:
            return self.all_gather(gemm(x)).flatten(0, 1)
        return self.gather(gemm(self.gather(x, inputs)), "hidden")

    def unsharded_outputs(self, features: int, dimension: Dimension) -> int:
        if self.in_parts:
            return features
        return features * self.sharding.shares[dimension].total // self.local_size(dimension)

    def on_leave(self, release: Release) -> None:
        self._releases.append(release)

    def leave(self) -> None:
        """Leave the group; other ranks may have ended already."""
        for release in self._releases:
            release()  # NCCL waits for captured graphs
        self._exchange.close()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack equally shaped tensors of all ranks: [ranks, ...]."""
        began = time.perf_counter_ns()
        stack = x.new_empty(self.ranks, *x.shape)
        if not x.numel():
            return stack
        self._exchange.all_gather(x.contiguous(), stack)
        self.collectives += 1
        self.collective_ns += time.perf_counter_ns() - began
        return stack


SINGLE_RANK = SingleRank()
