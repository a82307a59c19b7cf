"""Naive model of the fair queue: computes every rank from scratch."""

from coordinator.scheduling.sequence import Sequence


class FairRule:
    """Waiting sequences in order of arrival, and sequences in the window."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._now = 0
        self._client_since: dict[str, int] = {}
        self._request_since: dict[int, int] = {}
        self._request_of: dict[int, int] = {}

    def add(self, samples: list[Sequence]) -> None:
        self._now += 1
        client = samples[0].request.client
        if not any(sequence.request.client == client for sequence in self.waiting):
            self._client_since[client] = self._now
        self._request_since[self._now] = self._now
        self._request_of.update({sample.sequence_id: self._now for sample in samples})
        self.waiting += samples

    @property
    def next(self) -> Sequence:
        return min(self.waiting, key=self._rank)

    def in_turn(self) -> list[Sequence]:
        """`next`, then the first sample of each request, by client."""
        firsts: dict[int, Sequence] = {}
        for sequence in self.waiting:
            firsts.setdefault(self._request_of[sequence.sequence_id], sequence)
        return [self.next, *sorted((first for first in firsts.values() if first is not self.next), key=self._rank)]

    def enter(self, sequence: Sequence) -> None:
        self._now += 1
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._client_since[sequence.request.client] = self._now
        self._request_since[self._request_of[sequence.sequence_id]] = self._now

    def number_of(self, client: str) -> int:
        return sum(sequence.request.client == client for sequence in self.running)

    def _rank(self, sequence: Sequence) -> tuple[int, ...]:
        client, request = sequence.request.client, self._request_of[sequence.sequence_id]
        siblings = sum(self._request_of[other.sequence_id] == request for other in self.running)
        turn = self._client_since[client], sequence.request.priority, siblings, self._request_since[request]
        return self.number_of(client), *turn, sequence.sequence_id
