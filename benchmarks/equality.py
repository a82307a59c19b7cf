"""Compare token ids of batched speculation with plain decoding, and with `generate` of transformers.

    python -m benchmarks.equality [--prompts FILE] [--max-tokens 64] [--concurrency 8] [--k 3]
    python -m benchmarks.equality --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --reference served    (on a GPU)

Plain decoding runs one request at a time with k = 0. By default, the target has float32 activations, like `generate`.
With `--activations int8` or `auto`, tokens need to equal only those of plain decoding: `generate` cannot round
activations (`python -m benchmarks.quality` measures the difference).

By default, `generate` computes in float32 on the CPU. With `--reference served` it uses the device and dtype of the
target, after the service has ended. It sums in another order, so it may break near-ties differently. The table shows
every difference, with the margin between the two highest logits there, which is often 0 in bfloat16. The last line
printed is JSON.
"""

import argparse
import asyncio
from typing import get_args

import torch

from benchmarks.peers import Peers
from benchmarks.prompts import add_prompts, checked, load_prompts
from benchmarks.report import finish, parser_of, progress, show, whole
from specpool.cli.generate import sure_answers
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.engine.config.devices import use_device
from specpool.engine.config.options import Activations
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.v1 import common_pb2

TokenIds = list[list[int]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    add_prompts(parser)
    parser.add_argument("--num-prompts", type=whole(1, 10_000), default=32)
    parser.add_argument("--max-tokens", type=whole(1, 100_000), default=64)
    parser.add_argument("--concurrency", type=whole(1, 256), default=8)
    parser.add_argument("--k", type=whole(0, 16), default=3)
    parser.add_argument(
        "--reference", choices=("float32", "served"), default="float32", help="device and dtype of `generate`"
    )
    parser.add_argument(
        "--activations", choices=get_args(Activations), default="float32", help="activations of the target"
    )
    options = parser.parse_args()
    if options.target is None or options.draft is None:
        pair = embedded_pair()
        options.target, options.draft = options.target or str(pair.target), options.draft or str(pair.draft)
    lines = checked(parser, lambda: load_prompts(options.prompts, options.num_prompts))
    try:
        served, alone, info = asyncio.run(serve(lines, options))
    except ProcessFailedError as error:
        parser.error(str(error))
    device, dtype = reference_place(options.reference, info)
    generated, differences = generate(Peers(options.target, device, dtype), lines, served, options.max_tokens)
    show("against generate", differences)
    result = {
        "prompts": len(lines),
        "max_tokens": options.max_tokens,
        "concurrency": options.concurrency,
        "num_speculative_tokens": options.k,
        "activations": info.activations,
        "equivalence": common_pb2.Equivalence.Name(info.equivalence),
        "reference": f"transformers, {str(dtype).removeprefix('torch.')} on {device}",
        "exact_match_alone": equal_share(served, alone),
        "exact_match_generate": equal_share(served, generated),
        "differences": differences,
    }
    finish("equality", result, None)


def reference_place(reference: str, info: common_pb2.ModelInfo) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the reference. `info`: description of the served target."""
    if reference == "float32":
        return torch.device("cpu"), torch.float32
    return use_device(info.device.split()[0]), getattr(torch, info.dtype)


async def serve(
    lines: list[PromptLine], options: argparse.Namespace
) -> tuple[TokenIds, TokenIds, common_pb2.ModelInfo]:
    """Token ids in batches, token ids alone with k = 0, and the target's description."""
    settings = UpSettings(
        port=0, target=options.target, draft=options.draft, target_activations=options.activations, drain_seconds=1,
        log_level="warning",
    )  # fmt: skip
    async with running(settings) as address, AsyncClient(address) as client:

        async def answers(concurrency: int, k: int, what: str) -> TokenIds:
            responses = sure_answers(
                client, lines, concurrency, max_tokens=options.max_tokens, num_speculative_tokens=k
            )
            return [list((await anext(responses)).token_ids) for _ in progress(lines, what)]

        served = await answers(options.concurrency, options.k, "served")
        alone = await answers(1, 0, "alone, k = 0")
        return served, alone, (await client.model_info()).target


def generate(
    peers: Peers, lines: list[PromptLine], served: TokenIds, max_tokens: int
) -> tuple[TokenIds, list[dict[str, object]]]:
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
    """The first position at which two answers differ; the end of the shorter one if it begins the other."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(some), len(others)))


def equal_share(some: TokenIds, others: TokenIds) -> float:
    return sum(one == other for one, other in zip(some, others, strict=True)) / len(some)


if __name__ == "__main__":
    main()
