"""The one place where messages between coordinator and workers become dataclasses and back, but for the answers of
workers, which `specpool.protocol.answers` reads.

Reading also checks: the items that it returns can be served whatever is cached. InvalidArgumentError names a field that
cannot.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, RoundLimits, Verdict, VerifyItem
from specpool.protocol.sampling import RANGES, SamplingParams, TokenLogprobs, in_range
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo
from specpool.v1 import common_pb2, draft_worker_pb2, target_worker_pb2

_TO_WIRE: dict[ItemStatus, Any] = {
    status: common_pb2.ItemStatus.Value(f"ITEM_STATUS_{status.name}") for status in ItemStatus
}
# Unset floats are 0 on the wire, which would be nonsense for these fields: 0 means that there is no such rule.
_UNSET_MEANS_ONE = ("top_p", "repetition_penalty")

# Limits of requests to workers, far above what coordinators send: they bound what a hostile one can make a worker do.
MAX_COORDINATOR_ID_LENGTH = 128
MAX_ITEM_DRAFT_TOKENS = 1024
MAX_ITEM_LOGPROBS = 256
MAX_SAMPLING_TOKENS = 2048
MAX_CHANCES = 1024
MAX_RELEASED = 2**20


# --- The draft worker's rounds


def propose_request(
    coordinator_id: str,
    round_id: int,
    items: Iterable[ProposeItem],
    chances: Iterable[float],
    step_cost: float,
    traceparent: str = "",
) -> draft_worker_pb2.ProposeRequest:
    """The message of a round for the draft worker."""
    return draft_worker_pb2.ProposeRequest(
        coordinator_id=coordinator_id,
        round_id=round_id,
        chances=chances,
        step_cost=step_cost,
        traceparent=traceparent,
        items=[draft_worker_pb2.ProposeItem(**{**vars(item), "sampling": _sampling(item)}) for item in items],
    )


def read_propose_items(request: draft_worker_pb2.ProposeRequest, limits: RoundLimits) -> list[ProposeItem]:
    """The items of a round for the draft worker. InvalidArgumentError."""
    _check_number("items", len(request.items), limits.max_items)
    seen: set[int] = set()
    items = []
    for index, item in enumerate(request.items):
        field = f"items[{index}]"
        _check(field, item, limits, max(0, item.num_draft_tokens - 1), seen)
        _check_number(f"{field}.num_draft_tokens", item.num_draft_tokens, MAX_ITEM_DRAFT_TOKENS)
        items.append(
            ProposeItem(
                **_common_fields(field, item),
                num_draft_tokens=item.num_draft_tokens,
                min_chance=_between(f"{field}.min_chance", item.min_chance),
                next_chance=_between(f"{field}.next_chance", item.next_chance) if item.HasField("next_chance") else 1.0,
            )
        )
    return items


def read_step_cost(request: draft_worker_pb2.ProposeRequest) -> float:
    """The lowest expected gain of a draft step of the round. InvalidArgumentError."""
    return _between("step_cost", request.step_cost, most=math.inf)


def read_chances(request: draft_worker_pb2.ProposeRequest) -> list[float]:
    """The acceptance probabilities by the draft's own. InvalidArgumentError."""
    _check_number("chances", len(request.chances), MAX_CHANCES)
    return [_between(f"chances[{index}]", chance) for index, chance in enumerate(request.chances)]


def propose_response(
    round_id: int, proposals: Iterable[Proposal], spent: Mapping[str, int]
) -> draft_worker_pb2.ProposeResponse:
    """The draft worker's answer. `spent`: nanoseconds, by the names of the message's fields."""
    results = [draft_worker_pb2.ProposeResult(**_result_fields(proposal)) for proposal in proposals]
    return draft_worker_pb2.ProposeResponse(round_id=round_id, results=results, **spent)


# --- The target worker's rounds


def verify_request(
    coordinator_id: str, round_id: int, items: Iterable[VerifyItem], traceparent: str = ""
) -> target_worker_pb2.VerifyRequest:
    """The message of a round for the target worker."""
    return target_worker_pb2.VerifyRequest(
        coordinator_id=coordinator_id,
        round_id=round_id,
        traceparent=traceparent,
        items=[target_worker_pb2.VerifyItem(**{**vars(item), "sampling": _sampling(item)}) for item in items],
    )


def read_verify_items(request: target_worker_pb2.VerifyRequest, limits: RoundLimits) -> list[VerifyItem]:
    """The items of a round for the target worker. InvalidArgumentError."""
    _check_number("items", len(request.items), limits.max_items)
    logits = sum(len(item.draft_token_ids) + 1 for item in request.items)
    if logits > limits.max_logits:
        raise InvalidArgumentError("items", f"ask for the choices at {logits} positions of at most {limits.max_logits}")
    seen: set[int] = set()
    items = []
    for index, item in enumerate(request.items):
        field = f"items[{index}]"
        _check(field, item, limits, len(item.draft_token_ids), seen)
        _check_number(f"{field}.draft_token_ids", len(item.draft_token_ids), MAX_ITEM_DRAFT_TOKENS)
        _check_number(f"{field}.logprobs", item.logprobs, MAX_ITEM_LOGPROBS)
        drafts = tuple(item.draft_token_ids)
        if drafts and item.prefill_only:
            raise InvalidArgumentError(f"{field}.draft_token_ids", "must be empty with prefill_only")
        if drafts:
            _check_token_ids(f"{field}.draft_token_ids", drafts, limits)
        items.append(
            VerifyItem(
                **_common_fields(field, item),
                draft_token_ids=drafts,
                prefill_only=item.prefill_only,
                logprobs=item.logprobs if item.HasField("logprobs") else None,
            )
        )
    return items


def verify_response(
    round_id: int, verdicts: Iterable[Verdict], spent: Mapping[str, int]
) -> target_worker_pb2.VerifyResponse:
    """The target worker's answer. `spent`: nanoseconds, by the names of the message's fields."""
    results = [
        target_worker_pb2.VerifyResult(
            **_result_fields(verdict) | {"logprobs": [logprobs_message(logprobs) for logprobs in verdict.logprobs]}
        )
        for verdict in verdicts
    ]
    return target_worker_pb2.VerifyResponse(round_id=round_id, results=results, **spent)


# --- Messages of both workers


def require_coordinator(coordinator_id: str) -> None:
    """Raises InvalidArgumentError for an empty id, as sequences without an owner could never expire, and a long one."""
    if not coordinator_id:
        raise InvalidArgumentError("coordinator_id", "must not be empty")
    if len(coordinator_id) > MAX_COORDINATOR_ID_LENGTH:
        raise InvalidArgumentError(
            "coordinator_id", f"has {len(coordinator_id)} characters of at most {MAX_COORDINATOR_ID_LENGTH}"
        )


def logprobs_message(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Log-probabilities at one position as a message."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def release_request(coordinator_id: str, sequence_ids: Iterable[int]) -> common_pb2.ReleaseRequest:
    """The message that frees sequences."""
    return common_pb2.ReleaseRequest(coordinator_id=coordinator_id, sequence_ids=sequence_ids)


def read_release(request: common_pb2.ReleaseRequest) -> list[int]:
    """The sequences to free. InvalidArgumentError."""
    _check_number("sequence_ids", len(request.sequence_ids), MAX_RELEASED)
    return list(request.sequence_ids)


def worker_info_response(info: WorkerInfo) -> common_pb2.GetWorkerInfoResponse:
    """The description of a worker as a message."""
    equivalence = common_pb2.EQUIVALENCE_BITWISE if info.bitwise else common_pb2.EQUIVALENCE_NUMERIC
    model = common_pb2.ModelInfo(equivalence=equivalence, **_named_as(common_pb2.ModelInfo, info))
    ranks = [common_pb2.RankMemory(**vars(rank)) for rank in info.ranks]
    load = common_pb2.WorkerLoad(**{**_named_as(common_pb2.WorkerLoad, info), "ranks": ranks})
    costs = common_pb2.StepCosts(
        rows=info.step_seconds.keys(),
        seconds=info.step_seconds.values(),
        cached=info.step_cached,
        seconds_per_cached=info.seconds_per_cached,
        max_rows=info.max_rows,
    )
    known = info.step_seconds or info.max_rows
    return common_pb2.GetWorkerInfoResponse(
        model=model, load=load, costs=costs if known else None, instance_id=info.instance_id
    )


def _named_as(message: Any, info: WorkerInfo) -> dict[str, Any]:
    """The fields that a message shares by name with the description."""
    names = {field.name for field in message.DESCRIPTOR.fields}
    return {name: value for name, value in vars(info).items() if name in names}


def tokenizer_response(files: TokenizerFiles) -> target_worker_pb2.GetTokenizerResponse:
    """A tokenizer as a message."""
    return target_worker_pb2.GetTokenizerResponse(
        tokenizer_json=files.tokenizer_json,
        chat_template=files.chat_template,
        special_tokens=files.special_tokens,
        eos_token_ids=files.eos_token_ids,
    )


def _check(field: str, item: Any, limits: RoundLimits, drafts: int, seen: set[int]) -> None:
    """Raises InvalidArgumentError for an item of a round that cannot be served, whatever is cached.

    `drafts`: positions that the item takes beyond its tokens. `seen`: sequence ids of the round so far, to which the
    item's id is added.
    """
    if item.sequence_id in seen:
        raise InvalidArgumentError(f"{field}.sequence_id", f"{item.sequence_id} occurs twice in the round")
    seen.add(item.sequence_id)
    if item.HasField("prefix_sequence_id") and not item.base_length:
        raise InvalidArgumentError(f"{field}.base_length", "must be above 0 with prefix_sequence_id")
    if not item.token_ids:
        raise InvalidArgumentError(f"{field}.token_ids", "must not be empty")
    asked = item.max_length if item.HasField("max_length") else limits.max_model_len
    if asked > limits.max_model_len:
        raise InvalidArgumentError(f"{field}.max_length", f"{asked} is above {limits.max_model_len}")
    reserved = limits.capacity(item.sequence_id)
    most = min(limits.max_model_len, asked if reserved is None else reserved)
    end = item.base_length + len(item.token_ids) + drafts
    if end > most:
        raise InvalidArgumentError(field, f"would reach {end} positions of at most {most}")
    _check_token_ids(f"{field}.token_ids", item.token_ids, limits)


def _check_token_ids(field: str, token_ids: Sequence[int], limits: RoundLimits) -> None:
    largest = max(token_ids)
    if largest >= limits.vocab_size:
        raise InvalidArgumentError(field, f"{largest} is not below {limits.vocab_size}")


def _check_number(field: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidArgumentError(field, f"{number} is above {most}")


def _between(field: str, value: float, most: float = 1.0) -> float:
    if not 0 <= value <= most:
        raise InvalidArgumentError(field, f"{value:g} is not from 0 to {most:g}")
    return value


def _result_fields(result: Proposal | Verdict) -> dict[str, Any]:
    """Fields of a result message. The wire keeps the field's former name, `cached_length`."""
    fields = {**vars(result), "status": _TO_WIRE[result.status]}
    return fields | {"cached_length": fields.pop("num_cached_tokens")}


def _common_fields(field: str, item: Any) -> dict[str, Any]:
    """Arguments for the fields of `SequenceItem`."""
    return {
        "sequence_id": item.sequence_id,
        "base_length": item.base_length,
        "token_ids": tuple(item.token_ids),
        "sampling": _read_sampling(f"{field}.sampling", item.sampling) if item.HasField("sampling") else None,
        "prefix_sequence_id": item.prefix_sequence_id if item.HasField("prefix_sequence_id") else None,
        "max_length": item.max_length if item.HasField("max_length") else None,
    }


def _sampling(item: ProposeItem | VerifyItem) -> common_pb2.Sampling | None:
    if item.sampling is None:
        return None
    return common_pb2.Sampling(**{**vars(item.sampling), "logit_bias": dict(item.sampling.logit_bias)})


def _read_sampling(field: str, sampling: common_pb2.Sampling) -> SamplingParams:
    for name in ("stop_token_ids", "logit_bias"):
        _check_number(f"{field}.{name}", len(getattr(sampling, name)), MAX_SAMPLING_TOKENS)
    numbers: dict[str, Any] = {name: getattr(sampling, name) for name in RANGES if name != "logit_bias"}
    numbers |= {name: numbers[name] or 1.0 for name in _UNSET_MEANS_ONE}
    checked: dict[str, Any] = {name: in_range(f"{field}.{name}", numbers[name], RANGES[name]) for name in numbers}
    biases = sorted(sampling.logit_bias.items())
    return SamplingParams(
        **checked,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        logit_bias=tuple(
            (token, in_range(f"{field}.logit_bias", bias, RANGES["logit_bias"])) for token, bias in biases
        ),
        seed=sampling.seed,
        prompt_length=sampling.prompt_length,
    )
