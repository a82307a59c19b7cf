"""Token ids of the service in batches, against the service alone with k = 0, and against `generate` of transformers.

    python -m benchmarks.equality [--prompts FILE] [--max-tokens 64] [--concurrency 8] [--k 3]
    python -m benchmarks.equality --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --reference served    (on a GPU)

By default `generate` computes in float32 on the CPU. For a large model, `--reference served` lets it compute on the
device and in the dtype of the service's target, once the service has ended. It sums in another order, so it may decide
near-ties differently: every difference is shown with the margin between the reference's two best logits where it
begins, which in bfloat16 is often 0. The last line printed is JSON.
"""

import argparse
import asyncio
from pathlib import Path

import torch

from benchmarks.peers import Peers
from benchmarks.prompts import load_prompts
from benchmarks.report import finish, progress, show
from specpool.cli.generate import sure_answers
from specpool.cli.up import UpSettings, running
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.engine.config.devices import use_device
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.v1 import common_pb2


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument(
        "--reference",
        choices=("float32", "served"),
        default="float32",
        help="where generate computes: in float32 on the CPU, or as the service's target does",
    )
    options = parser.parse_args()
    target, draft = _models(options)
    lines = load_prompts(options.prompts, options.num_prompts)

    served, alone, info = asyncio.run(_serve(target, draft, lines, options))
    device, dtype = reference_place(options.reference, info)
    generated, differences = _generate(Peers(target, device, dtype), lines, served, options.max_tokens)
    if differences:
        show("against generate", differences)
    result = {
        "prompts": len(lines),
        "max_tokens": options.max_tokens,
        "concurrency": options.concurrency,
        "num_speculative_tokens": options.k,
        "equivalence": common_pb2.Equivalence.Name(info.equivalence),
        "reference": f"transformers, {str(dtype).removeprefix('torch.')} on {device}",
        "exact_match_alone": _share(served, alone),
        "exact_match_generate": _share(served, generated),
        "differences": differences,
    }
    finish("equality", result, None)


def _models(options: argparse.Namespace) -> tuple[str, str]:
    """Target and draft: those of the embedded pair where none is named."""
    if options.target is not None and options.draft is not None:
        return options.target, options.draft
    pair = embedded_pair()
    return options.target or str(pair.target), options.draft or str(pair.draft)


def reference_place(reference: str, info: common_pb2.ModelInfo) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a reference. `info`: of the target that was served."""
    if reference == "float32":
        return torch.device("cpu"), torch.float32
    return use_device(info.device.split()[0]), getattr(torch, info.dtype)


async def _serve(
    target: str, draft: str, lines: list[PromptLine], options: argparse.Namespace
) -> tuple[list[list[int]], list[list[int]], common_pb2.ModelInfo]:
    settings = UpSettings(port=0, target=target, draft=draft, drain_seconds=1, log_level="warning")
    async with running(settings) as address, AsyncClient(address) as client:
        served = await _answers(client, lines, options.concurrency, options.k, options.max_tokens, "served")
        alone = await _answers(client, lines, 1, 0, options.max_tokens, "alone, k = 0")
        info = await client.model_info()
    return served, alone, info.target


async def _answers(
    client: AsyncClient, lines: list[PromptLine], concurrency: int, k: int, max_tokens: int, what: str
) -> list[list[int]]:
    found = []
    responses = sure_answers(client, lines, concurrency, max_tokens=max_tokens, num_speculative_tokens=k)
    for _ in progress(lines, what):
        response = await anext(responses)
        found.append(list(response.token_ids))
    return found


def _generate(
    peers: Peers, lines: list[PromptLine], served: list[list[int]], max_tokens: int
) -> tuple[list[list[int]], list[dict[str, object]]]:
    """Token ids by `generate`, one prompt at a time, and a row for each answer that differs from `served`."""
    generated, differences = [], []
    for line, tokens in progress(list(zip(lines, served, strict=True)), "generate"):
        (answer,) = peers.generate([line.prompt], 1, max_tokens)
        generated.append(answer)
        if answer != tokens:
            position = first_difference(answer, tokens)
            margin = peers.margin(peers.encode(line.prompt) + tokens[:position])
            differences.append({"prompt": line.id, "first_difference_at": position, "margin_of_the_best_two": margin})
    return generated, differences


def first_difference(some: list[int], others: list[int]) -> int:
    """The first position at which two different answers are not the same, which may be the end of one of them."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(some), len(others)))


def _share(some: list[list[int]], others: list[list[int]]) -> float:
    return sum(one == other for one, other in zip(some, others, strict=True)) / len(some)


if __name__ == "__main__":
    main()
