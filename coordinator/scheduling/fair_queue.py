"""The queue: which waiting sequence enters the window next, fairly between clients and between their requests. Pure.

The rule: the client with the fewest sequences in the window comes first; among its requests those with the lowest
`priority`, and among these the one with the fewest samples in the window. Ties go to the client, and to the request,
whose last turn or arrival is longest ago. So clients take turns, and so do the requests of a client, however many wait
behind them; requests of one sample each enter in the order of their arrival.

Where neighbours are to be about equally long (`by_length`), the rule chooses only the client and the priority.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import count

from coordinator.scheduling.ranking import Rank, Ranking
from coordinator.scheduling.sequence import Sequence

# Sequences of a client that may enter before the one whose turn it is, where neighbours are to be about equally long.
MOST_PASSED_OVER = 16


@dataclass
class _Request:
    """A request with samples that wait or are in the window."""

    number: int
    first_sample_id: int
    priority: int
    since: int
    """Time of its last turn, or of its arrival."""
    waiting: dict[int, Sequence] = field(default_factory=dict)
    running: int = 0
    """Samples in the window."""

    @property
    def first(self) -> Sequence:
        return next(iter(self.waiting.values()))

    @property
    def rank(self) -> Rank:
        return self.priority, self.running, self.since


@dataclass
class _Client:
    """A client with sequences that wait or are in the window."""

    name: str
    since: int = 0
    """Time of its last turn, or at which the first of its waiting sequences arrived."""
    waiting: int = 0
    running: int = 0
    passed_over: int = 0
    """Sequences that entered since the one whose turn it is could have."""
    requests: dict[int, _Request] = field(default_factory=dict)
    turns: Ranking[int] = field(default_factory=Ranking)
    """The requests with samples that wait."""

    @property
    def rank(self) -> Rank:
        return self.running, self.since


class FairQueue:
    """The waiting sequences, and the number of sequences that each client and request has in the window.

    The time of every operation grows with the logarithm of the number of clients and requests; only `by_length` looks
    at all requests of a client.
    """

    def __init__(self, by_length: bool = False) -> None:
        self.tokens = 0
        """Prompt tokens of all waiting sequences."""
        self._waiting: dict[int, Sequence] = {}
        self._places: dict[int, tuple[_Client, _Request]] = {}
        """By sequence, waiting or in the window."""
        self._clients: dict[str, _Client] = {}
        self._requests: dict[int, _Request] = {}
        """By the id of the first sample."""
        self._turns: Ranking[str] = Ranking()
        """The clients with sequences that wait."""
        self._clock = count(1)
        self._by_length = by_length
        self._returning = 0
        """Waiting sequences that were in the window before."""
        self._last_length = 0
        """Prompt tokens of the sequence that entered last."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def newcomers(self) -> int:
        """The waiting sequences that were not set aside, but wait for the first time."""
        return len(self._waiting) - self._returning

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences in the order of their arrival."""
        return iter(self._waiting.values())

    @property
    def next(self) -> Sequence:
        """The sequence that enters next. IndexError if none waits."""
        client = self._clients[self._turns.first]
        request = client.requests[client.turns.first]
        if self._by_length and client.passed_over < MOST_PASSED_OVER:
            urgent = (other for other in client.requests.values() if other.waiting)
            urgent = (other for other in urgent if other.priority == request.priority)
            request = min(urgent, key=lambda other: abs(other.first.prompt_length - self._last_length))
        return request.first

    def first_to_yield(self, members: Iterable[Sequence]) -> Sequence | None:
        """The member of the window that is to give its place to the next sequence; None if the next sequence must wait.
        If the client of the next sequence has no place, a client with several yields one; if only its request has none,
        a request of the same client with several yields one. The member that yields is the one of which the target
        worker has cached least.
        """
        client, request = self._places[self.next.sequence_id]
        found = [(*self._places[member.sequence_id], member) for member in members]
        if not client.running:
            places = [(theirs.running, member) for theirs, _, member in found]
        elif not request.running:
            places = [(its.running, member) for theirs, its, member in found if theirs is client]
        else:
            return None
        most = max((number for number, _ in places), default=0)
        candidates = [member for number, member in places if number == most]
        return min(candidates, key=lambda member: member.num_cached_tokens) if most > 1 else None

    def waiting_of(self, client: str) -> int:
        """The waiting sequences of a client."""
        return self._clients[client].waiting if client in self._clients else 0

    def running_of(self, client: str) -> int:
        """The sequences of a client in the window."""
        return self._clients[client].running if client in self._clients else 0

    def add(self, samples: Items[Sequence]) -> None:
        """Queues the samples of one request, new ones or some that were set aside."""
        request, first_id = samples[0].request, samples[0].first_sample_id
        now, waiting = next(self._clock), {sample.sequence_id: sample for sample in samples}
        client = self._clients.setdefault(request.client, _Client(request.client))
        queued = self._requests.setdefault(first_id, _Request(now, first_id, request.priority, since=now))
        client.requests[queued.number] = queued
        queued.waiting.update(waiting)
        client.since = client.since if client.waiting else now
        client.waiting += len(samples)
        self._waiting.update(waiting)
        self._returning += sum(sample.is_preempted for sample in samples)
        self._places.update(dict.fromkeys(waiting, (client, queued)))
        self.tokens += sum(sample.prompt_length for sample in samples)
        self._settle(client, queued)

    def enter(self, sequence: Sequence) -> None:
        """Notes that a waiting sequence entered the window, which was a turn of its client and of its request."""
        client, request = self._places[sequence.sequence_id]
        client.passed_over = 0 if request.number == client.turns.first else client.passed_over + 1
        self._last_length = sequence.prompt_length
        self._remove(sequence)
        client.since = request.since = next(self._clock)
        client.running += 1
        request.running += 1
        self._settle(client, request)

    def discard(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out."""
        client, request = self._remove(sequence)
        del self._places[sequence.sequence_id]
        self._settle(client, request)

    def leave(self, sequence_id: int) -> None:
        """Notes that a sequence left the window."""
        client, request = self._places.pop(sequence_id)
        client.running -= 1
        request.running -= 1
        self._settle(client, request)

    def _remove(self, sequence: Sequence) -> tuple[_Client, _Request]:
        client, request = self._places[sequence.sequence_id]
        del self._waiting[sequence.sequence_id], request.waiting[sequence.sequence_id]
        client.waiting -= 1
        self._returning -= sequence.is_preempted
        self.tokens -= sequence.prompt_length
        return client, request

    def _settle(self, client: _Client, request: _Request) -> None:
        """Puts a client and its request where they belong now; forgets them when nothing of them is left."""
        if request.waiting:
            client.turns.put(request.number, request.rank)
        else:
            client.turns.discard(request.number)
        if client.waiting:
            self._turns.put(client.name, client.rank)
        else:
            self._turns.discard(client.name)
        if not (request.waiting or request.running):
            del client.requests[request.number], self._requests[request.first_sample_id]
        if not client.requests:
            del self._clients[client.name]

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts do not agree with the sequences."""
        clients = self._clients.values()
        requests = [request for client in clients for request in client.requests.values()]
        assert sum(client.waiting for client in clients) == len(self._waiting), "a client has lost a sequence"
        assert sum(len(request.waiting) for request in requests) == len(self._waiting), "a request has lost one"
        running = len(self._places) - len(self._waiting)
        assert sum(client.running for client in clients) == running == sum(request.running for request in requests)
        assert self._returning == sum(sequence.is_preempted for sequence in self), "those that return are miscounted"
        assert self.tokens == sum(sequence.prompt_length for sequence in self), "tokens are miscounted"
        assert len(self._turns) == sum(client.waiting > 0 for client in clients), "a client has no turn"
