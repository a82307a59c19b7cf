from specpool.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("coordinator_id", "round_id", "items", "traceparent", "may_join", "feature_layers", "feature_window", "chances", "step_cost")
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    MAY_JOIN_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: str
    round_id: int
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    traceparent: str
    may_join: bool
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_window: int
    chances: _containers.RepeatedScalarFieldContainer[float]
    step_cost: float
    def __init__(self, coordinator_id: _Optional[str] = ..., round_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ..., traceparent: _Optional[str] = ..., may_join: _Optional[bool] = ..., feature_layers: _Optional[_Iterable[int]] = ..., feature_window: _Optional[int] = ..., chances: _Optional[_Iterable[float]] = ..., step_cost: _Optional[float] = ...) -> None: ...

class OwnDraftItem(_message.Message):
    __slots__ = ("max_verified", "num_draft_tokens", "max_length", "min_chance", "next_chance")
    MAX_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MIN_CHANCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_CHANCE_FIELD_NUMBER: _ClassVar[int]
    max_verified: int
    num_draft_tokens: int
    max_length: int
    min_chance: float
    next_chance: float
    def __init__(self, max_verified: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., max_length: _Optional[int] = ..., min_chance: _Optional[float] = ..., next_chance: _Optional[float] = ...) -> None: ...

class VerifyItem(_message.Message):
    __slots__ = ("sequence_id", "base_length", "token_ids", "draft_token_ids", "prefill_only", "sampling", "logprobs", "cache_namespace", "expected_prefix_length", "after_round_id", "branches", "max_draft_tokens", "want_features", "own_draft")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ONLY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    OWN_DRAFT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prefill_only: bool
    sampling: _common_pb2.Sampling
    logprobs: int
    cache_namespace: bytes
    expected_prefix_length: int
    after_round_id: int
    branches: _containers.RepeatedCompositeFieldContainer[_common_pb2.Branch]
    max_draft_tokens: int
    want_features: bool
    own_draft: OwnDraftItem
    def __init__(self, sequence_id: _Optional[int] = ..., base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., prefill_only: _Optional[bool] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., logprobs: _Optional[int] = ..., cache_namespace: _Optional[bytes] = ..., expected_prefix_length: _Optional[int] = ..., after_round_id: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[_common_pb2.Branch, _Mapping]]] = ..., max_draft_tokens: _Optional[int] = ..., want_features: _Optional[bool] = ..., own_draft: _Optional[_Union[OwnDraftItem, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("round_id", "results", "forward_ns", "realign_ns", "instance_id", "evicted_pages", "draft_ns", "draft_rows")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    REALIGN_NS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROWS_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    results: _containers.RepeatedCompositeFieldContainer[VerifyResult]
    forward_ns: int
    realign_ns: int
    instance_id: str
    evicted_pages: _containers.RepeatedScalarFieldContainer[bytes]
    draft_ns: int
    draft_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round_id: _Optional[int] = ..., results: _Optional[_Iterable[_Union[VerifyResult, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., realign_ns: _Optional[int] = ..., instance_id: _Optional[str] = ..., evicted_pages: _Optional[_Iterable[bytes]] = ..., draft_ns: _Optional[int] = ..., draft_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("sequence_id", "status", "token_ids", "cached_length", "logprobs", "num_forced_tokens", "error", "features", "prefix_length", "own_draft", "reusable_length")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    OWN_DRAFT_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    status: _common_pb2.ItemStatus
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_length: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    num_forced_tokens: int
    error: str
    features: bytes
    prefix_length: int
    own_draft: OwnDraftResult
    reusable_length: int
    def __init__(self, sequence_id: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ItemStatus, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., cached_length: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., num_forced_tokens: _Optional[int] = ..., error: _Optional[str] = ..., features: _Optional[bytes] = ..., prefix_length: _Optional[int] = ..., own_draft: _Optional[_Union[OwnDraftResult, _Mapping]] = ..., reusable_length: _Optional[int] = ...) -> None: ...

class OwnDraftResult(_message.Message):
    __slots__ = ("draft_token_ids", "confidences", "num_verified", "status", "cached_length")
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    num_verified: int
    status: _common_pb2.ItemStatus
    cached_length: int
    def __init__(self, draft_token_ids: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ..., num_verified: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ItemStatus, str]] = ..., cached_length: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "special_tokens", "eos_token_ids", "tool_chat_template", "instance_id")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tool_chat_template: str
    instance_id: str
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tool_chat_template: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...
