"""Settings of `specpool plan`."""

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from specpool.engine.config.options import INT8, MTP, Activations, Dtype, check_int8
from specpool.environment.extras import explain_missing
from specpool.rpc.config.settings import DraftAddress, LogLevel, Seconds, Settings, TargetAddress
from specpool.rpc.security.settings import ClientSecurity

PROGRAM = "specpool plan"
OTHER_TOKENIZER = "a draft worker would translate tokens, which plans do not predict; measure with specpool bench"


class PlanSettings(Settings, ClientSecurity):
    """Measure a pair, predict its speed by batch and draft length, and recommend a configuration.

    Acceptance holds for greedy decoding; sampling accepts fewer draft tokens.
    """

    target: str | None = Field(
        None, min_length=1, description="hub id, folder or GGUF file; default: the embedded pair's"
    )
    draft: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None,
        min_length=1,
        description="hub ids, folders or GGUF files of drafts, or mtp (the target's MTP layer); "
        "default: the embedded pair's",
    )
    target_address: TargetAddress | None = Field(None, description="host:port of a running target worker")
    draft_address: DraftAddress | None = Field(
        None, description="host:port of a running draft worker; default: the draft that the target worker carries"
    )
    acceptance: float | None = Field(
        None, ge=0, le=1, description="with running workers: share of draft tokens accepted, from GetServerInfo"
    )
    prompts: Path | None = Field(None, description="JSONL file, as for generate; default: a small built-in set")
    num_prompts: int = Field(16, ge=1, le=4096, description="number of prompts to answer, in one batch")
    max_tokens: int = Field(64, ge=2, description="maximum tokens of an answer")
    batches: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [1, 2, 4, 8, 16, 32], min_length=1, description="batch sizes to predict: sequences per round"
    )
    max_num_speculative_tokens: int = Field(8, ge=1, le=64, description="maximum draft tokens of a sequence in a round")
    device: str = Field("auto", description="device of the target")
    draft_device: str = Field("auto", description="device of the drafts")
    dtype: Dtype = Field("auto", description="dtype of the target's weights")
    draft_dtype: Dtype = Field("auto", description="dtype of the drafts' weights")
    activations: Activations = Field("auto", description="activations of the target, as for a worker")
    draft_activations: Activations = Field("auto", description="activations of the drafts")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of a model; default: torch's choice")
    max_model_len: int | None = Field(
        None, ge=16, description="maximum positions of a sequence; default: the model's own, as far as memory allows"
    )
    exchange_seconds: Seconds = Field(
        0.001, ge=0, description="round-trip time of a call to a worker, without its computation"
    )
    shared: bool | None = Field(
        None, description="one device for both models, and a target worker that carries the draft; default: on one GPU"
    )
    sequence_positions: int | None = Field(
        None,
        ge=1,
        description="positions of a typical sequence, prompt and answer; default: 2048 for the cache, as measured for "
        "the speed",
    )
    throughput: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="required tokens/s of all cells together; default: one cell"
    )
    targets: int = Field(1, ge=1, le=64, description="target workers now, to say which worker to add next")
    drafts: int = Field(1, ge=1, le=64, description="draft workers now")
    concurrency: int | None = Field(
        None, ge=1, le=65536, description="requests at a time; default: the recommended batch for each target"
    )
    output: Path | None = Field(
        None, description="folder for the result and a plot, or a .yaml file for values of the Helm chart"
    )
    force: bool = Field(False, description="replace an existing file of values")
    log_level: LogLevel = Field("warning", description="minimum level of logged messages")

    @property
    def one_device(self) -> bool | None:
        """`shared`; True for a draft that the target worker carries; False for workers on different hosts."""
        if self.target_address is not None and self.draft_address is None:
            return True
        if self.shared is None and self.target_address is not None and self.draft_address is not None:
            hosts = {address.rpartition(":")[0] for address in (self.target_address, self.draft_address)}
            return None if len(hosts) == 1 else False
        return self.shared

    @property
    def values_file(self) -> Path | None:
        """Output file for values of the Helm chart."""
        return self.output if self.output is not None and self.output.suffix in (".yaml", ".yml") else None

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        """Check the output before measuring for minutes."""
        if self.values_file is not None:
            check_writable(self.values_file, self.force)
        elif self.output is not None and (problem := explain_missing("bench")) is not None:
            raise ValueError(f"output: the plot {problem}")
        elif self.output is not None and self.output.is_dir() and not os.access(self.output, os.W_OK):
            raise ValueError(f"output: {self.output} is not writable")
        return self

    @model_validator(mode="after")
    def _check_activations(self) -> Self:
        if self.activations == INT8:
            check_int8(dtype=self.dtype, devices={"--device": [self.device]})
        if self.draft_activations == INT8:
            check_int8("draft-", dtype=self.draft_dtype, devices={"--draft-device": [self.draft_device]})
        return self

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        running = {name: getattr(self, name) for name in ("target_address", "draft_address", "acceptance")}
        given = [name for name, value in running.items() if value is not None]
        missing = {"target_address", "acceptance"} - set(given)
        if given and missing:
            raise ValueError(f"{min(missing).replace('_', '-')}: must be given with {given[0].replace('_', '-')}")
        if given and (self.target is not None or self.draft is not None):
            raise ValueError("give models or the addresses of running workers, not both")
        if self.target == MTP:
            raise ValueError("target: mtp is a draft")
        if self.target is not None and self.draft is None:
            raise ValueError("draft: required with a target")
        return self


def check_writable(file: Path, force: bool) -> None:
    """Raise ValueError if the file cannot be written, or exists without `force`."""
    if file.is_dir():
        raise ValueError(f"output: {file} is a folder")
    if file.exists() and not force:
        raise ValueError(f"output: {file} exists; --force replaces it")
    if not file.parent.is_dir():
        raise ValueError(f"output: {file.parent} is not a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"output: {file} is not writable")
