from specpool.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposeRequest(_message.Message):
    __slots__ = ("coordinator_id", "round_id", "items", "chances", "step_cost", "traceparent", "translation_id")
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRANSLATION_ID_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: str
    round_id: int
    items: _containers.RepeatedCompositeFieldContainer[ProposeItem]
    chances: _containers.RepeatedScalarFieldContainer[float]
    step_cost: float
    traceparent: str
    translation_id: str
    def __init__(self, coordinator_id: _Optional[str] = ..., round_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ProposeItem, _Mapping]]] = ..., chances: _Optional[_Iterable[float]] = ..., step_cost: _Optional[float] = ..., traceparent: _Optional[str] = ..., translation_id: _Optional[str] = ...) -> None: ...

class ProposeItem(_message.Message):
    __slots__ = ("sequence_id", "base_length", "token_ids", "num_draft_tokens", "sampling", "cache_namespace", "expected_prefix_length", "min_chance", "next_chance", "num_branches", "num_unverified", "features")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MIN_CHANCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_CHANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_UNVERIFIED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    sampling: _common_pb2.Sampling
    cache_namespace: bytes
    expected_prefix_length: int
    min_chance: float
    next_chance: float
    num_branches: int
    num_unverified: int
    features: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., cache_namespace: _Optional[bytes] = ..., expected_prefix_length: _Optional[int] = ..., min_chance: _Optional[float] = ..., next_chance: _Optional[float] = ..., num_branches: _Optional[int] = ..., num_unverified: _Optional[int] = ..., features: _Optional[bytes] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("round_id", "results", "forward_ns", "realign_ns", "instance_id")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    REALIGN_NS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    results: _containers.RepeatedCompositeFieldContainer[ProposeResult]
    forward_ns: int
    realign_ns: int
    instance_id: str
    def __init__(self, round_id: _Optional[int] = ..., results: _Optional[_Iterable[_Union[ProposeResult, _Mapping]]] = ..., forward_ns: _Optional[int] = ..., realign_ns: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class ProposeResult(_message.Message):
    __slots__ = ("sequence_id", "status", "draft_token_ids", "cached_length", "confidences", "branches")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    status: _common_pb2.ItemStatus
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_length: int
    confidences: _containers.RepeatedScalarFieldContainer[float]
    branches: _containers.RepeatedCompositeFieldContainer[_common_pb2.Branch]
    def __init__(self, sequence_id: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ItemStatus, str]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., cached_length: _Optional[int] = ..., confidences: _Optional[_Iterable[float]] = ..., branches: _Optional[_Iterable[_Union[_common_pb2.Branch, _Mapping]]] = ...) -> None: ...

class UseTokenizerRequest(_message.Message):
    __slots__ = ("coordinator_id", "tokenizer_json", "vocab_size", "eos_token_ids", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: str
    tokenizer_json: bytes
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, coordinator_id: _Optional[str] = ..., tokenizer_json: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class UseTokenizerResponse(_message.Message):
    __slots__ = ("instance_id", "translation_id", "method", "vocabulary_coverage", "refusal")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSLATION_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    translation_id: str
    method: str
    vocabulary_coverage: float
    refusal: str
    def __init__(self, instance_id: _Optional[str] = ..., translation_id: _Optional[str] = ..., method: _Optional[str] = ..., vocabulary_coverage: _Optional[float] = ..., refusal: _Optional[str] = ...) -> None: ...
