"""Create a pair of random models whose draft is right with a chosen probability, in the shapes of well-known models.

    python -m benchmarks.pair --output FOLDER [--acceptance 0.7] [--target qwen3-8b] [--draft qwen3-0.6b]
    python -m benchmarks.throughput --target FOLDER/target --draft FOLDER/draft

The target walks a random path through the whole vocabulary. Half of the hidden features hold the last token's
embedding, which no layer changes; the output head maps them to the token's successors. Most steps of the path have two
successors. The layers alone decide between those, on the other half of the features, so another order of summation
anywhere changes about one token in a hundred in bfloat16. The draft has the same successors, but layers of its own: it
is right about half of these steps, and about all others. No token repeats, so prompt lookup finds nothing. The chat
template ends in a letter that depends on the prompt's length, so answers start with different tokens.
"""

import argparse
import math
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.report import console, parser_of
from benchmarks.shapes import SHAPES, random_model
from specpool.engine.config.devices import pick_device
from specpool.engine.config.sources import UnsupportedModelError
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

MAX_MODEL_LEN = 512
"""Maximum length of the tiny pair."""
MARGIN = 3.0
"""Logits of successors, as a multiple of the largest other logit to expect."""
STARTS = string.ascii_letters + string.digits
TEMPLATE = (
    "{%- set text = messages[-1]['content'] -%}{{ text }}{{ 'STARTS'[text | length % COUNT] }}"
    .replace("STARTS", STARTS).replace("COUNT", str(len(STARTS)))
)  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for both models")
    parser.add_argument("--target", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--draft", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--acceptance", type=float, default=0.7, help="share of tokens that the draft gets right")
    parser.add_argument("--device", default="auto", help="device to make them on")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = _prepare(parser, options)
    target, draft = successors_of_pair(SHAPES[options.target]["vocab_size"], options.acceptance)
    for name, shape, successors in (("target", options.target, target), ("draft", options.draft, draft)):
        with console.status(f"making the {name}"):
            save_model(options.output / name, shape, successors, device, getattr(torch, options.dtype))
        print(options.output / name)


def _prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Check the options, seed torch, create the folders. Return the device."""
    if not 0 <= options.acceptance <= 1:
        parser.error(f"--acceptance: {options.acceptance:g} is not from 0 to 1")
    target, draft = (SHAPES[shape]["vocab_size"] for shape in (options.target, options.draft))
    if target != draft:
        parser.error(f"--draft: the vocabulary has {draft} tokens, but the target has {target}")
    try:
        device = pick_device(options.device)
        torch.manual_seed(options.seed)
        for name in ("target", "draft"):
            (options.output / name).mkdir(parents=True, exist_ok=True)
    except UnsupportedModelError as error:
        parser.error(f"--device: {error}")
    except (RuntimeError, ValueError) as error:
        parser.error(f"--seed: {error}")
    except OSError as error:
        parser.error(f"--output: {error}")
    return device


def successors_of_pair(count: int, acceptance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Successors of the first `count` tokens in the target and in the draft, each [count, 2].

    The draft guesses which of two successors the target takes, so at most half of such steps may be wrong. With an
    acceptance below a half, it also has wrong successors.
    """
    contested = min(1.0, 2 * (1 - acceptance))
    successors = path_through(count, contested)
    return successors, partly_wrong(successors, 1 - acceptance / (1 - contested / 2))


def path_through(count: int, contested: float) -> torch.Tensor:
    """[count, 2]: the successors of each token, on a random path through `count` tokens without end-of-sequence.

    A share of the steps is contested, and leads to one of two tokens, with the same successors. Others have equal ones.
    """
    order = torch.randperm(count)
    order = order[order != EOS_TOKEN_ID]
    ends = (1 + (torch.rand(len(order)) < contested).long()).cumsum(0).clamp(max=len(order)).unique()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    steps = torch.stack([order[starts], order[ends - 1]], 1)
    successors = torch.full((count, 2), EOS_TOKEN_ID)
    successors[order] = steps.roll(-1, 0).repeat_interleave(ends - starts, 0)
    return successors


def partly_wrong(successors: torch.Tensor, share: float) -> torch.Tensor:
    """`successors` with those of other tokens for a random share of the tokens."""
    wrong = torch.randperm(len(successors))[: round(share * len(successors))]
    other = successors.clone()
    other[wrong] = successors[wrong.roll(1)]
    return other


def save_model(folder: Path, shape: str, successors: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
    model = random_model(shape, device, dtype, "eager", tie_word_embeddings=False)
    lead(model, successors.to(device))
    model.save_pretrained(folder)
    save_tokenizer(folder, template=TEMPLATE)


@torch.no_grad()
def lead(model: PreTrainedModel, successors: torch.Tensor) -> None:
    """Make a model choose a successor of the last token; its layers choose which.

    `successors`: of the tokens with the lowest ids. The model may choose any token after others.
    """
    body: Any = model.model
    led = model.config.hidden_size // 2  # features that layers read, but do not change
    for layer in body.layers:
        for weight in (weight for weight in layer.parameters() if weight.dim() > 1):
            weight.normal_(std=weight.shape[1] ** -0.5)
        layer.self_attn.o_proj.weight[:led] = layer.mlp.down_proj.weight[:led] = 0
    embeddings, head = body.embed_tokens.weight.normal_(), model.get_output_embeddings().weight.normal_()
    add_successors(head[:, :led].zero_(), successors, embeddings[:, :led])
    head[:, :led] *= _scale_of_path(body, led)


def add_successors(head: torch.Tensor, successors: torch.Tensor, embeddings: torch.Tensor) -> None:
    """Add the embedding of each token to the rows of its successors. Both have the same features."""
    first, second = successors.T
    contested = first != second
    head.index_add_(0, first, embeddings[: len(first)])
    head.index_add_(0, second[contested], embeddings[: len(first)][contested])


def _scale_of_path(body: Any, led: int) -> float:
    """Scale of the head's leading features, so that the logits of successors have the margin."""
    vocab_size, hidden_size = body.embed_tokens.weight.shape
    tokens = torch.randint(vocab_size, (1, 64), device=body.embed_tokens.weight.device)
    state = body(tokens).last_hidden_state.float()
    kept, added = state[..., :led].square().mean().sqrt(), state[..., led:].square().mean().sqrt()
    others = added * math.sqrt(2 * math.log(vocab_size) * (hidden_size - led))  # the largest of so many normal numbers
    return float(MARGIN * others / (kept * led))


def save_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, template: str = CHAT_TEMPLATE) -> None:
    """Save the byte tokenizer, or another, in the format of transformers."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer or byte_tokenizer(), eos_token="<eos>", chat_template=template
    )
    fast.save_pretrained(folder)


def tiny_config(**changes: Any) -> LlamaConfig:
    """A tiny Llama with two KV heads and three query heads for each."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": EOS_TOKEN_ID, "bos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


@torch.no_grad()
def make_tiny_pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Save a tiny target and a draft that often agrees with it. Return both folders.

    `changes`: arguments of `tiny_config`.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(**changes))
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    for weight in matrices:
        weight.normal_(std=0.12)
    model.save_pretrained(folder / "target")
    for weight in matrices:
        weight.add_(torch.randn_like(weight), alpha=0.005)
    model.save_pretrained(folder / "draft")
    for name in ("target", "draft"):
        save_tokenizer(folder / name)
    return folder / "target", folder / "draft"


if __name__ == "__main__":
    main()
