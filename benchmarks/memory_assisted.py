"""Assisted generation of transformers, for `benchmarks.memory`: reads chats and prints answers, as JSON."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import logging

from benchmarks.memory import Answers, peak_of, reset_peak
from benchmarks.peers import CPU, Peers
from specpool.engine.cache.memory import return_freed_memory
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_parts import OUTPUT_HEAD
from specpool.engine.models.draft_weights import find_named
from specpool.engine.models.tokenizer import load_tokenizer
from specpool.engine.models.weights import read_weights
from specpool.engine.weights.quantized import as_tensor

NEVER = -1e9
"""Logit of a token that the draft cannot propose."""


def main() -> None:
    order = json.load(sys.stdin)
    logging.set_verbosity_error()
    peers = Peers(order["target"])
    tokenizer: Any = load_tokenizer(order["target"])
    draft = assistant(order["draft"], peers.model.config.vocab_size)
    return_freed_memory()
    before, began = reset_peak(os.getpid()), time.perf_counter()
    answers = [converse(peers, tokenizer, draft, questions, order["tokens"]) for questions in order["questions"]]
    seconds = time.perf_counter() - began
    print(json.dumps({"answers": answers, "seconds": seconds, "bytes": peak_of(os.getpid()) - before}))


def assistant(model: str, vocab_size: int) -> Any:
    """The draft with an output head over the whole vocabulary, as transformers needs it."""
    draft: Any
    draft, _ = read_weights(model, load_config(EngineOptions(model=model)), CPU, torch.float32)
    stored = load_file(Path(model) / OUTPUT_HEAD)
    weight, output_ids = find_named(stored, "weight"), stored["output_ids"].long()
    assert weight is not None
    head = nn.Linear(draft.config.hidden_size, vocab_size)
    head.weight.data.zero_()
    head.bias.data.fill_(NEVER)
    head.weight.data[output_ids], head.bias.data[output_ids] = as_tensor(weight).float(), 0.0
    draft.set_output_embeddings(head)
    return draft


@torch.inference_mode()
def converse(peers: Peers, tokenizer: Any, draft: Any, questions: list[str], tokens: int) -> Answers:
    chat: list[dict[str, str]] = []
    answers: Answers = []
    for question in questions:
        chat.append({"role": "user", "content": question})
        ids = torch.tensor([peers.encode(chat)])
        mask = torch.ones_like(ids)
        output = peers.model.generate(
            ids, attention_mask=mask, assistant_model=draft, max_new_tokens=tokens, do_sample=False
        )
        answers.append(output[0, ids.shape[1] :].tolist())
        chat.append({"role": "assistant", "content": tokenizer.decode(answers[-1], skip_special_tokens=True)})
    return answers


if __name__ == "__main__":
    main()
