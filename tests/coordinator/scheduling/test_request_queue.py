"""Several windows share a queue: no sequence is lost or in two of them, and limits and fairness hold."""

from itertools import count

import pytest
from admitting_window import AdmittingWindow
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_window import make_sequence

from coordinator.scheduling.capacity import DuplicateRequestError, KVCapacity, QueueLimitError, QueueLimits
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.scheduling.sequence import Sequence

INDEX = st.integers(0, 10**6)


def make_windows(
    number: int, max_num_seqs: int = 4, queue_size: int = 100
) -> tuple[RequestQueue, list[AdmittingWindow]]:
    queue = RequestQueue(QueueLimits(queue_size))
    windows = [AdmittingWindow(max_num_seqs, queue) for _ in range(number)]
    return queue, windows


def ids(sequences: "list[Sequence] | set[Sequence]") -> list[int]:
    return sorted(sequence.sequence_id for sequence in sequences)


def decode(window: AdmittingWindow, group: list[Sequence], tokens: int = 1) -> None:
    """Run a round of a group."""
    window.begin_round(group)
    for sequence in group:
        sequence.commit([0] * tokens)
        sequence.target.commit(len(sequence.token_ids) - 1)
    window.end_round(group)


class WindowsMachine(RuleBasedStateMachine):
    """Several windows, whose workers come and go while sequences run, pause and end."""

    @initialize(
        number=st.integers(1, 3),
        max_num_seqs=st.integers(1, 3),
        positions=st.sampled_from([0, 40, 90]),
        page_size=st.sampled_from([1, 8]),
    )
    def start(self, number: int, max_num_seqs: int, positions: int, page_size: int) -> None:
        self.queue, self.windows = make_windows(number, max_num_seqs, queue_size=6)
        for window in self.windows:
            window.fit(max_num_seqs, KVCapacity(positions // page_size, page_size))
        self.ids = count(1)
        self.groups: dict[AdmittingWindow, list[Sequence]] = {}
        self.alive: dict[int, Sequence] = {}

    def pick(self, index: int) -> AdmittingWindow:
        return self.windows[index % len(self.windows)]

    @rule(
        n=st.integers(1, 3), length=st.sampled_from([1, 17, 33]), client=st.sampled_from("xy"), tokens=st.integers(1, 9)
    )
    def submit(self, n: int, length: int, client: str, tokens: int) -> None:
        first = next(self.ids)
        new = [make_sequence(first if not i else next(self.ids), str(first), tokens, (1,) * length, client=client)
               for i in range(n)]  # fmt: skip
        for sequence in new:
            sequence.first_sample_id = first
        try:
            self.queue.submit(new)
        except QueueLimitError:
            return
        self.alive |= {sequence.sequence_id: sequence for sequence in new}

    @rule(index=INDEX)
    def admit(self, index: int) -> None:
        window = self.pick(index)
        if window.is_open:
            for sequence in window.admit():
                place = self.queue.window_of(sequence)
                assert place is not None
                assert place.is_open

    @rule(index=INDEX)
    def begin_round(self, index: int) -> None:
        window = self.pick(index)
        if window not in self.groups and window.is_open and window.eligible:
            self.groups[window] = list(window.eligible)
            window.begin_round(self.groups[window])

    @precondition(lambda self: self.groups)
    @rule(index=INDEX, gained=st.integers(0, 3))
    def end_round(self, index: int, gained: int) -> None:
        window = list(self.groups)[index % len(self.groups)]
        group = self.groups.pop(window)
        for sequence in group if window.is_open else ():
            if sequence.finish is None and gained:
                sequence.commit([0] * gained)
                sequence.target.commit(len(sequence.token_ids) - 1)
        window.end_round(group)
        self.queue.vacate(window) if window.is_lost else None
        self.drop_finished()

    def drop_finished(self) -> None:
        self.alive = {i: sequence for i, sequence in self.alive.items() if sequence.finish is None}

    @rule(index=INDEX)
    def release(self, index: int) -> None:
        window = self.pick(index)
        if window.is_open:
            window.released(window.leaving)

    @precondition(lambda self: self.alive)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        self.queue.abort(list(self.alive.values())[index % len(self.alive)])
        self.drop_finished()

    @precondition(lambda self: self.alive)
    @rule(index=INDEX)
    def pause_or_resume(self, index: int) -> None:
        sequence = list(self.alive.values())[index % len(self.alive)]
        self.queue.resume(sequence) if sequence.paused else self.queue.pause(sequence)

    @rule(index=INDEX)
    def lose(self, index: int) -> None:
        window = self.pick(index)
        window.is_open, window.is_lost = False, True
        self.queue.vacate(window)

    @rule(index=INDEX, is_same=st.booleans())
    def come_back(self, index: int, is_same: bool) -> None:
        window = self.pick(index)
        if not window.is_lost or window in self.groups:
            return
        if not is_same:
            window.forget_target_caches()
        window.is_open, window.is_lost = True, False
        self.drop_finished()

    @invariant()
    def no_sequence_is_lost(self) -> None:
        if not hasattr(self, "queue"):
            return
        for window in self.windows:
            window.check_integrity()
        assert ids(self.queue.in_flight) == sorted(self.alive)

    def teardown(self) -> None:
        """All sequences finish once all workers are back."""
        if not hasattr(self, "queue"):
            return
        for sequence in self.alive.values():
            self.queue.resume(sequence)
        for window in self.windows:
            window.end_round(self.groups.pop(window, []))
            window.is_open, window.is_lost = True, False
        for _ in range(1000):
            for window in self.windows:
                window.admit()
                if group := list(window.eligible):
                    decode(window, group)
                window.released(window.leaving)
        assert self.queue.is_empty
        assert not any(window.occupied for window in self.windows)


TestWindows = WindowsMachine.TestCase


def test_sequences_enter_the_window_with_the_least_load() -> None:
    queue, windows = make_windows(2)
    for i in range(6):
        queue.submit([make_sequence(i)])
    assert len(windows[0].admit()) == 6
    assert [window.occupied for window in windows] == [3, 3]


def test_a_window_that_is_not_open_gets_no_sequences() -> None:
    queue, windows = make_windows(2)
    windows[1].is_open = False
    for i in range(6):
        queue.submit([make_sequence(i)])
    windows[0].admit()
    assert [window.occupied for window in windows] == [4, 0]


def test_a_cached_prefix_decides_between_windows_of_similar_load() -> None:
    queue, windows = make_windows(2, max_num_seqs=8)
    for window in windows:
        window.fit(8, KVCapacity(0, 16))
    for i, prompt in enumerate([(1,) * 33, (2,) * 33]):
        queue.submit([make_sequence(i, prompt=prompt)])
    windows[0].admit()
    for i in range(2, 8):
        queue.submit([make_sequence(i, prompt=(2,) * 33)])
        windows[0].admit()
    assert [window.occupied for window in windows] == [4, 4], "both have the prefix once the load is uneven"
    assert ids(list(windows[1].members))[:3] == [1, 2, 3]


def test_nothing_is_preempted_while_another_window_has_room() -> None:
    queue, windows = make_windows(2, max_num_seqs=2)
    windows[1].is_open = False
    for i in range(2):
        queue.submit([make_sequence(i, client="one")])
    windows[0].admit()
    queue.submit([make_sequence(2, client="other")])
    windows[1].is_open = True
    assert windows[0].admit() == []
    assert not queue.preempted
    assert ids(windows[1].admit()) == [2]


def test_sequences_of_a_lost_worker_go_first_and_keep_their_tokens() -> None:
    queue, windows = make_windows(2, max_num_seqs=2)
    for i in range(6):
        queue.submit([make_sequence(i, max_tokens=9)])
    windows[0].admit()
    lost = list(windows[0].members)
    decode(windows[0], lost)
    windows[0].is_open, windows[0].is_lost = False, True
    assert queue.vacate(windows[0]) == set(ids(lost))
    assert windows[0].occupied == 0
    decode(windows[1], list(windows[1].members), 9)
    windows[1].released(windows[1].leaving)
    assert windows[1].admit() == lost
    assert [(sequence.num_generated, sequence.target.num_cached_tokens) for sequence in lost] == [(1, 0)] * 2


def test_a_sequence_in_a_round_moves_after_it() -> None:
    queue, windows = make_windows(2)
    queue.submit([make_sequence(1)])
    (sequence,) = windows[0].admit()
    windows[0].begin_round([sequence])
    windows[0].is_open = False
    assert not queue.vacate(windows[0])
    windows[0].end_round([sequence])
    assert queue.vacate(windows[0]) == {1}
    assert windows[1].admit() == [sequence]


def test_all_windows_share_ids_and_limits() -> None:
    queue, windows = make_windows(2, max_num_seqs=1, queue_size=1)
    queue.submit([make_sequence(1, "a")])
    windows[1].admit()
    with pytest.raises(DuplicateRequestError):
        queue.submit([make_sequence(2, "a")])
    for i in range(3, 5):
        queue.submit([make_sequence(i)])
    with pytest.raises(QueueLimitError):
        queue.submit([make_sequence(6)])


def test_a_removed_window_gives_up_its_sequences() -> None:
    queue, windows = make_windows(2)
    for i in range(4):
        queue.submit([make_sequence(i, max_tokens=9)])
    windows[0].admit()
    queue.remove(windows[0])
    windows[1].admit()
    assert windows[1].occupied == 4
    assert queue.windows == [windows[1]]
    windows[1].check_integrity()
