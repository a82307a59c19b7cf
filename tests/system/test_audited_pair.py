"""Every answer of real models passes its audit."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pair_service import serving_pair

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_speculative_tokens": 0},
    {"temperature": 1.0},  # the server draws a seed
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7, "n": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logit_bias": {5: 4.0}, "min_tokens": 8},
    {"stop": ["a", "e"], "ignore_eos": True},
    {"logprobs": 4},
]


@pytest.mark.slow
async def test_all_answers_of_a_pair_pass(tiny_pair: tuple[Path, Path]) -> None:
    async with serving_pair(*tiny_pair, audit_share=1.0) as service:
        prompts = [list(range(1, length)) for length in (4, 40)]
        requests = [(prompt, options) for prompt in prompts for options in OPTIONS]
        calls = (service.client.generate(prompt, max_tokens=24, **options) for prompt, options in requests)
        answers = await asyncio.gather(*calls)
        samples = sum(1 + len(answer.other_samples) for answer in answers)
        results = service.process.coordinator.auditor.results
        async with asyncio.timeout(60):
            while results.total() < samples:  # noqa: ASYNC110 - the auditor has no event for it
                await asyncio.sleep(0.02)
        assert dict(+results) == {"equal": samples}
