"""Reading the answers of workers. No answer is trusted: one that does not fit its request raises MisfitError.

A worker that is broken, restarted as another one, or out of step may cost time, but never a wrong token.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, SequenceItem, Verdict, VerifyItem
from specpool.protocol.sampling import TokenLogprobs
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import TENSOR_PARALLEL_SUMS, StepCosts
from specpool.v1 import common_pb2, draft_worker_pb2, target_worker_pb2

STATUSES = {common_pb2.ItemStatus.Value(f"ITEM_STATUS_{status.name}"): status for status in ItemStatus}
MOST_VOCABULARY, MOST_POSITIONS, MOST_SLOTS = 2**24, 2**31, 2**16
MOST_DESCRIPTION_BYTES = 2**16
# What rounding may add to a probability of 1 or to a log-probability of 0.
ROUNDING = 1e-3


M = TypeVar("M")


class MisfitError(Exception):
    """A worker's answer does not fit the request."""


def read_verdicts(
    response: target_worker_pb2.VerifyResponse, round_id: int, items: Sequence[VerifyItem], vocab_size: int
) -> list[Verdict]:
    """The target worker's answer: one verdict for each item of the round, in their order. MisfitError."""
    statuses = _read_statuses(response, round_id, items)
    answered = zip(response.results, statuses, items, strict=True)
    return [_read_verdict(result, status, item, vocab_size) for result, status, item in answered]


def _read_verdict(result: Any, status: ItemStatus, item: VerifyItem, vocab_size: int) -> Verdict:
    if status is not ItemStatus.OK:
        return Verdict(item.sequence_id, status)
    tokens, drafts = tuple(result.token_ids), item.draft_token_ids
    accepted = max(0, len(tokens) - 1)
    if item.prefill_only:
        _require(not tokens, "it chose a token for a prompt chunk")
    else:
        _require(0 < len(tokens) <= len(drafts) + 1, f"it gained {len(tokens)} tokens from {len(drafts)} draft tokens")
        _require(max(tokens) < vocab_size, "a token is outside its vocabulary")
        _require(tokens[:accepted] == drafts[:accepted], "the accepted tokens are not the draft's")
        _require(tokens[accepted:] != drafts[accepted : accepted + 1], "it rejected a draft token and chose the same")
    expected = item.base_length + len(item.token_ids) + accepted
    _require(result.cached_length == expected, f"it cached {result.cached_length} positions instead of {expected}")
    return Verdict(item.sequence_id, status, tokens, expected, _read_logprobs(result, item, vocab_size))


def _read_logprobs(result: Any, item: VerifyItem, vocab_size: int) -> tuple[TokenLogprobs, ...]:
    if item.logprobs is None:
        return ()
    _require(len(result.logprobs) == len(result.token_ids), "not every token has its log-probability")
    most = min(item.logprobs, vocab_size)
    for found in result.logprobs:
        _require(len(found.top_token_ids) == len(found.top_logprobs) == most, "log-probabilities are missing")
        _require(all(token < vocab_size for token in found.top_token_ids), "a token is outside its vocabulary")
        # Comparison with NaN is false.
        _require(all(value <= ROUNDING for value in (found.logprob, *found.top_logprobs)), "a log-probability is wrong")
    return tuple(
        TokenLogprobs(found.logprob, tuple(zip(found.top_token_ids, found.top_logprobs, strict=True)))
        for found in result.logprobs
    )


def read_proposals(
    response: draft_worker_pb2.ProposeResponse, round_id: int, items: Sequence[ProposeItem]
) -> list[Proposal]:
    """The draft worker's answer: one proposal for each item of the round, none longer than requested. MisfitError."""
    statuses = _read_statuses(response, round_id, items)
    answered = zip(response.results, statuses, items, strict=True)
    return [_read_proposal(result, status, item) for result, status, item in answered]


def _read_proposal(result: Any, status: ItemStatus, item: ProposeItem) -> Proposal:
    if status is not ItemStatus.OK:
        return Proposal(item.sequence_id, status)
    drafted, confidences = tuple(result.draft_token_ids), tuple(result.confidences)
    _require(len(drafted) <= item.num_draft_tokens, "it drafted more tokens than it was asked for")
    _require(len(confidences) in (0, len(drafted)), "not every draft token has its confidence")
    _require(all(0 <= confidence <= 1 + ROUNDING for confidence in confidences), "a confidence is no probability")
    expected = item.base_length + len(item.token_ids) + max(0, len(drafted) - 1)
    _require(result.cached_length == expected, f"it cached {result.cached_length} positions instead of {expected}")
    return Proposal(item.sequence_id, status, drafted, expected, tuple(min(1.0, value) for value in confidences))


def read_step_costs(response: common_pb2.GetWorkerInfoResponse) -> StepCosts:
    """The durations of a worker's passes, as far as it has measured them. Numbers that make no sense are left out."""
    costs = response.costs
    measured = zip(costs.rows, costs.seconds, strict=False)
    per_cached = costs.seconds_per_cached
    return StepCosts(
        step_seconds={rows: seconds for rows, seconds in measured if rows > 0 and 0 < seconds < math.inf},
        step_cached=costs.cached,
        seconds_per_cached=per_cached if 0 <= per_cached < math.inf else 0.0,
        max_rows=costs.max_rows,
    )


def decoded(message: M | None, what: str) -> M:
    """The message; MisfitError if there is none, which is what gRPC makes of bytes that cannot be decoded."""
    if message is None:
        raise MisfitError(f"its {what} is no message of the expected type")
    return message


def check_worker_info(response: common_pb2.GetWorkerInfoResponse) -> None:
    """Raises MisfitError for a description that no worker could have."""
    model, load = response.model, response.load
    _require(response.ByteSize() <= MOST_DESCRIPTION_BYTES, f"it takes more than {MOST_DESCRIPTION_BYTES} bytes")
    _require(model.equivalence in common_pb2.Equivalence.values(), f"its equivalence is {model.equivalence}")
    _require(0 < model.vocab_size <= MOST_VOCABULARY, f"its vocabulary has {model.vocab_size} tokens")
    _require(0 < model.max_model_len <= MOST_POSITIONS, f"its sequences have {model.max_model_len} positions")
    _require(load.slots_total <= MOST_SLOTS, f"it has {load.slots_total} slots")
    ranks, described = max(1, model.tensor_parallel), len(load.ranks)
    _require(described == (ranks if ranks > 1 else 0), f"it has {ranks} ranks and describes {described}")
    sums = TENSOR_PARALLEL_SUMS if ranks > 1 else ("",)
    _require(model.tensor_parallel_sums in sums, f"its tensor_parallel_sums are not those of {ranks} ranks")


def read_tokenizer(response: target_worker_pb2.GetTokenizerResponse) -> TokenizerFiles:
    """The tokenizer of the target worker, as it is."""
    return TokenizerFiles(
        tokenizer_json=response.tokenizer_json,
        chat_template=response.chat_template,
        special_tokens=dict(response.special_tokens),
        eos_token_ids=tuple(response.eos_token_ids),
    )


def _read_statuses(response: Any, round_id: int, items: Iterable[SequenceItem]) -> list[ItemStatus]:
    """The status of each item, once the answer is known to be to this round."""
    _require(response.round_id == round_id, f"it answered round {response.round_id} instead of {round_id}")
    asked, answered = [item.sequence_id for item in items], [result.sequence_id for result in response.results]
    _require(answered == asked, "its results are not for the sequences of the round, in their order")
    _require(all(result.status in STATUSES for result in response.results), "a status is unknown")
    return [STATUSES[result.status] for result in response.results]


def _require(fits: bool, reason: str) -> None:
    if not fits:
        raise MisfitError(reason)
