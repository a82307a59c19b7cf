"""Exchanges between the ranks of a model in a pass, by collectives of torch.distributed.

Nothing is reduced on the way: an all-reduce adds in an order that depends on its size. Results are gathered, and every
rank adds what is to be added, in the order of the ranks.
"""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed
from torch.nn.functional import embedding

from specpool.engine.sharding.shares import Dimension, Sharding
from specpool.engine.sharding.store import Store

Product = Callable[[torch.Tensor], torch.Tensor]
Release = Callable[[], None]

# Torch 2.13 has renamed it.
_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
# The end of a rank is noticed through its connection, so that no collective has to give up.
PATIENCE = timedelta(days=365)


class Alone:
    """The only rank of a model that is not divided: it has all of everything, and exchanges nothing."""

    ranks = 1
    in_parts = False
    """Whether each rank sums the terms that it has of what is added to the hidden states."""

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

    def terms(self, product: Product, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        """`added` before it is summed, [terms, n, hidden], of a product that gives terms [terms, n, outputs]."""
        return product(x)

    def whole(self, features: int, dimension: Dimension) -> int:
        """Outputs of a product whose terms are summed in the order of the whole product, of which this rank has
        `features`: its share of a dimension, or as many times that."""
        return features

    def before_leaving(self, release: Release) -> None:
        """`release`: drops what holds the means of exchange."""


class Group(Alone):
    """All ranks of a model, as one of them sees them. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, sharding: Sharding, store: Store, device: torch.device) -> None:
        """Waits until all ranks have joined. `store`: where they find each other. OSError: they cannot be reached."""
        self.rank, self.ranks, self.sharding = rank, sharding.ranks, sharding
        self.in_parts = sharding.sums == "parts"
        self.collectives = 0
        """Collectives so far; those of recorded passes count when they are recorded."""
        self.collective_ns = 0
        """Nanoseconds that they took so far; on a GPU that is only their launch."""
        self._borders = torch.tensor(sharding.shares["tokens"].firsts[1:], device=device)
        self._on_gpu = device.type == "cuda"
        self._releases: list[Release] = []
        try:
            distributed.init_process_group(
                "nccl" if self._on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=self.ranks,
                timeout=PATIENCE,
                # Connects at once, since nothing can connect while a pass is recorded.
                device_id=device if self._on_gpu else None,
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
        if len(set(sizes)) == 1:
            return self.stacked(x).movedim(0, -2).flatten(-2)
        missing = sizes[0] - x.shape[-1]  # ranks contribute equal numbers
        stack = self.stacked(torch.nn.functional.pad(x, (0, missing)) if missing else x)
        return torch.cat([its[..., :size] for its, size in zip(stack, sizes, strict=True)], -1)

    def added(self, product: Product, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        """The result [..., hidden] of a product that is added to the hidden states. `x`: a rank's share of inputs."""
        terms = self.terms(lambda its: product(its)[None], x, inputs)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def terms(self, product: Product, x: torch.Tensor, inputs: Dimension) -> torch.Tensor:
        """`added` before it is summed, [terms, n, hidden], of a product that gives terms [terms, n, outputs].

        Where sums are in parts, the terms of all ranks are in the order of the ranks.
        """
        if self.in_parts:
            return self.stacked(product(x)).flatten(0, 1)
        return self.gathered(product(self.gathered(x, inputs)), "hidden")

    def whole(self, features: int, dimension: Dimension) -> int:
        """Outputs of a product whose terms are summed in the order of the whole product, of which this rank has
        `features`: its share of a dimension, or as many times that. Those of the rank if sums are in parts."""
        return features if self.in_parts else features * self.sharding.shares[dimension].total // self.own(dimension)

    def before_leaving(self, release: Release) -> None:
        """`release`: drops what holds the means of exchange, such as recorded passes."""
        self._releases.append(release)

    def leave(self) -> None:
        """Leaves the other ranks, which may have ended."""
        for release in self._releases:
            release()  # NCCL waits until no recorded pass needs it
        everybody = distributed.group.WORLD
        if self._on_gpu and everybody is not None:
            everybody.abort()  # to end without it would wait for the others
        distributed.destroy_process_group()

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
