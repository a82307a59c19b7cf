"""A vLLM plugin for tests that fixes sampling with drafts on the CPU.

vLLM 0.32 for CPU verifies drafts of sampled requests with uninitialized temperatures (vLLM issue 55005). Other devices
have a kernel for them.
"""

from typing import Any


def patch() -> None:
    """Give each draft token the sampling parameters of its row."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(
        values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: Any = 0, replace_to: Any = 0
    ) -> torch.Tensor:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return torch.where(values == replace_from, replace_to, values).repeat_interleave(counts, output_size=count)

    rejection_sampler.expand_batch_to_tokens = expand
