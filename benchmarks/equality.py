"""Token ids of the service in batches, against the service alone with k = 0, and against `generate` of transformers.

    python -m benchmarks.equality [--prompts FILE] [--max-tokens 64] [--concurrency 8] [--k 3]

`generate` sums in another order, so it may decide near-ties differently: every difference is shown with the margin
between the two best logits where it begins. The last line printed is JSON.
"""

import argparse
import asyncio
import json
from pathlib import Path

import grpc
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from coordinator.client import Client
from coordinator.commands.generate import answers
from coordinator.commands.prompts import PromptLine, own_prompts, read_prompts
from coordinator.commands.up import UpSettings, running
from coordinator.tokenizer import TargetTokenizer, TokenizerFiles
from engine.embedded_pair import embedded_pair
from engine.loading import tokenizer_files

console = Console(stderr=True)


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
    options = parser.parse_args()
    pair = embedded_pair()
    target, draft = options.target or str(pair.target), options.draft or str(pair.draft)
    lines = read_prompts(options.prompts.open(encoding="utf-8")) if options.prompts else own_prompts()
    lines = lines[: options.num_prompts]

    served, alone, equivalence = asyncio.run(_serve(target, draft, lines, options))
    generated, margins = _generate(target, lines, served, options.max_tokens)
    table = Table("prompt", "first difference at", "margin of the two best logits there", title="against generate")
    for identity, position, margin in margins:
        table.add_row(str(identity), str(position), f"{margin:.2e}")
    if margins:
        console.print(table)
    result = {
        "prompts": len(lines),
        "max_tokens": options.max_tokens,
        "concurrency": options.concurrency,
        "num_speculative_tokens": options.k,
        "equivalence": equivalence,
        "exact_match_alone": _share(served, alone),
        "exact_match_generate": _share(served, generated),
        "largest_margin_of_a_difference": max((margin for *_, margin in margins), default=None),
    }
    print(json.dumps(result))


async def _serve(
    target: str, draft: str, lines: list[PromptLine], options: argparse.Namespace
) -> tuple[list[list[int]], list[list[int]], str]:
    settings = UpSettings(port=0, target=target, draft=draft, drain_seconds=1, log_level="warning")
    async with running(settings) as address, Client(address) as client:
        served = await _answers(client, lines, options.concurrency, options.k, options.max_tokens, "served")
        alone = await _answers(client, lines, 1, 0, options.max_tokens, "alone, k = 0")
        info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
    return served, alone, common_pb2.Equivalence.Name(info.target.equivalence)


async def _answers(
    client: Client, lines: list[PromptLine], concurrency: int, k: int, max_tokens: int, what: str
) -> list[list[int]]:
    found = []
    responses = answers(client, lines, concurrency, max_tokens=max_tokens, num_speculative_tokens=k)
    for _ in track(lines, what, console=console, transient=True):
        response = await anext(responses)
        if isinstance(response, grpc.aio.AioRpcError):
            raise response
        found.append(list(response.token_ids))
    return found


@torch.inference_mode()
def _generate(
    target: str, lines: list[PromptLine], served: list[list[int]], max_tokens: int
) -> tuple[list[list[int]], list[tuple[object, int, float]]]:
    """Token ids by `generate`, one prompt at a time, and (id, position, margin) where they differ from `served`."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    files = tokenizer_files(AutoTokenizer.from_pretrained(target), model)
    tokenizer = TargetTokenizer(TokenizerFiles(**vars(files)))
    generated, margins = [], []
    for line, tokens in track(list(zip(lines, served, strict=True)), "generate", console=console, transient=True):
        prompt = _encode(tokenizer, line)
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens, do_sample=False,
        )  # fmt: skip
        generated.append(output[0, len(prompt) :].tolist())
        if generated[-1] != tokens:
            pairs = zip(generated[-1], tokens, strict=False)
            position = next(i for i, (one, other) in enumerate(pairs) if one != other)
            margins.append((line.id, position, _margin(model, prompt + tokens[:position])))
    return generated, margins


def _encode(tokenizer: TargetTokenizer, line: PromptLine) -> list[int]:
    if isinstance(line.prompt, str):
        return tokenizer.encode_text(line.prompt)
    return tokenizer.encode_chat([(message["role"], message["content"]) for message in line.prompt])


def _margin(model: PreTrainedModel, context: list[int]) -> float:
    best = model(torch.tensor([context])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def _share(some: list[list[int]], others: list[list[int]]) -> float:
    return sum(one == other for one, other in zip(some, others, strict=True)) / len(some)


if __name__ == "__main__":
    main()
