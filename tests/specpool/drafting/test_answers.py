"""The store of finished answers against a naive search: bounds, isolation and evictions."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpool.drafting.answers import MAX_OCCURRENCES, MIN_MATCH, RUNS, AnswerStore
from specpool.drafting.suffixes import TOKENS_PER_CALL
from specpool.drafting.votes import MAX_MATCH

ALICE, BOB, CAROL = ("alice", "s"), ("bob", "s"), ("carol", "s")
ALICE_TOO = "alice", "t"
LENGTH = 16
NAMESPACES = ALICE, BOB, CAROL, ALICE_TOO

lengths = st.integers(0, 3 * LENGTH)
answers = lengths.flatmap(lambda length: st.lists(st.integers(0, 3), min_size=length, max_size=length))
additions = st.lists(st.tuples(st.sampled_from(NAMESPACES), answers), max_size=12)


def answer(number: int, length: int = LENGTH) -> list[int]:
    """An answer whose tokens appear in no other."""
    return [1000 * number + i for i in range(length)]


def index_all(store: AnswerStore) -> None:
    while store._unindexed:
        store.index_some()


def filled(*added: tuple[tuple[str, str], list[int]], max_tokens: int = 10_000) -> AnswerStore:
    """A store with these answers, indexed, whose hash table has no collisions."""
    store = AnswerStore(max_tokens)
    store._num_buckets, store._table = 2**60, defaultdict(int)  # type: ignore[assignment]
    for namespace, token_ids in added:
        store.add(namespace, token_ids)
        index_all(store)
    return store


def matches(store: AnswerStore, namespace: tuple[str, str], last_ids: list[int], k: int) -> list[tuple[int, list[int]]]:
    return [(length, list(following)) for length, following in store.matches(namespace, last_ids, k)]


def has(store: AnswerStore, namespace: tuple[str, str], number: int) -> bool:
    """Whether the store proposes the end of `answer(number)`, without counting as a use of the namespace."""
    orders = [store._clients, *(client.shelves for client in store._clients.values())]
    before = [list(order) for order in orders]
    found = matches(store, namespace, answer(number)[:4], 3)
    for order, names in zip(orders, before, strict=True):
        for name in names:
            order.move_to_end(name)
    assert found in [[], [(4, answer(number)[4:7])]]
    return bool(found)


def naive(texts: list[list[int]], last_ids: list[int], k: int) -> list[tuple[int, list[int]]]:
    """Find the last tokens by brute force, longest match first, then latest. Equal texts count once."""
    found, seen = [], set[tuple[int, ...]]()
    for number, text in enumerate(texts):
        if tuple(text) in seen:
            continue
        seen.add(tuple(text))
        for end in range(MIN_MATCH, len(text)):
            length = next((i for i in range(min(end, len(last_ids))) if text[end - 1 - i] != last_ids[-1 - i]), None)
            length = min(end, len(last_ids)) if length is None else length
            if length >= MIN_MATCH:
                found.append((length, number, end, text[end : end + k]))
    latest = sorted(found, key=lambda match: match[:3], reverse=True)
    return [(length, following) for length, _, _, following in latest]


@given(added=additions, last_ids=st.lists(st.integers(0, 3), max_size=6), k=st.integers(1, 9))
def test_matches_equal_those_of_a_naive_search(
    added: list[tuple[tuple[str, str], list[int]]], last_ids: list[int], k: int
) -> None:
    store = filled(*added)
    for namespace in NAMESPACES:
        own = [text for name, text in added if name == namespace and len(text) > MIN_MATCH]
        found, expected = matches(store, namespace, last_ids, k), naive(own, last_ids, k)
        assert len(found) <= MAX_OCCURRENCES * len(RUNS)
        assert [length for length, _ in found] == sorted((length for length, _ in found), reverse=True)
        assert all(match in expected for match in found)
        if len(expected) <= MAX_OCCURRENCES:
            assert found == expected


@given(
    added=additions,
    max_tokens=st.integers(1, 120),
    num_buckets=st.integers(1, 120),
    chunks=st.lists(st.booleans(), min_size=12, max_size=12),
    last_ids=st.lists(st.integers(0, 3), min_size=2, max_size=6),
)
def test_the_store_is_bounded_and_proposes_only_text_of_the_namespace(
    added: list[tuple[tuple[str, str], list[int]]],
    max_tokens: int,
    num_buckets: int,
    chunks: list[bool],
    last_ids: list[int],
) -> None:
    """With a small hash table full of collisions, and answers that are evicted before and after they are indexed."""
    store = AnswerStore(max_tokens)
    store._num_buckets = min(num_buckets, store._num_buckets)
    table_bytes = len(store._table) * store._table.itemsize
    known: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    for (namespace, token_ids), is_indexed in zip(added, chunks, strict=False):
        known[namespace].append(token_ids)
        store.add(namespace, token_ids)
        if is_indexed:
            store.index_some()
        check_bounds(store, table_bytes)
        for name in NAMESPACES:
            for length, following in matches(store, name, last_ids, 3):
                assert length >= MIN_MATCH
                assert following
                wanted = [*last_ids[len(last_ids) - length :], *following]
                assert any(contains(text, wanted) for text in known[name])


def check_bounds(store: AnswerStore, table_bytes: int) -> None:
    by_shelf = Counter[int]()
    for held_answer in store._answers.values():
        by_shelf[id(held_answer.shelf)] += len(held_answer.token_ids)
    held = {
        name: sum(by_shelf[id(shelf)] for shelf in client.shelves.values()) for name, client in store._clients.items()
    }
    assert sum(held.values()) == store.num_tokens <= store.max_tokens
    assert all(tokens <= store.max_tokens // 2 for tokens in held.values())
    assert {name: client.num_tokens for name, client in store._clients.items()} == held
    shelves = [shelf for client in store._clients.values() for shelf in client.shelves.values()]
    assert {id(shelf) for shelf in shelves} == by_shelf.keys(), "no empty namespace is kept"
    assert all(held.values()), "no empty client is kept"
    assert store._unindexed.keys() <= store._answers.keys()
    assert len(store._table) * store._table.itemsize == table_bytes


def contains(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text)))


def test_long_answers_are_indexed_over_many_calls() -> None:
    class Writes(defaultdict[int, int]):
        count = 0

        def __setitem__(self, key: int, value: int) -> None:
            self.count += 1
            super().__setitem__(key, value)

    store, text = filled(max_tokens=100_000), answer(1, 5 * TOKENS_PER_CALL)
    store._table = writes = Writes(int)  # type: ignore[assignment]
    store.add(ALICE, text)
    assert writes.count == 0
    for call in range(1, 6):
        before = writes.count
        store.index_some()
        assert writes.count - before <= 2 * TOKENS_PER_CALL * len(RUNS), "reading a new bucket also writes"
        found = [end for end in range(4, len(text)) if matches(store, ALICE, text[:end], 1)]
        assert len(found) == pytest.approx(min(len(text), call * TOKENS_PER_CALL), abs=8)
        assert found == [*range(4, 4 + len(found))]


def test_the_least_recently_used_client_loses_its_oldest_answers() -> None:
    size = LENGTH
    store = filled((ALICE, answer(1)), (ALICE, answer(2)), (BOB, answer(3)), (BOB, answer(4)), max_tokens=4 * size)
    matches(store, ALICE, [1, 2], 1)  # a use
    store.add(CAROL, answer(5))
    assert [has(store, ALICE, 1), has(store, ALICE, 2), has(store, BOB, 3), has(store, BOB, 4)] == [1, 1, 0, 1]
    store.add(CAROL, answer(6))
    assert [has(store, ALICE, 1), has(store, ALICE, 2), has(store, BOB, 4)] == [1, 1, 0]


@pytest.mark.parametrize("num_salts", [1, 2, 40])
def test_one_client_cannot_displace_all_others(num_salts: int) -> None:
    store = filled((BOB, answer(0)), max_tokens=10 * LENGTH)
    salts = [("alice", str(number % num_salts)) for number in range(40)]
    for number in range(1, 40):
        store.add(salts[number], answer(number))
    index_all(store)
    assert has(store, BOB, 0)
    assert [number for number in range(40) if has(store, salts[number], number)] == [35, 36, 37, 38, 39]


def test_a_client_loses_answers_of_its_least_recently_used_salt() -> None:
    size = LENGTH
    store = filled((ALICE, answer(1)), (ALICE_TOO, answer(2)), (ALICE_TOO, answer(3)), max_tokens=6 * size)
    matches(store, ALICE, [1, 2], 1)  # a use
    store.add(ALICE, answer(4))
    index_all(store)
    held = [has(store, ALICE, 1), has(store, ALICE_TOO, 2), has(store, ALICE_TOO, 3), has(store, ALICE, 4)]
    assert held == [True, False, True, True]


def test_a_repeated_answer_is_kept_once_and_becomes_the_newest() -> None:
    size = LENGTH
    store = filled((ALICE, answer(1)), (ALICE, answer(2)), (ALICE, answer(1)), max_tokens=4 * size)
    assert store.num_tokens == 2 * size
    store.add(ALICE, answer(3))
    index_all(store)
    assert [has(store, ALICE, number) for number in (1, 2, 3)] == [True, False, True]


def test_an_answer_longer_than_a_client_may_hold_is_cut() -> None:
    store = filled((ALICE, answer(1, 100)), max_tokens=60)
    assert store.num_tokens == 30
    assert matches(store, ALICE, answer(1)[:4], 99) == [(4, answer(1, 30)[4:])]


def test_a_collision_does_not_reveal_an_answer_of_another_namespace() -> None:
    store = filled()
    store._num_buckets = 1
    store.add(ALICE, answer(1))
    index_all(store)
    last_ids = answer(1)[-5:-1]
    assert matches(store, ALICE, last_ids, 3) == [(4, answer(1)[-1:])]
    store.add(BOB, [*answer(2), *last_ids, 7])
    index_all(store)
    assert matches(store, BOB, last_ids, 3) == [(4, [7])]
    assert matches(store, ALICE, [*answer(2)[-2:], *last_ids], 3) in ([], [(4, answer(1)[-1:])])
    assert matches(store, CAROL, last_ids, 3) == []


def test_repetitive_answers_have_bounded_cost() -> None:
    store = filled(*((ALICE, [1] * size) for size in range(100, 200)), max_tokens=100_000)
    found = matches(store, ALICE, [1] * 100, 32)
    assert 0 < len(found) <= MAX_OCCURRENCES * len(RUNS)
    assert all(length <= MAX_MATCH for length, _ in found)
