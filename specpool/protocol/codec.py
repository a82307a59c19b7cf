"""Converts between dataclasses and the protobuf messages of both workers.

This is the only codec of the worker protocol. `specpool.protocol.responses` reads and checks responses. Functions that
read a request also validate it: InvalidArgumentError names the field.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.features import (
    MAX_FEATURE_BYTES,
    MAX_FEATURE_LAYERS,
    MAX_FEATURE_WINDOW,
    NUMBER_BYTES,
    WantedFeatures,
)
from specpool.protocol.prefixes import MAX_EVICTED_PAGES, MAX_NAMESPACE_BYTES
from specpool.protocol.rounds import (
    MAX_ITEM_BRANCHES,
    MAX_ITEM_UNVERIFIED,
    Branch,
    ItemStatus,
    OwnDraft,
    OwnDraftItem,
    Proposal,
    ProposeItem,
    RoundLimits,
    Verdict,
    VerifyItem,
)
from specpool.protocol.sampling import MAX_TAG_TOKENS, RANGES, Reasoning, SamplingParams, TokenLogprobs, in_range
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import WorkerInfo
from specpool.v1 import common_pb2, draft_worker_pb2, target_worker_pb2

_STATUSES: dict[ItemStatus, Any] = {
    status: common_pb2.ItemStatus.Value(f"ITEM_STATUS_{status.name}") for status in ItemStatus
}
# Unset floats are 0 on the wire. For these fields, 0 means 1: no effect.
_UNSET_MEANS_ONE = ("top_p", "repetition_penalty")

# Limits of requests to workers, far above what coordinators send. They bound the work that a hostile client can cause.
MAX_COORDINATOR_ID_LENGTH = 128
MAX_ITEM_DRAFT_TOKENS = 1024
MAX_ITEM_LOGPROBS = 256
MAX_SAMPLING_TOKENS = 2048
MAX_GRAMMAR_LENGTH = 2**18
MAX_CHANCES = 1024
MAX_RELEASED = 2**20
MAX_VOCAB_SIZE = 2**24


# --- Rounds of the draft worker


def propose_request(
    coordinator_id: str,
    round_id: int,
    items: Iterable[ProposeItem],
    chances: Iterable[float],
    step_cost: float,
    traceparent: str = "",
    translation_id: str = "",
) -> draft_worker_pb2.ProposeRequest:
    """Build the request of a draft round."""
    return draft_worker_pb2.ProposeRequest(
        coordinator_id=coordinator_id,
        round_id=round_id,
        chances=chances,
        step_cost=step_cost,
        traceparent=traceparent,
        translation_id=translation_id,
        items=[draft_worker_pb2.ProposeItem(**_item_fields(item)) for item in items],
    )


def read_propose_items(request: draft_worker_pb2.ProposeRequest, limits: RoundLimits) -> list[ProposeItem]:
    """Read the items of a draft round. Raises InvalidArgumentError."""
    _check_maximum("items", len(request.items), limits.max_items)
    seen: set[int] = set()
    items = []
    for index, item in enumerate(request.items):
        field = f"items[{index}]"
        fields = _common_fields(field, item)
        _check_item(field, item, limits, seen)
        _check_maximum(f"{field}.num_draft_tokens", item.num_draft_tokens, MAX_ITEM_DRAFT_TOKENS)
        _check_branches(field, item)
        if item.num_branches and request.translation_id:
            raise InvalidArgumentError(f"{field}.num_branches", "must be 0 with translation_id")
        next_chance = item.next_chance if item.HasField("next_chance") else 1.0
        items.append(
            ProposeItem(
                **fields,
                num_draft_tokens=item.num_draft_tokens,
                min_chance=_checked(f"{field}.min_chance", item.min_chance),
                next_chance=_checked(f"{field}.next_chance", next_chance),
                num_branches=item.num_branches,
                num_unverified=item.num_unverified,
                features=item.features,
            )
        )
    _check_logits(sum(max(1 + item.num_unverified, item.num_branches) for item in items), limits)
    _check_maximum("features", sum(len(item.features) for item in items), MAX_FEATURE_BYTES)
    return items


def read_step_cost(request: draft_worker_pb2.ProposeRequest | target_worker_pb2.VerifyRequest) -> float:
    """Read the minimum expected gain of a draft step. Raises InvalidArgumentError."""
    return _checked("step_cost", request.step_cost, maximum=math.inf)


def read_chances(request: draft_worker_pb2.ProposeRequest | target_worker_pb2.VerifyRequest) -> list[float]:
    """Read the acceptance probabilities by the draft's own probability. Raises InvalidArgumentError."""
    _check_maximum("chances", len(request.chances), MAX_CHANCES)
    return [_checked(f"chances[{index}]", chance) for index, chance in enumerate(request.chances)]


def propose_response(
    round_id: int, proposals: Iterable[Proposal], spent: Mapping[str, int], instance_id: str
) -> draft_worker_pb2.ProposeResponse:
    """Build the response to a draft round. `spent`: nanoseconds by field name."""
    results = []
    for proposal in proposals:
        branches = _branch_messages(proposal.branches)
        results.append(draft_worker_pb2.ProposeResult(**_result_fields(proposal) | {"branches": branches}))
    return draft_worker_pb2.ProposeResponse(round_id=round_id, results=results, instance_id=instance_id, **spent)


def _branch_messages(branches: Iterable[Branch]) -> list[common_pb2.Branch]:
    return [common_pb2.Branch(**vars(branch)) for branch in branches]


def use_tokenizer_request(
    coordinator_id: str, files: TokenizerFiles, vocab_size: int
) -> draft_worker_pb2.UseTokenizerRequest:
    """Build the request that sends the target's tokenizer to a draft worker."""
    return draft_worker_pb2.UseTokenizerRequest(
        coordinator_id=coordinator_id,
        tokenizer_json=files.tokenizer_json,
        vocab_size=vocab_size,
        eos_token_ids=files.eos_token_ids,
        special_tokens=files.special_tokens,
    )


def read_use_tokenizer(request: draft_worker_pb2.UseTokenizerRequest) -> tuple[TokenizerFiles, int]:
    """Read a target's tokenizer and vocabulary size. Raises InvalidArgumentError."""
    require_coordinator(request.coordinator_id)
    _check_maximum("vocab_size", request.vocab_size, MAX_VOCAB_SIZE)
    _check_maximum("eos_token_ids", len(request.eos_token_ids), MAX_SAMPLING_TOKENS)
    files = TokenizerFiles(
        tokenizer_json=request.tokenizer_json,
        chat_template="",
        special_tokens=dict(request.special_tokens),
        eos_token_ids=tuple(request.eos_token_ids),
    )
    return files, request.vocab_size


# --- Rounds of the target worker


def verify_request(
    coordinator_id: str,
    round_id: int,
    items: Sequence[VerifyItem],
    traceparent: str = "",
    may_join: bool = False,
    features: WantedFeatures | None = None,
    hints: tuple[Iterable[float], float] = ((), 0.0),
) -> target_worker_pb2.VerifyRequest:
    """Build the request of a target round.

    `features`: for the items that want them; None: only a carried draft reads them. `hints`: `chances` and `step_cost`
    for the carried draft.
    """
    wanted = features if any(item.want_features for item in items) else None
    chances, step_cost = hints if any(item.own_draft is not None for item in items) else ((), 0.0)
    return target_worker_pb2.VerifyRequest(
        coordinator_id=coordinator_id,
        round_id=round_id,
        traceparent=traceparent,
        may_join=may_join,
        feature_layers=() if wanted is None else wanted.spec.layers,
        feature_window=0 if wanted is None else wanted.window,
        chances=chances,
        step_cost=step_cost,
        items=[target_worker_pb2.VerifyItem(**_verify_fields(item)) for item in items],
    )


def read_verify_items(request: target_worker_pb2.VerifyRequest, limits: RoundLimits) -> list[VerifyItem]:
    """Read the items of a target round. Raises InvalidArgumentError."""
    _check_maximum("items", len(request.items), limits.max_items)
    for index, item in enumerate(request.items):
        _check_maximum(f"items[{index}].branches", len(item.branches), MAX_ITEM_BRANCHES)
        _check_own_draft(f"items[{index}].own_draft", item, limits)
    _check_logits(sum(_max_num_draft_tokens(item) + 1 for item in request.items), limits)
    seen: set[int] = set()
    items = []
    for index, item in enumerate(request.items):
        field, drafts = f"items[{index}]", tuple(item.draft_token_ids)
        continues = item.HasField("after_round_id")
        fields = _continued_fields(field, item, request.round_id) if continues else _common_fields(field, item)
        _check_item(field, item, limits, seen)
        _check_maximum(f"{field}.draft_token_ids", len(drafts), MAX_ITEM_DRAFT_TOKENS)
        _check_maximum(f"{field}.logprobs", item.logprobs, MAX_ITEM_LOGPROBS)
        _check_maximum(f"{field}.max_draft_tokens", item.max_draft_tokens, MAX_ITEM_DRAFT_TOKENS)
        if drafts and item.prefill_only:
            raise InvalidArgumentError(f"{field}.draft_token_ids", "must be empty with prefill_only")
        _check_token_ids(f"{field}.draft_token_ids", drafts, limits)
        items.append(
            VerifyItem(
                **fields,
                draft_token_ids=drafts,
                branches=_read_branches(field, item, limits),
                prefill_only=item.prefill_only,
                logprobs=_optional(item, "logprobs"),
                max_draft_tokens=item.max_draft_tokens,
                want_features=item.want_features,
                own_draft=_read_own_draft(f"{field}.own_draft", item.own_draft) if item.HasField("own_draft") else None,
            )
        )
    _check_features(request, items, limits)
    return items


def _check_features(request: target_worker_pb2.VerifyRequest, items: Iterable[VerifyItem], limits: RoundLimits) -> None:
    layers, window = request.feature_layers, request.feature_window
    _check_maximum("feature_layers", len(layers), MAX_FEATURE_LAYERS)
    _check_maximum("feature_window", window, MAX_FEATURE_WINDOW)
    if layers and not limits.num_layers:
        raise InvalidArgumentError("feature_layers", "must be empty: this worker returns no features")
    if not all(0 < layer <= limits.num_layers for layer in layers):
        raise InvalidArgumentError("feature_layers", f"must be from 1 to {limits.num_layers}")
    if layers and not window:
        raise InvalidArgumentError("feature_window", "must be positive with feature_layers")
    # A continued item has no token yet, but gets one.
    rows = sum(max(1, each.num_features(window, each.max_num_draft_tokens)) for each in items if each.want_features)
    if rows and not layers and not limits.carries_draft:
        raise InvalidArgumentError("feature_layers", "must not be empty if an item wants features")
    _check_maximum("features", rows * len(layers) * limits.hidden_size * NUMBER_BYTES, MAX_FEATURE_BYTES)


def _max_num_draft_tokens(item: target_worker_pb2.VerifyItem) -> int:
    drafted = max([len(item.draft_token_ids), *(len(branch.draft_token_ids) for branch in item.branches)])
    return max(drafted, item.max_draft_tokens, item.own_draft.max_verified)


def _check_own_draft(field: str, item: target_worker_pb2.VerifyItem, limits: RoundLimits) -> None:
    if item.HasField("own_draft") and not limits.carries_draft:
        raise InvalidArgumentError(field, "must be unset: this worker carries no draft")
    for name in ("max_verified", "num_draft_tokens"):
        _check_maximum(f"{field}.{name}", getattr(item.own_draft, name), MAX_ITEM_DRAFT_TOKENS)


def _read_own_draft(field: str, message: target_worker_pb2.OwnDraftItem) -> OwnDraftItem:
    next_chance = message.next_chance if message.HasField("next_chance") else 1.0
    return OwnDraftItem(
        message.max_verified,
        message.num_draft_tokens,
        message.max_length,
        _checked(f"{field}.min_chance", message.min_chance),
        _checked(f"{field}.next_chance", next_chance),
    )


def _read_branches(field: str, item: target_worker_pb2.VerifyItem, limits: RoundLimits) -> tuple[Branch, ...]:
    if not item.branches:
        return ()
    if not item.HasField("after_round_id"):
        raise InvalidArgumentError(f"{field}.branches", "must be empty without after_round_id")
    if item.draft_token_ids:
        raise InvalidArgumentError(f"{field}.draft_token_ids", "must be empty with branches")
    branches = []
    for index, message in enumerate(item.branches):
        name, drafts = f"{field}.branches[{index}]", tuple(message.draft_token_ids)
        _check_maximum(f"{name}.draft_token_ids", len(drafts), MAX_ITEM_DRAFT_TOKENS)
        _check_token_ids(f"{name}.draft_token_ids", drafts, limits)
        branches.append(Branch(message.num_accepted, message.token_id, drafts))
    if len({branch.outcome for branch in branches}) < len(branches):
        raise InvalidArgumentError(f"{field}.branches", "must have at most one branch per outcome")
    return tuple(branches)


def verify_response(
    round_id: int,
    verdicts: Iterable[Verdict],
    spent: Mapping[str, int],
    instance_id: str,
    evicted_pages: Sequence[bytes] = (),
    draft_rows: Sequence[int] = (),
) -> target_worker_pb2.VerifyResponse:
    """Build the response to a target round. `spent`: nanoseconds by field name. `draft_rows`: of the carried draft."""
    assert len(evicted_pages) <= MAX_EVICTED_PAGES
    results = []
    for verdict in verdicts:
        logprobs = [logprobs_message(at_position) for at_position in verdict.logprobs]
        own_draft = None if verdict.own_draft is None else _own_draft_fields(verdict.own_draft)
        fields = _result_fields(verdict) | {"logprobs": logprobs, "own_draft": own_draft}
        results.append(target_worker_pb2.VerifyResult(**fields))
    return target_worker_pb2.VerifyResponse(
        round_id=round_id,
        results=results,
        instance_id=instance_id,
        evicted_pages=evicted_pages,
        draft_rows=draft_rows,
        **spent,
    )


def _own_draft_fields(draft: OwnDraft) -> dict[str, Any]:
    fields = _result_fields(draft)
    del fields["sequence_id"], fields["branches"]
    return fields


def logprobs_message(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Build the message of the log-probabilities at one position."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_token_ids=logprobs.top_token_ids, top_logprobs=logprobs.top_logprobs
    )


# --- Other messages


def require_coordinator(coordinator_id: str) -> None:
    """Check a coordinator id: sequences without an owner would never expire. Raises InvalidArgumentError."""
    if not coordinator_id:
        raise InvalidArgumentError("coordinator_id", "must not be empty")
    if len(coordinator_id) > MAX_COORDINATOR_ID_LENGTH:
        reason = f"has {len(coordinator_id)} characters, more than the maximum of {MAX_COORDINATOR_ID_LENGTH}"
        raise InvalidArgumentError("coordinator_id", reason)


def release_request(coordinator_id: str, sequence_ids: Iterable[int] | None) -> common_pb2.ReleaseRequest:
    """Build the request that frees sequences. None: all sequences of the coordinator."""
    return common_pb2.ReleaseRequest(
        coordinator_id=coordinator_id, sequence_ids=sequence_ids or (), all=sequence_ids is None
    )


def read_release(request: common_pb2.ReleaseRequest) -> list[int] | None:
    """Read the sequences to free. None: all sequences of the coordinator. Raises InvalidArgumentError."""
    _check_maximum("sequence_ids", len(request.sequence_ids), MAX_RELEASED)
    return None if request.all else list(request.sequence_ids)


def model_message(info: WorkerInfo) -> common_pb2.ModelInfo:
    """Build the description of a worker's model."""
    equivalence = common_pb2.EQUIVALENCE_BITWISE if info.bitwise else common_pb2.EQUIVALENCE_NUMERIC
    return common_pb2.ModelInfo(equivalence=equivalence, **_shared_fields(common_pb2.ModelInfo, info))


def worker_info_response(info: WorkerInfo) -> common_pb2.GetWorkerInfoResponse:
    """Build the description of a worker, and of the draft that it carries."""
    ranks = [common_pb2.RankMemory(**vars(rank)) for rank in info.ranks]
    load = common_pb2.WorkerLoad(**_shared_fields(common_pb2.WorkerLoad, info) | {"ranks": ranks})
    costs = None
    if info.step_seconds or info.max_rows:
        costs = common_pb2.StepCosts(
            rows=info.step_seconds.keys(),
            seconds=info.step_seconds.values(),
            cached=info.step_cached,
            seconds_per_cached=info.seconds_per_cached,
            max_rows=info.max_rows,
        )
    draft = None if info.draft is None else worker_info_response(replace(info.draft, instance_id=info.instance_id))
    return common_pb2.GetWorkerInfoResponse(
        model=model_message(info), load=load, costs=costs, instance_id=info.instance_id, draft=draft
    )


def tokenizer_response(files: TokenizerFiles, instance_id: str) -> target_worker_pb2.GetTokenizerResponse:
    """Build the message of a tokenizer."""
    return target_worker_pb2.GetTokenizerResponse(**asdict(files), instance_id=instance_id)


# --- Fields


def _shared_fields(message: Any, info: WorkerInfo) -> dict[str, Any]:
    """Return the fields that a message shares by name with `WorkerInfo`."""
    names = {field.name for field in message.DESCRIPTOR.fields}
    return {name: value for name, value in vars(info).items() if name in names}


def _item_fields(item: ProposeItem | VerifyItem) -> dict[str, Any]:
    sampling = item.sampling
    if sampling is None:
        return vars(item)
    reasoning = None if sampling.reasoning is None else vars(sampling.reasoning)
    message = common_pb2.Sampling(**{**vars(sampling), "logit_bias": dict(sampling.logit_bias), "reasoning": reasoning})
    return {**vars(item), "sampling": message}


def _verify_fields(item: VerifyItem) -> dict[str, Any]:
    fields = _item_fields(item)
    if item.branches:
        fields = {**fields, "branches": _branch_messages(item.branches)}
    if item.own_draft is not None:
        fields = {**fields, "own_draft": item.own_draft._asdict()}
    return fields


def _result_fields(result: Proposal | Verdict) -> dict[str, Any]:
    """Return the fields of a result message. `num_cached_tokens` is named `cached_length` on the wire."""
    fields = {**vars(result), "status": _STATUSES[result.status]}
    return fields | {"cached_length": fields.pop("num_cached_tokens")}


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _common_fields(field: str, item: Any) -> dict[str, Any]:
    """Return the arguments of `SequenceItem`. Raises InvalidArgumentError."""
    if not item.token_ids:
        raise InvalidArgumentError(f"{field}.token_ids", "must not be empty")
    return {
        "sequence_id": item.sequence_id,
        "base_length": item.base_length,
        "token_ids": tuple(item.token_ids),
        "sampling": _read_sampling(f"{field}.sampling", item.sampling) if item.HasField("sampling") else None,
        "cache_namespace": _optional(item, "cache_namespace"),
        "expected_prefix_length": item.expected_prefix_length,
    }


def _continued_fields(field: str, item: target_worker_pb2.VerifyItem, round_id: int) -> dict[str, Any]:
    """Return the arguments of `SequenceItem` for a sequence that continues. Raises InvalidArgumentError."""
    unset = ("base_length", "token_ids", "prefill_only", "expected_prefix_length")
    given = [name for name in unset if getattr(item, name)]
    given += [name for name in ("sampling", "cache_namespace") if item.HasField(name)]
    if given:
        raise InvalidArgumentError(f"{field}.{given[0]}", "must be unset with after_round_id")
    if item.after_round_id >= round_id:
        reason = f"{item.after_round_id} must be below {round_id}, the round"
        raise InvalidArgumentError(f"{field}.after_round_id", reason)
    return {
        "sequence_id": item.sequence_id,
        "base_length": 0,
        "token_ids": (),
        "after_round_id": item.after_round_id,
    }


def _read_sampling(field: str, sampling: common_pb2.Sampling) -> SamplingParams:
    for name in ("stop_token_ids", "logit_bias"):
        _check_maximum(f"{field}.{name}", len(getattr(sampling, name)), MAX_SAMPLING_TOKENS)
    _check_maximum(f"{field}.grammar", len(sampling.grammar), MAX_GRAMMAR_LENGTH)
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
        grammar=sampling.grammar,
        reasoning=_read_reasoning(f"{field}.reasoning", sampling.reasoning) if sampling.HasField("reasoning") else None,
    )


def _read_reasoning(field: str, reasoning: common_pb2.Reasoning) -> Reasoning:
    for name in ("begin", "end", "leading"):
        _check_maximum(f"{field}.{name}", len(getattr(reasoning, name)), MAX_TAG_TOKENS)
    for name in ("begin", "end"):
        if not getattr(reasoning, name):
            raise InvalidArgumentError(f"{field}.{name}", "must not be empty")
    return Reasoning(
        begin=tuple(reasoning.begin),
        end=tuple(reasoning.end),
        starts_inside=reasoning.starts_inside,
        max_tokens=_optional(reasoning, "max_tokens"),
        grammar_after=reasoning.grammar_after,
        leading=tuple(reasoning.leading),
    )


# --- Checks, which raise InvalidArgumentError


def _check_item(field: str, item: Any, limits: RoundLimits, seen: set[int]) -> None:
    """Check the common fields of an item. `seen`: sequence ids of the round so far; the item's id is added."""
    if item.sequence_id in seen:
        raise InvalidArgumentError(f"{field}.sequence_id", f"{item.sequence_id} occurs twice in the round")
    seen.add(item.sequence_id)
    _check_maximum(f"{field}.cache_namespace", len(item.cache_namespace), MAX_NAMESPACE_BYTES)
    if item.expected_prefix_length and item.expected_prefix_length >= len(item.token_ids):
        reason = f"{item.expected_prefix_length} must be below the number of token_ids, {len(item.token_ids)}"
        raise InvalidArgumentError(f"{field}.expected_prefix_length", reason)
    _check_token_ids(f"{field}.token_ids", item.token_ids, limits)


def _check_branches(field: str, item: draft_worker_pb2.ProposeItem) -> None:
    _check_maximum(f"{field}.num_branches", item.num_branches, MAX_ITEM_BRANCHES)
    _check_maximum(f"{field}.num_unverified", item.num_unverified, MAX_ITEM_UNVERIFIED)
    if item.num_branches and not item.num_draft_tokens:
        raise InvalidArgumentError(f"{field}.num_draft_tokens", "must be positive with num_branches")
    if item.num_unverified and not item.num_branches:
        raise InvalidArgumentError(f"{field}.num_unverified", "must be 0 without num_branches")
    if item.num_unverified >= len(item.token_ids):
        reason = f"{item.num_unverified} must be below {len(item.token_ids)}, the number of token_ids"
        raise InvalidArgumentError(f"{field}.num_unverified", reason)


def _check_logits(logits: int, limits: RoundLimits) -> None:
    if logits > limits.max_logits:
        reason = f"need the logits of {logits} positions, more than the maximum of {limits.max_logits}"
        raise InvalidArgumentError("items", reason)


def _check_token_ids(field: str, token_ids: Sequence[int], limits: RoundLimits) -> None:
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        raise InvalidArgumentError(field, f"token id {largest} must be below the vocabulary size {limits.vocab_size}")


def _check_maximum(field: str, number: int, maximum: int) -> None:
    if number > maximum:
        raise InvalidArgumentError(field, f"{number} is more than the maximum of {maximum}")


def _checked(field: str, value: float, maximum: float = 1.0) -> float:
    if not 0 <= value <= maximum:
        raise InvalidArgumentError(field, f"{value:g} must be from 0 to {maximum:g}")
    return value
