"""Shares of the prefill budget: fair among clients, bounded waiting, nothing wasted."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.prefill import (
    MAX_STEPS,
    MAX_UNCHUNKED_TOKENS,
    MAX_WAIT_ROUNDS,
    MIN_SHARE,
    share_prefill,
    timely_budget,
)
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.protocol.rounds import ItemStatus, Verdict

BUDGET = 128


def sequence_of(number: int, client: str, length: int, priority: int = 0) -> Sequence:
    request = GenerationRequest(
        f"r{number}", (1,) * length, 4, frozenset(), num_speculative_tokens=0, client=client, priority=priority
    )
    return Sequence(number, request)


def sequences_of(clients: Iterable[tuple[str, int]]) -> list[Sequence]:
    return [sequence_of(number, client, length) for number, (client, length) in enumerate(clients)]


def prefill(sequences: list[Sequence], budget: int = BUDGET, no_slot: frozenset[int] = frozenset()) -> None:
    """Run a round that every sequence takes part in."""
    round_ = Round(1, sequences, budget)
    items = round_.verify_items()
    verdicts = [
        Verdict(item.sequence_id, ItemStatus.NO_SLOT, (), 0)
        if item.sequence_id in no_slot
        else Verdict(
            item.sequence_id,
            ItemStatus.OK,
            () if item.prefill_only else (2,),
            item.base_length + len(item.token_ids),
        )
        for item in items
    ]
    round_.commit(verdicts)


def rounds_until_first_token(sequence: Sequence, others: list[Sequence], **options: object) -> int:
    for number in range(1, 10_000):
        prefill([*others, sequence], **options)  # type: ignore[arg-type]
        if sequence.num_generated:
            return number
    raise AssertionError("no token")


@st.composite
def catchups(draw: st.DrawFn) -> list[tuple[Sequence, int]]:
    lengths = st.integers(1, 3 * BUDGET)
    clients = draw(st.lists(st.tuples(st.sampled_from("abcd"), lengths), max_size=12))
    sequences = sequences_of(clients)
    for sequence in sequences:
        sequence.prefill_waits = draw(st.integers(0, 20))
        sequence.target.had_no_slot = draw(st.booleans())
    return [(sequence, sequence.prompt_length) for sequence in sequences]


@given(catchups(), st.integers(1, 2 * BUDGET))
def test_the_budget_is_used_and_never_exceeded(work: list[tuple[Sequence, int]], budget: int) -> None:
    shares = share_prefill(work, budget)
    long = {sequence.sequence_id: missing for sequence, missing in work if missing > MAX_UNCHUNKED_TOKENS}
    assert shares.keys() == {sequence.sequence_id for sequence, _ in work}
    assert all(0 <= shares[sequence.sequence_id] <= missing for sequence, missing in work)
    assert all(shares[sequence.sequence_id] == missing for sequence, missing in work if missing <= MAX_UNCHUNKED_TOKENS)
    served = sum(shares[sequence_id] for sequence_id in long)
    assert served <= budget
    if len({sequence.request.client for sequence, _ in work}) * MIN_SHARE <= budget:
        assert served == min(budget, sum(long.values()))


@given(catchups())
def test_no_client_gets_less_than_an_equal_share_unless_it_wants_less(work: list[tuple[Sequence, int]]) -> None:
    shares = share_prefill(work, BUDGET)
    wanted: dict[str, int] = {}
    given_: dict[str, int] = {}
    for sequence, missing in work:
        if missing > MAX_UNCHUNKED_TOKENS:
            client = sequence.request.client
            wanted[client] = wanted.get(client, 0) + missing
            given_[client] = given_.get(client, 0) + shares[sequence.sequence_id]
    assert all(given_[client] >= min(wanted[client], BUDGET // len(wanted)) for client in wanted)


@pytest.mark.parametrize(("others", "length"), [(8, 4000), (15, 8000)])
def test_a_short_prompt_does_not_wait_for_another_clients_long_ones(others: int, length: int) -> None:
    hog = sequences_of([("hog", length)] * others)
    assert rounds_until_first_token(sequence_of(99, "other", 20), hog) == 1


def test_a_short_prompt_goes_before_the_long_ones_of_its_client() -> None:
    assert rounds_until_first_token(sequence_of(99, "a", 20), sequences_of([("a", 4000)] * 8)) == 1


def test_a_long_prompt_waits_a_bounded_time_for_shorter_ones_of_its_client() -> None:
    long, number = sequence_of(0, "a", 2 * BUDGET), 0
    while not long.num_generated:
        number += 1
        prefill([long, sequence_of(number, "a", BUDGET)])
        assert number <= 2 * (MAX_WAIT_ROUNDS + 1)


def test_more_clients_than_the_budget_has_shares_take_turns() -> None:
    sequences = sequences_of([(f"client {number}", 40) for number in range(20)])
    for _ in range(20):
        prefill(sequences, budget=2 * MIN_SHARE)
    assert min(sequence.target.num_cached_tokens for sequence in sequences) >= MIN_SHARE


def test_a_sequence_without_a_slot_does_not_hold_up_others() -> None:
    stuck, other = sequence_of(0, "a", 20), sequence_of(1, "a", 4 * BUDGET)
    assert rounds_until_first_token(other, [stuck], no_slot=frozenset({0})) <= 6


def test_priority_orders_the_prompts_of_a_client() -> None:
    urgent, short = sequence_of(0, "a", 2 * BUDGET, priority=-1), sequence_of(1, "a", BUDGET)
    prefill([short, urgent])
    assert (urgent.target.num_cached_tokens, short.target.num_cached_tokens) == (BUDGET, 0)


def pass_seconds(rows: int) -> float:
    """A CPU: each row adds a fifth of a step."""
    return 0.004 + 0.001 * rows if rows else 0.0


def decoding(number: int, client: str) -> Sequence:
    sequence = sequence_of(number, client, 20)
    sequence.target.commit(19)
    return sequence


def budget_beside(decoders: list[Sequence], prefilling: list[Sequence]) -> int:
    work = [(each, len(each.token_ids) - each.target.num_cached_tokens) for each in (*decoders, *prefilling)]
    return timely_budget(work, 0, BUDGET, pass_seconds)


@given(st.integers(1, 8), st.integers(1, 4))
def test_prefill_takes_a_fair_share_of_the_time_of_decoding_clients(decoders: int, hogs: int) -> None:
    others = [decoding(number, f"decoder {number}") for number in range(decoders)]
    hog = [sequence_of(100 + number, f"hog {number}", 4000) for number in range(hogs)]
    budget = budget_beside(others, hog)
    limit = pass_seconds(decoders) * (1 + hogs / decoders)
    assert budget == 1 or pass_seconds(decoders + budget) <= limit < pass_seconds(decoders + budget + 1)


def test_prefill_of_the_only_client_takes_a_few_steps() -> None:
    budget = budget_beside([decoding(0, "a")], [sequence_of(1, "a", 4000)])
    assert pass_seconds(1 + budget) - pass_seconds(1) <= MAX_STEPS * pass_seconds(1) < 0.001 * (budget + 1)


def test_cheap_rows_are_limited_by_the_budget_alone() -> None:
    work = [(decoding(0, "a"), 1), (sequence_of(1, "hog", 4000), 4000)]
    assert timely_budget(work, 0, BUDGET, lambda rows: 0.006 + 1e-6 * rows) == BUDGET
