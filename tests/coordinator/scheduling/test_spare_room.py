"""When a background sequence enters, when it leaves, and that it takes nothing from requests. Pure."""

from itertools import count

import pytest
from admitting_window import AdmittingWindow

from coordinator.scheduling.audits import SpareRoom
from coordinator.scheduling.capacity import KVCapacity, QueueLimits
from coordinator.scheduling.prefill import MAX_UNCHUNKED_TOKENS
from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import GenerationRequest, Sequence

_ids = count(1)


def sequence_of(is_background: bool = False, length: int = 40, client: str = "user", max_tokens: int = 8) -> Sequence:
    number = next(_ids)
    request = GenerationRequest(
        f"r{number}",
        tuple(range(length)),
        max_tokens,
        frozenset(),
        num_speculative_tokens=0,
        client="audit" if is_background else client,
        is_background=is_background,
    )
    return Sequence(number, request)


def submit(window: AdmittingWindow, *sequences: Sequence) -> None:
    for sequence in sequences:
        window.queue.submit([sequence])


def window_of(places: int = 16, users: int = 0, queue: int = 100, **options: int) -> AdmittingWindow:
    window = AdmittingWindow(places, QueueLimits(queue), **options)
    submit(window, *(sequence_of() for _ in range(users)))
    window.admit()
    return window


def room_of(window: AdmittingWindow, max_batch_size: int = 16, mixes_lengths: bool = True) -> SpareRoom:
    return SpareRoom(lambda: [window], max_batch_size, mixes_lengths)


@pytest.mark.parametrize(("users", "enters"), [(0, True), (11, True), (12, False), (16, False)])
def test_it_enters_while_a_quarter_of_the_places_stays_free(users: int, enters: bool) -> None:
    assert room_of(window_of(users=users)).may_enter(48) is enters


def test_it_enters_no_full_batch_and_no_window_with_waiting_requests() -> None:
    assert not room_of(window_of(64, users=12)).may_enter(48)
    window = window_of()
    submit(window, sequence_of())
    assert not room_of(window).may_enter(48)


@pytest.mark.parametrize(("length", "enters"), [(750, True), (751, False)])
def test_it_enters_while_a_quarter_of_the_pages_stays_free(length: int, enters: bool) -> None:
    window = window_of()
    window.fit(16, KVCapacity(1000, 1))
    assert room_of(window).may_enter(length) is enters


def test_it_stays_until_the_last_free_place_is_needed() -> None:
    window = window_of(users=8)
    room = room_of(window)
    submit(window, sequence_of(is_background=True))
    assert room.may_stay()
    window.admit()
    assert not room.may_enter(48)  # one at a time
    for _ in range(6):
        submit(window, sequence_of())
        assert room.may_stay()
        window.admit()
    submit(window, sequence_of())
    assert not room.may_stay()
    window.check_integrity()


def test_it_leaves_when_pages_run_short() -> None:
    window = window_of()
    window.fit(16, KVCapacity(1000, 1))
    submit(window, sequence_of(is_background=True, length=92))
    window.admit()
    submit(window, sequence_of(length=392))
    assert room_of(window).may_stay()
    window.admit()
    submit(window, sequence_of(length=593, client="other"))  # one page too many
    assert not room_of(window).may_stay()


@pytest.mark.parametrize(("places", "mixes_lengths"), [(1, True), (3, True), (16, False)])
def test_it_runs_alone_in_small_windows_and_with_groups_by_length(places: int, mixes_lengths: bool) -> None:
    assert not room_of(window_of(places, users=1), mixes_lengths=mixes_lengths).may_enter(48)
    window = window_of(places)
    room = room_of(window, mixes_lengths=mixes_lengths)
    assert room.may_enter(48)
    submit(window, sequence_of(is_background=True))
    window.admit()
    assert room.may_stay()
    submit(window, sequence_of())
    assert not room.may_stay()


def test_requests_that_wait_for_its_place_are_not_refused() -> None:
    window = window_of(places=4, queue=0)
    submit(window, sequence_of(is_background=True))
    window.admit()
    submit(window, *(sequence_of() for _ in range(4)))
    window.admit()
    window.check_integrity()
    assert (window.running, window.queued) == (4, 1)


def test_it_neither_uses_nor_leaves_cached_prefixes() -> None:
    window = AdmittingWindow(4, QueueLimits(8))
    window.fit(4, KVCapacity(0, 16))
    first, second = sequence_of(is_background=True), sequence_of(is_background=True)
    for sequence in (first, second):
        submit(window, sequence)
        window.admit()
        assert (sequence.cache_namespace, sequence.target.predicted) == (None, 0)
        window.begin_round([sequence])
        sequence.target.commit(40)
        window.end_round([sequence])
        window.queue.abort(sequence)
        window.released([sequence.sequence_id])
    assert window.is_empty
    assert not window.background


def test_its_prompt_takes_no_prefill_of_others() -> None:
    background, user, decoding = sequence_of(True, 500), sequence_of(length=500), sequence_of(length=500, client="b")
    decoding.target.commit(499)

    def rows(*group: Sequence) -> dict[int, int]:
        round_ = Round(1, list(group), 128, pass_seconds=lambda count: 1 + count)
        items = {item.sequence_id: len(item.token_ids) for item in round_.verify_items()}
        round_.discard()
        return items

    for others in ([user], [user, decoding]):
        shared = rows(*others, background)
        assert shared.pop(background.sequence_id) == MAX_UNCHUNKED_TOKENS
        assert min(shared.values()) >= 1
    assert rows(background)[background.sequence_id] == rows(user)[user.sequence_id]


def test_clients_wait_for_no_background_sequence() -> None:
    window = window_of(users=1)
    submit(window, sequence_of(is_background=True))
    window.admit()
    window.add_round_time({}, 1.0, lambda rows: 1.0)
    assert len(window.eligible) == 2
