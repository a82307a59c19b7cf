"""Create a pair of random models whose draft is right with a chosen probability, in the shapes of well-known models.

    python -m benchmarks.pair --output FOLDER [--acceptance 0.7] [--target qwen3-8b] [--draft qwen3-0.6b]
    python -m benchmarks.throughput --target FOLDER/target --draft FOLDER/draft

In the target, each token has a fixed successor, on a path through the whole vocabulary. The last token's embedding
outweighs the layers, and the output head maps each embedding to the successor. The draft has the same successors for
most tokens and wrong ones for the rest. No token repeats, so prompt lookup finds nothing. The chat template ends in a
letter that depends on the prompt's length, so answers start with different tokens.
"""

import argparse
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
SCALE_OF_LAYERS = 0.01
"""Factor for the output of the random layers."""
STARTS = string.ascii_letters + string.digits
TEMPLATE = (
    "{%- set text = messages[-1]['content'] -%}{{ text }}{{ 'STARTS'[text | length % COUNT] }}"
    .replace("STARTS", STARTS).replace("COUNT", str(len(STARTS)))
)  # fmt: skip


def main() -> None:
    """Parse the command line, create both models, and print their folders."""
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
    follows = path_through(SHAPES[options.target]["vocab_size"])
    for name, shape, successors in (
        ("target", options.target, follows),
        ("draft", options.draft, partly_wrong(follows, 1 - options.acceptance)),
    ):
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


def path_through(vocab_size: int) -> torch.Tensor:
    """[vocab_size]: the successor of each token, on a random path through all tokens but end-of-sequence."""
    order = torch.randperm(vocab_size)
    order = order[order != EOS_TOKEN_ID]
    follows = torch.full((vocab_size,), EOS_TOKEN_ID)
    follows[order] = order.roll(-1)
    return follows


def partly_wrong(follows: torch.Tensor, share: float) -> torch.Tensor:
    """`follows` with wrong successors for a random share of the tokens."""
    wrong = torch.randperm(len(follows))[: round(share * len(follows))]
    other = follows.clone()
    other[wrong] = follows[wrong.roll(1)]
    return other


def save_model(folder: Path, shape: str, follows: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Save a model of this shape with these successors, and a byte tokenizer."""
    model = random_model(shape, device, dtype, "eager", tie_word_embeddings=False)
    lead(model, follows.to(device))
    model.save_pretrained(folder)
    save_tokenizer(folder, template=TEMPLATE)


@torch.no_grad()
def lead(model: PreTrainedModel, follows: torch.Tensor) -> None:
    """Make a model choose the successor of the last token."""
    body: Any = model.model
    for layer in body.layers:
        layer.self_attn.o_proj.weight.mul_(SCALE_OF_LAYERS)
        layer.mlp.down_proj.weight.mul_(SCALE_OF_LAYERS)
    embeddings, head = body.embed_tokens.weight, model.get_output_embeddings().weight
    embeddings.normal_()
    head[follows] = embeddings


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
