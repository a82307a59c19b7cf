"""Numbers for which rounding shows how they were added up."""

import torch


class ProbeInputs:
    """Random tensors of a sample's device and dtype, the same in every process.

    A sum whose terms cancel leaves rounding alone, and a different order of summation changes it in nearly every
    element. Of an ordinary sum in half precision it changes one element in thousands.
    """

    def __init__(self, sample: torch.Tensor) -> None:
        self._sample = sample
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        """Numbers of about one size."""
        return torch.randn(*shape, generator=self._generator).to(self._sample)

    def cancelling(self, count: int, *shape: int) -> torch.Tensor:
        """[count, *shape]: numbers of many sizes; over the first axis they sum to zero, in exact arithmetic."""
        size = torch.exp2(torch.randint(-7, 8, (count // 2, *shape), generator=self._generator)).to(self._sample)
        half = self.normal(count // 2, *shape) * size
        return torch.cat([half, -half, torch.zeros(count % 2, *shape).to(half)])

    def order(self, count: int) -> torch.Tensor:
        """A random order of `count` things."""
        return torch.randperm(count, generator=self._generator).to(self._sample.device)
