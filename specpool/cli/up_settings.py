"""Settings of `specpool up`."""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from coordinator.config.settings import MAX_SPECULATIVE_TOKENS, CoordinatorSettings, PolicyName
from coordinator.config.shares import Shares, read_shares
from specpool.drafting.plans import DraftMethod
from specpool.engine.config.device_names import exact_name, may_be_gpu
from specpool.engine.config.options import INT8, MTP, Activations, EngineOptions, check_int8
from specpool.environment.process import usable_cpus
from specpool.rpc.config.settings import ListeningSettings
from specpool.rpc.security.settings import Names
from specpool.worker.settings import WorkerSettings

MAX_WORKERS = 64
"""Maximum workers of a role."""
METRICS_PORTS = {"target": 1, "draft": 2, "standby": 3}
"""Offset of each role's first metrics port from the coordinator's. Other workers' ports follow."""
DRAFT_NAMES = CURRENT, CANARY = ("current", "canary")
"""Names of the drafts in `draft_share`."""
CPU = "cpu"

# Reuse the field definitions of the processes.
ENGINE: dict[str, Any] = EngineOptions.model_fields
COORDINATOR: dict[str, Any] = CoordinatorSettings.model_fields
WORKER: dict[str, Any] = WorkerSettings.model_fields


class UpSettings(ListeningSettings):
    """Serve a pair on this machine, over gRPC and OpenAI's HTTP API. Default: the embedded pair."""

    colocates_on_cpu: ClassVar[bool] = False
    """Whether target workers on a CPU carry the draft by default, as on a GPU (docs/decisions.md)."""

    port: int = COORDINATOR["port"]
    target: str | None = Field(
        None, min_length=1, description="target: hub id, folder or GGUF file; default: the embedded pair's"
    )
    draft: str | None = Field(
        None,
        min_length=1,
        description='draft: hub id, folder or GGUF file; "mtp": the target\'s own MTP layer; "none": prompt lookup '
        "only; default: the embedded pair's if the target is",
    )
    draft_canary: str | None = Field(
        None,
        min_length=1,
        description="second draft to compare with the first one, in its own worker: hub id, folder or GGUF file",
    )
    target_revision: str | None = ENGINE["revision"]
    draft_revision: str | None = ENGINE["revision"]
    targets: int = Field(1, ge=1, le=MAX_WORKERS, description="target workers, which share the sequences")
    drafts: int = Field(1, ge=1, le=MAX_WORKERS, description="draft workers")
    separate: bool | None = Field(
        None,
        description="run the draft in its own worker instead of in each target worker; default: on a CPU, with several "
        "drafts, or if draft_device differs from the target's device",
    )
    target_device: Names = Field(
        ("auto",),
        min_length=1,
        description='device of the target: "cpu", "cuda" or "cuda:1"; "auto" uses a GPU if there is one. Several '
        "targets are assigned to the listed devices round-robin",
    )
    target_devices: Names = Field(
        (), description="shard the target over these devices, such as cuda:0,cuda:1; instead of target_device"
    )
    target_weights: Literal["auto", "float32"] = ENGINE["weights"]
    target_activations: Activations = ENGINE["activations"]
    draft_activations: Activations = ENGINE["activations"]
    target_kv_memory: ByteSize | None = Field(
        None,
        description="size of a target's KV cache and recurrent states per rank; required if the target "
        "shares a GPU with another worker",
    )
    draft_kv_memory: ByteSize | None = Field(
        None,
        description="size of a draft's KV cache and recurrent states; required if a draft worker shares a GPU with "
        "another worker",
    )
    target_memory_limit: ByteSize | None = ENGINE["memory_limit"]
    draft_memory_limit: ByteSize | None = ENGINE["memory_limit"]
    standby: bool = Field(
        False,
        description="also run a standby, which takes over at once if the only target worker is lost. "
        "On a CPU, it takes the memory of the target's weights, and none for a cache before it serves",
    )
    standby_devices: Names = Field(
        (), description="devices of the standby, as many as the target has; default: the target's"
    )
    draft_device: Names = Field(
        ("auto",),
        min_length=1,
        description="device of the draft; with two GPUs: cuda:1. Several drafts are assigned to the listed devices "
        "round-robin; default: the target's GPU, in the target worker; otherwise a GPU if there is one",
    )
    threads: int = Field(
        default_factory=usable_cpus,
        ge=1,
        le=1024,
        description="CPU threads of each worker, shared by targets, drafts or ranks on the CPU; default: all available",
    )
    served_model_name: str | None = COORDINATOR["served_model_name"]
    max_num_seqs: int = COORDINATOR["max_num_seqs"]
    max_batch_size: Annotated[int | None, COORDINATOR["max_batch_size"]] = Field(
        None, description="sequences in one round; default: all"
    )
    policy: PolicyName = COORDINATOR["policy"]
    prefix_caching: bool = COORDINATOR["prefix_caching"]
    kv_layout: Literal["slots", "padded"] = ENGINE["kv_layout"]
    max_model_len: int | None = ENGINE["max_model_len"]
    num_speculative_tokens: Annotated[int | None, Field(le=MAX_SPECULATIVE_TOKENS)] = COORDINATOR[
        "num_speculative_tokens"
    ]
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535 - len(METRICS_PORTS),
        description="Prometheus port of the coordinator; the next ones are the target's, the draft worker's, the "
        "standby's, and those of other targets and drafts; default: none",
    )
    startup_cache: bool = WORKER["startup_cache"]
    draft_method: DraftMethod = COORDINATOR["draft_method"]
    lookup_store_tokens: int = COORDINATOR["lookup_store_tokens"]
    draft_share: Shares | None = Field(
        None,
        description="shares of new samples for the drafts current and canary, such as canary=0.1; 0 withdraws a draft; "
        "default: expected tokens per second decide",
    )
    smg: bool = COORDINATOR["smg"]
    chat_template: Path | None = COORDINATOR["chat_template"]
    reasoning_tags: str = COORDINATOR["reasoning_tags"]
    audit_share: float | None = COORDINATOR["audit_share"]
    record: Path | None = COORDINATOR["record"]
    record_share: float | None = COORDINATOR["record_share"]
    record_max_bytes: ByteSize = COORDINATOR["record_max_bytes"]
    record_max_age_seconds: float = COORDINATOR["record_max_age_seconds"]

    @field_validator("target_devices", "standby_devices")
    @classmethod
    def _check_devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        if len(devices) > 1 and set(devices) != {CPU}:
            for device in devices:
                if re.fullmatch(r"cuda:(0|[1-9]\d*)", device) is None:
                    raise ValueError(f'"{device}" cannot be one of several devices: use "cuda:N" for all, or "cpu"')
                if devices.count(device) > 1:
                    raise ValueError(f"duplicate device {device}")
        return devices

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.target_devices and "target_device" in self.model_fields_set:
            raise ValueError(
                "give target_device, which places each target, or target_devices, which shards a single one, not both"
            )
        if max(self.targets, self.drafts) > 1:
            self._check_counts()
        if self.draft_canary is not None and not self.has_draft:
            raise ValueError("draft_canary needs a draft")
        if self.draft_canary in (MTP, "none"):
            raise ValueError("draft_canary must be a model; only draft can be mtp or none")
        if self.draft_share is not None and self.draft_canary is None:
            raise ValueError("draft_share needs --draft-canary")
        if unknown := read_shares(self.draft_share or "").keys() - {*DRAFT_NAMES}:
            raise ValueError(f"draft_share: the drafts are named {CURRENT} and {CANARY}, not {min(unknown)}")
        if self.record_share is not None and self.record is None:
            raise ValueError("record_share needs --record, the directory for the answers")
        self._check_ports()
        for role, workers in (("target", self.targets), ("draft", self.draft_workers)):
            if (given := len(getattr(self, f"{role}_device"))) > workers:
                sharded = " for one on each, or target_devices to shard a single one" * (role == "target")
                raise ValueError(f"{role}_device lists {given} devices: give --{role}s {given}{sharded}")
            if None not in (getattr(self, f"{role}_kv_memory"), getattr(self, f"{role}_memory_limit")):
                raise ValueError(f"give {role}_kv_memory or {role}_memory_limit, not both")
        if self.standby_devices and not self.standby:
            raise ValueError("standby_devices needs --standby")
        if self.standby_devices and len(self.standby_devices) != max(1, len(self.target_devices)):
            raise ValueError("standby_devices must be as many as the target's devices")
        if self.target_activations == INT8:
            devices = {
                "--target-device": self.target_device,
                "--target-devices": self.target_devices,
                "--standby-devices": self.standby_devices,
            }
            check_int8("target-", weights=self.target_weights, devices=devices)
        if self.draft_activations == INT8:
            device = ("target", self._first_devices) if self.is_colocated else ("draft", self.draft_device)
            check_int8("draft-", devices={f"--{device[0]}-device": device[1]})
        self._check_colocated()
        if self.target == MTP:
            raise ValueError("target: mtp is a draft; name its target, and give --draft mtp")
        for role, model in (("target", self.target), ("draft", self.draft)):
            if getattr(self, f"{role}_revision") is not None and model in (None, "none", MTP):
                raise ValueError(f"{role}_revision needs a {role} from the hub")
        return self

    def _check_ports(self) -> None:
        others = len(METRICS_PORTS) - (not self.standby)
        if max(self.targets, self.draft_workers) > 1:
            others = len(METRICS_PORTS) + self.targets + self.draft_workers - 2
        if self.metrics_port is not None and self.metrics_port + others > 65535:
            raise ValueError(f"metrics_port leaves no ports for the {others} workers")
        ports = self._ports()
        for name, port in ports.items():
            if self.metrics_port is not None and 0 <= port - self.metrics_port <= others:
                raise ValueError(f"--{name} must not be metrics_port or one of the {others} ports after it")
            if port and [*ports.values()].count(port) > 1:
                raise ValueError(f"{', '.join(f'--{name} {port}' for name, port in ports.items())} must differ")

    def _ports(self) -> dict[str, int]:
        """Return the ports by flag, without those for metrics."""
        return {"port": self.port}

    def _check_counts(self) -> None:
        if self.targets > 1 and self.standby:
            raise ValueError("--standby needs a single target; several take over from each other")
        if self.targets > 1 and self.target_devices:
            raise ValueError("target_devices shards a single target; to place several, give target_device")
        if self.drafts > 1 and not self.has_draft:
            raise ValueError("--drafts needs a draft")

    def _check_colocated(self) -> None:
        if self.separate is False and self.has_draft and not self.can_colocate:
            raise ValueError("--no-separate: a target can carry only one draft, on its own device")
        if self.is_colocated and self.draft_memory_limit is not None:
            raise ValueError("draft_memory_limit needs --separate; a target and its draft share target_memory_limit")

    @property
    def has_draft(self) -> bool:
        return self.draft != "none" and (self.draft is not None or self.target is None)

    @property
    def draft_workers(self) -> int:
        """Number of draft workers, unless targets carry the draft. The last one is the canary."""
        return self.drafts + (self.draft_canary is not None)

    @property
    def can_colocate(self) -> bool:
        """Whether each target worker may carry the draft."""
        devices = {exact_name(device) for device in self._first_devices}
        chosen = self.draft_device if "draft_device" in self.model_fields_set else ()
        return self.has_draft and self.draft_workers == 1 and all(devices == {exact_name(device)} for device in chosen)

    @property
    def is_colocated(self) -> bool:
        """Whether each target worker carries the draft."""
        if self.separate is not None:
            return self.has_draft and not self.separate
        return self.can_colocate and (self.colocates_on_cpu or all(map(may_be_gpu, self._first_devices)))

    @property
    def _first_devices(self) -> tuple[str, ...]:
        """The device of each target's first rank."""
        return self.target_devices[:1] or self.target_device

    def metrics_offset(self, role: str, number: int) -> int:
        """Return the offset of a worker's metrics port from the coordinator's. Workers are numbered from 1."""
        if number == 1:
            return METRICS_PORTS[role]
        return len(METRICS_PORTS) + number - 1 + (0 if role == "target" else self.targets - 1)
