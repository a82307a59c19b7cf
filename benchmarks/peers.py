"""Plain decoding with `transformers` as a reference: `generate` in static batches, and `generate_batch`."""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from coordinator.prompts.chat_reader import read_chat
from coordinator.prompts.tokenizer import TargetTokenizer
from specpool.client import Chat
from specpool.client.chats import make_chat
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.tokenizer import load_tokenizer, tokenizer_files
from specpool.engine.models.weights import read_weights
from specpool.protocol.tokenizer import TokenizerFiles

CPU = torch.device("cpu")


class Peers:
    """The target in transformers; by default in float32 on the CPU."""

    def __init__(self, target: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any
        self.model, _ = read_weights(target, load_config(EngineOptions(model=target)), device, dtype)
        files = tokenizer_files(load_tokenizer(target), self.model)
        self.tokenizer = TargetTokenizer(TokenizerFiles(**vars(files)))
        self._eos = set(files.eos_token_ids)
        self._pad: int = self.model.config.pad_token_id or 0

    def encode(self, prompt: str | Chat) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode_text(prompt)
        return self.tokenizer.encode_chat(read_chat(make_chat(prompt)))

    @torch.inference_mode()
    def generate(self, prompts: list[str | Chat], batch: int, max_tokens: int) -> list[list[int]]:
        """Token ids of the answers. Each batch is left-padded and runs to its longest answer."""
        ids = [self.encode(prompt) for prompt in prompts]
        answers: list[list[int]] = []
        for first in range(0, len(ids), batch):
            members = ids[first : first + batch]
            length = max(map(len, members))
            padded = self._tensor([[self._pad] * (length - len(tokens)) + tokens for tokens in members])
            mask = self._tensor([[0] * (length - len(tokens)) + [1] * len(tokens) for tokens in members])
            output = self.model.generate(padded, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
            answers += [self._to_the_end(row) for row in output[:, length:].tolist()]
        return answers

    def generate_batch(self, prompts: list[str | Chat], batch: int, max_tokens: int) -> list[list[int]]:
        """Token ids of the answers, by continuous batching of at most `batch` requests."""
        ids = [self.encode(prompt) for prompt in prompts]
        config = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=sorted(self._eos), pad_token_id=self._pad
        )
        continuous = ContinuousBatchingConfig(max_requests_per_batch=batch, max_batch_tokens=512, num_blocks=64)
        outputs = self.model.generate_batch(ids, config, continuous_batching_config=continuous, progress_bar=False)
        by_prompt = {tuple(output.prompt_ids): list(output.generated_tokens) for output in outputs.values()}
        return [self._to_the_end(by_prompt[tuple(prompt)]) for prompt in ids]

    @torch.inference_mode()
    def margin(self, context: list[int]) -> float:
        """Difference between the two highest logits after a context."""
        top = self.model(self._tensor([context])).logits[0, -1].topk(2).values
        return float(top[0] - top[1])

    def _tensor(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, device=self.model.device)

    def _to_the_end(self, tokens: list[int]) -> list[int]:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tokens[:end]
