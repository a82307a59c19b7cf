"""A pair of random models, as fast or slow as well-known ones, whose draft is right as often as wanted.

    python -m benchmarks.pair --output FOLDER [--acceptance 0.7] [--target qwen3-8b] [--draft qwen3-0.6b]
    python -m benchmarks.throughput --target FOLDER/target --draft FOLDER/draft

Whatever came before, the target follows each token by a fixed other one, on a path through the whole vocabulary: the
last token's embedding outweighs what the layers add to it, and the head's rows are the embeddings of the tokens before.
So does the draft, but for a share of the tokens, after which it always takes a wrong one. Nothing is repeated, so that
prompt lookup finds nothing. Answers begin with different tokens, by the length of the prompt: the chat template ends
with a letter that depends on it.
"""

import argparse
import string
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.shapes import SHAPES, random_model
from specpool.engine.config.devices import pick_device
from specpool.engine.config.sources import UnsupportedModelError
from specpool.testing import CHAT_TEMPLATE, EOS_TOKEN_ID, byte_tokenizer

# The output of the random layers is scaled down to this.
SCALE_OF_LAYERS = 0.01
STARTS = string.ascii_letters + string.digits
TEMPLATE = (
    "{%- set text = messages[-1]['content'] -%}{{ text }}{{ 'STARTS'[text | length % COUNT] }}"
    .replace("STARTS", STARTS).replace("COUNT", str(len(STARTS)))
)  # fmt: skip


def main() -> None:
    """Parses the command line, makes both models, prints where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for both")
    parser.add_argument("--target", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--draft", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--acceptance", type=float, default=0.7, help="share of tokens that the draft is right about")
    parser.add_argument("--device", default="auto", help="device to make them on")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 <= options.acceptance <= 1:
        parser.error(f"--acceptance: {options.acceptance:g} is not from 0 to 1")
    vocabulary = [SHAPES[shape]["vocab_size"] for shape in (options.target, options.draft)]
    if vocabulary[0] != vocabulary[1]:
        parser.error(f"--draft: its vocabulary has {vocabulary[1]} tokens, the target's {vocabulary[0]}")
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
    follows = path_through(vocabulary[0])
    for name, shape, its in (
        ("target", options.target, follows),
        ("draft", options.draft, partly_wrong(follows, 1 - options.acceptance)),
    ):
        with Console(stderr=True).status(f"making the {name}"):
            save_model(options.output / name, shape, its, device, getattr(torch, options.dtype))
        print(options.output / name)


def path_through(vocab_size: int) -> torch.Tensor:
    """[vocab_size]: the token that follows each, on a random path through all but the end-of-sequence token."""
    order = torch.randperm(vocab_size)
    order = order[order != EOS_TOKEN_ID]
    follows = torch.full((vocab_size,), EOS_TOKEN_ID)
    follows[order] = order.roll(-1)
    return follows


def partly_wrong(follows: torch.Tensor, share: float) -> torch.Tensor:
    """`follows`, but for a random share of the tokens, each of which gets the follower of another one."""
    wrong = torch.randperm(len(follows))[: round(share * len(follows))]
    other = follows.clone()
    other[wrong] = follows[wrong.roll(1)]
    return other


def save_model(folder: Path, shape: str, follows: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Saves a model of this shape that follows each token so, and a tokenizer of bytes."""
    model = random_model(shape, device, dtype, "eager", tie_word_embeddings=False)
    lead(model, follows.to(device))
    model.save_pretrained(folder)
    save_tokenizer(folder, template=TEMPLATE)


@torch.no_grad()
def lead(model: PreTrainedModel, follows: torch.Tensor) -> None:
    """Makes a model choose the token that follows the last one, whatever came before."""
    body: Any = model.model
    for layer in body.layers:
        layer.self_attn.o_proj.weight.mul_(SCALE_OF_LAYERS)
        layer.mlp.down_proj.weight.mul_(SCALE_OF_LAYERS)
    embeddings, head = body.embed_tokens.weight, model.get_output_embeddings().weight
    embeddings.normal_()
    head[follows] = embeddings


def save_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, template: str = CHAT_TEMPLATE) -> None:
    """Saves the byte tokenizer, or another, in the form that transformers loads."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer or byte_tokenizer(), eos_token="<eos>", chat_template=template
    )
    fast.save_pretrained(folder)


if __name__ == "__main__":
    main()
