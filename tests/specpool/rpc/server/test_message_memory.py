"""An upper bound on the memory of a message, from its bytes alone."""

from contextlib import suppress

import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError, Message
from serving import make_request

from specpool.rpc.server.message_memory import MAX_GROWTH, MAX_VISITED, memory_of
from specpool.v1 import common_pb2, target_worker_pb2
from specpool.v1 import generation_pb2 as pb


def memory(message: Message) -> int:
    return memory_of(message.SerializeToString(), message.DESCRIPTOR)


def test_small_elements_exceed_their_wire_size() -> None:
    chat = pb.ChatMessage(tool_calls=[pb.ToolCall()] * 1000)
    options = {str(i): [None] * 10 for i in range(100)}
    biases = dict.fromkeys(range(1000), 1.0)
    for message, minimum in (
        (make_request(prompt=[7] * 1000), 16 * 1000),
        (make_request(prompt=[100_000] * 1000), 16 * 1000),
        (pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage()] * 1000)), 128 * 1000),
        (pb.GenerateRequest(chat=pb.ChatInput(messages=[chat])), 128 * 1000),
        (pb.GenerateRequest(chat=pb.ChatInput(chat_template_kwargs=options)), 128 * 1300),
        (pb.GenerateRequest(sampling_params=pb.SamplingParams(logit_bias=biases)), 128 * 1000),
        (pb.GenerateRequest(sampling_params=pb.SamplingParams(stop=[""] * 1000)), 128 * 1000),
        (common_pb2.TokenLogprobs(top_token_ids=[1] * 1000, top_logprobs=[1.0] * 1000), 16 * 2000),
        (pb.GenerateRequest(text="x" * 1000), 1000),
    ):
        assert minimum <= memory(message) < minimum + 15_000


@pytest.mark.parametrize(
    "payload", [b"\x1a\x00" * 10**6, b"\x1b" * 100_000, b"\x18" + b"\xff" * 10**6, b"\x78\x00" * 10**6]
)
def test_hostile_messages_need_as_much_as_a_message_can(payload: bytes) -> None:
    """Too many elements, groups, endless numbers, too many unknown fields."""
    kind = target_worker_pb2.VerifyRequest
    assert memory_of(payload, kind.DESCRIPTOR) == (1 + MAX_GROWTH) * len(payload)


def test_entries_of_maps_without_values_count() -> None:
    entries = b"".join(b"\x0a\x06\x0a\x04%04d" % number for number in range(8000))
    assert len(struct_pb2.Struct.FromString(entries).fields) == 8000
    assert memory_of(entries, struct_pb2.Struct.DESCRIPTOR) >= 128 * 8000


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_truncated_messages_are_left_to_the_parser(cut: int) -> None:
    message = make_request(prompt=[1, 2, 100_000], max_tokens=300, request_id="an id")
    payload = message.SerializeToString()[:-cut]
    memory_of(payload, message.DESCRIPTOR)
    with suppress(DecodeError):
        pb.GenerateRequest.FromString(payload)


def test_rounds_of_maximum_size_are_counted_precisely() -> None:
    items = [
        target_worker_pb2.VerifyItem(sequence_id=i, token_ids=[50_000] * 8000, draft_token_ids=[7] * 16, logprobs=20)
        for i in range(1024)
    ]
    message = target_worker_pb2.VerifyRequest(coordinator_id="c", round_id=1, items=items)
    assert len(items) * 12 < MAX_VISITED
    assert memory(message) < message.ByteSize() + 16 * 8100 * 1024
    assert memory_of(b"any bytes", None) == len(b"any bytes")
