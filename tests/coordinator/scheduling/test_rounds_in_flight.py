"""A window with two rounds in flight: of different groups, or the second one continuing sequences of the first."""

from itertools import count

from admitting_window import AdmittingWindow
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.scheduling.caches import PendingRound
from coordinator.scheduling.capacity import KVCapacity, QueueLimits
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.protocol.rounds import VerifyItem

MAX_ROUNDS = 2


class Flight:
    """A round of a group."""

    def __init__(self, number: int, group: list[Sequence]) -> None:
        self.number, self.group = number, group
        self.pending: dict[Sequence, PendingRound] = {}
        self.is_sent = False


class RoundsInFlight(RuleBasedStateMachine):
    """Plays the round loop and the workers against a window."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        positions=st.sampled_from([0, 30, 90]),
        page_size=st.sampled_from([1, 8]),
        preempts=st.booleans(),
    )
    def start(self, max_num_seqs: int, positions: int, page_size: int, preempts: bool) -> None:
        self.window = AdmittingWindow(max_num_seqs, QueueLimits(1000), preempts=preempts)
        self.window.fit(max_num_seqs, KVCapacity(positions // page_size, page_size))
        self.ids, self.rounds = count(1), count(1)
        self.flights: list[Flight] = []
        self.alive: list[Sequence] = []
        self.held: set[int] = set()
        """Sequences that the target worker has seen and not released."""

    def teardown(self) -> None:
        """Everything ends, and nothing stays behind."""
        if not hasattr(self, "window"):
            return
        for sequence in self.alive:
            if sequence.paused:
                self.window.queue.resume(sequence)
        for _ in range(2000):
            if self.window.is_empty and not self.flights:
                break
            while self.flights:
                if not self.flights[0].is_sent:
                    self.send()
                self.end(1)
            self.release()
            self.admit()
            if len(self.window.ready):
                self.begin(4)
        assert self.window.is_empty, "sequences never end"
        assert not self.held, "a slot is never released"

    @rule(prompt_length=st.integers(1, 20), max_tokens=st.integers(1, 6), client=st.sampled_from("xy"))
    def submit(self, prompt_length: int, max_tokens: int, client: str) -> None:
        sequence_id = next(self.ids)
        request = GenerationRequest(str(sequence_id), (1,) * prompt_length, max_tokens, frozenset(), 0, client=client)
        self.alive.append(Sequence(sequence_id, request))
        self.window.queue.submit([self.alive[-1]])

    @rule()
    def admit(self) -> None:
        self.window.admit()

    @precondition(lambda self: len(self.flights) < MAX_ROUNDS and len(self.window.ready))
    @rule(size=st.integers(1, 4))
    def begin(self, size: int) -> None:
        group = list(self.window.ready)[:size]
        assert all(sequence.can_continue for sequence in group)
        self.window.begin_round(group)
        self.flights.append(Flight(next(self.rounds), group))

    @precondition(lambda self: any(not flight.is_sent for flight in self.flights))
    @rule()
    def send(self) -> None:
        flight = next(flight for flight in self.flights if not flight.is_sent)
        flight.is_sent = True
        for sequence in flight.group:
            if sequence.finish is None:
                flight.pending[sequence] = PendingRound(flight.number, VerifyItem(1, 0, ()), None)
                sequence.target.send(flight.pending[sequence])
                self.held.add(sequence.sequence_id)
        self.window.round_sent(flight.group)

    @precondition(lambda self: self.flights and self.flights[0].is_sent)
    @rule(token=st.integers(0, 3))
    def end(self, token: int) -> None:
        """The oldest round is answered. Token 0: the worker has lost the caches."""
        flight = self.flights.pop(0)
        for sequence, pending in flight.pending.items():
            if sequence.finish is not None or not sequence.target.awaits(pending):
                continue
            sequence.target.answer()
            if token:
                sequence.target.commit(len(sequence.token_ids))
                sequence.commit([token])
            else:
                sequence.target.discard_all()
                sequence.target.miss()
        self.window.end_round(flight.group)

    @precondition(lambda self: self.flights and self.flights[0].is_sent)
    @rule()
    def fail(self) -> None:
        """The oldest round fails. Its sequences stay in it until it ends."""
        flight = self.flights.pop(0)
        for sequence, pending in flight.pending.items():
            if pending in sequence.target.pending:
                sequence.target.discard_all()
        held = self.window.hold(flight.group)
        assert not {sequence.sequence_id for sequence in held} & {s.sequence_id for s in self.window.ready}
        self.window.end_round(flight.group)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.window.queue.abort(data.draw(st.sampled_from(self.alive)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def pause_or_resume(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        if sequence.finish is None:
            (self.window.queue.resume if sequence.paused else self.window.queue.pause)(sequence)

    @rule()
    def release(self) -> None:
        leaving = self.window.leaving
        in_flight = {sequence.sequence_id for flight in self.flights for sequence in flight.group}
        assert not leaving & in_flight, "a slot is released during a round of its sequence"
        self.held -= leaving
        self.window.released(leaving)

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "window"):
            return
        self.window.check_integrity()
        in_flight = [sequence for flight in self.flights for sequence in flight.group]
        for sequence in in_flight:
            assert in_flight.count(sequence) <= MAX_ROUNDS
            assert len(sequence.target.pending) <= in_flight.count(sequence)
        unsent = {s.sequence_id for flight in self.flights if not flight.is_sent for s in flight.group}
        assert not unsent & {sequence.sequence_id for sequence in self.window.ready}, "an unsent round is overtaken"


RoundsInFlight.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestRoundsInFlight = RoundsInFlight.TestCase
