"""Faults of a worker's description of itself, and of a target's tokenizer."""

import asyncio
import math
from collections.abc import Iterable
from typing import Any

from specpool.testing.faults import Answer, RefusedError, Table, entry
from specpool.v1 import common_pb2

DESCRIPTIONS: Table = {}
TOKENIZERS: Table = {}
UINT32_MAX, UINT64_MAX = 2**32 - 1, 2**64 - 1


def _with_costs(answer: Answer, rows: Iterable[int], seconds: Iterable[float], **fields: float) -> Any:
    costs = answer.response.costs
    costs.Clear()
    costs.rows.extend(rows)
    costs.seconds.extend(seconds)
    for name, value in fields.items():
        setattr(costs, name, value)
    return answer.response


@entry(DESCRIPTIONS)
def info_empty(answer: Answer) -> Any:
    """Describes itself by a message without any field."""
    return b""


@entry(DESCRIPTIONS)
def info_undecodable(answer: Answer) -> Any:
    """Describes itself by bytes that are no message."""
    return b"\xff" * 64


@entry(DESCRIPTIONS)
def info_invalid_utf8(answer: Answer) -> Any:
    """Has a name that is no text."""
    return answer.response.SerializeToString().replace(b"fake", b"\xff\xfe\xff\xfe", 1)


@entry(DESCRIPTIONS)
async def info_never(answer: Answer) -> Any:
    """Never describes itself."""
    await asyncio.Event().wait()


@entry(DESCRIPTIONS)
def info_refused(answer: Answer) -> Any:
    """Refuses to describe itself, in 64 KiB."""
    raise RefusedError("INTERNAL", "no" * 2**15)


@entry(DESCRIPTIONS)
def info_long_notes(answer: Answer) -> Any:
    """Has 64 notes of 128 KiB each."""
    answer.response.model.notes[:] = ["n" * 2**17] * 64
    return answer.response


@entry(DESCRIPTIONS)
def info_no_vocabulary(answer: Answer) -> Any:
    """Has a vocabulary of no tokens."""
    answer.response.model.vocab_size = 0
    return answer.response


@entry(DESCRIPTIONS)
def info_no_length(answer: Answer) -> Any:
    """Has no room for a single position."""
    answer.response.model.max_model_len = 0
    return answer.response


@entry(DESCRIPTIONS)
def info_unknown_equivalence(answer: Answer) -> Any:
    """Promises what the protocol does not know."""
    answer.response.model.equivalence = 99
    return answer.response


@entry(DESCRIPTIONS)
def info_no_slots(answer: Answer) -> Any:
    """Has no slots."""
    answer.response.load.slots_total = 0
    return answer.response


@entry(DESCRIPTIONS)
def info_huge_slots(answer: Answer) -> Any:
    """Has 2^32 - 1 slots, all of them in use."""
    answer.response.load.slots_total = answer.response.load.slots_in_use = UINT32_MAX
    return answer.response


@entry(DESCRIPTIONS)
def info_huge_memory(answer: Answer) -> Any:
    """Has numbers of bytes and positions whose products overflow."""
    load = answer.response.load
    load.kv_positions_total = load.kv_positions_free = load.kv_bytes_total = load.kv_bytes_per_token = UINT64_MAX
    load.weight_bytes = load.activation_bytes = UINT64_MAX
    load.kv_positions_multiple = UINT32_MAX
    return answer.response


@entry(DESCRIPTIONS)
def info_indivisible_memory(answer: Answer) -> Any:
    """Reserves positions in multiples of 0."""
    answer.response.load.kv_positions_total = 2**20
    answer.response.load.kv_positions_multiple = 0
    return answer.response


@entry(DESCRIPTIONS)
def info_missing_ranks(answer: Answer) -> Any:
    """Is divided among 4 ranks, and describes 2 of them."""
    answer.response.model.tensor_parallel, answer.response.model.tensor_parallel_sums = 4, "whole"
    answer.response.load.ranks.extend([common_pb2.RankMemory(device="cpu")] * 2)
    return answer.response


@entry(DESCRIPTIONS)
def info_unknown_sums(answer: Answer) -> Any:
    """Is divided among 2 ranks, which sum in a way that the protocol does not know."""
    answer.response.model.tensor_parallel, answer.response.model.tensor_parallel_sums = 2, "backwards"
    answer.response.load.ranks.extend([common_pb2.RankMemory(device="cpu")] * 2)
    return answer.response


@entry(DESCRIPTIONS)
def costs_nan(answer: Answer) -> Any:
    """Has passes whose duration is no number."""
    return _with_costs(answer, [1, 2, 4], [math.nan] * 3)


@entry(DESCRIPTIONS)
def costs_infinite(answer: Answer) -> Any:
    """Has passes that never end."""
    return _with_costs(answer, [1, 2, 4], [math.inf] * 3)


@entry(DESCRIPTIONS)
def costs_negative(answer: Answer) -> Any:
    """Has passes that end before they begin."""
    return _with_costs(answer, [1, 2, 4], [-0.001, -0.002, -0.004], seconds_per_cached=-1.0)


@entry(DESCRIPTIONS)
def costs_of_zero(answer: Answer) -> Any:
    """Has passes that take no time."""
    return _with_costs(answer, [1, 2, 4], [0.0] * 3)


@entry(DESCRIPTIONS)
def costs_of_no_rows(answer: Answer) -> Any:
    """Has measured a pass of no rows, and one of a single row."""
    return _with_costs(answer, [0, 1], [0.001, 0.001])


@entry(DESCRIPTIONS)
def costs_of_one_pass(answer: Answer) -> Any:
    """Has measured one pass several times."""
    return _with_costs(answer, [4, 4, 4], [0.001, 0.002, 0.003])


@entry(DESCRIPTIONS)
def costs_unsorted(answer: Answer) -> Any:
    """Has its passes out of order."""
    return _with_costs(answer, [64, 1, 8], [0.003, 0.001, 0.002])


@entry(DESCRIPTIONS)
def costs_uneven(answer: Answer) -> Any:
    """Has more passes than durations."""
    return _with_costs(answer, [1, 2, 4, 8], [0.001])


@entry(DESCRIPTIONS)
def costs_by_cached_nan(answer: Answer) -> Any:
    """Has cached positions that take no number of seconds."""
    return _with_costs(answer, [1, 2], [0.001, 0.002], seconds_per_cached=math.nan)


@entry(DESCRIPTIONS)
def costs_by_cached_huge(answer: Answer) -> Any:
    """Has cached positions that take 10^308 seconds each."""
    return _with_costs(answer, [1, 2], [0.001, 0.002], seconds_per_cached=1e308, cached=UINT32_MAX)


@entry(TOKENIZERS)
def tokenizer_no_json(answer: Answer) -> Any:
    """Has a tokenizer that is no JSON."""
    answer.response.tokenizer_json = b"\xff{"
    return answer.response


@entry(TOKENIZERS)
def tokenizer_empty(answer: Answer) -> Any:
    """Has no tokenizer."""
    return b""


@entry(TOKENIZERS)
def tokenizer_undecodable(answer: Answer) -> Any:
    """Has a tokenizer that is no message."""
    return b"\xff" * 64


@entry(TOKENIZERS)
def tokenizer_never(answer: Answer) -> Any:
    """Never gives its tokenizer."""
    return asyncio.Event().wait()


@entry(TOKENIZERS)
def template_does_not_compile(answer: Answer) -> Any:
    """Has a chat template that is no template."""
    answer.response.chat_template = "{% for message in %}{{"
    return answer.response


@entry(TOKENIZERS)
def template_fails(answer: Answer) -> Any:
    """Has a chat template that divides by zero."""
    answer.response.chat_template = "{{ 1 // 0 }}"
    return answer.response


@entry(TOKENIZERS)
def eos_outside_the_vocabulary(answer: Answer) -> Any:
    """Ends its sequences with a token that it does not have."""
    answer.response.eos_token_ids[:] = [UINT32_MAX]
    return answer.response
