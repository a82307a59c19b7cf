"""Malformed requests: hypothesis strategies by method, derived from the message descriptors."""

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2

from specpool.v1 import common_pb2, draft_worker_pb2, generation_pb2, target_worker_pb2

SAMPLING = common_pb2.Sampling(temperature=0.5, top_p=0.9, seed=1, prompt_length=3)
ITEM = {"sequence_id": 1, "token_ids": [1, 2, 3], "sampling": SAMPLING, "cache_namespace": b"fuzz"}
GENERATE = generation_pb2.GenerateRequest(
    tokenized=generation_pb2.TokenizedInput(input_ids=[1, 2, 3]),
    sampling_params=generation_pb2.SamplingParams(max_tokens=3, stop=["x"], logit_bias={3: 1.0}, n=1),
    speculative=generation_pb2.SpeculativeParams(num_speculative_tokens=2, prediction={"text": "xyz"}),
)
REQUESTS: list[Message] = [
    GENERATE,
    generation_pb2.AbortRequest(request_id="none"),
    draft_worker_pb2.ProposeRequest(
        coordinator_id="fuzz", round_id=1, items=[{**ITEM, "num_draft_tokens": 3, "min_chance": 0.1}], chances=[0, 1]
    ),
    target_worker_pb2.VerifyRequest(
        coordinator_id="fuzz", round_id=1, items=[{**ITEM, "draft_token_ids": [4, 5], "logprobs": 2}]
    ),
    common_pb2.ReleaseRequest(coordinator_id="fuzz", sequence_ids=[1]),
    vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=3, stop=["x"], logit_bias={3: 1.0}, n=1, seed=1),
    ),
    vllm_engine_pb2.AbortRequest(request_ids=["none"]),
]
VALID = {message.DESCRIPTOR.full_name: message for message in REQUESTS}


def integers(bits: int, signed: bool) -> st.SearchStrategy[int]:
    minimum, maximum = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    edges = [
        value for value in (0, 1, 2, 3, 63, 64, 256, 257, 2**16, 2**31 - 1, 2**31, maximum, minimum) if value <= maximum
    ]
    return st.sampled_from(edges) | st.integers(minimum, maximum)


TEXTS = st.text(max_size=20) | st.sampled_from(["", "\0", "fuzz", "x" * 129, "🙂" * 5000, "{{ 1 // 0 }}", "\ufeff"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
VALUES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: integers(32, True),
    FieldDescriptor.CPPTYPE_INT64: integers(64, True),
    FieldDescriptor.CPPTYPE_UINT32: integers(32, False),
    FieldDescriptor.CPPTYPE_UINT64: integers(64, False),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([*range(6), 99, -1]),
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
}


def values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values of a field. Messages are dicts of fields; a repeated field sometimes has more than a thousand values."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(values_of(entry["key"]), values_of(entry["value"]), max_size=4)
    if field.message_type is not None and field.message_type.full_name == "google.protobuf.Struct":  # recursive
        return st.dictionaries(TEXTS, JSON_VALUES, max_size=4)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    single = fields_of(field.message_type) if field.message_type is not None else VALUES[field.cpp_type]
    if not field.is_repeated:
        return single
    few = st.lists(single, max_size=3)
    return few | st.builds(lambda value, number: [value] * number, single, st.sampled_from([100, 1100]))


def fields_of(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields of a message."""
    return st.fixed_dictionaries({}, optional={field.name: values_of(field) for field in kind.fields})


def replaced(valid: Message, name: str, value: Any) -> Message:
    """The message with one field replaced."""
    kind = type(valid)
    changed = kind()
    changed.CopyFrom(valid)
    changed.ClearField(name)
    changed.MergeFrom(kind(**{name: value}))
    return changed


def with_one_wrong(valid: Message) -> st.SearchStrategy[Message]:
    """A valid message in which one field, at any depth, has a random value."""

    def wrong(field: FieldDescriptor) -> st.SearchStrategy[Message]:
        value = getattr(valid, field.name)
        inside = field.message_type is not None and not field.message_type.GetOptions().map_entry
        if not inside or not (value if field.is_repeated else valid.HasField(field.name)):
            return values_of(field).map(lambda other: replaced(valid, field.name, other))
        if field.is_repeated:
            return with_one_wrong(value[0]).map(lambda other: replaced(valid, field.name, [other]))
        return with_one_wrong(value).map(lambda other: replaced(valid, field.name, other))

    fields = [*valid.DESCRIPTOR.fields]
    return st.sampled_from(fields).flatmap(wrong) if fields else st.just(valid)


def cut_and_pasted(payload: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """The bytes of a message after some edits."""
    for start, length, new in edits:
        at = start % (len(payload) + 1)
        payload = payload[:at] + new + payload[at + length :]
    return payload


def garbage(method: MethodDescriptor) -> st.SearchStrategy[list[bytes]]:
    """Random bytes, edited messages, and messages of random fields."""
    kind = message_factory.GetMessageClass(method.input_type)
    edit = st.tuples(st.integers(0, 200), st.integers(0, 8), st.binary(max_size=8))
    valid = VALID.get(method.input_type.full_name, kind()).SerializeToString()
    changed = st.lists(edit, min_size=1, max_size=2).map(lambda edits: cut_and_pasted(valid, edits))
    random_fields = fields_of(method.input_type).map(lambda fields: kind(**fields).SerializeToString())
    return st.lists(st.binary(max_size=300) | changed | random_fields, min_size=1, max_size=1)


def almost_valid(method: MethodDescriptor) -> st.SearchStrategy[list[bytes]]:
    """Messages with one wrong field, mixed with valid messages in streams."""
    valid = VALID.get(method.input_type.full_name, message_factory.GetMessageClass(method.input_type)())
    wrong = with_one_wrong(valid).map(lambda message: message.SerializeToString())
    one = st.just(valid.SerializeToString()) | wrong if method.client_streaming else wrong
    return st.lists(one, min_size=1, max_size=3 if method.client_streaming else 1)
