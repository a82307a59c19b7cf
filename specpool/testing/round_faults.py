"""Faults of the answers to rounds, the same for both workers: verdicts and proposals have the same outer form."""

import asyncio
from typing import Any

from specpool.testing.faults import Answer, RefusedError, Table, entry

ROUNDS: Table = {}
FAR_AWAY = 2**40
SLOW_SECONDS = 0.1


def _with_status(answer: Answer, status: int) -> Any:
    for result in answer.response.results:
        result.Clear()
        result.status = status
    for item, result in answer.pairs:
        result.sequence_id = item.sequence_id
    return answer.response


@entry(ROUNDS)
def previous_answer(answer: Answer) -> Any:
    """Gives the answer to the round before."""
    return answer.earlier or answer.response


@entry(ROUNDS)
def previous_results(answer: Answer) -> Any:
    """Gives the results of the round before, as if they were of this one."""
    if answer.earlier is not None:
        del answer.response.results[:]
        answer.response.results.extend(answer.earlier.results)
    return answer.response


@entry(ROUNDS)
def next_round_id(answer: Answer) -> Any:
    """Says that the answer is to the round after this one."""
    answer.response.round_id += 1
    return answer.response


@entry(ROUNDS)
def no_round_id(answer: Answer) -> Any:
    """Leaves out the number of the round."""
    answer.response.round_id = 0
    return answer.response


@entry(ROUNDS)
def missing_result(answer: Answer) -> Any:
    """Leaves out the last result."""
    del answer.response.results[-1:]
    return answer.response


@entry(ROUNDS)
def no_results(answer: Answer) -> Any:
    """Leaves out all results."""
    del answer.response.results[:]
    return answer.response


@entry(ROUNDS)
def doubled_results(answer: Answer) -> Any:
    """Gives every result twice."""
    answer.response.results.extend([*answer.response.results])
    return answer.response


@entry(ROUNDS)
def reordered_results(answer: Answer) -> Any:
    """Gives the results in reverse."""
    backwards = [*answer.response.results][::-1]
    del answer.response.results[:]
    answer.response.results.extend(backwards)
    return answer.response


@entry(ROUNDS)
def extra_result(answer: Answer) -> Any:
    """Adds a result for a sequence that does not exist."""
    answer.response.results.add(sequence_id=FAR_AWAY, status=1, cached_length=1)
    return answer.response


@entry(ROUNDS)
def unknown_sequences(answer: Answer) -> Any:
    """Gives results for sequences that do not exist only."""
    for result in answer.response.results:
        result.sequence_id += FAR_AWAY
    return answer.response


@entry(ROUNDS)
def unspecified_status(answer: Answer) -> Any:
    """Leaves out whether the results are valid."""
    for result in answer.response.results:
        result.status = 0
    return answer.response


@entry(ROUNDS)
def unknown_status(answer: Answer) -> Any:
    """Gives a status that the protocol does not have."""
    for result in answer.response.results:
        result.status = 99
    return answer.response


@entry(ROUNDS)
def all_cache_miss(answer: Answer) -> Any:
    """Has lost every cache, also of sequences that are sent in full."""
    return _with_status(answer, 2)


@entry(ROUNDS)
def all_no_slot(answer: Answer) -> Any:
    """Has a slot for no sequence, also for those that hold one."""
    return _with_status(answer, 3)


@entry(ROUNDS)
def all_stale_round(answer: Answer) -> Any:
    """Takes every round for a delayed duplicate."""
    return _with_status(answer, 4)


@entry(ROUNDS)
def cached_length_zero(answer: Answer) -> Any:
    """Says that nothing is cached."""
    for result in answer.response.results:
        result.cached_length = 0
    return answer.response


@entry(ROUNDS)
def cached_length_too_long(answer: Answer) -> Any:
    """Says that one position more is cached."""
    for result in answer.response.results:
        result.cached_length += 1
    return answer.response


@entry(ROUNDS)
def cached_length_too_short(answer: Answer) -> Any:
    """Says that one position fewer is cached."""
    for result in answer.response.results:
        result.cached_length = max(0, result.cached_length - 1)
    return answer.response


@entry(ROUNDS)
def cached_length_huge(answer: Answer) -> Any:
    """Says that 2^31 positions are cached."""
    for result in answer.response.results:
        result.cached_length = 2**31
    return answer.response


@entry(ROUNDS)
def huge_times(answer: Answer) -> Any:
    """Says that the round took 584 years, and realignment as long."""
    answer.response.forward_ns = answer.response.realign_ns = 2**64 - 1
    return answer.response


@entry(ROUNDS)
def empty_response(answer: Answer) -> Any:
    """Answers with a message without any field."""
    return b""


@entry(ROUNDS)
def undecodable(answer: Answer) -> Any:
    """Answers with bytes that are no message."""
    return b"\xff" * 64


@entry(ROUNDS)
def cut_off_message(answer: Answer) -> Any:
    """Leaves out the second half of the message."""
    payload = answer.response.SerializeToString()
    return payload[: len(payload) // 2]


@entry(ROUNDS)
def long_refusal(answer: Answer) -> Any:
    """Refuses the round, and says so in 64 KiB."""
    raise RefusedError("INTERNAL", "no" * 2**15)


@entry(ROUNDS)
def refusal_as_bad_input(answer: Answer) -> Any:
    """Refuses the round as if it were malformed."""
    raise RefusedError("INVALID_ARGUMENT", "items: told to refuse")


@entry(ROUNDS)
def internal_error_of_the_transport(answer: Answer) -> Any:
    """Ends the round with an error of gRPC's own, as a cut connection can."""
    raise RefusedError("INTERNAL", "Internal error from Core", by_worker=False)


@entry(ROUNDS)
def unimplemented(answer: Answer) -> Any:
    """Denies that it has the method."""
    raise RefusedError("UNIMPLEMENTED", "told to deny")


@entry(ROUNDS)
async def never(answer: Answer) -> Any:
    """Never answers."""
    await asyncio.Event().wait()


@entry(ROUNDS)
async def slow(answer: Answer) -> Any:
    """Answers rightly, and late."""
    await asyncio.sleep(SLOW_SECONDS)
    return answer.response


@entry(ROUNDS)
def flapping(answer: Answer) -> Any:
    """Fails in every second round."""
    if answer.number % 2:
        raise RefusedError("UNAVAILABLE", "told to flap")
    return answer.response
