"""Engine options, shared by both workers."""

from collections.abc import Iterable, Mapping
from typing import Literal, Self

from pydantic import BaseModel, ByteSize, Field, model_validator

from specpool.engine.config.sources import UnsupportedModelError

Activations = Literal["auto", "float32", "int8"]

FLOAT32: Literal["float32"] = "float32"
INT8: Literal["int8"] = "int8"


def int8_refusal(needed: str, remedy: str = "", role: str = "") -> str:
    """The error message if a requirement of int8 activations is not met.

    `remedy`: what helps besides other activations. `role`: begins the names of the settings, such as "target-".
    """
    return (
        f"{role}activations: int8 needs {needed}; {remedy and f'{remedy}, or '}set {role}activations to auto or float32"
    )


class Int8RefusedError(UnsupportedModelError):
    """The model cannot have the int8 activations that are required. `needed`, `remedy`: as in `int8_refusal`."""

    def __init__(self, needed: str, remedy: str = "") -> None:
        super().__init__(needed, remedy)
        self.needed, self.remedy = needed, remedy

    def __str__(self) -> str:
        return int8_refusal(self.needed, self.remedy)


def check_int8(
    role: str = "",
    *,
    shares_flags: bool = False,
    devices: Mapping[str, Iterable[str]],
    native: bool = True,
    fused: bool = True,
    weights: str = "auto",
    dtype: str = "auto",
) -> None:
    """Raise ValueError if other options rule out int8 activations.

    `role`: as in `int8_refusal`. `shares_flags`: only the flag of the activations has the role as a prefix. `devices`:
    by flag, such as "--standby-devices".
    """
    prefix = "" if shares_flags else role
    needed = {
        f"--{prefix}native": native,
        f"--{prefix}fused": fused,
        f"--{prefix}weights auto": weights == "auto",
        f"--{prefix}dtype float32": dtype in ("auto", "float32"),
        **{f"{flag} cpu": not any(name.startswith("cuda") for name in names) for flag, names in devices.items()},
    }
    missing = next((option for option, is_met in needed.items() if not is_met), None)
    if missing is not None:
        raise ValueError(int8_refusal(missing, role=role))


MAX_RANKS = 64
MIN_MODEL_LEN = 16
MIN_GRAMMAR_MEMORY, MAX_GRAMMAR_MEMORY = 32 * 2**20, 256 * 2**20

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

MTP = "mtp"
"""Model that stands for the multi-token prediction (MTP) layer in the checkpoint of the target."""
MTP_NEEDS_FUSED = "fused: mtp needs the fused pass"


class EngineOptions(BaseModel, frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True):
    """Engine settings, which both workers take as flags."""

    model: str = Field(
        min_length=1,
        description='hub id, folder, or GGUF file of a decoder-only model; for a draft, also "mtp": the MTP layer of '
        "target_model",
    )
    revision: str | None = Field(
        None, min_length=1, description="branch, tag or commit of a hub model; a commit pins the version"
    )
    target_model: str | None = Field(
        None,
        min_length=1,
        description="for EAGLE heads and mtp: folder, GGUF file (not for mtp) or hub id of the target that provides "
        "the embeddings, the tokenizer and, if the draft has none, the output head; with mtp, revision selects its "
        "version; ignored for other models",
    )
    device: str = Field(
        "auto",
        description='"cpu", "cuda" or "cuda:1"; "auto" uses a GPU if there is one. With tensor_parallel: one device '
        'per rank of this node, such as "cuda:0,cuda:1", or "cuda" for the first GPUs',
    )
    dtype: Dtype = Field(
        "auto",
        description="data type of the weights and the KV cache (a compiled pass always caches float32); "
        '"auto": as stored on a GPU, float32 on a CPU',
    )
    weights: Literal["auto", "float32"] = Field(
        "auto",
        description='"auto": keep weights quantized if the pass is compiled and supports their format, and dtype is '
        'float32; "float32": always dequantize them',
    )
    activations: Activations = Field(
        "auto",
        description='format of activations in GEMMs with quantized weights. "int8": rounded to 8 bits as in llama.cpp, '
        'with a scale per 32 inputs; needs a compiled pass. "float32": not rounded, with the bits of dequantized '
        'weights. "auto": int8 if the pass is compiled and weights stay quantized, otherwise float32',
    )
    max_model_len: int | None = Field(
        None,
        ge=MIN_MODEL_LEN,
        description="maximum positions of a sequence, prompt and answer; default: the model's own, as far as the KV "
        "cache can hold them",
    )
    max_sequences: int = Field(16, ge=1, le=4096, description="maximum number of sequences in the KV cache")
    kv_memory: ByteSize | None = Field(
        None,
        description="size of the KV cache and recurrent states per rank, such as 8GiB; default: enough for "
        "max_sequences of max_model_len, or if that is not set, of 2048 positions (on a GPU 4096) and one of full "
        "length; at most 80% of a GPU's or 40% of the machine's free memory",
    )
    memory_budget: ByteSize | None = Field(
        None,
        description="total size of weights, activations, KV cache and recurrent states per rank, such as 16GiB; "
        "replaces kv_memory",
    )
    memory_limit: ByteSize | None = Field(
        None,
        description="total memory per rank, such as 2GiB: on a CPU, the resident memory of the process; on a GPU, what "
        "it allocates there. The KV cache and recurrent states get the rest; replaces kv_memory",
    )
    grammar_memory: ByteSize | None = Field(
        None,
        description="host memory for compiled grammars, at least 32MiB; 0 turns off constraints; default: 256MiB, or "
        "on a CPU with memory_limit, 1/32 of that limit (32MiB to 256MiB), which includes it",
    )
    kv_layout: Literal["slots", "padded"] = Field(
        "slots", description='"slots": sequences stay in place; "padded": a left-padded batch, realigned every round'
    )
    fused: bool = Field(
        True,
        description="run fast families (docs/models.md) with our fused pass instead of the transformers modules; "
        "hybrid models need it",
    )
    native: bool = Field(
        True,
        description="on a CPU, compile the fused pass for this processor (float32 or bfloat16, needs a C compiler)",
    )
    cuda_graphs: bool = Field(
        True, description="on a GPU, capture the fused pass as CUDA graphs to cut launch overhead"
    )
    gemm: Literal["auto", "triton", "cublas"] = Field(
        "auto",
        description='GEMM backend of the fused pass on a GPU. "auto": the fastest batch-invariant one, but always '
        '"triton" for a target if the bits of the backends differ',
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="maximum new tokens of one forward pass; longer inputs take several passes; default: 512 on a CPU, "
        "2048 on a GPU",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of the model, per rank; default: torch's choice, shared among the ranks of this node",
    )
    tensor_parallel: int = Field(
        1, ge=1, le=MAX_RANKS, description="number of ranks: processes, each with its own device and shard of the model"
    )
    tensor_parallel_sums: Literal["auto", "whole", "parts"] = Field(
        "auto",
        description='how ranks add up GEMM terms. "whole": one rank computes each output, with the same bits for any '
        'number of ranks. "parts": ranks compute partial sums and add them in rank order, with half the exchanges, but '
        'bits depend on the number of ranks. "auto": whole on CPUs, parts on GPUs',
    )
    nnodes: int = Field(1, ge=1, le=MAX_RANKS, description="number of nodes; each runs the same number of ranks")
    node_rank: int = Field(0, ge=0, description="number of this node; node 0 serves, the others only compute")
    master_addr: str | None = Field(
        None, pattern=r"^\S+$", description="host name or address of node 0, if there are several nodes"
    )
    master_port: int = Field(29500, ge=1, le=65535, description="port on which node 0 waits for the other nodes")

    @classmethod
    def of(cls, settings: "EngineOptions") -> Self:
        return cls(**settings.model_dump(include=set(cls.model_fields)))

    @property
    def mtp_target(self) -> "EngineOptions | None":
        """The options of the target whose MTP layer is the model; None for other models."""
        if self.model != MTP or self.target_model is None:
            return None
        return EngineOptions(model=self.target_model, revision=self.revision, max_model_len=self.max_model_len)

    @property
    def memory_limits(self) -> dict[str, int]:
        """The limits of memory that are set, in bytes by name. There is at most one."""
        limits = {name: getattr(self, name) for name in ("kv_memory", "memory_budget", "memory_limit")}
        return {name: int(limit) for name, limit in limits.items() if limit is not None}

    def resolve_grammar_memory(self, device_type: str) -> int:
        """Return `grammar_memory` in bytes, or its default for this type of device."""
        if self.grammar_memory is not None:
            return int(self.grammar_memory)
        if self.memory_limit is None or device_type != "cpu":
            return MAX_GRAMMAR_MEMORY
        return min(MAX_GRAMMAR_MEMORY, max(MIN_GRAMMAR_MEMORY, int(self.memory_limit) // 32))

    def resolve_max_num_batched_tokens(self, device_type: str) -> int:
        """Return `max_num_batched_tokens`, or its default for this type of device."""
        return self.max_num_batched_tokens or (512 if device_type == "cpu" else 2048)

    def expected_positions(self, device_type: str) -> int | None:
        """Return the positions of an ordinary sequence, which size the default cache; None: `max_model_len`."""
        if self.max_model_len is not None:
            return None
        return 2048 if device_type == "cpu" else 4096

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.model == MTP and self.target_model in (None, MTP):
            raise ValueError("model mtp needs target_model, the model that has the MTP layer")
        if self.model == MTP and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel must be 1 with model mtp")
        if self.model == MTP and not self.fused:
            raise ValueError(MTP_NEEDS_FUSED)
        if self.tensor_parallel % self.nnodes:
            raise ValueError(f"tensor_parallel {self.tensor_parallel} is not a multiple of nnodes {self.nnodes}")
        if self.kv_layout == "padded" and self.tensor_parallel > 1:
            raise ValueError("kv_layout padded needs tensor_parallel 1")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank must be below nnodes, which is {self.nnodes}")
        if (self.master_addr is None) != (self.nnodes == 1):
            raise ValueError("master_addr must be given if nnodes is above 1, and only then")
        if self.grammar_memory is not None and 0 < self.grammar_memory < MIN_GRAMMAR_MEMORY:
            raise ValueError(f"grammar_memory must be 0 or at least 32MiB, not {self.grammar_memory.human_readable()}")
        if len(self.memory_limits) > 1:
            raise ValueError(f"give {' or '.join(self.memory_limits)}, not both")
        if self.activations == INT8:
            check_int8(
                native=self.native,
                fused=self.fused or self.tensor_parallel > 1,  # ranks always run the fused pass
                weights=self.weights,
                dtype=self.dtype,
                devices={"--device": self.device.split(",")},
            )
        return self
