"""Settings of `specpool plan`."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from specpool.engine.config.options import Dtype
from specpool.rpc.config.settings import LogLevel, Seconds, Settings
from specpool.rpc.security.settings import ClientSecurity

PROGRAM = "specpool plan"


class PlanSettings(Settings, ClientSecurity):
    """Measures a pair, predicts its speed by batch and draft length, and recommends what to run it with.

    Acceptance is that of greedy decoding; samples are accepted less often.
    """

    target: str | None = Field(None, description="hub id, folder or GGUF file; default: the embedded pair's")
    draft: list[str] | None = Field(
        None,
        min_length=1,
        description="hub id, folder or GGUF file of one draft or several; default: the embedded pair's",
    )
    target_address: str | None = Field(
        None, min_length=1, description="host:port of a running target worker, instead of measuring a model here"
    )
    draft_address: str | None = Field(None, min_length=1, description="host:port of a running draft worker, likewise")
    acceptance: float | None = Field(
        None,
        ge=0,
        le=1,
        description="with running workers: share of draft tokens that are accepted, as GetServerInfo reports it",
    )
    prompts: Path | None = Field(None, description="JSONL file, as for generate; default: a few of our own")
    num_prompts: int = Field(16, ge=1, le=4096, description="number of prompts that the target answers, in one batch")
    max_tokens: int = Field(64, ge=2, description="most tokens of an answer")
    batches: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [1, 2, 4, 8, 16, 32], min_length=1, description="sequences of a round to predict for"
    )
    longest: int = Field(8, ge=1, le=64, description="most draft tokens of a round")
    device: str = Field("auto", description="device of the target")
    draft_device: str = Field("auto", description="device of the drafts")
    dtype: Dtype = Field("auto", description="weights of the target")
    draft_dtype: Dtype = Field("auto", description="weights of the drafts")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of a model; default: torch's choice")
    max_model_len: int | None = Field(
        None, ge=16, description="positions a sequence can have; default: the model's own limit, at most 4096"
    )
    exchange_seconds: Seconds = Field(0.001, ge=0, description="time of a message to a worker and back")
    shared: bool | None = Field(
        None, description="whether target and draft take turns on one device; default: if their devices are the same"
    )
    sequence_positions: int | None = Field(
        None,
        ge=1,
        description="positions that a sequence takes, prompt and answer; default: a cache for sequences of full "
        "length, and speed as measured",
    )
    throughput: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="tokens/s wanted of all cells together; default: those of one cell"
    )
    output: Path | None = Field(
        None, description="folder for the result and a plot, or a .yaml file for values of the Helm chart"
    )
    force: bool = Field(False, description="replace the file of values if it exists")
    log_level: LogLevel = Field("warning", description="least severe messages logged")

    @property
    def one_device(self) -> bool | None:
        """`shared`; workers on different hosts share no device, whatever its name."""
        if self.shared is None and self.target_address is not None and self.draft_address is not None:
            hosts = {address.rpartition(":")[0] for address in (self.target_address, self.draft_address)}
            return None if len(hosts) == 1 else False
        return self.shared

    @property
    def values_file(self) -> Path | None:
        """Where the values of the Helm chart are written."""
        return self.output if self.output is not None and self.output.suffix in (".yaml", ".yml") else None

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        if self.values_file is not None:
            refuse_unusable(self.values_file, self.force)
        elif self.output is not None and find_spec("matplotlib") is None:
            raise ValueError("output: the plot needs matplotlib: pip install 'specpool[bench]'")
        elif self.output is not None and self.output.is_dir() and not os.access(self.output, os.W_OK):
            raise ValueError(f"output: {self.output} cannot be written")
        return self

    @model_validator(mode="after")
    def _has_a_draft(self) -> Self:
        running = {name: getattr(self, name) for name in ("target_address", "draft_address", "acceptance")}
        given = [name for name, value in running.items() if value is not None]
        if given and len(given) < len(running):
            missing = next(name for name in running if name not in given)
            raise ValueError(f"{missing.replace('_', '-')}: must be given with {given[0].replace('_', '-')}")
        if given and (self.target is not None or self.draft is not None):
            raise ValueError("give models or the addresses of running workers, not both")
        if self.target is not None and self.draft is None:
            raise ValueError("draft: name one for this target")
        return self


def refuse_unusable(file: Path, force: bool) -> None:
    """ValueError if the file of values cannot be written, so that no measurement is made in vain."""
    if file.is_dir():
        raise ValueError(f"output: {file} is a folder")
    if file.exists() and not force:
        raise ValueError(f"output: {file} exists; --force replaces it")
    if not file.parent.is_dir():
        raise ValueError(f"output: {file.parent} is no folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"output: {file} cannot be written")
