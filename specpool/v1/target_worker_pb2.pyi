from specpool.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("coordinator_id", "round_id", "items", "traceparent", "may_join", "feature_layers", "feature_window")
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    MAY_JOIN_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: str
    round_id: int
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    traceparent: str
    may_join: bool
    feature_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_window: int
    def __init__(self, coordinator_id: _Optional[str] = ..., round_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ..., traceparent: _Optional[str] = ..., may_join: _Optional[bool] = ..., feature_layers: _Optional[_Iterable[int]] = ..., feature_window: _Optional[int] = ...) -> None: ...

class VerifyItem(_message.Message):
    __slots__ = ("sequence_id", "base_length", "token_ids", "draft_token_ids", "prefill_only", "sampling", "logprobs", "cache_namespace", "expected_prefix_length", "after_round_id", "branches", "max_draft_tokens", "want_features")
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
    def __init__(self, sequence_id: _Optional[int] = ..., base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., prefill_only: _Optional[bool] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., logprobs: _Optional[int] = ..., cache_namespace: _Optional[bytes] = ..., expected_prefix_length: _Optional[int] = ..., after_round_id: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[_common_pb2.Branch, _Mapping]]] = ..., max_draft_tokens: _Optional[int] = ..., want_features: _Optional[bool] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("round_id", "results", "forward_ns", "realign_ns", "instance_id", "evicted_pages")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    REALIGN_NS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    results: _containers.RepeatedCompositeFieldContainer[VerifyResult]
    forward_ns: int
    realign_ns: int
    instance_id: str
    evicted_pages: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, round_id: _Optional[int] = ..., results: _Optional[_Iterable[_Union[VerifyResult, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., realign_ns: _Optional[int] = ..., instance_id: _Optional[str] = ..., evicted_pages: _Optional[_Iterable[bytes]] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("sequence_id", "status", "token_ids", "cached_length", "logprobs", "num_forced_tokens", "error", "features", "prefix_length")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    status: _common_pb2.ItemStatus
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_length: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    num_forced_tokens: int
    error: str
    features: bytes
    prefix_length: int
    def __init__(self, sequence_id: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ItemStatus, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., cached_length: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., num_forced_tokens: _Optional[int] = ..., error: _Optional[str] = ..., features: _Optional[bytes] = ..., prefix_length: _Optional[int] = ...) -> None: ...

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
