"""Settings of the coordinator."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, model_validator

from coordinator.config.shares import Shares, read_shares
from coordinator.prompts.chat_formats import AUTO, check_reasoning_tags
from coordinator.prompts.process_link import check_template
from specpool.drafting.answers import MAX_STORE_TOKENS
from specpool.drafting.plans import DraftMethod
from specpool.environment.extras import explain_missing
from specpool.protocol.features import MAX_FEATURE_WINDOW
from specpool.protocol.rounds import MAX_DRAFT_TOKENS
from specpool.rpc.config.settings import (
    UINT32_MAX,
    DraftAddresses,
    Seconds,
    ServerSettings,
    TargetAddress,
    TargetAddresses,
)
from specpool.rpc.observability.otlp import OtlpEndpoint
from specpool.rpc.security.channel import Connector, SecurityOptions, is_followed, split_addresses, split_named
from specpool.rpc.security.settings import ServerSecurity
from specpool.rpc.security.tls import TlsFiles
from specpool.rpc.security.tokens import token_of

MAX_NUM_SEQS = 4096
"""Limit of the flags: no worker has more slots."""
MAX_SPECULATIVE_TOKENS = MAX_DRAFT_TOKENS
"""Default of `max_num_speculative_tokens`."""

MIN_RECORD_BYTES, MAX_RECORD_SECONDS = 2**24, 366 * 86_400

PolicyName = Literal["ragged", "exspec", "eqspec"]
Overlap = Literal["auto", "on", "off"]
"""Whether both workers may run at the same time. "auto": only on separate devices."""


class WorkerSecurity(ServerSecurity, frozen=True):
    """How the coordinator connects to its workers; defaults to the files of its own server."""

    worker_tls: bool | None = Field(None, description="use TLS to the workers; default: if a CA is set")
    worker_tls_ca: Path | None = Field(
        None, description="PEM file with the CA of the workers' certificates; default: tls_ca"
    )
    worker_tls_cert: Path | None = Field(
        None, description="PEM file with the client certificate for the workers; default: tls_cert"
    )
    worker_tls_key: Path | None = Field(None, description="PEM file with its key; default: tls_key")
    worker_tls_name: str | None = Field(
        None, min_length=1, description="name in the workers' certificates; default: the host of their address"
    )
    worker_token: Path | None = Field(None, description="file with the API token for the workers")

    @property
    def worker_security(self) -> SecurityOptions:
        """Options of the connectors to both workers."""
        security = SecurityOptions(token_file=self.worker_token)
        ca = self.worker_tls_ca or self.tls_ca
        if self.worker_tls is False or ca is None:
            return security
        use_own = self.worker_tls_cert is None
        return security | SecurityOptions(
            tls_ca=ca,
            tls_cert=self.tls_cert if use_own else self.worker_tls_cert,
            tls_key=self.tls_key if use_own else self.worker_tls_key,
            tls_name=self.worker_tls_name,
        )

    @model_validator(mode="after")
    def _check_worker_security(self) -> Self:
        if self.worker_tls and self.worker_tls_ca is None and self.tls_ca is None:
            raise ValueError("worker_tls: must be given with worker_tls_ca, the CA of the workers")
        TlsFiles(self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key, prefix="worker_").load()
        token_of(None, self.worker_token, setting="worker_token")
        security = self.worker_security
        for name in ("worker_tls_ca", "worker_tls_cert", "worker_tls_name") if "tls_ca" not in security else ():
            if getattr(self, name) is not None:
                required = "worker_tls_ca" if self.worker_tls is None else "worker_tls, which is off"
                raise ValueError(f"{name}: must be given with {required}")
        Connector("", **security)
        return self


def _check_stubs_installed(smg: bool) -> bool:
    if smg and (problem := explain_missing("smg")) is not None:
        raise ValueError(problem)
    return smg


ServesSmg = Annotated[bool, AfterValidator(_check_stubs_installed)]


def _check_template(path: Path | None) -> Path | None:
    if path is not None:
        check_template(path)
    return path


TemplateFile = Annotated[Path | None, AfterValidator(_check_template)]


ReasoningTags = Annotated[str, AfterValidator(check_reasoning_tags)]


def _check_given(path: object) -> object:
    if path == "":  # Path("") is the current directory
        raise ValueError("must not be empty")
    return path


def _check_folder(path: Path | None) -> Path | None:
    if path is not None and path.exists() and not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    return path


RecordFolder = Annotated[Path | None, BeforeValidator(_check_given), AfterValidator(_check_folder)]


class CoordinatorSettings(ServerSettings, WorkerSecurity):
    """Serves generation: schedules requests, with a draft worker and a target worker."""

    port: int = Field(50050, ge=0, le=65535, description="port to listen on; 0: any free port")
    target_address: TargetAddresses = Field(
        "127.0.0.1:50051",
        description="host:port of the target worker, or a comma-separated list of replicas; dns:///host:port follows "
        "all addresses of a DNS name",
    )
    target_standby_address: TargetAddress | None = Field(
        None,
        description="host:port of a second target worker with the same model, which takes over if the first one is "
        "lost; default: none",
    )
    draft_address: DraftAddresses | None = Field(
        None,
        description="host:port of the draft worker, or several, separated by commas; dns:///host:port: every record "
        "of the name, also new ones; NAME=ADDRESS names the draft at an address; default: prompt lookup only",
    )
    draft_share: Shares | None = Field(
        None,
        description="shares of new samples for named drafts, such as new=0.1, separated by commas; 0 withdraws a "
        "draft, and unlisted drafts split the rest equally; default: expected tokens per second decide",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="model name for clients, metrics, traces and the gateway smg; default: the target's hub id, or the "
        "last part of its path",
    )
    policy: PolicyName = Field(
        "ragged",
        description="batching policy: ragged (any sequences), exspec (equal lengths) or eqspec (fixed batches)",
    )
    max_num_seqs: int = Field(
        16,
        ge=1,
        le=MAX_NUM_SEQS,
        description="maximum sequences running, for each target worker; its slots limit them too",
    )
    max_batch_size: int = Field(16, ge=1, le=MAX_NUM_SEQS, description="maximum sequences in one round")
    min_group_size: int | None = Field(
        None, ge=1, description="exspec: minimum size of an equal-length group; default: half a batch"
    )
    max_wait_rounds: int = Field(
        8, ge=0, le=UINT32_MAX, description="exspec: maximum rounds that a ready sequence waits"
    )
    prefer_group: Literal["largest", "oldest"] = Field(
        "largest", description="exspec: which equal-length group runs first"
    )
    admission: Literal["arrival", "length"] = Field(
        "arrival", description="next request to run: the first in the queue, or the one closest in length to the last"
    )
    prefix_caching: bool = Field(True, description="reuse cached prefixes of earlier requests")
    queue_size: int = Field(
        256, ge=0, le=UINT32_MAX, description="maximum samples that wait; further requests are refused"
    )
    queue_tokens: int = Field(
        4_194_304,
        ge=1,
        le=UINT32_MAX,
        description="maximum tokens of waiting prompts and predictions, unless a single request has more",
    )
    max_requests_per_client: int | None = Field(
        None, ge=1, le=UINT32_MAX, description="maximum samples of one client, queued and running; default: unlimited"
    )
    num_speculative_tokens: int | None = Field(
        None, ge=0, description="default draft tokens per round; unset: chosen adaptively in each round, possibly zero"
    )
    draft_method: DraftMethod = Field(
        DraftMethod.BEST,
        description="default draft method: model (the draft model), ngram (prompt lookup), suffix (prompt lookup, also "
        "in earlier answers), prediction (the request's), or best (the most promising one in each round)",
    )
    lookup_store_tokens: int = Field(
        0,
        ge=0,
        le=MAX_STORE_TOKENS,
        description="maximum tokens of finished answers to keep, at about 60 bytes each, for prompt lookup by later "
        "requests with the same client and nonempty cache_salt; 0: keep none",
    )
    overlap: Overlap = Field(
        "auto", description="draft during verifications, if it pays; auto: only if the workers' devices differ"
    )
    max_num_speculative_tokens: int = Field(
        MAX_SPECULATIVE_TOKENS, ge=0, le=1024, description="maximum num_speculative_tokens of a request"
    )
    default_max_tokens: int = Field(256, ge=1, le=UINT32_MAX, description="max_tokens of requests that set none")
    prefill_tokens: int = Field(
        128,
        ge=1,
        le=UINT32_MAX,
        description="maximum prompt tokens prefilled per round; fewer run while they would delay the tokens of others",
    )
    feature_window: int = Field(
        64,
        ge=1,
        le=MAX_FEATURE_WINDOW,
        description="last prompt tokens whose hidden states go from the target worker to a draft that reads them",
    )
    audit_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of answers to replay by plain decoding, when there is room, and compare; default: 0.001 if "
        "the target's equivalence is bitwise, otherwise 0",
    )
    record: RecordFolder = Field(
        None,
        description="record the token ids of finished answers in this directory, to train a draft (docs/recording.md); "
        "default: record nothing",
    )
    record_share: float | None = Field(None, gt=0, le=1, description="share of finished answers to record; default: 1")
    record_max_bytes: ByteSize = Field(
        ByteSize(2**30),
        ge=MIN_RECORD_BYTES,
        description="maximum size of the recording; the oldest answers are deleted first",
    )
    record_max_age_seconds: float = Field(
        604_800.0,
        ge=60,
        le=MAX_RECORD_SECONDS,
        description="maximum age of a recorded answer; a running coordinator deletes older ones",
    )
    draft_timeout_seconds: Seconds = Field(5.0, gt=0, description="timeout of the draft worker")
    target_timeout_seconds: Seconds = Field(120.0, gt=0, description="timeout of the target worker")
    metrics_compat: Literal["vllm"] | None = Field(None, description="also serve metrics under vLLM's names")
    otlp_metrics_endpoint: OtlpEndpoint | None = Field(
        None,
        description="send request latencies to this OTLP collector over gRPC, as OpenTelemetry GenAI metrics: "
        "http://HOST:4317, or https:// for TLS; default: none",
    )
    trace_prompts: bool = Field(False, description="include prompts and outputs in traces")
    chat_template: TemplateFile = Field(
        None, description="file with a Jinja chat template; default: the target model's own"
    )
    reasoning_tags: ReasoningTags = Field(
        AUTO,
        description="tags around the model's reasoning: BEGIN,END; auto: known tags that are tokens and occur in the "
        "chat template; none: no tags",
    )
    max_request_bytes: ByteSize = Field(ByteSize(2**20), ge=1024, le=2**31 - 1, description="largest request accepted")

    smg: ServesSmg = Field(False, description="also serve vllm.grpc.engine.VllmEngine, for the HTTP gateway smg")

    @property
    def target_addresses(self) -> list[str]:
        """The entries of `target_address`."""
        return split_addresses(self.target_address)

    @property
    def draft_entries(self) -> list[tuple[str, str]]:
        """Name and address of each entry of `draft_address`. The name may be empty."""
        return split_named(self.draft_address or "")

    @property
    def draft_shares(self) -> dict[str, float]:
        """`draft_share` by name."""
        return read_shares(self.draft_share or "")

    @property
    def usable_window(self) -> int:
        """`max_num_seqs`; at most one batch with eqspec."""
        return min(self.max_num_seqs, self.max_batch_size) if self.policy == "eqspec" else self.max_num_seqs

    @property
    def default_group_size(self) -> int:
        """`min_group_size`, or its default."""
        return self.min_group_size or min(self.max_batch_size, max(2, self.max_batch_size // 2))

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.target_standby_address == self.target_address:
            raise ValueError("target_standby_address must not be target_address")
        is_list = len(self.target_addresses) > 1 or is_followed(self.target_address)
        if self.target_standby_address is not None and is_list:
            raise ValueError("target_standby_address needs a single target_address: replicas take over from each other")
        if unknown := self.draft_shares.keys() - {name for name, _ in self.draft_entries}:
            raise ValueError(f"draft_share: draft_address has no draft named {min(unknown)}")
        if self.default_group_size > self.max_batch_size:
            raise ValueError("min_group_size must not exceed max_batch_size")
        if self.metrics_compat is not None and self.metrics_port is None:
            raise ValueError("metrics_compat needs a metrics_port")
        if self.trace_prompts and self.otlp_traces_endpoint is None:
            raise ValueError("trace_prompts needs an otlp_traces_endpoint")
        if self.record_share is not None and self.record is None:
            raise ValueError("record_share needs --record")
        if (self.num_speculative_tokens or 0) > self.max_num_speculative_tokens:
            raise ValueError("num_speculative_tokens must not exceed max_num_speculative_tokens")
        return self
