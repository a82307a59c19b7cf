"""Faults in `GetWorkerInfo` of both workers, and in the target's `GetTokenizer`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lab.faults import LONG_DETAILS, NOT_A_MESSAGE, Answer, Fault, never, refuses, returns

from specpool.v1 import common_pb2

UINT32_MAX, UINT64_MAX = 2**32 - 1, 2**64 - 1


def part(name: str, **fields: Any) -> Fault:
    """Overwrites fields of a part of the description; the part "" is the description itself."""

    def spoil(answer: Answer) -> None:
        message = getattr(answer.response, name) if name else answer.response
        for field, value in fields.items():
            if isinstance(value, list):
                getattr(message, field)[:] = value
            else:
                setattr(message, field, value)

    return spoil


def costs(rows: Sequence[int], seconds: Sequence[float], **fields: float) -> Fault:
    """Replace the measured costs."""

    def spoil(answer: Answer) -> None:
        answer.response.costs.CopyFrom(common_pb2.StepCosts(rows=rows, seconds=seconds, **fields))

    return spoil


def two_ranks(**model: Any) -> Fault:
    """Describes two ranks."""

    def spoil(answer: Answer) -> None:
        part("model", **model)(answer)
        answer.response.load.ranks.extend([common_pb2.RankMemory(device="cpu")] * 2)

    return spoil


def invalid_utf8(answer: Answer) -> bytes:
    """Send a name that is not valid UTF-8."""
    payload: bytes = answer.response.SerializeToString()
    return payload.replace(b"fake", b"\xff\xfe\xff\xfe", 1)


HUGE_MEMORY = dict.fromkeys(
    ("kv_positions_total", "kv_positions_free", "kv_bytes_total", "kv_bytes_per_token", "weight_bytes",
     "activation_bytes"), UINT64_MAX,
)  # fmt: skip

DESCRIPTIONS: dict[str, Fault] = {
    "info_empty": returns(b""),
    "info_undecodable": returns(NOT_A_MESSAGE),
    "info_invalid_utf8": invalid_utf8,
    "info_never": never,
    "info_refused": refuses("INTERNAL", LONG_DETAILS),
    "info_long_notes": part("model", notes=["n" * 2**17] * 64),
    "info_no_vocabulary": part("model", vocab_size=0),
    "info_no_length": part("model", max_model_len=0),
    "info_unknown_equivalence": part("model", equivalence=99),
    "info_no_slots": part("load", slots_total=0),
    "info_huge_slots": part("load", slots_total=UINT32_MAX, slots_in_use=UINT32_MAX),
    "info_huge_memory": part("load", kv_positions_multiple=UINT32_MAX, **HUGE_MEMORY),
    "info_indivisible_memory": part("load", kv_positions_total=2**20, kv_positions_multiple=0),
    "info_missing_ranks": two_ranks(tensor_parallel=4, tensor_parallel_sums="whole"),
    "info_unknown_sums": two_ranks(tensor_parallel=2, tensor_parallel_sums="backwards"),
    "costs_nan": costs([1, 2, 4], [math.nan] * 3),
    "costs_infinite": costs([1, 2, 4], [math.inf] * 3),
    "costs_negative": costs([1, 2, 4], [-0.001, -0.002, -0.004], seconds_per_cached=-1.0),
    "costs_of_zero": costs([1, 2, 4], [0.0] * 3),
    "costs_of_no_rows": costs([0, 1], [0.001, 0.001]),
    "costs_of_one_pass": costs([4, 4, 4], [0.001, 0.002, 0.003]),
    "costs_unsorted": costs([64, 1, 8], [0.003, 0.001, 0.002]),
    "costs_uneven": costs([1, 2, 4, 8], [0.001]),
    "costs_by_cached_nan": costs([1, 2], [0.001, 0.002], seconds_per_cached=math.nan),
    "costs_by_cached_huge": costs([1, 2], [0.001, 0.002], seconds_per_cached=1e308, cached=UINT32_MAX),
}

TOKENIZERS: dict[str, Callable[[Answer], Any]] = {
    "tokenizer_no_json": part("", tokenizer_json=b"\xff{"),
    "tokenizer_empty": returns(b""),
    "tokenizer_undecodable": returns(NOT_A_MESSAGE),
    "tokenizer_never": never,
    "template_does_not_compile": part("", chat_template="{% for message in %}{{"),
    "tool_template_does_not_compile": part("", tool_chat_template="{% if %}"),
    "template_fails": part("", chat_template="{{ 1 // 0 }}"),
    "eos_outside_the_vocabulary": part("", eos_token_ids=[UINT32_MAX]),
}
