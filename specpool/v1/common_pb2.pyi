from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ItemStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_STATUS_UNSPECIFIED: _ClassVar[ItemStatus]
    ITEM_STATUS_OK: _ClassVar[ItemStatus]
    ITEM_STATUS_CACHE_MISS: _ClassVar[ItemStatus]
    ITEM_STATUS_NO_SLOT: _ClassVar[ItemStatus]
    ITEM_STATUS_STALE_ROUND: _ClassVar[ItemStatus]
    ITEM_STATUS_GRAMMAR_FAILED: _ClassVar[ItemStatus]
    ITEM_STATUS_GRAMMAR_NOT_READY: _ClassVar[ItemStatus]

class Equivalence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EQUIVALENCE_UNSPECIFIED: _ClassVar[Equivalence]
    EQUIVALENCE_BITWISE: _ClassVar[Equivalence]
    EQUIVALENCE_NUMERIC: _ClassVar[Equivalence]
ITEM_STATUS_UNSPECIFIED: ItemStatus
ITEM_STATUS_OK: ItemStatus
ITEM_STATUS_CACHE_MISS: ItemStatus
ITEM_STATUS_NO_SLOT: ItemStatus
ITEM_STATUS_STALE_ROUND: ItemStatus
ITEM_STATUS_GRAMMAR_FAILED: ItemStatus
ITEM_STATUS_GRAMMAR_NOT_READY: ItemStatus
EQUIVALENCE_UNSPECIFIED: Equivalence
EQUIVALENCE_BITWISE: Equivalence
EQUIVALENCE_NUMERIC: Equivalence

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens", "stop_token_ids", "logit_bias", "seed", "prompt_length", "grammar", "reasoning")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    prompt_length: int
    grammar: str
    reasoning: Reasoning
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., prompt_length: _Optional[int] = ..., grammar: _Optional[str] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("begin", "end", "starts_inside", "max_tokens", "grammar_after", "leading")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STARTS_INSIDE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_AFTER_FIELD_NUMBER: _ClassVar[int]
    LEADING_FIELD_NUMBER: _ClassVar[int]
    begin: _containers.RepeatedScalarFieldContainer[int]
    end: _containers.RepeatedScalarFieldContainer[int]
    starts_inside: bool
    max_tokens: int
    grammar_after: bool
    leading: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, begin: _Optional[_Iterable[int]] = ..., end: _Optional[_Iterable[int]] = ..., starts_inside: _Optional[bool] = ..., max_tokens: _Optional[int] = ..., grammar_after: _Optional[bool] = ..., leading: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs", "text", "top_texts")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOP_TEXTS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    text: str
    top_texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., text: _Optional[str] = ..., top_texts: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "architecture", "dtype", "device", "vocab_size", "max_model_len", "tokenizer_fingerprint", "equivalence", "parameters", "notes", "weights_fingerprint", "numerics_fingerprint", "tensor_parallel", "tensor_parallel_sums", "weight_kinds", "activations", "hidden_size", "num_layers", "feature_layers", "feature_width", "tokenizer_translation", "vocabulary_coverage")
    class WeightKindsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EQUIVALENCE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SUMS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_KINDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_TRANSLATION_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    equivalence: Equivalence
    parameters: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    weights_fingerprint: str
    numerics_fingerprint: str
    tensor_parallel: int
    tensor_parallel_sums: str
    weight_kinds: _containers.ScalarMap[str, int]
    activations: str
    hidden_size: int
    num_layers: int
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_width: int
    tokenizer_translation: str
    vocabulary_coverage: float
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., equivalence: _Optional[_Union[Equivalence, str]] = ..., parameters: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ..., weights_fingerprint: _Optional[str] = ..., numerics_fingerprint: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., tensor_parallel_sums: _Optional[str] = ..., weight_kinds: _Optional[_Mapping[str, int]] = ..., activations: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., feature_layers: _Optional[_Iterable[int]] = ..., feature_width: _Optional[int] = ..., tokenizer_translation: _Optional[str] = ..., vocabulary_coverage: _Optional[float] = ...) -> None: ...

class RankMemory(_message.Message):
    __slots__ = ("device", "weight_bytes", "kv_bytes", "activation_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    def __init__(self, device: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("num_accepted", "token_id", "draft_token_ids", "confidences")
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    num_accepted: int
    token_id: int
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_accepted: _Optional[int] = ..., token_id: _Optional[int] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("slots_total", "slots_in_use", "kv_bytes_per_token", "kv_bytes_total", "kv_layout", "weight_bytes", "activation_bytes", "kv_positions_total", "kv_positions_free", "kv_positions_multiple", "ranks", "max_rounds_ahead", "max_branches", "supports_grammars", "returns_features", "state_bytes_total")
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_POSITIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_POSITIONS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_POSITIONS_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROUNDS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FEATURES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    slots_total: int
    slots_in_use: int
    kv_bytes_per_token: int
    kv_bytes_total: int
    kv_layout: str
    weight_bytes: int
    activation_bytes: int
    kv_positions_total: int
    kv_positions_free: int
    kv_positions_multiple: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankMemory]
    max_rounds_ahead: int
    max_branches: int
    supports_grammars: bool
    returns_features: bool
    state_bytes_total: int
    def __init__(self, slots_total: _Optional[int] = ..., slots_in_use: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_bytes_total: _Optional[int] = ..., kv_layout: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ..., kv_positions_total: _Optional[int] = ..., kv_positions_free: _Optional[int] = ..., kv_positions_multiple: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankMemory, _Mapping]]] = ..., max_rounds_ahead: _Optional[int] = ..., max_branches: _Optional[int] = ..., supports_grammars: _Optional[bool] = ..., returns_features: _Optional[bool] = ..., state_bytes_total: _Optional[int] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("rows", "seconds", "cached", "seconds_per_cached", "max_rows")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_CACHED_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    cached: int
    seconds_per_cached: float
    max_rows: int
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., cached: _Optional[int] = ..., seconds_per_cached: _Optional[float] = ..., max_rows: _Optional[int] = ...) -> None: ...

class GetWorkerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerInfoResponse(_message.Message):
    __slots__ = ("model", "load", "costs", "instance_id", "draft")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    load: WorkerLoad
    costs: StepCosts
    instance_id: str
    draft: GetWorkerInfoResponse
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., costs: _Optional[_Union[StepCosts, _Mapping]] = ..., instance_id: _Optional[str] = ..., draft: _Optional[_Union[GetWorkerInfoResponse, _Mapping]] = ...) -> None: ...

class WatchStartupRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStartupResponse(_message.Message):
    __slots__ = ("phase", "failure")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    failure: str
    def __init__(self, phase: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("coordinator_id", "sequence_ids", "all")
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: str
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    all: bool
    def __init__(self, coordinator_id: _Optional[str] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., all: _Optional[bool] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released", "instance_id")
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    released: int
    instance_id: str
    def __init__(self, released: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...
