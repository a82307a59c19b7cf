"""The host of a worker's backend: leases of coordinators."""

from types import SimpleNamespace

import pytest

from specpool.engine.cache.slots import SlotTable
from specpool.protocol.rounds import ItemStatus
from specpool.worker.host import WorkerHost

LEASE_SECONDS = 10.0
NO_MEMORY = [
    MemoryError(),
    ImportError("_lib.so: failed to map segment from shared object"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to"),
]


@pytest.mark.parametrize("fails", [False, True])
async def test_work_longer_than_the_lease_keeps_its_sequences(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("specpool.worker.host.time", SimpleNamespace(monotonic=lambda: clock.now))
    slots = SlotTable(4)
    slots.load = slots.info = lambda: None  # type: ignore[attr-defined]
    host = WorkerHost(lambda report: slots)  # type: ignore[arg-type, return-value]
    await host.load()

    def work(table: SlotTable) -> None:
        assert table.realign(("slow", 1), 1, 0) is ItemStatus.OK
        clock.now += 2 * LEASE_SECONDS
        if fails:
            raise ZeroDivisionError

    try:
        if fails:
            with pytest.raises(ZeroDivisionError):
                await host.run(work, "slow")
        else:
            await host.run(work, "slow")
        assert await host.run(lambda table: table.expire(clock.now, LEASE_SECONDS)) == 0
        clock.now += 2 * LEASE_SECONDS
        assert await host.run(lambda table: table.expire(clock.now, LEASE_SECONDS)) == 1
    finally:
        host.close()


@pytest.mark.parametrize("error", [*NO_MEMORY, ValueError("no")], ids=lambda error: type(error).__name__)
async def test_lack_of_memory_is_reported(error: Exception) -> None:
    slots, exhausted = SlotTable(4), list[bool]()
    slots.load = slots.info = lambda: None  # type: ignore[attr-defined]
    host = WorkerHost(lambda report: slots)  # type: ignore[arg-type, return-value]
    host.on_exhausted = lambda: exhausted.append(True)
    await host.load()

    def work(table: SlotTable) -> None:
        raise error

    try:
        with pytest.raises(type(error)):
            await host.run(work, "any")
        assert bool(exhausted) is (error in NO_MEMORY)
    finally:
        host.close()
