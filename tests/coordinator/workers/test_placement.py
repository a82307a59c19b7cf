"""Placement of sequences on draft workers."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.workers.placement import Placement

WORKERS = ["a", "b", "c"]
some = st.lists(st.sampled_from(WORKERS), min_size=1, unique=True)
sequence_ids = st.integers(0, 9)


class PlacementMachine(RuleBasedStateMachine):
    """Random changes, compared with a plain mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.placement: Placement[str] = Placement()
        self.expected: dict[int, str] = {}
        self.released: dict[int, str] = {}

    def count(self, worker: str) -> int:
        return [*self.expected.values()].count(worker)

    @rule(sequence_id=sequence_ids, workers=some, source_id=st.none() | sequence_ids)
    def place(self, sequence_id: int, workers: list[str], source_id: int | None) -> None:
        self.remove(sequence_id)
        least = min(map(self.count, workers))
        worker = self.placement.place(sequence_id, workers, source_id)
        has_source = source_id is not None and self.placement.has_cached(worker, source_id)
        assert worker in workers
        assert self.count(worker) <= least + has_source
        self.expected[sequence_id] = worker

    @rule(sequence_id=sequence_ids)
    def remove(self, sequence_id: int) -> None:
        assert self.placement.remove(sequence_id) == self.expected.pop(sequence_id, None)

    @rule(released=st.lists(sequence_ids, unique=True), limit=st.integers(0, 3))
    def release(self, released: list[int], limit: int) -> None:
        self.placement.release(released, limit)
        self.released |= {each: self.expected.pop(each) for each in released if each in self.expected}
        assert len(self.placement._released) <= limit

    @rule(worker=st.sampled_from(WORKERS))
    def forget(self, worker: str) -> None:
        self.placement.forget(worker)
        for placed in (self.expected, self.released):
            for sequence_id in [each for each, on in placed.items() if on == worker]:
                del placed[sequence_id]

    @invariant()
    def every_sequence_is_on_one_worker(self) -> None:
        assert {each: self.placement.worker_of(each) for each in self.expected} == self.expected
        assert [*map(self.placement.count, WORKERS)] == [*map(self.count, WORKERS)]
        for sequence_id in range(10):
            cached = [worker for worker in WORKERS if self.placement.has_cached(worker, sequence_id)]
            known = self.expected.get(sequence_id, self.released.get(sequence_id))
            assert cached in ([], [known])
            assert sequence_id not in self.expected or cached


TestPlacement = PlacementMachine.TestCase


@given(st.lists(st.none() | sequence_ids, max_size=60))
def test_workers_that_stay_are_balanced(sources: list[int | None]) -> None:
    placement: Placement[str] = Placement()
    for sequence_id, source_id in enumerate(sources):
        placement.place(sequence_id, WORKERS, source_id)
    counts = [placement.count(worker) for worker in WORKERS]
    assert max(counts) - min(counts) <= (2 if any(sources) or 0 in sources else 1)
