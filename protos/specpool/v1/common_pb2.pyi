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
EQUIVALENCE_UNSPECIFIED: Equivalence
EQUIVALENCE_BITWISE: Equivalence
EQUIVALENCE_NUMERIC: Equivalence

class ModelInfo(_message.Message):
    __slots__ = ("model", "architecture", "dtype", "device", "vocab_size", "max_model_len", "tokenizer_fingerprint", "equivalence", "parameters")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EQUIVALENCE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    equivalence: Equivalence
    parameters: int
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., equivalence: _Optional[_Union[Equivalence, str]] = ..., parameters: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("slots_total", "slots_in_use", "kv_bytes_per_token", "kv_bytes_total", "kv_layout")
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    slots_total: int
    slots_in_use: int
    kv_bytes_per_token: int
    kv_bytes_total: int
    kv_layout: str
    def __init__(self, slots_total: _Optional[int] = ..., slots_in_use: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_bytes_total: _Optional[int] = ..., kv_layout: _Optional[str] = ...) -> None: ...

class GetWorkerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerInfoResponse(_message.Message):
    __slots__ = ("model", "load")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    load: WorkerLoad
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("coordinator_id", "sequence_ids")
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: str
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, coordinator_id: _Optional[str] = ..., sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...
