"""Placement of sequences on draft workers."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.workers.placement import MAX_PREFIXES, Placement

WORKERS = ["a", "b", "c"]
some = st.lists(st.sampled_from(WORKERS), min_size=1, unique=True)
sequence_ids = st.integers(0, 9)


class PlacementMachine(RuleBasedStateMachine):
    """Random changes, compared with a plain mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.placement: Placement[str] = Placement()
        self.expected: dict[int, str] = {}

    def count(self, worker: str) -> int:
        return [*self.expected.values()].count(worker)

    @rule(sequence_id=sequence_ids, workers=some, prefix=st.none() | sequence_ids)
    def place(self, sequence_id: int, workers: list[str], prefix: int | None) -> None:
        self.remove(sequence_id)
        least = min(map(self.count, workers))
        worker = self.placement.place(sequence_id, workers, prefix)
        assert worker in workers
        assert self.count(worker) <= least + (prefix is not None)
        self.expected[sequence_id] = worker

    @rule(sequence_id=sequence_ids)
    def remove(self, sequence_id: int) -> None:
        assert self.placement.remove(sequence_id) == self.expected.pop(sequence_id, None)

    @rule(released=st.lists(sequence_ids, unique=True))
    def release(self, released: list[int]) -> None:
        self.placement.release(released)
        for each in released:
            self.expected.pop(each, None)

    @rule(worker=st.sampled_from(WORKERS))
    def forget(self, worker: str) -> None:
        self.placement.forget(worker)
        self.expected = {each: on for each, on in self.expected.items() if on != worker}

    @invariant()
    def every_sequence_is_on_one_worker(self) -> None:
        assert {each: self.placement.worker_of(each) for each in self.expected} == self.expected
        assert [*map(self.placement.count, WORKERS)] == [*map(self.count, WORKERS)]


TestPlacement = PlacementMachine.TestCase


@given(st.lists(st.none() | sequence_ids, max_size=60))
def test_workers_that_stay_are_balanced(prefixes: list[int | None]) -> None:
    placement: Placement[str] = Placement()
    for sequence_id, prefix in enumerate(prefixes):
        placement.place(sequence_id, WORKERS, prefix)
    counts = [placement.count(worker) for worker in WORKERS]
    assert max(counts) - min(counts) <= (2 if any(prefixes) or 0 in prefixes else 1)


def test_sequences_with_a_prefix_are_placed_together_unless_that_worker_has_more() -> None:
    placement: Placement[str] = Placement()
    assert [placement.place(i, WORKERS, prefix) for i, prefix in enumerate(["x", "y", "y", "x"])] == [
        "a",
        "b",
        "b",
        "a",
    ]
    assert placement.place(4, WORKERS, "x") == "c"
    placement.release(range(5))
    assert placement.place(5, WORKERS, "y") == "b", "it may still have the pages of released sequences"


def test_few_prefixes_are_remembered() -> None:
    placement: Placement[str] = Placement()
    for number in range(MAX_PREFIXES + 1):
        placement.place(number, WORKERS, number)
    assert len(placement._worker_by_prefix) == MAX_PREFIXES
