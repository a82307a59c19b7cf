from google.protobuf import struct_pb2 as _struct_pb2
from specpool.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_METHOD_UNSPECIFIED: _ClassVar[DraftMethod]
    DRAFT_METHOD_MODEL: _ClassVar[DraftMethod]
    DRAFT_METHOD_NGRAM: _ClassVar[DraftMethod]
    DRAFT_METHOD_BEST: _ClassVar[DraftMethod]
    DRAFT_METHOD_SUFFIX: _ClassVar[DraftMethod]
    DRAFT_METHOD_PREDICTION: _ClassVar[DraftMethod]
DRAFT_METHOD_UNSPECIFIED: DraftMethod
DRAFT_METHOD_MODEL: DraftMethod
DRAFT_METHOD_NGRAM: DraftMethod
DRAFT_METHOD_BEST: DraftMethod
DRAFT_METHOD_SUFFIX: DraftMethod
DRAFT_METHOD_PREDICTION: DraftMethod

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "tokenized", "chat", "sampling_params", "speculative", "priority", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    tokenized: TokenizedInput
    chat: ChatInput
    sampling_params: SamplingParams
    speculative: SpeculativeParams
    priority: int
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., speculative: _Optional[_Union[SpeculativeParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class TokenizedInput(_message.Message):
    __slots__ = ("input_ids",)
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, input_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "chat_template_kwargs", "tools")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    chat_template_kwargs: _struct_pb2.Struct
    tools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., tools: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "type", "function")
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    id: str
    type: str
    function: FunctionCall
    def __init__(self, id: _Optional[str] = ..., type: _Optional[str] = ..., function: _Optional[_Union[FunctionCall, _Mapping]] = ...) -> None: ...

class FunctionCall(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed", "logprobs", "logit_bias", "n", "json_schema", "regex", "grammar", "structural_tag", "json_object", "choice", "constraint_after_reasoning", "max_thinking_tokens", "json_whitespace", "skip_special_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_AFTER_REASONING_FIELD_NUMBER: _ClassVar[int]
    MAX_THINKING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JSON_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    n: int
    json_schema: str
    regex: str
    grammar: str
    structural_tag: str
    json_object: bool
    choice: ChoiceConstraint
    constraint_after_reasoning: bool
    max_thinking_tokens: int
    json_whitespace: bool
    skip_special_tokens: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., n: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., structural_tag: _Optional[str] = ..., json_object: _Optional[bool] = ..., choice: _Optional[_Union[ChoiceConstraint, _Mapping]] = ..., constraint_after_reasoning: _Optional[bool] = ..., max_thinking_tokens: _Optional[int] = ..., json_whitespace: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class ChoiceConstraint(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class SpeculativeParams(_message.Message):
    __slots__ = ("num_speculative_tokens", "method", "prediction")
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    num_speculative_tokens: int
    method: DraftMethod
    prediction: Prediction
    def __init__(self, num_speculative_tokens: _Optional[int] = ..., method: _Optional[_Union[DraftMethod, str]] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("text", "tokenized")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokenized: TokenizedInput
    def __init__(self, text: _Optional[str] = ..., tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "finish_reason", "matched_token_id", "matched_stop_str", "seed", "usage", "speculative_decoding", "timings", "logprobs", "index", "other_samples", "starts_in_reasoning")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STR_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_DECODING_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OTHER_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STARTS_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    matched_token_id: int
    matched_stop_str: str
    seed: int
    usage: Usage
    speculative_decoding: SpeculativeDecodingStats
    timings: Timings
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    index: int
    other_samples: _containers.RepeatedCompositeFieldContainer[GenerateResponse]
    starts_in_reasoning: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., matched_token_id: _Optional[int] = ..., matched_stop_str: _Optional[str] = ..., seed: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculative_decoding: _Optional[_Union[SpeculativeDecodingStats, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., index: _Optional[int] = ..., other_samples: _Optional[_Iterable[_Union[GenerateResponse, _Mapping]]] = ..., starts_in_reasoning: _Optional[bool] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("request_id", "chunk", "complete", "starts_in_reasoning")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    STARTS_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk: GenerateChunk
    complete: GenerateResponse
    starts_in_reasoning: bool
    def __init__(self, request_id: _Optional[str] = ..., chunk: _Optional[_Union[GenerateChunk, _Mapping]] = ..., complete: _Optional[_Union[GenerateResponse, _Mapping]] = ..., starts_in_reasoning: _Optional[bool] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "index")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    index: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., index: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ...) -> None: ...

class SpeculativeDecodingStats(_message.Message):
    __slots__ = ("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    def __init__(self, mean_acceptance_length: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_s", "time_to_first_token_s", "total_s", "prefill_s", "decode_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    time_to_first_token_s: float
    total_s: float
    prefill_s: float
    decode_s: float
    def __init__(self, queue_s: _Optional[float] = ..., time_to_first_token_s: _Optional[float] = ..., total_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("target", "draft", "max_model_len", "default_max_tokens", "num_speculative_tokens", "max_num_speculative_tokens", "has_chat_template", "eos_token_ids", "served_model_name", "reasoning", "tool_call_format", "chat_template_options")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    target: _common_pb2.ModelInfo
    draft: _common_pb2.ModelInfo
    max_model_len: int
    default_max_tokens: int
    num_speculative_tokens: int
    max_num_speculative_tokens: int
    has_chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    served_model_name: str
    reasoning: ReasoningTags
    tool_call_format: str
    chat_template_options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, target: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., max_model_len: _Optional[int] = ..., default_max_tokens: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ..., max_num_speculative_tokens: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., served_model_name: _Optional[str] = ..., reasoning: _Optional[_Union[ReasoningTags, _Mapping]] = ..., tool_call_format: _Optional[str] = ..., chat_template_options: _Optional[_Iterable[str]] = ...) -> None: ...

class ReasoningTags(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: str
    end: str
    def __init__(self, begin: _Optional[str] = ..., end: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "uptime_s", "policy", "queue_size", "running", "queued", "target", "draft", "counters", "max_num_seqs", "speculation", "standby", "targets", "draft_workers", "drafts")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    policy: str
    queue_size: int
    running: int
    queued: int
    target: WorkerState
    draft: WorkerState
    counters: ServerCounters
    max_num_seqs: int
    speculation: SpeculationState
    standby: WorkerState
    targets: _containers.RepeatedCompositeFieldContainer[WorkerState]
    draft_workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    drafts: _containers.RepeatedCompositeFieldContainer[DraftModelState]
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., policy: _Optional[str] = ..., queue_size: _Optional[int] = ..., running: _Optional[int] = ..., queued: _Optional[int] = ..., target: _Optional[_Union[WorkerState, _Mapping]] = ..., draft: _Optional[_Union[WorkerState, _Mapping]] = ..., counters: _Optional[_Union[ServerCounters, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationState, _Mapping]] = ..., standby: _Optional[_Union[WorkerState, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., draft_workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[DraftModelState, _Mapping]]] = ...) -> None: ...

class DraftModelState(_message.Message):
    __slots__ = ("name", "model", "weights_fingerprint", "share", "running", "draft_tokens", "accepted_draft_tokens", "rounds", "completion_tokens", "expected_tokens_per_s", "ready_workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    READY_WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    weights_fingerprint: str
    share: float
    running: int
    draft_tokens: int
    accepted_draft_tokens: int
    rounds: int
    completion_tokens: int
    expected_tokens_per_s: float
    ready_workers: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., share: _Optional[float] = ..., running: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., expected_tokens_per_s: _Optional[float] = ..., ready_workers: _Optional[int] = ...) -> None: ...

class SpeculationState(_message.Message):
    __slots__ = ("draft_steps", "expected_tokens_per_s", "plain_tokens_per_s", "model_acceptance_rate", "ngram_acceptance_rates", "draft_step_s", "verify_s", "verify_row_s", "exchange_s")
    class NgramAcceptanceRatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    NGRAM_ACCEPTANCE_RATES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEP_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_ROW_S_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    draft_steps: int
    expected_tokens_per_s: float
    plain_tokens_per_s: float
    model_acceptance_rate: float
    ngram_acceptance_rates: _containers.ScalarMap[int, float]
    draft_step_s: float
    verify_s: float
    verify_row_s: float
    exchange_s: float
    def __init__(self, draft_steps: _Optional[int] = ..., expected_tokens_per_s: _Optional[float] = ..., plain_tokens_per_s: _Optional[float] = ..., model_acceptance_rate: _Optional[float] = ..., ngram_acceptance_rates: _Optional[_Mapping[int, float]] = ..., draft_step_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., verify_row_s: _Optional[float] = ..., exchange_s: _Optional[float] = ...) -> None: ...

class DraftCounters(_message.Message):
    __slots__ = ("draft_tokens", "accepted_draft_tokens")
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("address", "state", "reason", "model", "load", "draft")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: str
    reason: str
    model: _common_pb2.ModelInfo
    load: _common_pb2.WorkerLoad
    draft: str
    def __init__(self, address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., draft: _Optional[str] = ...) -> None: ...

class GroupingCounters(_message.Message):
    __slots__ = ("same_length_rounds", "mixed_rounds", "fallback_rounds", "group_sizes")
    SAME_LENGTH_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MIXED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZES_FIELD_NUMBER: _ClassVar[int]
    same_length_rounds: int
    mixed_rounds: int
    fallback_rounds: int
    group_sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, same_length_rounds: _Optional[int] = ..., mixed_rounds: _Optional[int] = ..., fallback_rounds: _Optional[int] = ..., group_sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class ServerCounters(_message.Message):
    __slots__ = ("requests", "finished", "rounds", "completion_tokens", "draft_tokens", "accepted_draft_tokens", "cache_misses", "prompt_tokens", "cached_tokens", "stage_seconds", "grouping", "draft_lengths", "drafts", "refused", "audited")
    class FinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StageSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class DraftsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: DraftCounters
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[DraftCounters, _Mapping]] = ...) -> None: ...
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AuditedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_MISSES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUPING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    requests: int
    finished: _containers.ScalarMap[str, int]
    rounds: int
    completion_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    cache_misses: int
    prompt_tokens: int
    cached_tokens: int
    stage_seconds: _containers.ScalarMap[str, float]
    grouping: GroupingCounters
    draft_lengths: _containers.RepeatedScalarFieldContainer[int]
    drafts: _containers.MessageMap[str, DraftCounters]
    refused: _containers.ScalarMap[str, int]
    audited: _containers.ScalarMap[str, int]
    def __init__(self, requests: _Optional[int] = ..., finished: _Optional[_Mapping[str, int]] = ..., rounds: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., cache_misses: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., stage_seconds: _Optional[_Mapping[str, float]] = ..., grouping: _Optional[_Union[GroupingCounters, _Mapping]] = ..., draft_lengths: _Optional[_Iterable[int]] = ..., drafts: _Optional[_Mapping[str, DraftCounters]] = ..., refused: _Optional[_Mapping[str, int]] = ..., audited: _Optional[_Mapping[str, int]] = ...) -> None: ...
