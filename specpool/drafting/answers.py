"""Finished answers of earlier requests, to draft the tokens that followed an earlier occurrence of a run. Pure."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from specpool.drafting.ngrams import MAX_RUN, TOKENS_PER_CALL

# Minimum length of a repeated run: a single token says little about another answer.
MIN_RUN = 2
# Buckets of the hash table per token, of 8 bytes each. More buckets lose fewer runs to collisions.
BUCKETS_PER_TOKEN = 8

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


class AnswerStore:
    """Answers of all namespaces. Requests find only answers of their own namespace.

    A hash table of fixed size maps each run to its last occurrence. An evicted answer leaves its entries behind until
    others overwrite them, so no call takes long. Each hit is compared with the answer's tokens.
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
        """Add an answer, which later calls of `index_some` index. A repeated answer becomes the newest again."""
        max_tokens = self.max_tokens // 2
        text = array("I", token_ids[:max_tokens]).tobytes()
        length = len(text) // array("I").itemsize
        if length <= MIN_RUN:
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
            self._answers[shelf.answers[text]] = _Answer(shelf, memoryview(text).cast("I"))
            client.num_tokens += length
            self.num_tokens += length
        self._unindexed[shelf.answers[text]] = MIN_RUN
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

    def propose(self, namespace: Namespace, token_ids: Sequence[int], k: int) -> tuple[tuple[int, ...], int]:
        """At most `k` tokens that followed the last tokens in an answer of the namespace, and the length of the run.

        `((), 0)` if no run repeats.
        """
        name, salt = namespace
        client = self._clients.get(name)
        if client is None or salt not in client.shelves or k <= 0:
            return (), 0
        self._clients.move_to_end(name)
        client.shelves.move_to_end(salt)
        shelf = client.shelves[salt]
        last_ids = list(token_ids[-MAX_RUN:])
        for bucket in reversed(list(self._buckets(shelf, last_ids))):
            number, end = divmod(self._table[bucket], self.max_tokens)
            answer = self._answers.get(number)
            if answer is not None and answer.shelf is shelf:  # otherwise evicted, or of another namespace
                run = _run_length(answer.token_ids[max(0, end - MAX_RUN) : end].tolist(), last_ids)
                if run >= MIN_RUN:
                    return tuple(answer.token_ids[end : end + k]), run
        return (), 0

    def _index(self, number: int, answer: _Answer, start: int, stop: int) -> None:
        """Index the runs before each position from `start` to `stop` - 1."""
        first = max(0, start - MAX_RUN)
        token_ids = answer.token_ids[first:stop].tolist()
        for end in range(start, stop):
            run = token_ids[max(0, end - MAX_RUN - first) : end - first]
            for bucket in self._buckets(answer.shelf, run):
                self._table[bucket] = number * self.max_tokens + end

    def _buckets(self, shelf: _Shelf, last_ids: list[int]) -> Iterator[int]:
        """Buckets of the runs that end with the last token, shortest first."""
        key = shelf.number
        for length, token in enumerate(reversed(last_ids), 1):
            key = hash((key, token))
            if length >= MIN_RUN:
                yield key % self._num_buckets

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


def _run_length(token_ids: list[int], last_ids: list[int]) -> int:
    """Length of the common suffix."""
    pairs = zip(reversed(token_ids), reversed(last_ids), strict=False)
    return next((i for i, (token, last) in enumerate(pairs) if token != last), min(len(token_ids), len(last_ids)))
