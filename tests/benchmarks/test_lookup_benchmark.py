"""The lookup benchmark on synthetic answers, and its agent trace."""

from benchmarks.agent_trace import agent_texts
from benchmarks.lookup import ALL, MULTI_TURN, group_of, replay, summary
from benchmarks.target_answers import Turn

LOOP = [*range(10, 20)]


def test_a_replay_counts_rounds_tokens_and_drafts() -> None:
    turns = [Turn("rag", 0, LOOP, LOOP * 4), Turn("coding", 1, [1, 2], [3, 4, 5])]
    found = replay(turns, k=8, row_cost=0.1, is_shared=False)
    assert found.keys() == {"rag", MULTI_TURN, ALL}
    copied, chat = found["rag"], found[MULTI_TURN]
    assert copied.tokens == 4 * len(LOOP) - 1, "the first token comes from the prompt's pass"
    assert copied.rounds + copied.accepted == copied.tokens
    assert copied.rounds < copied.tokens / 3
    assert (chat.rounds, chat.tokens, chat.drafted) == (2, 2, 0)
    assert found[ALL].tokens == copied.tokens + chat.tokens
    (row, *_) = summary(found, row_cost=0.1)
    assert row["net"] < row["tokens_per_round"] == round(copied.tokens / copied.rounds, 3)


def test_shared_requests_find_earlier_answers() -> None:
    turns = [Turn("rag", 0, [number], [*range(100, 140)]) for number in range(3)]
    alone, shared = (replay(turns, 8, 0.1, is_shared)[ALL] for is_shared in (False, True))
    assert alone.rounds == alone.tokens
    assert shared.rounds < 0.7 * shared.tokens


def test_categories_of_chats_are_one_group() -> None:
    assert [group_of(Turn(category, number, [], [])) for category, number in (("stem", 0), ("qa", 0), ("stem", 1))] == [
        "chat", "qa", MULTI_TURN
    ]  # fmt: skip


def test_the_trace_is_deterministic_and_repeats_calls_with_other_arguments() -> None:
    tickets = list(agent_texts(20))
    assert tickets == list(agent_texts(20))
    orders = [call for _, steps in tickets for call, _ in steps if '"get_order"' in call]
    assert len(orders) == len(set(orders)) == len(tickets)
    assert len({call[:40] for call in orders}) == 1
