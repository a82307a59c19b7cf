"""What the ranks of a model exchange in a pass, by collectives of torch.distributed.

Nothing is reduced on the way: an all-reduce adds in an order that depends on its size. Results are gathered, and every
rank adds what is to be added, in the order of the ranks.
"""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed
from torch.nn.functional import embedding

from engine.parallel.shares import Dimension, Sharding
from engine.parallel.store import Store

Product = Callable[[torch.Tensor], torch.Tensor]

# Torch 2.13 has renamed it.
_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
# A rank that has ended is noticed by its connection, long before a collective gives up.
PATIENCE = timedelta(days=365)


class Alone:
    """A model that is not divided: all of this is its own."""

    ranks = 1

    def total(self, size: int, dimension: Dimension) -> int:
        """Size of a dimension of which this rank has `size`."""
        return size

    def embedded(self, weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [n, features] of the embedding, of which each rank has its share of tokens, for tokens [n]."""
        return embedding(token_ids, weight)

    def gathered(self, x: torch.Tensor, dimension: Dimension) -> torch.Tensor:
        """All features [..., total] of a dimension of which each rank has its share [..., size]."""
        return x

    def added(self, product: Product, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        """The result [..., hidden] of a product that is added to the hidden states. `x`: a rank's share of inputs."""
        return product(x)


class Group(Alone):
    """All ranks of a model, as one of them sees them. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, sharding: Sharding, store: Store, device: torch.device) -> None:
        """Waits until all ranks have joined. `store`: where they find each other. OSError: they cannot be reached."""
        self.rank, self.ranks, self.sharding = rank, sharding.ranks, sharding
        self.collectives = 0
        """Collectives so far."""
        self.collective_ns = 0
        """Nanoseconds that they took so far; on a GPU that is only their launch."""
        self._borders = torch.tensor(sharding.shares["tokens"].firsts[1:], device=device)
        on_gpu = device.type == "cuda"
        try:
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=self.ranks,
                timeout=PATIENCE,
                device_id=device if on_gpu else None,
            )
        except RuntimeError as error:
            raise OSError(f"ranks cannot reach each other: {str(error).splitlines()[0]}") from error

    def embedded(self, weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [n, features] of the embedding, of which each rank has its share of tokens, for tokens [n]."""
        return self.chosen(embedding(self.own_tokens(token_ids), weight), token_ids)

    def total(self, size: int, dimension: Dimension) -> int:
        """Size of a dimension of which this rank has `size`."""
        return self.sharding.shares[dimension].total

    def own(self, dimension: Dimension) -> int:
        """Size of this rank's share of a dimension."""
        return self.sharding.shares[dimension].sizes[self.rank]

    def own_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Indexes into this rank's share of the tokens; any index for the tokens of other ranks."""
        own = self.sharding.shares["tokens"].of(self.rank)
        return (token_ids - own.start).clamp(0, len(own) - 1)

    def chosen(self, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """For each of n tokens the row of the rank that has it. `rows`: [n, features] of `own_tokens`."""
        owners = torch.bucketize(token_ids, self._borders, right=True)
        found: torch.Tensor = self.stacked(rows)[owners, torch.arange(len(token_ids), device=token_ids.device)]
        return found

    def gathered(self, x: torch.Tensor, dimension: Dimension) -> torch.Tensor:
        """All features [..., total] of a dimension of which each rank has its share [..., size]."""
        sizes = self.sharding.shares[dimension].sizes
        missing = sizes[0] - x.shape[-1]  # ranks contribute equal numbers
        stack = self.stacked(torch.nn.functional.pad(x, (0, missing)) if missing else x)
        return torch.cat([its[..., :size] for its, size in zip(stack, sizes, strict=True)], -1)

    def added(self, product: Product, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        """The result [..., hidden] of a product that is added to the hidden states. `x`: a rank's share of inputs."""
        if self.sharding.sums == "whole":
            return self.gathered(product(self.gathered(x, inputs)), "hidden")
        terms = self.stacked(product(x))
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def stacked(self, x: torch.Tensor) -> torch.Tensor:
        """Tensors of equal shapes of all ranks, [ranks, ...]."""
        began = time.perf_counter_ns()
        stack = x.new_empty(self.ranks, *x.shape)
        if not x.numel():
            return stack
        _all_gather(stack.view(-1), x.contiguous().view(-1))
        self.collectives += 1
        self.collective_ns += time.perf_counter_ns() - began
        return stack


ALONE = Alone()
