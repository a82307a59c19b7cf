"""Settings of the coordinator."""

from importlib.util import find_spec
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AliasChoices, ByteSize, Field, model_validator

from coordinator.config.worker_security import WorkerSecurity
from coordinator.scheduling.sequence import DraftMethod
from specpool.protocol.rounds import MAX_DRAFT_TOKENS
from specpool.rpc.config.settings import UINT32_MAX, Seconds, ServerSettings

MAX_NUM_SEQS = 4096
"""Largest window: no worker has more slots."""
MAX_SPECULATIVE_TOKENS = MAX_DRAFT_TOKENS
"""Most draft tokens that a request may ask for, unless the settings say otherwise."""

PolicyName = Literal["ragged", "exspec", "eqspec"]
Overlap = Literal["auto", "on", "off"]
"""Whether both workers may be busy at a time: "auto" where they have devices of their own."""


def _check_stubs_installed(smg: bool) -> bool:
    if smg and find_spec("smg_grpc_proto") is None:
        raise ValueError("needs smg-grpc-proto: pip install 'specpool[smg]'")
    return smg


ServesSmg = Annotated[bool, AfterValidator(_check_stubs_installed)]


class CoordinatorSettings(ServerSettings, WorkerSecurity):
    """Serves generation: keeps the pool, and runs its rounds with a draft and a target worker."""

    port: int = Field(50050, ge=0, le=65535, description="port to listen on; 0 lets the system choose")
    target_address: str = Field("127.0.0.1:50051", min_length=1, description="host:port of the target worker")
    draft_address: str | None = Field(
        None, min_length=1, description="host:port of the draft worker; without one, only prompt lookup drafts"
    )
    policy: PolicyName = Field(
        "ragged",
        description="sequences batched together: any, those of equal length, or a batch fixed at admission",
    )
    max_num_seqs: int = Field(
        16,
        ge=1,
        le=MAX_NUM_SEQS,
        validation_alias=AliasChoices("max_num_seqs", "window_size"),
        description="sequences generated at a time, as far as the target has slots",
    )
    max_batch_size: int = Field(16, ge=1, le=MAX_NUM_SEQS, description="sequences in one round")
    min_group_size: int | None = Field(
        None, ge=1, description="exspec: fewer sequences of equal length get no round alone; default: half a batch"
    )
    max_wait_rounds: int = Field(
        8, ge=0, le=UINT32_MAX, description="exspec: rounds after which a waiting sequence is in the next one"
    )
    prefer_group: Literal["largest", "oldest"] = Field(
        "largest", description="exspec: which group of equal length comes first"
    )
    admission: Literal["arrival", "length"] = Field(
        "arrival",
        description="next to enter the window: the first in the queue, or the one about as long as the last to enter",
    )
    prefix_caching: bool = Field(
        True,
        validation_alias=AliasChoices("prefix_caching", "prefix_reuse"),
        description="copy what is cached of earlier requests that begin the same",
    )
    queue_size: int = Field(
        256, ge=0, le=UINT32_MAX, description="samples that may wait; requests beyond them are refused"
    )
    queue_tokens: int = Field(
        4_194_304, ge=1, le=UINT32_MAX, description="prompt tokens that may wait in total, unless one request has more"
    )
    max_requests_per_client: int | None = Field(
        None,
        ge=1,
        le=UINT32_MAX,
        description="samples of one client that may wait or be generated; default: as many as queue and window hold",
    )
    stream_stall_seconds: Seconds = Field(
        60.0, gt=0, description="time after which a stream that its client does not read is ended"
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        description="draft tokens per round unless a request says otherwise; default: as many as save time, "
        "possibly zero",
    )
    draft_method: DraftMethod = Field(
        DraftMethod.BEST,
        description="draft method unless a request says otherwise: the draft worker's model, ngram (prompt lookup: "
        "what followed the last tokens when they came before), or best: in each round the one that promises more",
    )
    overlap: Overlap = Field(
        "auto",
        description="draft for one group while another is verified, where it pays; auto: if the workers have devices "
        "of their own",
    )
    max_num_speculative_tokens: int = Field(
        MAX_SPECULATIVE_TOKENS, ge=0, le=1024, description="the most that a request may ask for"
    )
    default_max_tokens: int = Field(256, ge=1, le=UINT32_MAX, description="max_tokens of requests that set none")
    prefill_tokens: int = Field(
        128,
        ge=1,
        le=UINT32_MAX,
        description="prompt tokens prefilled per round alongside decoding sequences; fewer stall them less",
    )
    draft_timeout_seconds: Seconds = Field(5.0, gt=0, description="a slower draft worker is left out for a while")
    target_timeout_seconds: Seconds = Field(120.0, gt=0, description="a slower target worker counts as unreachable")
    metrics_compat: Literal["vllm"] | None = Field(
        None, description="serve metrics under vLLM's names too, for tools that know no others"
    )
    trace_prompts: bool = Field(False, description="traces include prompts and outputs")
    max_request_bytes: ByteSize = Field(ByteSize(2**20), ge=1024, le=2**31 - 1, description="largest request accepted")

    smg: ServesSmg = Field(
        False,
        description="serve vllm.grpc.engine.VllmEngine too, so that the gateway smg can speak HTTP for this server",
    )

    @property
    def usable_window(self) -> int:
        """`max_num_seqs`, but no more than a batch where the window is one batch (eqspec)."""
        return min(self.max_num_seqs, self.max_batch_size) if self.policy == "eqspec" else self.max_num_seqs

    @property
    def least_group_size(self) -> int:
        """`min_group_size`, or its default."""
        return self.min_group_size or min(self.max_batch_size, max(2, self.max_batch_size // 2))

    @model_validator(mode="after")
    def _groups_within_batch(self) -> Self:
        if self.least_group_size > self.max_batch_size:
            raise ValueError("min_group_size must not exceed max_batch_size")
        return self

    @model_validator(mode="after")
    def _compatible_metrics_are_served(self) -> Self:
        if self.metrics_compat is not None and self.metrics_port is None:
            raise ValueError("metrics_compat needs a metrics_port")
        return self

    @model_validator(mode="after")
    def _traces_with_prompts_are_sent(self) -> Self:
        if self.trace_prompts and self.otlp_traces_endpoint is None:
            raise ValueError("trace_prompts needs an otlp_traces_endpoint")
        return self

    @model_validator(mode="after")
    def _speculation_within_limit(self) -> Self:
        if (self.num_speculative_tokens or 0) > self.max_num_speculative_tokens:
            raise ValueError("num_speculative_tokens must not exceed max_num_speculative_tokens")
        return self
