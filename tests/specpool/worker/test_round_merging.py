"""Rounds of different coordinators that share a forward pass."""

import asyncio
import threading
from typing import Any

import pytest
from worker_service import CACHE_MISS, OK, Worker, verify

from specpool.worker.round_merging import SHORT_TOKENS, Round, RoundMerging, Work


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def merging(clock: Clock) -> RoundMerging:
    return RoundMerging(clock)


def add(merging: RoundMerging, coordinator: str, num_tokens: int = 1, steps: int = 1) -> Round:
    round_ = Round(coordinator, None, lambda: Work(num_tokens, steps))
    merging.add(round_)
    return round_


def serve(merging: RoundMerging, clock: Clock, *rounds: Round, seconds: float = 1.0) -> None:
    taken = merging.take(rounds[0], max_tokens=1000)
    assert taken == list(rounds)
    with merging.serving(taken):
        clock.now += seconds


def test_one_round_of_each_coordinator_is_taken(merging: RoundMerging) -> None:
    first, _, other, third = (add(merging, name) for name in "aabc")
    assert merging.take(first, 1000) == [first, other, third]


@pytest.mark.parametrize(
    ("first", "other", "together"),
    [
        ((1, 1), (SHORT_TOKENS, 1), True),
        ((1, 1), (SHORT_TOKENS + 1, 1), False),
        ((500, 1), (500, 1), True),
        ((501, 1), (500, 1), False),
        ((1, 2), (1, 4), True),
        ((1, 2), (1, 5), False),
    ],
)
def test_long_rounds_do_not_join_short_ones(
    merging: RoundMerging, first: tuple[int, int], other: tuple[int, int], together: bool
) -> None:
    rounds = [add(merging, "a", *first), add(merging, "b", *other)]
    assert merging.take(rounds[0], 1000) == rounds[: 1 + together]


def test_a_single_coordinator_never_waits(merging: RoundMerging, clock: Clock) -> None:
    for _ in range(3):
        round_ = add(merging, "a")
        assert merging.patience(round_) == 0
        serve(merging, clock, round_)
        clock.now += 0.1


def test_alternating_coordinators_meet(merging: RoundMerging, clock: Clock) -> None:
    serve(merging, clock, add(merging, "a"))
    clock.now += 0.1
    a, b = add(merging, "a"), add(merging, "b")
    merging.discard(b)
    serve(merging, clock, a)
    b = add(merging, "b")
    assert 0.1 < merging.patience(b) < 0.5
    clock.now += 0.1
    a = add(merging, "a")
    assert merging.patience(b) == 0
    serve(merging, clock, b, a)


@pytest.mark.parametrize("gap", [1.5, 100.0])
def test_coordinators_expected_late_are_not_awaited(merging: RoundMerging, clock: Clock, gap: float) -> None:
    serve(merging, clock, add(merging, "a"))
    clock.now += gap
    serve(merging, clock, add(merging, "a"))
    assert merging.patience(add(merging, "b")) <= 0


def test_a_coordinator_that_does_not_come_is_awaited_once(merging: RoundMerging, clock: Clock) -> None:
    serve(merging, clock, add(merging, "a"))
    clock.now += 0.1
    serve(merging, clock, add(merging, "a"))
    b = add(merging, "b")
    clock.now += merging.patience(b)
    serve(merging, clock, b)
    assert merging.patience(add(merging, "b")) == 0


# --- On a worker


async def merged(target: Worker, *calls: Any) -> list[Any]:
    """Call while the model thread is busy, so that all valid rounds wait at the same time."""
    release = threading.Event()
    holding = asyncio.create_task(target.host.run(lambda backend: release.wait()))
    tasks = [asyncio.ensure_future(call) for call in calls]
    thread = target.host._thread
    while (  # noqa: ASYNC110 - other thread
        thread.running is None or target.host.waiting + sum(task.done() for task in tasks) < len(calls)
    ):
        await asyncio.sleep(0.001)
    release.set()
    await holding
    return list(await asyncio.gather(*tasks, return_exceptions=True))


async def test_merged_rounds_take_one_pass_and_give_the_same_tokens(target: Worker) -> None:
    prompts = [[5, 6, 7], [9, 8]]
    truths = [target.continuation(prompt, 3) for prompt in prompts]
    passes = target.host.backend.passes
    items = [verify(1, 0, prompt, truth[:2]) for prompt, truth in zip(prompts, truths, strict=True)]
    calls = [target.round(item, coordinator_id=name) for name, item in zip("ab", items, strict=True)]
    results = await merged(target, *calls)
    assert [list(result.token_ids) for (result,) in results] == truths
    assert target.host.backend.passes == passes + 1
    results = await merged(
        target, target.round(verify(1, 4, [1]), coordinator_id="a"), target.round(verify(7, 4, [1]), coordinator_id="b")
    )
    assert [result.status for (result,) in results] == [OK, CACHE_MISS]


@pytest.mark.parametrize("position", [0, 1])
async def test_an_invalid_round_fails_alone(target: Worker, position: int) -> None:
    truth = target.continuation([5, 6, 7], 1)
    calls = [target.round(verify(1, 0, [5, 6, 7]), coordinator_id="a")]
    calls.insert(position, target.round(verify(1, 0, [10**6]), coordinator_id="b"))
    results = await merged(target, *calls)
    assert isinstance(results.pop(position), Exception)
    assert list(results[0][0].token_ids) == truth
