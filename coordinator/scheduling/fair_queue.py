"""The queue: chooses which waiting sequence enters the window next, fairly among clients and requests. Pure.

The client with the fewest sequences in the window goes first. Among its requests, the lowest `priority` goes first,
then the request with the fewest samples in the window. Ties go to the client or request that has waited longest since
its arrival or last turn. Clients therefore take turns, and so do the requests of each client. Requests with one sample
enter in order of arrival.

With `by_length`, this rule chooses only the client and the priority. Among these requests, the one closest in length to
the last sequence enters.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import count, islice

from coordinator.scheduling.ranking import Rank, Ranking
from coordinator.scheduling.sequence import Sequence

MayEnter = Callable[[Sequence, list[Sequence]], bool]
"""Whether a waiting sequence could enter once these victims have left."""

# With `by_length`: how many sequences may overtake the one whose turn it is.
MAX_OVERTAKES = 16
# Requests of a client to examine for one that fits into the KV cache.
MAX_EXAMINED = 16


@dataclass
class Request:
    """A request with unfinished samples."""

    first_sample_id: int
    priority: int
    samples: dict[int, Sequence]
    """Unfinished samples, by id."""
    since: int = 0
    """Time of the arrival or of the last turn."""
    waiting: dict[int, Sequence] = field(default_factory=dict)
    running: int = 0
    """Samples in a window."""

    @property
    def first(self) -> Sequence:
        return next(iter(self.waiting.values()))

    @property
    def rank(self) -> Rank:
        return self.priority, self.running, self.since


@dataclass
class _Client:
    """A client with sequences waiting or in the window."""

    name: str
    since: int = 0
    """Time of the last turn, or of the arrival of the first waiting sequence."""
    waiting: int = 0
    running: int = 0
    overtakes: int = 0
    """Sequences that overtook the one whose turn it is."""
    requests: dict[int, Request] = field(default_factory=dict)
    """By the id of the first sample."""
    turns: Ranking[int] = field(default_factory=Ranking)
    """Requests with waiting samples."""

    @property
    def rank(self) -> Rank:
        return self.running, self.since


class FairQueue:
    """Waiting sequences, and how many each client and request has in the window.

    Operations take logarithmic time in the number of clients and requests. Only `by_length` examines all requests of a
    client.
    """

    def __init__(self, by_length: bool = False) -> None:
        self.tokens = 0
        """Tokens of the prompts and predictions of all waiting sequences."""
        self._waiting: dict[int, Sequence] = {}
        self._places: dict[int, tuple[_Client, Request]] = {}
        """By sequence, waiting or in the window."""
        self._clients: dict[str, _Client] = {}
        self._turns: Ranking[str] = Ranking()
        """Clients with waiting sequences."""
        self._clock = count(1)
        self._by_length = by_length
        self._preempted = 0
        """Waiting sequences that were in the window before."""
        self._last_length = 0
        """Prompt tokens of the last sequence to enter."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def newcomers(self) -> int:
        """Sequences that wait for the first time."""
        return len(self._waiting) - self._preempted

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences in order of arrival."""
        return iter(self._waiting.values())

    @property
    def next(self) -> Sequence:
        """The sequence that enters next. Raises IndexError if none waits."""
        client = self._clients[self._turns.first]
        request = client.requests[client.turns.first]
        if self._by_length and client.overtakes < MAX_OVERTAKES:
            candidates = (
                other for other in client.requests.values() if other.waiting and other.priority == request.priority
            )
            request = min(candidates, key=lambda other: abs(other.first.prompt_length - self._last_length))
        return request.first

    def in_turn(self) -> Iterator[Sequence]:
        """Waiting sequences that may enter next: `next`, and a few early requests of each client in turn."""
        first = self.next
        yield first
        for client in sorted((self._clients[name] for name in self._turns), key=lambda client: client.rank):
            requests = sorted(islice(client.turns, MAX_EXAMINED), key=lambda i: client.requests[i].rank)
            yield from (sample for i in requests if (sample := client.requests[i].first) is not first)

    def slot_victims(self, members: Iterable[Sequence], places: int, may_enter: MayEnter) -> list[Sequence]:
        """The members to preempt so that the waiting clients get their max-min fair shares of the window.

        `places`: number of waiting sequences that can enter already. A client takes places from the client with the
        most, while that one keeps at least as many. Victims are the least urgent sequences with the fewest cached
        tokens.
        """
        by_client: dict[str, list[Sequence]] = {}
        for member in members:
            by_client.setdefault(member.request.client, []).append(member)
        top = max((self._clients[name].running for name in by_client), default=0)
        if not self._waiting or top < self._clients[self._turns.first].running + 2:
            return []
        running = {name: client.running for name, client in self._clients.items()}
        waiting = {name: client.waiting for name, client in self._clients.items() if client.waiting}
        for group in by_client.values():
            group.sort(key=lambda member: (-member.request.priority, member.target.num_cached_tokens), reverse=True)
        victims: list[Sequence] = []
        while waiting:
            name = min(waiting, key=lambda client: (running[client], self._clients[client].since))
            if places > 0:
                places -= 1
            else:
                most = max((client for client in by_client if by_client[client]), key=running.__getitem__, default=name)
                if running[most] < running[name] + 2:
                    break
                client = self._clients[name]
                if not may_enter(client.requests[client.turns.first].first, [*victims, by_client[most][-1]]):
                    del waiting[name]
                    continue
                victims.append(by_client[most].pop())
                running[most] -= 1
            running[name] += 1
            waiting[name] -= 1
            if not waiting[name]:
                del waiting[name]
        return victims

    def request_victim(self, members: Iterable[Sequence], may_enter: MayEnter) -> Sequence | None:
        """The member to preempt for the next sequence, if its request has no place and another of its client several.

        The victim has the fewest cached tokens.
        """
        next_client, next_request = self._places[self.next.sequence_id]
        if next_request.running:
            return None
        places = [(*self._places[member.sequence_id], member) for member in members]
        candidates = [(request.running, member) for client, request, member in places if client is next_client]
        max_running = max((running for running, _ in candidates), default=0)
        if max_running < 2:
            return None
        victims = [member for running, member in candidates if running == max_running]
        victim = min(victims, key=lambda member: member.target.num_cached_tokens)
        return victim if may_enter(self.next, [victim]) else None

    def has_place(self, sequence: Sequence) -> bool:
        """Whether another sample of the same request is in the window."""
        return self._places[sequence.sequence_id][1].running > 0

    def waiting_of(self, client: str) -> int:
        return self._clients[client].waiting if client in self._clients else 0

    def running_of(self, client: str) -> int:
        return self._clients[client].running if client in self._clients else 0

    @property
    def waiting_clients(self) -> int:
        """Number of clients with waiting sequences."""
        return len(self._turns)

    def clients_without_place(self) -> set[str]:
        """Clients that wait, and have no sequence in the window."""
        return {name for name in self._turns if not self._clients[name].running}

    def add(self, samples: Items[Sequence], request: Request | None = None, goes_first: bool = False) -> Request:
        """Queue samples of a request. Return it.

        `request`: of preempted samples; None: a new one. `goes_first`: before other requests of its client.
        """
        asked, first_id = samples[0].request, samples[0].first_sample_id
        now, waiting = next(self._clock), {sample.sequence_id: sample for sample in samples}
        assert self._places.keys().isdisjoint(waiting), "a sequence is queued twice"
        request = request or Request(first_id, asked.priority, dict(waiting))
        client = self._clients.setdefault(asked.client, _Client(asked.client))
        client.requests[first_id] = request
        if not (request.waiting or request.running):
            request.since = now
        request.since = 0 if goes_first else request.since
        request.waiting.update(waiting)
        client.since = client.since if client.waiting else now
        client.waiting += len(samples)
        self._waiting.update(waiting)
        self._preempted += sum(sample.is_preempted for sample in samples)
        self._places.update(dict.fromkeys(waiting, (client, request)))
        self.tokens += sum(sample.num_queued_tokens for sample in samples)
        self._settle(client, request)
        return request

    def enter(self, sequence: Sequence) -> None:
        """Move a waiting sequence into the window, which takes the turn of its client and request."""
        client, request = self._places[sequence.sequence_id]
        client.overtakes = 0 if request.first_sample_id == client.turns.first else client.overtakes + 1
        self._last_length = sequence.prompt_length
        self._remove(sequence)
        client.since = request.since = next(self._clock)
        client.running += 1
        request.running += 1
        self._settle(client, request)

    def discard(self, sequence: Sequence) -> None:
        client, request = self._remove(sequence)
        del self._places[sequence.sequence_id]
        self._settle(client, request)

    def leave(self, sequence_id: int) -> None:
        """Remove a sequence from the window, unless it has left before."""
        if sequence_id not in self._places:
            return
        client, request = self._places.pop(sequence_id)
        client.running -= 1
        request.running -= 1
        self._settle(client, request)

    def _remove(self, sequence: Sequence) -> tuple[_Client, Request]:
        client, request = self._places[sequence.sequence_id]
        del self._waiting[sequence.sequence_id], request.waiting[sequence.sequence_id]
        client.waiting -= 1
        self._preempted -= sequence.is_preempted
        self.tokens -= sequence.num_queued_tokens
        return client, request

    def _settle(self, client: _Client, request: Request) -> None:
        """Update the ranks of a client and its request, and drop those with no sequence left."""
        if request.waiting:
            client.turns.put(request.first_sample_id, request.rank)
        else:
            client.turns.discard(request.first_sample_id)
        if client.waiting:
            self._turns.put(client.name, client.rank)
        else:
            self._turns.discard(client.name)
        if not (request.waiting or request.running):
            del client.requests[request.first_sample_id]
        if not client.requests:
            del self._clients[client.name]

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts do not agree with the sequences."""
        clients = self._clients.values()
        requests = [request for client in clients for request in client.requests.values()]
        assert sum(client.waiting for client in clients) == len(self._waiting), "a client has lost a sequence"
        assert sum(len(request.waiting) for request in requests) == len(self._waiting), "a request has lost one"
        running = len(self._places) - len(self._waiting)
        assert sum(client.running for client in clients) == running == sum(request.running for request in requests)
        assert self._preempted == sum(sequence.is_preempted for sequence in self), "preempted sequences are miscounted"
        assert self.tokens == sum(sequence.num_queued_tokens for sequence in self), "tokens are miscounted"
        assert len(self._turns) == sum(client.waiting > 0 for client in clients), "a client has no turn"
