"""Reads and checks responses of workers. A response that does not fit its request raises InvalidResponseError.

A broken, replaced or desynchronized worker may cost time, but never a wrong token.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from specpool.protocol.codec import MAX_ITEM_DRAFT_TOKENS, MAX_VOCAB_SIZE
from specpool.protocol.features import MAX_FEATURE_LAYERS, MAX_FEATURE_WIDTH, WantedFeatures
from specpool.protocol.prefixes import DIGEST_BYTES, MAX_EVICTED_PAGES
from specpool.protocol.rounds import (
    Branch,
    ItemStatus,
    OwnDraft,
    Proposal,
    ProposeItem,
    SequenceItem,
    Verdict,
    VerifyItem,
)
from specpool.protocol.sampling import NO_LOGPROBS, Logprobs
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.protocol.worker_info import (
    TENSOR_PARALLEL_SUMS,
    TRANSLATIONS,
    RankMemory,
    TranslationInfo,
    WorkerInfo,
)
from specpool.v1 import common_pb2, draft_worker_pb2, target_worker_pb2

STATUSES = {common_pb2.ItemStatus.Value(f"ITEM_STATUS_{status.name}"): status for status in ItemStatus}
RANK_FIELDS = [field.name for field in common_pb2.RankMemory.DESCRIPTOR.fields]
MAX_POSITIONS, MAX_SLOTS = 2**31, 2**16
MAX_DESCRIPTION_BYTES = 2**16
MAX_TRANSLATION_ID = 128
MAX_ERROR_CHARACTERS = 1000
# Tolerance of a probability above 1, or of a log-probability above 0.
ROUNDING = 1e-3

M = TypeVar("M")

MAX_SMALL_BYTES = 2**16
"""Limit of all responses except tokenizers and rounds. Responses of rounds may always be this large."""
# Upper bounds on encoded sizes: a result with its error but without tokens, a token, and a log-probability.
ITEM_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 8192, 16, 16
EVICTION_BYTES = MAX_EVICTED_PAGES * (2 + DIGEST_BYTES)


class InvalidResponseError(Exception):
    """A worker's response does not fit the request."""


def read_verdicts(
    response: target_worker_pb2.VerifyResponse,
    round_id: int,
    items: Sequence[VerifyItem],
    vocab_size: int,
    features: WantedFeatures | None = None,
) -> list[Verdict]:
    """Read the response to a target round: one verdict per item, in order. Raises InvalidResponseError.

    Features of a wrong size are dropped, because no token depends on them; see `drops_features`.
    """
    statuses = _read_statuses(response, round_id, items)
    answered = zip(response.results, statuses, items, strict=True)
    verdicts = [_read_verdict(result, status, item, vocab_size) for result, status, item in answered]
    if features is not None:
        for result, verdict, item in zip(response.results, verdicts, items, strict=True):
            rows = item.num_features(features.window, max(0, len(verdict.token_ids) - 1), verdict.prefix_length)
            if len(result.features) == rows * features.spec.row_bytes and verdict.num_cached_tokens:
                verdict.features = result.features
    return verdicts


def read_evicted_pages(response: target_worker_pb2.VerifyResponse) -> list[bytes]:
    """Read the digests of the evicted pages. Raises InvalidResponseError."""
    evicted = list(response.evicted_pages)
    _require(len(evicted) <= MAX_EVICTED_PAGES, "too many evicted pages")
    _require(all(len(digest) == DIGEST_BYTES for digest in evicted), "wrong size of a page digest")
    return evicted


def drops_features(response: target_worker_pb2.VerifyResponse, verdicts: Iterable[Verdict]) -> bool:
    """Whether `read_verdicts` has dropped features of a sequence that continued."""
    pairs = zip(response.results, verdicts, strict=True)
    return any(each.num_cached_tokens and len(result.features) != len(each.features) for result, each in pairs)


def _read_verdict(result: Any, status: ItemStatus, item: VerifyItem, vocab_size: int) -> Verdict:
    if status is not ItemStatus.OK or not item.token_ids:  # nobody waits for a sequence that did not continue
        return Verdict(item.sequence_id, status, error=result.error[:MAX_ERROR_CHARACTERS])
    own_draft = None if item.own_draft is None else _read_own_draft(result.own_draft, item, vocab_size)
    verified = () if own_draft is None else own_draft.verified_ids
    tokens, drafts, forced = tuple(result.token_ids), verified or item.draft_token_ids, result.num_forced_tokens
    accepted = max(0, len(tokens) - 1)
    # Messages are built only on failure: this runs for every sequence of every round.
    if item.prefill_only:
        _require(not tokens, "a prompt chunk gained a token")
    else:
        if forced > max(0, item.max_draft_tokens - len(drafts)):
            raise InvalidResponseError(f"{forced} tokens appended to {len(drafts)} draft tokens")
        if not 0 < len(tokens) <= len(drafts) + forced + 1:
            raise InvalidResponseError(f"{len(tokens)} tokens gained from {len(drafts) + forced} draft tokens")
        if (largest := max(tokens)) >= vocab_size:
            raise InvalidResponseError(f"token id {largest} is outside the vocabulary")
        known = min(accepted, len(drafts))
        _require(tokens[:known] == drafts[:known], "the accepted tokens differ from the draft tokens")
    expected, found = item.base_length + len(item.token_ids) + accepted, result.prefix_length
    _check_cached(result, expected)
    if not item.expected_prefix_length <= found < len(item.token_ids):
        raise InvalidResponseError(f"invalid prefix_length {found}, expected at least {item.expected_prefix_length}")
    reusable = result.reusable_length if result.HasField("reusable_length") else None
    if reusable is not None and reusable > expected:
        raise InvalidResponseError(f"invalid reusable_length {reusable}, expected at most {expected}")
    return Verdict(
        item.sequence_id,
        status,
        tokens,
        expected,
        _read_logprobs(result, item, vocab_size),
        forced,
        found,
        own_draft=own_draft,
        reusable_length=reusable,
    )


def _read_own_draft(result: Any, item: VerifyItem, vocab_size: int) -> OwnDraft:
    """Read the worker's own draft. Its status may be unset if there is none."""
    assert item.own_draft is not None
    drafted, confidences = _read_draft(result, MAX_ITEM_DRAFT_TOKENS)
    if result.num_verified > (limit := min(len(drafted), item.own_draft.max_verified)):
        raise InvalidResponseError(f"{result.num_verified} own draft tokens verified; the limit is {limit}")
    _require(all(token < vocab_size for token in drafted), "an own draft token is outside the vocabulary")
    status = STATUSES.get(result.status, ItemStatus.CACHE_MISS)
    cached = result.cached_length
    return OwnDraft(item.sequence_id, status, drafted, cached, confidences, num_verified=result.num_verified)


def read_draft_rows(response: target_worker_pb2.VerifyResponse) -> list[int]:
    """Read the rows of each pass of the carried draft. Raises InvalidResponseError."""
    rows = list(response.draft_rows)
    _require(len(rows) <= MAX_ITEM_DRAFT_TOKENS and 0 not in rows, "draft_rows of the carried draft are invalid")
    return rows


def _read_logprobs(result: Any, item: VerifyItem, vocab_size: int) -> Logprobs:
    if item.logprobs is None:
        return NO_LOGPROBS
    _require(len(result.logprobs) == len(result.token_ids), "a token has no log-probability")
    expected = min(item.logprobs, vocab_size)
    for entry in result.logprobs:
        _require(len(entry.top_token_ids) == len(entry.top_logprobs) == expected, "log-probabilities are missing")
        _require(all(token < vocab_size for token in entry.top_token_ids), "a top token id is outside the vocabulary")
        # Comparisons with NaN are false.
        valid = all(value <= ROUNDING for value in (entry.logprob, *entry.top_logprobs))
        _require(valid, "a log-probability is positive or NaN")
    positions = ((entry.logprob, entry.top_token_ids, entry.top_logprobs) for entry in result.logprobs)
    return Logprobs.of(expected, positions)


def read_proposals(
    response: draft_worker_pb2.ProposeResponse, round_id: int, items: Sequence[ProposeItem]
) -> list[Proposal]:
    """Read the response to a draft round: one proposal per item, in order. Raises InvalidResponseError."""
    statuses = _read_statuses(response, round_id, items)
    answered = zip(response.results, statuses, items, strict=True)
    return [_read_proposal(result, status, item) for result, status, item in answered]


def _read_proposal(result: Any, status: ItemStatus, item: ProposeItem) -> Proposal:
    if status is not ItemStatus.OK:
        return Proposal(item.sequence_id, status)
    drafted, confidences = _read_draft(result, 0 if item.num_branches else item.num_draft_tokens)
    expected = item.base_length + len(item.token_ids) + max(0, len(drafted) - 1)
    _check_cached(result, expected)
    return Proposal(item.sequence_id, status, drafted, expected, confidences, _read_branches(result, item))


def _read_draft(message: Any, limit: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The draft tokens of a proposal or branch, and their confidences."""
    drafted, confidences = tuple(message.draft_token_ids), tuple(message.confidences)
    if len(drafted) > limit:
        raise InvalidResponseError(f"{len(drafted)} draft tokens, {limit} requested")
    _require(len(confidences) in (0, len(drafted)), "a draft token has no confidence")
    _require(all(0 <= confidence <= 1 + ROUNDING for confidence in confidences), "a confidence is not a probability")
    return drafted, tuple(min(1.0, value) for value in confidences)


def _read_branches(result: Any, item: ProposeItem) -> tuple[Branch, ...]:
    if len(result.branches) > item.num_branches:
        raise InvalidResponseError(f"{len(result.branches)} branches, {item.num_branches} requested")
    branches = []
    for branch in result.branches:
        _require(branch.num_accepted <= item.num_unverified, "a branch accepts more tokens than are verified")
        draft = _read_draft(branch, item.num_draft_tokens)
        branches.append(Branch(branch.num_accepted, branch.token_id, *draft))
    return tuple(branches)


def _check_cached(result: Any, expected: int) -> None:
    if result.cached_length != expected:
        raise InvalidResponseError(f"{result.cached_length} positions cached instead of {expected}")


def _read_statuses(response: Any, round_id: int, items: Iterable[SequenceItem]) -> list[ItemStatus]:
    """Return the status of each item, and check that the response belongs to the round."""
    _require(response.round_id == round_id, f"the response is for round {response.round_id} instead of {round_id}")
    requested, answered = [item.sequence_id for item in items], [result.sequence_id for result in response.results]
    _require(answered == requested, "the results are not for the sequences of the round, in order")
    _require(all(result.status in STATUSES for result in response.results), "a status is unknown")
    return [STATUSES[result.status] for result in response.results]


def decoded(message: M | None, name: str) -> M:
    """Return the message. Raises InvalidResponseError for None, which stands for an oversized or undecodable one."""
    if message is None:
        raise InvalidResponseError(f"the {name} is too large, or not a message of the expected type")
    return message


def read_worker_info(response: common_pb2.GetWorkerInfoResponse) -> WorkerInfo:
    """Read the description of a worker and of the draft that it carries, without impossible step costs.

    Raises InvalidResponseError.
    """
    _check_worker_info(response)
    _require(not response.draft.HasField("draft"), "a carried draft cannot carry a draft")
    model, load, costs = response.model, response.load, response.costs
    shared = {field.name: getattr(part, field.name) for part in (model, load) for field in part.DESCRIPTOR.fields}
    del shared["equivalence"]
    measured = zip(costs.rows, costs.seconds, strict=False)
    per_cached = costs.seconds_per_cached
    read = {
        "bitwise": model.equivalence == common_pb2.EQUIVALENCE_BITWISE,
        "notes": tuple(model.notes),
        "weight_kinds": dict(model.weight_kinds),
        "feature_layers": tuple(model.feature_layers),
        "ranks": tuple(RankMemory(**{name: getattr(rank, name) for name in RANK_FIELDS}) for rank in load.ranks),
        "step_seconds": {rows: seconds for rows, seconds in measured if rows > 0 and 0 < seconds < math.inf},
        "step_cached": costs.cached,
        "seconds_per_cached": per_cached if 0 <= per_cached < math.inf else 0.0,
        "max_rows": costs.max_rows,
        "instance_id": response.instance_id,
        "draft": read_worker_info(response.draft) if response.HasField("draft") else None,
    }
    return WorkerInfo(**shared | read)


def _check_worker_info(response: common_pb2.GetWorkerInfoResponse) -> None:
    model, load = response.model, response.load
    size = response.ByteSize()
    _require(size <= MAX_DESCRIPTION_BYTES, f"{size} bytes, more than the maximum of {MAX_DESCRIPTION_BYTES}")
    _require(bool(response.instance_id), "instance_id is empty")
    _require(model.equivalence in common_pb2.Equivalence.values(), f"equivalence is {model.equivalence}")
    _require(0 < model.vocab_size <= MAX_VOCAB_SIZE, f"vocab_size is {model.vocab_size}")
    _require(0 < model.max_model_len <= MAX_POSITIONS, f"max_model_len is {model.max_model_len}")
    _require(0 < load.slots_total <= MAX_SLOTS, f"slots_total is {load.slots_total}")
    _require(len(model.feature_layers) <= MAX_FEATURE_LAYERS, f"{len(model.feature_layers)} feature_layers")
    _require(model.feature_width <= MAX_FEATURE_WIDTH, f"feature_width is {model.feature_width}")
    ranks, described = max(1, model.tensor_parallel), len(load.ranks)
    _require(described == (ranks if ranks > 1 else 0), f"{ranks} ranks, but {described} described")
    sums = TENSOR_PARALLEL_SUMS if ranks > 1 else ("",)
    _require(model.tensor_parallel_sums in sums, f"tensor_parallel_sums is {model.tensor_parallel_sums!r}")


def read_tokenizer(response: target_worker_pb2.GetTokenizerResponse) -> TokenizerFiles:
    """Read the tokenizer of the target worker, unchecked."""
    return TokenizerFiles(
        tokenizer_json=response.tokenizer_json,
        chat_template=response.chat_template,
        special_tokens=dict(response.special_tokens),
        eos_token_ids=tuple(response.eos_token_ids),
        tool_chat_template=response.tool_chat_template,
    )


def read_translation(response: draft_worker_pb2.UseTokenizerResponse, instance_id: str) -> TranslationInfo:
    """Read a draft worker's answer to `UseTokenizer`. Raises InvalidResponseError.

    `instance_id`: process that must have answered.
    """
    _require(response.instance_id == instance_id, "the translation comes from another process than the description")
    _require(bool(response.translation_id) != bool(response.refusal), "neither a translation nor a refusal, or both")
    _require(len(response.translation_id) <= MAX_TRANSLATION_ID, "the id of the translation is too long")
    _require(
        bool(response.refusal) or response.method in TRANSLATIONS, f"method is {response.method[:MAX_TRANSLATION_ID]!r}"
    )
    _require(0 <= response.vocabulary_coverage <= 1, f"vocabulary_coverage is {response.vocabulary_coverage}")
    return TranslationInfo(
        response.translation_id, response.method, response.vocabulary_coverage, response.refusal[:MAX_ERROR_CHARACTERS]
    )


def _require(fits: bool, reason: str) -> None:
    if not fits:
        raise InvalidResponseError(reason)


def max_verify_bytes(items: Iterable[VerifyItem], features: WantedFeatures | None) -> int:
    """Return the maximum size of the response to a target round. `features`: for the items that want them."""
    return MAX_SMALL_BYTES + EVICTION_BYTES + sum(_verify_result_bytes(item, features) for item in items)


def _verify_result_bytes(item: VerifyItem, features: WantedFeatures | None) -> int:
    num_draft_tokens = item.max_num_draft_tokens
    # The worker's own draft may be longer than its verified part.
    own_bytes = 0 if item.own_draft is None else ITEM_BYTES + TOKEN_BYTES * MAX_ITEM_DRAFT_TOKENS
    per_token = TOKEN_BYTES + (0 if item.logprobs is None else LOGPROB_BYTES * (1 + item.logprobs))
    size = ITEM_BYTES + own_bytes + per_token * (1 + num_draft_tokens)
    if features is None or not item.want_features:
        return size
    rows = min(features.window, max(1, len(item.token_ids))) + num_draft_tokens
    return size + rows * features.spec.row_bytes


def max_propose_bytes(items: Sequence[ProposeItem]) -> int:
    """Return the maximum size of the response to a draft round."""
    tokens = sum(max(1, item.num_branches) * (2 + item.num_draft_tokens) for item in items)
    return MAX_SMALL_BYTES + ITEM_BYTES * len(items) + TOKEN_BYTES * tokens
