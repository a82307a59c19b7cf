"""Turns of prompts: clients alternate, large and slow prompts leave a place to others, waiting prompts are limited."""

import asyncio

import pytest

from coordinator.prompts.turns import MAX_CLIENTS, MAX_LARGE_WAITING, SLOW_FOR_SECONDS, SLOW_SECONDS, Turn, Turns
from specpool.protocol.errors import QueueFullError


class Bench:
    """Turns with two places, and the prompts that have one."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.now = 0.0
        self.turns: Turns[int] = Turns(max_waiting, lambda: self.now)
        self.running: dict[str, tuple[Turn[int], int]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        for place in (1, 2):
            self.turns.add(place)

    async def ask(self, *names: str, is_large: bool = False) -> None:
        """Prompts that ask for a place. The first letter of a name is the client."""

        async def take(name: str) -> None:
            self.running[name] = await self.turns.take(name[0], is_large)

        for name in names:
            self.tasks[name] = asyncio.create_task(take(name))
        await self.settle()

    async def end(self, name: str, seconds: float = 0.0) -> None:
        self.now += seconds
        turn, place = self.running.pop(name)
        self.turns.end(turn)
        self.turns.add(place)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


async def test_clients_take_turns() -> None:
    bench = Bench()
    await bench.ask("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    assert [*bench.running] == ["a1", "a2"]
    order = []
    for name in ("a1", "a2", "b1", "c1", "a3"):
        await bench.end(name)
        order.append([*bench.running])
    assert order == [["a2", "b1"], ["b1", "c1"], ["c1", "a3"], ["a3", "b2"], ["b2", "a4"]]


async def test_one_large_prompt_has_a_place_at_a_time() -> None:
    bench = Bench()
    await bench.ask("a1", "b1", is_large=True)
    await bench.ask("a2", "b2")
    assert [*bench.running] == ["a1", "a2"]
    await bench.end("a2")
    assert [*bench.running] == ["a1", "b2"]
    await bench.end("a1")
    assert [*bench.running] == ["b2", "b1"]


async def test_a_large_prompt_does_not_wait_for_the_place_of_another_one() -> None:
    """The other one has ended its process, which takes a while to replace."""
    bench = Bench()
    await bench.ask("a1", "b1", is_large=True)
    turn, _ = bench.running.pop("a1")
    bench.turns.end(turn)
    await bench.settle()
    assert [*bench.running] == ["b1"]


async def test_prompts_of_a_slow_client_leave_a_place_to_others() -> None:
    bench = Bench()
    await bench.ask("a1", "a2", "a3", "a4")
    await bench.end("a1", SLOW_SECONDS * 2)
    await bench.end("a2")
    assert [*bench.running] == ["a3"]
    await bench.ask("b1")
    assert [*bench.running] == ["a3", "b1"]
    bench.now += SLOW_FOR_SECONDS
    await bench.end("b1")
    assert [*bench.running] == ["a3", "a4"]


async def test_a_client_whose_prompt_ended_a_process_is_slow() -> None:
    bench = Bench()
    await bench.ask("a1")
    bench.running["a1"][0].is_slow = True
    await bench.end("a1")
    await bench.ask("a2", "a3")
    assert [*bench.running] == ["a2"]


@pytest.mark.parametrize(("is_large", "fit"), [(False, 20), (True, MAX_LARGE_WAITING)])
async def test_waiting_prompts_of_a_client_are_limited(is_large: bool, fit: int) -> None:
    bench = Bench(max_waiting=20)
    await bench.ask("b1", "b2", is_large=is_large)
    await bench.ask("b3")
    await bench.ask(*(f"a{number}" for number in range(fit)), is_large=is_large)
    with pytest.raises(QueueFullError, match=rf"too many prompts are waiting to be tokenized \({fit}\)") as caught:
        await bench.turns.take("a", is_large)
    assert caught.value.retry_seconds > 0
    await bench.ask("c1", is_large=is_large)
    assert not bench.tasks["c1"].done()


@pytest.mark.parametrize("is_granted", [False, True])
async def test_prompts_cancelled_while_waiting_lose_no_place(is_granted: bool) -> None:
    bench = Bench()
    await bench.ask("a1", "a2")
    await bench.ask("b1", is_large=True)
    if is_granted:
        turn, place = bench.running.pop("a1")
        bench.turns.end(turn)
        bench.turns.add(place)
    bench.tasks["b1"].cancel()
    await bench.settle()
    if not is_granted:
        await bench.end("a1")
    await bench.end("a2")
    await bench.ask("c1", "c2")
    assert [*bench.running] == ["c1", "c2"]
    await bench.end("c1")
    await bench.ask("d1", is_large=True)
    assert [*bench.running] == ["c2", "d1"]


async def test_few_clients_are_remembered() -> None:
    bench = Bench()
    for number in range(MAX_CLIENTS + 100):
        turn, place = await bench.turns.take(str(number))
        turn.is_slow = True
        bench.turns.end(turn)
        bench.turns.add(place)
    assert len(bench.turns._served) == len(bench.turns._slow_until) == MAX_CLIENTS
