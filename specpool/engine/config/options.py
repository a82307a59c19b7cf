"""Options of an engine, the same for both workers."""

from typing import Literal, Self

from pydantic import AliasChoices, BaseModel, ByteSize, Field, model_validator

MAX_RANKS = 64

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineOptions(BaseModel, frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True):
    """Settings of an engine; every worker takes them as flags."""

    model: str = Field(description="hub id, folder, or GGUF file of a decoder-only model")
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a model from the hub; a commit pins it"
    )
    device: str = Field(
        "auto",
        description='"cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one; with tensor_parallel, one for each '
        'rank of this node, such as "cuda:0,cuda:1", or "cuda" for the first GPUs',
    )
    dtype: Dtype = Field(
        "auto",
        description="of the weights, and of the KV cache unless the pass is compiled (then float32); "
        '"auto": as stored on a GPU, float32 on a CPU',
    )
    weights: Literal["auto", "float32"] = Field(
        "auto",
        description='"auto": quantized weights of a GGUF file or a trained draft stay as they are in the file if the '
        'pass is compiled and dtype is float32; "float32": they are unpacked',
    )
    max_model_len: int | None = Field(
        None, ge=16, description="positions a sequence can have; default: the model's own limit, at most 4096"
    )
    max_sequences: int = Field(16, ge=1, le=4096, description="slots wanted in the KV cache")
    kv_memory: ByteSize | None = Field(
        None,
        description="KV cache (of each rank), such as 8GiB; default: what max_sequences need, at most 80% of a GPU's "
        "or 40% of a machine's free memory",
    )
    memory_budget: ByteSize | None = Field(
        None,
        description="weights, activations and KV cache together (of each rank), such as 16GiB; instead of kv_memory",
    )
    kv_layout: Literal["slots", "padded"] = Field(
        "slots",
        description='"slots": sequences stay in place; "padded": a left-padded batch, realigned every round',
    )
    fused: bool = Field(
        True,
        validation_alias=AliasChoices("fused", "lean"),
        description="run the Llama family by our own fused pass instead of the library's modules",
    )
    native: bool = Field(
        True, description="compile that pass for this processor, where there is a C compiler (CPU, float32 or bfloat16)"
    )
    cuda_graphs: bool = Field(True, description="capture that pass as CUDA graphs, for one launch instead of hundreds")
    gemm: Literal["auto", "triton", "cublas"] = Field(
        "auto",
        validation_alias=AliasChoices("gemm", "products"),
        description="GEMM backend of that pass on a GPU, where it is batch-invariant; "
        '"auto": the fastest, but always "triton" for a target if the bits of the backends differ',
    )
    max_num_batched_tokens: int | None = Field(
        None,
        validation_alias=AliasChoices("max_num_batched_tokens", "max_forward_tokens"),
        ge=1,
        le=2**20,
        description="tokens in one forward pass; more take several; default: 512 on a CPU, 2048 on a GPU",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of the model, or of each rank; default: torch's choice, or the processors divided "
        "among the ranks of this node",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="number of ranks that share the model: processes, each with a device and a share of the weights",
    )
    tensor_parallel_sums: Literal["auto", "whole", "parts"] = Field(
        "auto",
        description='how ranks sum: "whole": each output on one rank, in the order of one device, so that bits are the '
        'same for any number of ranks; "parts": each rank its terms, then added in the order of the ranks, with half '
        'as many exchanges, but bits depend on the number of ranks; "auto": whole on CPUs, parts on GPUs',
    )
    nnodes: int = Field(1, ge=1, le=MAX_RANKS, description="number of nodes; each has the same number of ranks")
    node_rank: int = Field(0, ge=0, description="number of this node; node 0 serves, the others only compute")
    master_addr: str | None = Field(
        None, pattern=r"^\S+$", description="host name or address of node 0, if there are several nodes"
    )
    master_port: int = Field(29500, ge=1, le=65535, description="port on which node 0 waits for the others")

    @classmethod
    def of(cls, settings: "EngineOptions") -> "EngineOptions":
        """The options among settings that have more of them."""
        return cls(**settings.model_dump(include=set(cls.model_fields)))

    def resolve_max_num_batched_tokens(self, device_type: str) -> int:
        """`max_num_batched_tokens`, or its default on this type of device."""
        return self.max_num_batched_tokens or (512 if device_type == "cpu" else 2048)

    @model_validator(mode="after")
    def _nodes_agree(self) -> Self:
        if self.tensor_parallel % self.nnodes:
            raise ValueError(f"tensor_parallel {self.tensor_parallel} is no multiple of nnodes {self.nnodes}")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank must be below nnodes, which is {self.nnodes}")
        if (self.master_addr is None) != (self.nnodes == 1):
            raise ValueError("master_addr must be given if nnodes is above 1, and only then")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.kv_memory is not None and self.memory_budget is not None:
            raise ValueError("give kv_memory or memory_budget, not both")
        return self
