"""Faults in workers' answers. Each fault corrupts the right answer to a call."""

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from specpool.testing import VOCAB_SIZE

UNKNOWN_SEQUENCE = 2**40
SLOW_SECONDS = 0.1
MILLION_TOKENS = [7] * 1_000_000
NOT_A_MESSAGE = b"\xff" * 64
LONG_DETAILS = "no" * 2**15


@dataclass
class Answer:
    """A right answer before a fault corrupts it. `response` is a copy."""

    request: Any
    response: Any
    previous: Any | None
    """The right answer to the previous request."""
    number: int
    """Number of this answer, from 1."""

    @property
    def pairs(self) -> Iterable[tuple[Any, Any]]:
        """Each item of the request with its result."""
        return zip(self.request.items, self.response.results, strict=True)


Fault = Callable[[Answer], Any]
"""Edits `response`, returns a message or bytes to send instead, or raises RefusedError; may be a coroutine."""


class RefusedError(Exception):
    """The call ends in an error. `by_worker`: the error carries the worker's mark, which transport errors lack."""

    def __init__(self, code: str, details: str, by_worker: bool = True) -> None:
        super().__init__(details)
        self.code, self.details, self.by_worker = code, details, by_worker


def returns(answer: Any) -> Fault:
    """Answer with fixed bytes."""
    return lambda _: answer


def refuses(*error: Any, **options: Any) -> Fault:
    """End the call in a RefusedError with these arguments."""

    def refuse(answer: Answer) -> None:
        raise RefusedError(*error, **options)

    return refuse


async def never(answer: Answer) -> None:
    """Never answers."""
    await asyncio.Event().wait()


async def slow(answer: Answer) -> None:
    """Give the right answer, but late."""
    await asyncio.sleep(SLOW_SECONDS)


def flapping(answer: Answer) -> None:
    """Fail in every second round."""
    if answer.number % 2:
        raise RefusedError("UNAVAILABLE", "told to flap")


def with_results(choose: Callable[[list[Any]], list[Any]]) -> Fault:
    """Replace the list of results."""

    def spoil(answer: Answer) -> None:
        results = choose([*answer.response.results])
        del answer.response.results[:]
        answer.response.results.extend(results)

    return spoil


def each(change: Callable[[Any], object]) -> Fault:
    """Change every result."""

    def spoil(answer: Answer) -> None:
        for result in answer.response.results:
            change(result)

    return spoil


def with_field(name: str, value: Callable[[Any], Any]) -> Fault:
    """Replace a field of every result by a function of its old value."""
    return each(lambda result: setattr(result, name, value(getattr(result, name))))


def with_list(name: str, values: Callable[[list[Any]], list[Any]]) -> Fault:
    """Replace a repeated field of every result by a function of its old values."""

    def change(result: Any) -> None:
        field = getattr(result, name)
        field[:] = values(list(field))

    return each(change)


def with_round_id(value: Callable[[int], int]) -> Fault:
    """Replace the round id."""
    return lambda answer: setattr(answer.response, "round_id", value(answer.response.round_id))


def previous_results(answer: Answer) -> None:
    """Give the results of the previous round under the id of this one."""
    if answer.previous is not None:
        with_results(lambda _: [*answer.previous.results])(answer)


def only_status(status: int) -> Fault:
    """Give every item this status and nothing else."""

    def spoil(answer: Answer) -> None:
        for item, result in answer.pairs:
            result.Clear()
            result.sequence_id, result.status = item.sequence_id, status

    return spoil


def unknown_sequence_added(answer: Answer) -> None:
    """Add a result for a sequence that does not exist."""
    answer.response.results.add(sequence_id=UNKNOWN_SEQUENCE, status=1, cached_length=1)


def huge_times(answer: Answer) -> None:
    """Claims that pass and realignment took 584 years each."""
    answer.response.forward_ns = answer.response.realign_ns = 2**64 - 1


def cut_off_message(answer: Answer) -> bytes:
    """Send only the first half of the message."""
    payload: bytes = answer.response.SerializeToString()
    return payload[: len(payload) // 2]


ROUNDS: dict[str, Fault] = {
    "previous_answer": lambda answer: answer.previous,
    "previous_results": previous_results,
    "next_round_id": with_round_id(lambda number: number + 1),
    "no_round_id": with_round_id(lambda _: 0),
    "missing_result": with_results(lambda results: results[:-1]),
    "no_results": with_results(lambda _: []),
    "doubled_results": with_results(lambda results: results * 2),
    "reordered_results": with_results(lambda results: results[::-1]),
    "unknown_sequence_added": unknown_sequence_added,
    "unknown_sequences": with_field("sequence_id", lambda sequence_id: sequence_id + UNKNOWN_SEQUENCE),
    "unspecified_status": with_field("status", lambda _: 0),
    "unknown_status": with_field("status", lambda _: 99),
    "all_cache_miss": only_status(2),
    "all_no_slot": only_status(3),
    "all_stale_round": only_status(4),
    "cached_length_zero": with_field("cached_length", lambda _: 0),
    "cached_length_too_long": with_field("cached_length", lambda length: length + 1),
    "cached_length_too_short": with_field("cached_length", lambda length: max(0, length - 1)),
    "cached_length_huge": with_field("cached_length", lambda _: 2**31),
    "other_instance": lambda answer: setattr(answer.response, "instance_id", "another process"),
    "no_instance": lambda answer: answer.response.ClearField("instance_id"),
    "huge_times": huge_times,
    "empty_response": returns(b""),
    "undecodable": returns(NOT_A_MESSAGE),
    "cut_off_message": cut_off_message,
    "long_refusal": refuses("INTERNAL", LONG_DETAILS),
    "refusal_as_bad_input": refuses("INVALID_ARGUMENT", "items: told to refuse"),
    "transport_error": refuses("INTERNAL", "Internal error from Core", by_worker=False),
    "unimplemented": refuses("UNIMPLEMENTED", "told to deny"),
    "never": never,
    "slow": slow,
    "flapping": flapping,
}
"""Faults of verdicts and proposals, which share the outer fields."""


def too_many_tokens(answer: Answer) -> None:
    """Give k + 2 tokens for k draft tokens."""
    for item, result in answer.pairs:
        result.token_ids.extend([7] * (len(item.draft_token_ids) + 2 - len(result.token_ids)))


def other_tokens_than_drafted(answer: Answer) -> None:
    """Give accepted tokens that differ from the draft."""
    for item, result in answer.pairs:
        if item.draft_token_ids and not item.prefill_only:
            wrong = (item.draft_token_ids[0] + 1) % VOCAB_SIZE
            result.token_ids[:] = [wrong, *(result.token_ids[1:] or [wrong])]


def tokens_for_a_prompt_chunk(answer: Answer) -> None:
    """Choose a token where the request only extends the cache."""
    for item, result in answer.pairs:
        if item.prefill_only:
            result.token_ids.append(7)


def accepted_more_than_cached(answer: Answer) -> None:
    """Accept the whole draft, but report the cached length of a rejection."""
    for item, result in answer.pairs:
        if item.draft_token_ids and len(result.token_ids) <= len(item.draft_token_ids):
            result.token_ids[:] = [*item.draft_token_ids, 7]


def each_logprobs(change: Callable[[Any], object]) -> Fault:
    """Change the log-probabilities of every token."""
    return each(lambda result: [change(logprobs) for logprobs in result.logprobs])


def nan_logprobs(logprobs: Any) -> None:
    """Replace all numbers by NaN."""
    logprobs.logprob = math.nan
    logprobs.top_logprobs[:] = [math.nan] * len(logprobs.top_logprobs)


def unknown_top_tokens(logprobs: Any) -> None:
    """Names tokens outside the vocabulary."""
    logprobs.top_token_ids[:] = [2**31] * len(logprobs.top_token_ids)


VERDICTS: dict[str, Fault] = {
    "no_tokens": with_list("token_ids", lambda _: []),
    "too_many_tokens": too_many_tokens,
    "a_million_tokens": with_list("token_ids", lambda tokens: tokens + MILLION_TOKENS),
    "other_tokens_than_drafted": other_tokens_than_drafted,
    "token_outside_the_vocabulary": with_list("token_ids", lambda tokens: tokens[:-1] + [VOCAB_SIZE] * bool(tokens)),
    "huge_token": with_list("token_ids", lambda tokens: tokens[:-1] + [2**31] * bool(tokens)),
    "tokens_for_a_prompt_chunk": tokens_for_a_prompt_chunk,
    "accepted_more_than_cached": accepted_more_than_cached,
    "missing_logprobs": each(lambda result: result.ClearField("logprobs")),
    "too_many_logprobs": each(lambda result: result.logprobs.add(logprob=-1.0)),
    "nan_logprobs": each_logprobs(nan_logprobs),
    "infinite_logprobs": each_logprobs(lambda logprobs: setattr(logprobs, "logprob", math.inf)),
    "uneven_logprobs": each_logprobs(lambda logprobs: logprobs.top_token_ids.append(7)),
    "unknown_top_tokens": each_logprobs(unknown_top_tokens),
}
"""Faults of verdicts. They leave out plausible wrong tokens, which nobody can detect."""


def confidences(values: Callable[[int], list[float]]) -> Fault:
    """Replace the confidences by a function of the number of draft tokens."""

    def change(result: Any) -> None:
        result.confidences[:] = values(len(result.draft_token_ids))

    return each(change)


def more_draft_tokens_than_asked(answer: Answer) -> None:
    """Drafts one token too many."""
    for item, result in answer.pairs:
        result.draft_token_ids[:] = [7] * (item.num_draft_tokens + 1)


def wrong_draft_tokens(answer: Answer) -> None:
    """Drafts tokens that the target never chooses, with full confidence."""
    with_list("draft_token_ids", lambda tokens: [(token + 1) % VOCAB_SIZE for token in tokens])(answer)
    confidences(lambda drafted: [1.0] * drafted)(answer)


PROPOSALS: dict[str, Fault] = {
    "nan_confidences": confidences(lambda drafted: [math.nan] * drafted),
    "infinite_confidences": confidences(lambda drafted: [math.inf] * drafted),
    "minus_infinite_confidences": confidences(lambda drafted: [-math.inf] * drafted),
    "negative_confidences": confidences(lambda drafted: [-0.5] * drafted),
    "confidences_above_one": confidences(lambda drafted: [1e30] * drafted),
    "no_confidences": confidences(lambda _: []),
    "too_few_confidences": confidences(lambda drafted: [0.9] * max(0, drafted - 1)),
    "too_many_confidences": confidences(lambda drafted: [0.9] * (drafted + 100)),
    "no_draft_tokens": with_list("draft_token_ids", lambda _: []),
    "more_draft_tokens_than_asked": more_draft_tokens_than_asked,
    "a_million_draft_tokens": with_list("draft_token_ids", lambda tokens: tokens + MILLION_TOKENS),
    "draft_tokens_outside_the_vocabulary": with_list("draft_token_ids", lambda tokens: [VOCAB_SIZE] * len(tokens)),
    "huge_draft_tokens": with_list("draft_token_ids", lambda tokens: [2**31] * len(tokens)),
    "wrong_draft_tokens": wrong_draft_tokens,
}
"""Faults of proposals."""


def of_own_drafts(fault: Fault) -> Fault:
    """Apply a fault of proposals to own drafts."""

    def spoil(answer: Answer) -> Any:
        drafts = [result.own_draft for result in answer.response.results if result.HasField("own_draft")]
        return fault(replace(answer, response=SimpleNamespace(results=drafts)))

    return spoil


def more_verified_than_drafted(answer: Answer) -> None:
    """Report more verified tokens than drafted ones."""
    for own_draft in answer.response.results:
        own_draft.num_verified = len(own_draft.draft_token_ids) + 1


OWN_DRAFTS: dict[str, Fault] = {
    **{
        f"own_{name}": of_own_drafts(PROPOSALS[name])
        for name in ("nan_confidences", "too_few_confidences", "no_draft_tokens", "draft_tokens_outside_the_vocabulary")
    },
    "own_more_verified_than_drafted": of_own_drafts(more_verified_than_drafted),
    "own_draft_not_cached": of_own_drafts(with_field("status", lambda _: 2)),
    "own_draft_without_a_slot": of_own_drafts(with_field("status", lambda _: 3)),
    "no_own_draft": each(lambda result: result.ClearField("own_draft")),
}
"""Faults in own drafts."""
