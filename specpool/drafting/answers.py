"""Store of finished answers, indexed by short token runs to find occurrences of a sequence's last tokens. Pure."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter

from specpool.drafting.suffixes import TOKENS_PER_CALL
from specpool.drafting.votes import MAX_MATCH, Match, match_length

# Lengths of the indexed runs. The longer run finds long matches among many occurrences of the shorter one.
RUNS = (4, 2)
# Minimum match: a single token says little about another answer.
MIN_MATCH = min(RUNS)
# Occurrences of each run to examine, latest first.
MAX_OCCURRENCES = 16
# Maximum store size that settings accept. Takes 1 GiB.
MAX_STORE_TOKENS = 2**24
# Buckets of the hash table per token, of 8 bytes each. More buckets lose fewer runs to collisions.
BUCKETS_PER_TOKEN = 4

Namespace = tuple[str, str]
"""Client and salt."""


@dataclass(eq=False)
class _Shelf:
    """The answers of one namespace."""

    number: int
    answers: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """Numbers of the answers by tokens, oldest first."""


@dataclass(eq=False)
class _Client:
    """The answers of one client."""

    shelves: OrderedDict[str, _Shelf] = field(default_factory=OrderedDict)
    """By salt, least recently used first."""
    num_tokens: int = 0


@dataclass(eq=False)
class _Answer:
    """An answer, and the namespace that it belongs to."""

    shelf: _Shelf
    token_ids: "memoryview[int]"
    links: "tuple[array[int], ...]"
    """By run length and position: the hash table's previous entry for the run that ends there."""


class AnswerStore:
    """Answers of all namespaces. Requests find only answers of their own namespace.

    A fixed-size hash table maps each run to its last occurrence, which links to the previous one. Entries of an evicted
    answer remain until others overwrite them, so eviction is cheap. Each hit is compared with the answer's tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: limit across all clients. Beyond it, the least recently used client loses answers.

        A client may hold half of them across all its salts.
        """
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        """Least recently used first."""
        self._answers: dict[int, _Answer] = {}
        self._unindexed: OrderedDict[int, int] = OrderedDict()
        """By number of an answer: the position after the first run that is not indexed yet."""
        self._numbers = count(1)
        self._num_buckets = BUCKETS_PER_TOKEN * max_tokens
        self._table = array("Q", (0,)) * self._num_buckets
        """By bucket: `max_tokens` times the number of an answer, plus the position after the run; 0: empty."""

    def add(self, namespace: Namespace, token_ids: Sequence[int]) -> None:
        """Add an answer; later calls of `index_some` index it. Adding a stored answer again renews its age."""
        max_tokens = self.max_tokens // 2
        text = array("I", token_ids[:max_tokens]).tobytes()
        length = len(text) // array("I").itemsize
        if length <= MIN_MATCH:
            return
        name, salt = namespace
        client = self._clients.pop(name, None) or _Client()
        shelf = client.shelves.pop(salt, None) or _Shelf(next(self._numbers))
        client.shelves[salt] = shelf
        if text in shelf.answers:
            shelf.answers.move_to_end(text)
        else:
            while client.num_tokens + length > max_tokens:
                self._evict_from(client)
            while self.num_tokens + length > self.max_tokens:
                self._evict_from_idle()
            shelf.answers[text] = next(self._numbers)
            links = tuple(array("Q", bytes(8 * length)) for _ in RUNS)
            self._answers[shelf.answers[text]] = _Answer(shelf, memoryview(text).cast("I"), links)
            self._unindexed[shelf.answers[text]] = MIN_MATCH
            client.num_tokens += length
            self.num_tokens += length
        client.shelves[salt] = shelf  # eviction may have removed the emptied shelf
        self._clients[name] = client

    def index_some(self) -> None:
        """Index at most `TOKENS_PER_CALL` tokens of new answers, oldest first."""
        budget = TOKENS_PER_CALL
        while self._unindexed and budget > 0:
            number, start = self._unindexed.popitem(last=False)
            answer = self._answers[number]
            stop = min(len(answer.token_ids), start + budget)
            self._index(number, answer, start, stop)
            budget -= stop - start
            if stop < len(answer.token_ids):
                self._unindexed[number] = stop
                self._unindexed.move_to_end(number, last=False)

    def matches(self, namespace: Namespace, token_ids: Sequence[int], k: int) -> list[Match]:
        """Find the last tokens in answers of the namespace. Each match has at most `k` following tokens.

        Longer matches come first, then later ones.
        """
        name, salt = namespace
        client = self._clients.get(name)
        if client is None or salt not in client.shelves:
            return []
        self._clients.move_to_end(name)
        client.shelves.move_to_end(salt)
        shelf, last_ids, found = client.shelves[salt], list(token_ids[-MAX_MATCH:]), dict[int, Match]()
        for kind, run in enumerate(RUNS):
            if len(last_ids) >= run:
                for entry, answer in self._occurrences(shelf, kind, last_ids[-run:]):
                    end = entry % self.max_tokens
                    if entry not in found and (length := match_length(answer.token_ids, end, last_ids)) >= run:
                        found[entry] = length, answer.token_ids[end : end + k]
        return sorted(found.values(), key=itemgetter(0), reverse=True)

    def _occurrences(self, shelf: _Shelf, kind: int, run: Sequence[int]) -> Iterator[tuple[int, _Answer]]:
        """Yield candidate occurrences of a run in a shelf's answers, latest first. Buckets may collide."""
        entry = self._table[self._bucket(shelf, run)]
        for _ in range(MAX_OCCURRENCES):
            number, end = divmod(entry, self.max_tokens)
            answer = self._answers.get(number)
            if answer is None:  # evicted, like all older entries
                return
            if answer.shelf is shelf:  # otherwise another namespace shares the bucket
                yield entry, answer
            entry = answer.links[kind][end]

    def _index(self, number: int, answer: _Answer, start: int, stop: int) -> None:
        """Index the runs before each position from `start` to `stop` - 1."""
        first = max(0, start - max(RUNS))
        token_ids = answer.token_ids[first:stop].tolist()
        for kind, run in enumerate(RUNS):
            for end in range(max(start, run), stop):
                bucket = self._bucket(answer.shelf, token_ids[end - run - first : end - first])
                answer.links[kind][end] = self._table[bucket]
                self._table[bucket] = number * self.max_tokens + end

    def _bucket(self, shelf: _Shelf, run: Sequence[int]) -> int:
        return hash((shelf.number, *run)) % self._num_buckets

    def _evict_from_idle(self) -> None:
        """Evict one answer from the least recently used client."""
        name, client = next(iter(self._clients.items()))
        self._evict_from(client)
        if not client.shelves:
            del self._clients[name]

    def _evict_from(self, client: _Client) -> None:
        """Evict the oldest answer stored under the client's least recently used salt."""
        salt, shelf = next(iter(client.shelves.items()))
        _, number = shelf.answers.popitem(last=False)
        if not shelf.answers:
            del client.shelves[salt]
        length = len(self._answers.pop(number).token_ids)
        self._unindexed.pop(number, None)
        client.num_tokens -= length
        self.num_tokens -= length
